"""An observed application on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from mqtemplate import MQApplication
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import HostAddress
from mqtemplate.observability import Observability
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing import Harness


@dataclass
class Observed:
    """An application with its harness and its observability."""

    app: MQApplication
    harness: Harness
    observability: Observability

    def samples(self, name: str) -> dict[tuple[str, ...], object]:
        """Return the values of a metric by the values of their labels, in the order of the labels' names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in self.observability.metrics.samples()
            if sample.name == name
        }


Observe = Callable[..., Observed]


@pytest.fixture
def observe() -> Iterator[Observe]:
    """Return a function that starts an observed application with components and settings."""
    with ExitStack() as stack:

        def start(*components: object, clock: VirtualClock | None = None, **settings: object) -> Observed:
            keys = {"mqtemplate.management.enabled": True} | {
                f"mqtemplate.{key.replace('__', '.')}": value for key, value in settings.items()
            }
            if not any(isinstance(each, EmbeddedBroker) for each in components):
                keys["rocketmq.name-server"] = "embedded:memory"
            app = stack.enter_context(MQApplication(*components, settings=keys, clock=clock or VirtualClock()))
            return Observed(app, Harness(app, raise_handler_errors=False), app.get(Observability))

        yield start


@pytest.fixture
def free_server() -> Iterator[tuple[RemoteBroker, threading.Event]]:
    """A client of a server in this process, and an event that stops the server when it is set."""
    cluster = LocalCluster(
        EmbeddedBroker(None, EmbeddedSettings(listen_host=HostAddress("127.0.0.1", 0))),
        BrokerServerSettings(listen=HostAddress("127.0.0.1", 0)),
    )
    cluster.start()
    stop = threading.Event()

    def stop_cluster() -> None:
        stop.wait()
        cluster.stop()

    thread = threading.Thread(target=stop_cluster)
    thread.start()
    try:
        with RemoteBroker(RemoteSettings(name_servers=(str(cluster.name_server_address),))) as broker:
            yield broker, stop
    finally:
        stop.set()
        thread.join()

"""Observability of an application whose broker is another process: here a server behind real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mqtemplate import message_listener
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import BrokerError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.message import HostAddress, Message, MessageExt
from mqtemplate.metrics import HistogramSnapshot
from mqtemplate.observability import GroupLags, Observability, ObservabilitySettings, Tracing
from mqtemplate.observability.collectors import GroupLag
from mqtemplate.observability.settings import LatenessSettings
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.template import RocketMQTemplate
from tests.waiting import eventually


@pytest.mark.feature("14.3")
def test_context_lag_and_lateness_cross_the_wire(free_server: tuple[RemoteBroker, threading.Event]) -> None:
    broker, _ = free_server
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ObservabilitySettings(lateness=LatenessSettings(threshold_ms=0))
    observed = Observability(broker, settings, tracing=Tracing(1, provider.get_tracer("test")))
    handled: list[MessageExt] = []

    @message_listener(topic="orders", consumer_group="billing", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(message: MessageExt) -> None:
        handled.append(message)

    registry = ListenerRegistry(broker, JsonMessageConverter(), observation=observed)
    registry.register(bill)
    observed.watch(registry)
    RocketMQTemplate(broker, observation=observed).sync_send("orders", "x", delay="200ms")
    broker.sends.send(
        Message("orders", b"x", {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"})
    )
    registry.start()
    try:
        eventually(lambda: len(handled) == 2, "two messages handled")
        spans = eventually(
            lambda: (found := exporter.get_finished_spans()) and len(found) == 3 and found, "three spans"
        )
        samples = observed.metrics.samples()
    finally:
        registry.stop()

    by_name = {(span.name, span.parent.trace_id if span.parent else 0) for span in spans}  # type: ignore[union-attr]
    [send] = [span for span in spans if span.name == "send orders"]  # type: ignore[union-attr]
    assert send.context is not None
    assert by_name == {
        ("send orders", 0),
        ("process orders", send.context.trace_id),
        ("process orders", int("4bf92f3577b34da6a3ce929d0e0e4736", 16)),
    }
    [late] = [each.value for each in samples if each.name == "lateness.delivery_ms"]
    assert isinstance(late, HistogramSnapshot)
    assert late.count == 1


@contextmanager
def two_processes_of_an_application(address: str) -> Iterator[list[Observability]]:
    """Yield the observability of two clients that have the same listeners, as two processes have."""
    with ExitStack() as stack:
        found = []
        for _ in range(2):
            broker = stack.enter_context(RemoteBroker(RemoteSettings(name_servers=(address,))))
            registry = ListenerRegistry(broker, JsonMessageConverter())
            registry.register(bill)
            registry.register(show)
            observed = Observability(broker)
            observed.watch(registry)
            registry.start()
            stack.callback(registry.stop)
            found.append(observed)
        yield found


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


@message_listener(topic="orders", consumer_group="screens", message_model="BROADCASTING")
def show(order: str) -> None: ...


def test_a_paused_group_that_has_never_committed_is_behind_at_the_server() -> None:
    """Its lag is exported; without a first commit nothing else shows that it does not consume."""
    cluster = LocalCluster(
        EmbeddedBroker(None, EmbeddedSettings(listen_host=HostAddress("127.0.0.1", 0))),
        BrokerServerSettings(listen=HostAddress("127.0.0.1", 0)),
    )
    cluster.start()
    try:
        server = Observability(cluster.engine)
        with two_processes_of_an_application(str(cluster.name_server_address)) as processes:
            for container in (each for observed in processes for each in observed.listeners):
                container.pause()
            cluster.engine.sends.send(Message("orders", b"x"))

            def lag() -> int:
                samples = [each for each in server.metrics.samples() if each.name == "group.lag"]
                labels = {"group": "billing", "topic": "orders"}
                found = [each.value for each in samples if labels.items() <= each.labels.items()]
                return sum(value for value in found if isinstance(value, int))

            eventually(lambda: lag() == 1, "the group has a lag")
    finally:
        cluster.stop()


def test_the_lag_of_a_group_is_exported_by_the_server_and_not_by_its_clients() -> None:
    """Each client knows it, for its health; of broadcasting groups, the clients keep the offsets."""
    cluster = LocalCluster(
        EmbeddedBroker(None, EmbeddedSettings(listen_host=HostAddress("127.0.0.1", 0), topics=("orders",))),
        BrokerServerSettings(listen=HostAddress("127.0.0.1", 0)),
    )
    cluster.start()
    try:
        server = Observability(cluster.engine)
        with two_processes_of_an_application(str(cluster.name_server_address)) as processes:

            def lags(observed: Observability, group: str) -> list[tuple[str, str]]:
                return [
                    (each.labels["topic"], each.labels["queue"])
                    for each in observed.metrics.samples()
                    if each.name == "group.lag" and each.labels["group"] == group
                ]

            def known(observed: Observability) -> int:
                found = GroupLags(observed.broker).read(observed.listeners)
                return sum((each.group, each.queue.topic) == ("billing", "orders") for each in found)

            queues = [("orders", str(each.queue_id)) for each in cluster.engine.queues("orders")]
            eventually(lambda: sum(map(known, processes)) == len(queues), "each queue has a process")
            eventually(lambda: all(queues == lags(each, "screens") for each in processes), "lags of each screen")
            assert [each for each in lags(server, "billing") if each[0] == "orders"] == queues
            assert [lags(each, "billing") for each in processes] == [[], []]
            assert lags(server, "screens") == []
    finally:
        cluster.stop()


class UnansweredLags(GroupLags):
    """Lags at a broker that hangs: each read would take its whole timeout."""

    reads = 0

    def read(self, listeners: Iterable[ListenerContainer]) -> list[GroupLag]:
        self.reads += 1
        raise BrokerError("127.0.0.1:10911 does not answer within 3000 ms")


def test_a_scrape_does_not_wait_again_and_again_for_a_broker_that_hangs() -> None:
    """The process would count as one that hangs, and its own alert would fire beside that of the broker."""
    clock = VirtualClock()
    with EmbeddedBroker(None, None, clock) as broker:
        lags = UnansweredLags(broker)
        found = [each for _ in range(4) for each in lags.samples(())]
        clock.move_ms(59_000)
        found += lags.samples(())
        before = lags.reads
        clock.move_ms(1_000)
        found += lags.samples(())

    assert found == []
    assert (before, lags.reads) == (1, 2)

"""The server that the supervisor starts, so that its workers can share a store directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.name_server import EmbeddedStore
from mqtemplate.context.settings.server import ServerSettings
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.running.local_server import local_cluster
from mqtemplate.running.prompt_threads import prompt_threads

_ANY_PORT = HostAddress("127.0.0.1", 0)


@contextmanager
def shared_server(settings: AppSettings, workers: int, report: Callable[[str], None]) -> Iterator[str | None]:
    """Serve the store directory of the settings inside the context, if several workers are to share it.

    Returns:
        Value of ``rocketmq.name-server`` for the workers; None if they need no other one.

    Raises:
        ConfigurationError: The store is in memory, which other processes cannot use.
        MQTemplateError: The server cannot start.
    """
    choice = settings.broker_choice
    if workers == 1 or not isinstance(choice, EmbeddedStore):
        yield None
        return
    if settings.store_path is None:
        raise ConfigurationError(
            f"rocketmq.name-server is {settings.rocketmq.name_server!r}, and {workers} worker processes cannot share "
            "the memory of one; name a folder (embedded:<folder>) or a server (host:port), or run one worker"
        )
    with ExitStack() as running:
        cluster = local_cluster(settings, _server(settings))
        cluster.start()
        running.callback(cluster.stop)
        running.enter_context(prompt_threads())
        report(
            f"broker {cluster.engine.name} for the workers on {cluster.address}, its name server on "
            f"{cluster.name_server_address}, store {settings.store_path}"
        )
        yield str(cluster.name_server_address)


def _server(settings: AppSettings) -> ServerSettings:
    """Return the settings of the server: addresses on loopback with free ports, unless the configuration has others."""
    server = settings.mqtemplate.server
    changed = {
        field: _ANY_PORT
        for field, key in (("listen", "mqtemplate.server.listen"), ("name_server", "mqtemplate.server.name-server"))
        if settings.origins.of(key) == "default"
    }
    return dataclasses.replace(server, **changed)  # type: ignore[arg-type]  # the two fields are addresses

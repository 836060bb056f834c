"""The server that the supervisor starts, so that its workers can share a store directory."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import ServerSettings
from mqtemplate.context.settings.rocketmq import EmbeddedStore
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.running.local_server import local_cluster
from mqtemplate.running.prompt_threads import prompt_threads
from mqtemplate.server.acl.settings import Account
from mqtemplate.server.local_address import LocalServerAddress

_ANY_PORT = HostAddress("127.0.0.1", 0)


@contextmanager
def shared_server(
    settings: AppSettings, workers: int, report: Callable[[str], None]
) -> Iterator[LocalServerAddress | None]:
    """Serve the store directory of the settings inside the context, if several workers are to share it.

    A directory belongs to one user, and a port of 127.0.0.1 is open to all users of the machine. So a client needs an
    account: the server creates one for the workers at each start, and commands of the same user find it in the
    directory.

    Returns:
        Address and account for the workers; None if they need no other one than that of the configuration.

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
        account = Account(access_key=f"run-{secrets.token_hex(8)}", secret_key=secrets.token_hex(), admin=True)
        is_open = _is_open_to_all(settings)
        cluster = local_cluster(settings, _server(settings), None if is_open else account)
        cluster.start()
        running.callback(cluster.stop)
        running.enter_context(prompt_threads())
        report(
            f"broker {cluster.engine.name} for the workers on {cluster.address}, its name server on "
            f"{cluster.name_server_address}, store {settings.store_path}"
        )
        if is_open:
            report("warning: mqtemplate.server.acl.enabled is false: every user of this machine can read and write all")
        address = LocalServerAddress(
            str(cluster.name_server_address), account.access_key, os.getpid(), account.secret_key
        )
        address.write(settings.store_path)
        running.callback(LocalServerAddress.remove, settings.store_path)
        yield address


def _is_open_to_all(settings: AppSettings) -> bool:
    """Return True if the configuration itself says that no account is needed."""
    key = "mqtemplate.server.acl.enabled"
    return settings.origins.of(key) != "default" and not settings.mqtemplate.server.acl.enabled


def _server(settings: AppSettings) -> ServerSettings:
    """Return the settings of the server: addresses on loopback with free ports, unless the configuration has others."""
    server = settings.mqtemplate.server
    changed = {
        field: _ANY_PORT
        for field, key in (("listen", "mqtemplate.server.listen"), ("name_server", "mqtemplate.server.name-server"))
        if settings.origins.of(key) == "default"
    }
    return dataclasses.replace(server, **changed)  # type: ignore[arg-type]  # the two fields are addresses

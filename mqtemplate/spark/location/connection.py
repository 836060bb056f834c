"""Connection of a Spark process to the broker that its options name."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mqtemplate.broker import Broker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.errors import MQTemplateError, RemoteConnectError, SparkError, StoreLockedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.server.local_address import LocalServerAddress
from mqtemplate.spark.location.cluster_connection import client_settings, kept_connection
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.records.offsets import OffsetTable

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

_log = get_logger("mqtemplate.spark")

_LOCK_FILE = "sparkWriter.lock"
_LOCK_TIMEOUT_S = 600.0
_POLL_S = 0.02
_REQUEST_TIMEOUT_MS = 15_000
"""Limit of one request. A page of pending positions and a request of the sink have megabytes: 3 s, the default of
clients, is too short for them on a busy machine. A broker that was killed is noticed at once, by its connection."""


def location_of(broker: Broker) -> BrokerLocation:
    """Return where Spark's processes find the messages of a broker of this process.

    Raises:
        SparkError: They cannot reach them.
    """
    if isinstance(broker, RemoteBroker):
        if broker.settings.namespace or broker.settings.namespace_v2:
            raise SparkError(
                "the data source has no namespaces; use a client without one, and write the prefix of the topics and "
                "groups in the listener"
            )
        settings = broker.settings
        return BrokerLocation(name_servers=settings.name_servers, address_map=tuple(settings.address_map.items()))
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

    if not isinstance(broker, EmbeddedBroker):
        raise SparkError(f"Spark reads from an EmbeddedBroker or a RemoteBroker, not {type(broker).__name__}")
    if broker.path is None:
        raise SparkError(
            "a broker in memory has no files that Spark could read; keep the broker in a folder, such as "
            "rocketmq.name-server: embedded:./data"
        )
    return BrokerLocation(store=str(broker.path))


@contextmanager
def open_broker(location: BrokerLocation, *, delivers: bool = True) -> Iterator[Broker]:
    """Yield a started broker.

    - By ``nameServer``: a client, which this process keeps for its next tasks.
    - By ``store``: the `LocalServer` of the process that owns the folder, if it runs one. If no process owns the
      folder, this process opens it; tasks that write at the same time wait for each other.

    Args:
        delivers: False: if this process opens the folder, delayed messages that are due stay where they are.

    Raises:
        SparkError: Another process owns the folder and runs no `LocalServer`.
        RemoteConnectError: No name server answers.
        ConfigurationError: The access key or TLS settings of this machine are wrong.
    """
    if location.store is None:
        settings = client_settings(location.client_file, location.client)
        arguments = location.name_servers, settings.credentials, settings.tls, location.address_map
        yield kept_connection((RemoteBroker, *arguments), lambda: _started_client(*arguments))
        return
    with open_local_server(location.store) as local:
        if local is not None:
            yield local
            return
    clock = SystemClock()
    with _opened(Path(location.store), clock if delivers else VirtualClock(clock.now_ms())) as broker:
        yield broker


@contextmanager
def open_local_server(store: str) -> Iterator[RemoteBroker | None]:
    """Yield a client of the `LocalServer` of a folder; None if none runs."""
    local = LocalServerAddress.read(store)
    client = None if local is None else _local_client(local)
    try:
        yield client
    finally:
        if client is not None:
            client.close()


def _local_client(local: LocalServerAddress) -> RemoteBroker | None:
    """Return a client of a server of this machine; None if the process that wrote the address was killed."""
    credentials = Credentials(access_key=local.access_key, secret_key=local.secret_key)
    try:
        return _started_client((local.address,), credentials)
    except RemoteConnectError:
        return None


def _started_client(
    addresses: tuple[str, ...],
    credentials: Credentials | None,
    tls: ClientTls | None = None,
    address_map: tuple[tuple[str, str], ...] = (),
) -> RemoteBroker:
    settings = RemoteSettings(
        name_servers=addresses,
        credentials=credentials,
        tls=tls,
        address_map=dict(address_map),
        producer_group="spark-sink",
        request_timeout_ms=_REQUEST_TIMEOUT_MS,
    )
    client = RemoteBroker(settings)
    client.start()
    return client


@contextmanager
def _opened(store: Path, clock: Clock) -> Iterator[EmbeddedBroker]:
    if not store.is_dir():
        raise SparkError(
            f"store folder {str(store)!r} does not exist; give the folder of an embedded broker that was started once"
        )
    # Most tasks that write are clients: each Python process of Spark would import the broker for nothing.
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

    with _exclusive(store), EmbeddedBroker(store, clock=clock) as broker:
        yield broker


def _lock_file(store: Path) -> BinaryIO:
    """Open the lock file of Spark's writers; create it if missing. A link could name any file of this user."""
    path = store / _LOCK_FILE
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
    except OSError as exc:
        raise SparkError(f"{path} cannot be opened: {exc.strerror}; it must be a file, or missing") from exc


@contextmanager
def _exclusive(store: Path) -> Iterator[None]:
    """Let one Spark process at a time open the folder. An application that owns it is not waited for."""
    with _lock_file(store) as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SparkError(
                        f"store folder {str(store)!r} was used by another Spark task for {_LOCK_TIMEOUT_S:g} s; "
                        "write with fewer tasks, or run the broker as a server and give option 'nameServer'"
                    ) from None
                threading.Event().wait(_POLL_S)
        try:
            yield
        except StoreLockedError as exc:
            raise SparkError(
                f"{exc}. For writes from Spark, that process runs mqtemplate.spark.LocalServer(broker), as a Spark "
                "listener container does; or run the broker as a server, and give option 'nameServer'"
            ) from exc


def commit_offsets(broker: Broker, group: str, end: OffsetTable) -> OffsetTable:
    """Commit the end of a batch for a group, but no lower offset than before, as a repeated batch would.

    Returns:
        The offsets of the group that are after the end of the batch, and stay.
    """
    ahead: OffsetTable = {}
    for queue, offset in sorted(end.items()):
        committed = broker.groups.committed_offset(group, queue) or 0
        if offset > committed:
            broker.groups.commit_offset(group, queue, offset)
        elif offset < committed:
            ahead[queue] = committed
    return ahead


def in_broker(name: str, end: OffsetTable) -> OffsetTable:
    """Return offsets of a folder with the present name of its broker: it has one broker, whatever its name was."""
    return {MessageQueue(queue.topic, name, queue.queue_id): offset for queue, offset in end.items()}


def commit_group_offsets(store: str, group: str, end: OffsetTable) -> OffsetTable:
    """Do what `commit_offsets` does, if a `LocalServer` runs for the folder.

    The checkpoint has the progress, so a failure is only logged.
    """
    try:
        with open_local_server(store) as broker:
            return {} if broker is None else commit_offsets(broker, group, in_broker(broker.name, end))
    except MQTemplateError as exc:
        _log.warning("spark.group_not_committed", group=group, reason=str(exc))
        return {}

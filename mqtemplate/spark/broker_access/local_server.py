"""Server for the Spark processes of this machine, in the process that owns an embedded broker."""

from __future__ import annotations

import json
import os
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.server.acl import AclGuard
from mqtemplate.server.acl_settings import Account, AclSettings
from mqtemplate.server.name_server.kv_config import KVConfig
from mqtemplate.server.name_server.processor import NameServer
from mqtemplate.server.name_server.registered_brokers import RegisteredBrokers
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.client import ClientProcessor
from mqtemplate.server.processors.delayed import DelayedMessageProcessor, PendingPositionsProcessor
from mqtemplate.server.processors.offset import OffsetProcessor
from mqtemplate.server.processors.sequenced import SequencedSendProcessor
from mqtemplate.server.registration import register
from mqtemplate.server.response import problem_response
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = get_logger("mqtemplate.spark")

_FILE = Path("config", "sparkServer.json")
_LISTEN = HostAddress("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class LocalServerAddress:
    """Contents of ``config/sparkServer.json``: how the Spark processes of this machine reach the owner of the folder.

    Attributes:
        process_id: The owner. Its end leaves the file behind if it was killed.
    """

    address: str
    access_key: str
    process_id: int
    secret_key: str = field(repr=False)

    @classmethod
    def read(cls, store: Path | str) -> LocalServerAddress | None:
        """Return the address in a store folder; None if no server runs."""
        try:
            values = json.loads(Path(store, _FILE).read_text())
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as exc:
            raise SparkError(
                f"{Path(store, _FILE)} cannot be read ({exc}); delete it, and start its server again"
            ) from exc

    def write(self, store: Path) -> None:
        """Write the file, readable by this user only: the key gives all rights to the broker."""
        path = store / _FILE
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({name: getattr(self, name) for name in self.__dataclass_fields__}, file)
        fresh.replace(path)


class _FolderServer:
    """The listener socket for one folder, with the processors that Spark's processes need."""

    def __init__(self, broker: EmbeddedBroker, store: Path) -> None:
        self._store = store
        key = secrets.token_hex()
        account = Account(access_key=f"spark-{secrets.token_hex(8)}", secret_key=key, admin=True)
        clock, settings = broker.clock, BrokerServerSettings(listen=_LISTEN)
        self._remoting = remoting = RemotingServer(
            _LISTEN,
            RemotingServerSettings(),
            clock,
            guard=AclGuard(AclSettings(accounts=(account,))),
            error_response=problem_response,
        )
        self._parts = parts = ServerParts(broker, settings, lambda: str(remoting.address))
        kinds = (
            ClientProcessor,
            OffsetProcessor,
            SequencedSendProcessor,
            DelayedMessageProcessor,
            PendingPositionsProcessor,
        )
        register(remoting, *(kind(parts) for kind in kinds))
        others = RegisteredBrokers(broker.name, clock)
        NameServer(parts.topics, KVConfig(broker.store.store_files), others, parts.address).register(remoting)
        _let_topics_be_created(broker)
        remoting.start()
        LocalServerAddress(str(remoting.address), account.access_key, os.getpid(), key).write(store)
        _log.debug("spark.server_started", address=str(remoting.address))

    def stop(self) -> None:
        """Remove the address and close all connections."""
        (self._store / _FILE).unlink(missing_ok=True)
        self._remoting.stop()
        self._parts.deferred_work.close()
        _log.debug("spark.server_stopped")


def _let_topics_be_created(engine: EmbeddedBroker) -> None:
    """Give clients the route by which they send to a new topic, as the broker itself creates topics."""
    if engine.settings.auto_create_topic_enable and engine.topics.config(AUTO_CREATE_TOPIC) is None:
        count = engine.settings.default_topic_queue_nums
        perm = Perm.READ | Perm.WRITE | Perm.INHERIT
        engine.topics.update(AUTO_CREATE_TOPIC, {"readQueueNums": count, "writeQueueNums": count, "perm": int(perm)})


_running: dict[Path, tuple[_FolderServer, int]] = {}
"""Folder -> its server in this process, and the number of `LocalServer` objects that use it."""
_changing = threading.Lock()


class LocalServer:
    """Lets Spark's processes write to an embedded broker of this process, and list its pending messages.

    The sink, the pending view and the changes by DataFrame find it by the broker's folder. It listens on 127.0.0.1 and
    accepts the key in ``config/sparkServer.json`` only. A `SparkListenerContainer` starts one; use it as a context
    manager for writes without a listener::

        with LocalServer(broker):
            df.write.format("mqtemplate").mode("append").option("store", broker.path).save()

    Several of one folder share one server, which stops with the last of them.

    Raises:
        SparkError: The broker has no folder.
    """

    def __init__(self, broker: EmbeddedBroker) -> None:
        if broker.path is None:
            raise SparkError(
                "a broker in memory has no folder by which Spark's processes could find it; keep the broker in a "
                "folder, such as rocketmq.name-server: embedded:./data"
            )
        self._broker, self._store = broker, broker.path
        self._is_started = False

    def start(self) -> None:
        """Listen, and write the address. A second call has no effect."""
        with _changing:
            if self._is_started:
                return
            server, users = _running.get(self._store) or (_FolderServer(self._broker, self._store), 0)
            _running[self._store] = server, users + 1
            self._is_started = True

    def stop(self) -> None:
        """Remove the address and close all connections, unless another one uses them. A second call has no effect."""
        with _changing:
            if not self._is_started:
                return
            self._is_started = False
            server, users = _running.pop(self._store)
            if users > 1:
                _running[self._store] = server, users - 1
            else:
                server.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

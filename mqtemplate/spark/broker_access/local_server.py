"""Server for the Spark processes of this machine, in the process that owns an embedded broker."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
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


class LocalServer:
    """Lets Spark's processes write to an embedded broker of this process, and list its pending messages.

    The sink, the pending view and the changes by DataFrame find it by the broker's folder. It listens on 127.0.0.1 and
    accepts the key in ``config/sparkServer.json`` only. A `SparkListenerContainer` starts one; use it as a context
    manager for writes without a listener::

        with LocalServer(broker):
            df.write.format("mqtemplate").mode("append").option("store", broker.path).save()

    Several of one folder in this process share one server.

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
        self._remoting: RemotingServer | None = None
        self._parts: ServerParts | None = None

    def start(self) -> None:
        """Listen, and write the address. A second call has no effect."""
        if self._remoting is not None or self._is_served_here():
            return
        key = secrets.token_hex()
        account = Account(access_key=f"spark-{secrets.token_hex(8)}", secret_key=key, admin=True)
        clock, settings = self._broker.clock, BrokerServerSettings(listen=_LISTEN)
        remoting = RemotingServer(
            _LISTEN,
            RemotingServerSettings(),
            clock,
            guard=AclGuard(AclSettings(accounts=(account,))),
            error_response=problem_response,
        )
        self._parts = parts = ServerParts(self._broker, settings, lambda: str(remoting.address))
        register(
            remoting,
            ClientProcessor(parts),
            OffsetProcessor(parts),
            SequencedSendProcessor(parts),
            DelayedMessageProcessor(parts),
            PendingPositionsProcessor(parts),
        )
        store_files = self._broker.store.store_files
        others = RegisteredBrokers(self._broker.name, clock)
        NameServer(parts.topics, KVConfig(store_files), others, parts.address).register(remoting)
        self._let_topics_be_created()
        remoting.start()
        self._remoting = remoting
        LocalServerAddress(str(remoting.address), account.access_key, os.getpid(), key).write(self._store)
        _log.debug("spark.server_started", address=str(remoting.address))

    def _is_served_here(self) -> bool:
        with contextlib.suppress(SparkError):
            known = LocalServerAddress.read(self._store)
            return known is not None and known.process_id == os.getpid()
        return False

    def _let_topics_be_created(self) -> None:
        """Give clients the route by which they send to a new topic, as the broker itself creates topics."""
        engine = self._broker
        if engine.settings.auto_create_topic_enable and engine.topics.config(AUTO_CREATE_TOPIC) is None:
            count = engine.settings.default_topic_queue_nums
            perm = Perm.READ | Perm.WRITE | Perm.INHERIT
            engine.topics.update(
                AUTO_CREATE_TOPIC, {"readQueueNums": count, "writeQueueNums": count, "perm": int(perm)}
            )

    def stop(self) -> None:
        """Remove the address and close all connections. A second call has no effect."""
        remoting, self._remoting = self._remoting, None
        if remoting is None or self._parts is None:
            return
        (self._store / _FILE).unlink(missing_ok=True)
        remoting.stop()
        self._parts.deferred_work.close()
        _log.debug("spark.server_stopped")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

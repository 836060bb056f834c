"""Brokers that tell the name server of themselves: RocketMQ's own, beside the one that lives in this process.

Source: RocketMQ ``namesrv: RouteInfoManager``; section 21 of the specification.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import structlog

from mqtemplate.clock import Clock
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerData,
    DataVersion,
    QueueData,
    RegisterBrokerBody,
    TopicConfig,
)
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.protocol.headers.admin import (
    BrokerRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.response import RefusedError

_log = structlog.stdlib.get_logger("mqtemplate.name_server")

_MASTER = 0
_EXPIRE_MS = 120_000
_MOST_BROKERS = 1_000


@dataclass(frozen=True, slots=True)
class _Door:
    """One address of a broker, and when it was last heard of."""

    address: str
    connection_id: int
    heard_ms: int
    expire_ms: int
    version: DataVersion


@dataclass(frozen=True, slots=True)
class RegisteredBroker:
    """A broker by its name: a master, and replicas.

    Attributes:
        topics: As its master told them.
        is_writable: Whether an administrator has left it the right to write.
    """

    cluster: str
    name: str
    doors: dict[int, _Door] = field(default_factory=dict)
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    is_writable: bool = True

    def data(self) -> BrokerData:
        """Where it is."""
        addresses = {broker_id: door.address for broker_id, door in sorted(self.doors.items())}
        return BrokerData(cluster=self.cluster, broker_name=self.name, broker_addrs=addresses)

    def queues(self, topic: str) -> QueueData | None:
        """Its queues of *topic*; None if it has none."""
        config = self.topics.get(topic)
        if config is None:
            return None
        return QueueData(
            broker_name=self.name,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm if self.is_writable else config.perm & ~Perm.WRITE,
            topic_sys_flag=config.topic_sys_flag,
        )


class RegisteredBrokers:
    """What registered brokers told, in memory only: each tells it again every 30 seconds.

    A broker is forgotten when it says so, when its connection ends, and when it is silent for two minutes, or as long
    as it said itself.

    Args:
        own_name: The name of the broker in this process, which nobody else may take.
    """

    slow: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, own_name: str, clock: Clock) -> None:
        self._own_name = own_name
        self._clock = clock
        self._lock = threading.Lock()
        self._brokers: dict[str, RegisteredBroker] = {}

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.QUERY_DATA_VERSION: self._query_version,
        }

    # --- asking --------------------------------------------------------------------------------

    def all(self) -> list[RegisteredBroker]:
        """Those that are there now, by name."""
        now_ms = self._clock.now_ms()
        alive = []
        known = list(self._brokers.values())  # at once: others may change the table
        for broker in sorted(known, key=lambda broker: broker.name):
            doors = {id_: door for id_, door in broker.doors.items() if door.heard_ms + door.expire_ms > now_ms}
            if doors:
                alive.append(replace(broker, doors=doors))
        return alive

    def with_topic(self, topic: str) -> list[RegisteredBroker]:
        """Those that have queues of *topic*."""
        return [broker for broker in self.all() if topic in broker.topics]

    # --- telling -------------------------------------------------------------------------------

    def set_writable(self, name: str, *, is_writable: bool) -> int:
        """Take the right to write from a broker, or give it back; how many topics it concerns."""
        with self._lock:
            broker = self._brokers.get(name)
            if broker is None:
                return 0
            self._brokers[name] = replace(broker, is_writable=is_writable)
            return len(broker.topics)

    def forget_topic(self, topic: str) -> None:
        """An administrator deleted *topic*; a broker that still has it tells it again."""
        with self._lock:
            for name, broker in self._brokers.items():
                topics = {other: config for other, config in broker.topics.items() if other != topic}
                self._brokers[name] = replace(broker, topics=topics)

    def forget(self, connection: Connection) -> None:
        """A connection ended, and with it whoever registered over it."""
        with self._lock:
            for broker in list(self._brokers.values()):
                self._drop(broker, [i for i, door in broker.doors.items() if door.connection_id == connection.id])

    def _drop(self, broker: RegisteredBroker, broker_ids: Iterable[int]) -> None:
        gone = set(broker_ids)
        if not gone:
            return
        doors = {broker_id: door for broker_id, door in broker.doors.items() if broker_id not in gone}
        if doors:
            self._brokers[broker.name] = replace(broker, doors=doors)
        else:
            del self._brokers[broker.name]
        _log.info("name_server.broker_gone", broker=broker.name, ids=sorted(gone))

    # --- requests ------------------------------------------------------------------------------

    def _register(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        told = request.header(RegisterBrokerRequestHeader)
        self._check(told, request.body)
        wrapper = RegisterBrokerBody.decode(request.body).topic_config_serialize_wrapper
        expire_ms = told.heartbeat_timeout_millis or _EXPIRE_MS
        door = _Door(told.broker_addr, connection.id, self._clock.now_ms(), expire_ms, wrapper.data_version)
        with self._lock:
            broker = self._brokers.get(told.broker_name)
            if broker is None:
                if len(self._brokers) >= _MOST_BROKERS:
                    raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{_MOST_BROKERS} brokers are registered already")
                broker = RegisteredBroker(told.cluster_name, told.broker_name)
                _log.info("name_server.broker_registered", broker=told.broker_name, address=told.broker_addr)
            # of a change a broker tells the changed topic only, so what is not told is not gone
            topics = broker.topics | (wrapper.topic_config_table if told.broker_id == _MASTER else {})
            doors = broker.doors | {told.broker_id: door}
            self._brokers[told.broker_name] = replace(broker, cluster=told.cluster_name, doors=doors, topics=topics)
            master = doors.get(_MASTER)
        is_replica = told.broker_id != _MASTER and master is not None
        header = RegisterBrokerResponseHeader(master_addr=master.address if master and is_replica else None)
        return request.response(header=header)

    def _check(self, told: RegisterBrokerRequestHeader, body: bytes) -> None:
        if told.broker_name == self._own_name:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"broker name {told.broker_name!r} is the one of the broker beside this name server; take another",
            )
        if told.compressed:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR, "compressed registrations are not read here; set compressedRegister=false"
            )
        if told.body_crc32 and told.body_crc32 != zlib.crc32(body) & 0x7FFF_FFFF:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, "the body is not the one that bodyCrc32 was computed over")

    def _unregister(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        told = request.header(BrokerRequestHeader)
        with self._lock:
            broker = self._brokers.get(told.broker_name)
            if broker is not None and told.broker_id in broker.doors:
                self._drop(broker, [told.broker_id])
        return request.response()

    def _query_version(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Whether a broker has to tell everything again; asking counts as a sign of life."""
        asked = request.header(BrokerRequestHeader)
        version = DataVersion.decode(request.body)
        with self._lock:
            broker = self._brokers.get(asked.broker_name)
            door = None if broker is None else broker.doors.get(asked.broker_id)
            if broker is None or door is None or door.address != asked.broker_addr:
                return request.response(header=QueryDataVersionResponseHeader(changed=True))
            heard = replace(door, heard_ms=self._clock.now_ms())
            self._brokers[asked.broker_name] = replace(broker, doors=broker.doors | {asked.broker_id: heard})
        changed = QueryDataVersionResponseHeader(changed=door.version != version)
        return request.response(header=changed, body=door.version.encode())

"""Brokers that register with the name server, such as RocketMQ's own, in addition to the broker of this process.

Source: RocketMQ ``namesrv: RouteInfoManager``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mqtemplate.clock import Clock
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import route as bodies
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import admin as headers
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError

_log = get_logger("mqtemplate.name_server")

MASTER_ID = 0
_EXPIRE_MS = 120_000
_MAX_BROKERS = 1_000
_MAX_REGISTRATION_BYTES = 16 << 20
"""Largest registration: the settings of all topics of a broker."""


@dataclass(frozen=True, slots=True)
class _Member:
    """The master or one replica of a broker: its address, and when it registered last."""

    address: str
    connection_id: int
    registered_ms: int
    expire_ms: int
    version: bodies.DataVersionBody


@dataclass(frozen=True, slots=True)
class RegisteredBroker:
    """A broker by its name: a master and its replicas.

    Attributes:
        members: By broker ID.
        topics: The topics that the master registered.
        is_writable: False if an administrator revoked the write permission.
    """

    cluster: str
    name: str
    members: dict[int, _Member] = field(default_factory=dict)
    topics: dict[str, bodies.TopicConfig] = field(default_factory=dict)
    is_writable: bool = True

    def data(self) -> bodies.BrokerData:
        """Return the addresses of the broker."""
        addresses = {broker_id: member.address for broker_id, member in sorted(self.members.items())}
        return bodies.BrokerData(cluster=self.cluster, broker_name=self.name, broker_addrs=addresses)


def queue_data(broker_name: str, config: bodies.TopicConfig, *, is_writable: bool) -> bodies.QueueData:
    """Return the queues of one topic on one broker."""
    return bodies.QueueData(
        broker_name=broker_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm if is_writable else config.perm & ~Perm.WRITE,
        topic_sys_flag=config.topic_sys_flag,
    )


class RegisteredBrokers:
    """Registrations of brokers, in memory only: each broker repeats its registration every 30 seconds.

    A registration ends with a request of the broker, or with its connection. It expires after two minutes, or after the
    timeout that the broker chose.

    Args:
        own_name: Name of the broker in this process. No other broker may register with it.
        is_open: False: all registrations are refused.
    """

    def __init__(self, own_name: str, clock: Clock, *, is_open: bool) -> None:
        self._own_name = own_name
        self._is_open = is_open
        self._clock = clock
        self._lock = threading.Lock()
        self._brokers: dict[str, RegisteredBroker] = {}

    # --- queries -------------------------------------------------------------------------------

    def all(self) -> list[RegisteredBroker]:
        """Return the brokers whose registration is valid, by name."""
        now_ms = self._clock.steady_ms()
        alive = []
        known = list(self._brokers.values())  # a copy: other threads may change the table
        for broker in sorted(known, key=lambda broker: broker.name):
            members = {
                broker_id: member
                for broker_id, member in broker.members.items()
                if member.registered_ms + member.expire_ms > now_ms
            }
            if members:
                alive.append(replace(broker, members=members))
        return alive

    def with_topic(self, topic: str) -> list[RegisteredBroker]:
        """Return the brokers that have queues of *topic*."""
        return [broker for broker in self.all() if topic in broker.topics]

    # --- changes -------------------------------------------------------------------------------

    def set_writable(self, name: str, *, is_writable: bool) -> int:
        """Grant or revoke the write permission of a broker. Return the number of its topics."""
        with self._lock:
            broker = self._brokers.get(name)
            if broker is None:
                return 0
            self._brokers[name] = replace(broker, is_writable=is_writable)
            return len(broker.topics)

    def forget_topic(self, topic: str) -> None:
        """Remove *topic* from all brokers. A broker that still has the topic registers it again."""
        with self._lock:
            for name, broker in self._brokers.items():
                topics = {other: config for other, config in broker.topics.items() if other != topic}
                self._brokers[name] = replace(broker, topics=topics)

    def forget(self, connection: Connection) -> None:
        """Remove the registrations that arrived on a closed connection."""
        with self._lock:
            for broker in list(self._brokers.values()):
                closed = [id_ for id_, member in broker.members.items() if member.connection_id == connection.id]
                self._remove(broker, closed)

    def _remove(self, broker: RegisteredBroker, broker_ids: Iterable[int]) -> None:
        removed = set(broker_ids)
        if not removed:
            return
        members = {broker_id: member for broker_id, member in broker.members.items() if broker_id not in removed}
        if members:
            self._brokers[broker.name] = replace(broker, members=members)
        else:
            del self._brokers[broker.name]
        _log.info("name_server.broker_removed", broker=broker.name, ids=sorted(removed))

    # --- requests ------------------------------------------------------------------------------

    @answers(RequestCode.REGISTER_BROKER, max_body_bytes=_MAX_REGISTRATION_BYTES)
    def _register(
        self, header: headers.RegisterBrokerRequestHeader, connection: Connection, request: RemotingCommand
    ) -> headers.RegisterBrokerResponseHeader:
        self._check_open()
        self._check(header, request.body)
        wrapper = bodies.RegisterBrokerBody.decode(request.body).topic_config_serialize_wrapper
        expire_ms = header.heartbeat_timeout_millis or _EXPIRE_MS
        member = _Member(header.broker_addr, connection.id, self._clock.steady_ms(), expire_ms, wrapper.data_version)
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            if broker is None:
                if len(self._brokers) >= _MAX_BROKERS:
                    raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{_MAX_BROKERS} brokers are registered already")
                broker = RegisteredBroker(header.cluster_name, header.broker_name)
                _log.debug("name_server.broker_registered", broker=header.broker_name, address=header.broker_addr)
            # After a change a broker registers the changed topics only, so the other topics are kept.
            topics = broker.topics | (wrapper.topic_config_table if header.broker_id == MASTER_ID else {})
            members = broker.members | {header.broker_id: member}
            self._brokers[header.broker_name] = replace(
                broker, cluster=header.cluster_name, members=members, topics=topics
            )
            master = members.get(MASTER_ID)
        is_replica = header.broker_id != MASTER_ID and master is not None
        return headers.RegisterBrokerResponseHeader(master_addr=master.address if master and is_replica else None)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                "brokers may not register with this name server: a registration could redirect any topic. Set "
                "mqtemplate.server.broker-registration-enable to true if it is meant for several brokers",
            )

    def _check(self, header: headers.RegisterBrokerRequestHeader, body: bytes) -> None:
        reason = None
        if header.broker_name == self._own_name:
            reason = f"broker name {header.broker_name!r} belongs to the broker of this name server; choose another"
        elif header.compressed:
            reason = "compressed registrations are not supported; set compressedRegister=false"
        elif header.body_crc32 and header.body_crc32 != zlib.crc32(body) & 0x7FFF_FFFF:  # Java's sign bit is cleared
            reason = "the checksum of the body differs from bodyCrc32"
        if reason is not None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, reason)

    @answers(RequestCode.UNREGISTER_BROKER)
    def _unregister(self, header: headers.BrokerRequestHeader) -> None:
        self._check_open()
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            if broker is not None and header.broker_id in broker.members:
                self._remove(broker, [header.broker_id])

    @answers(RequestCode.QUERY_DATA_VERSION)
    def _query_version(
        self, header: headers.BrokerRequestHeader, version: bodies.DataVersionBody
    ) -> tuple[headers.QueryDataVersionResponseHeader, bodies.DataVersionBody | None]:
        """Tell a broker if it must register its topics again. The request also renews the registration."""
        self._check_open()
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            member = None if broker is None else broker.members.get(header.broker_id)
            if broker is None or member is None or member.address != header.broker_addr:
                return headers.QueryDataVersionResponseHeader(changed=True), None
            members = broker.members | {header.broker_id: replace(member, registered_ms=self._clock.steady_ms())}
            self._brokers[header.broker_name] = replace(broker, members=members)
        return headers.QueryDataVersionResponseHeader(changed=member.version != version), member.version

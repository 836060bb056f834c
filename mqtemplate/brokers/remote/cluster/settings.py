"""Settings of a remote broker, and the namespace of its topics and groups on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypedDict

from annotated_types import Gt

from mqtemplate.delay.settings import DEFAULT_DELAY_LEVELS
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import MessageQueue
from mqtemplate.processes import absolute_path, home_folder
from mqtemplate.record.compression import CompressionType, max_body_bytes
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.topics import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
    is_system_group,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIntervals:
    """Intervals and limits of the requests of a client. The ranges apply to ``application.yml``."""

    poll_name_server_interval_ms: Annotated[int, Gt(0)] = 30_000
    """Milliseconds between two requests for the routes of topics."""

    heartbeat_broker_interval_ms: Annotated[int, Gt(0)] = 30_000
    """Milliseconds between two heartbeats. A broker removes a client after two minutes without a heartbeat."""

    persist_consumer_offset_interval_ms: Annotated[int, Gt(0)] = 5_000
    """Milliseconds between two updates of the brokers' consumer offsets. Commits in between are collected."""

    request_timeout_ms: Annotated[int, Gt(0)] = 3_000
    """Milliseconds within which a broker or name server has to answer a request that has no timeout of its own."""

    pending_read_limit: Annotated[int, Gt(0)] = 100_000
    """Most delayed messages that one query of pending messages reads from a RocketMQ cluster; with more it fails."""

    pending_read_rate: Annotated[int, Gt(0)] = 20_000
    """Most records a second that the index of pending messages reads from a RocketMQ cluster."""

    max_decompressed_size: Annotated[int, Gt(0)] | None = None
    """Largest body in bytes that is decompressed for a listener; four times ``producer.max-message-size`` if not given.
    A larger one stays compressed, and its message fails with an error that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings(ClientIntervals):
    """Address of a RocketMQ cluster and how to use it. The defaults are the same as in RocketMQ's Java client."""

    name_servers: tuple[str, ...]
    """Name servers as ``host:port``. The client uses one until it fails."""

    address_map: Mapping[str, str] = field(default_factory=dict)
    """Registered address of a broker -> address to connect to; see `AddressMap`."""

    producer_group: str = "mqtemplate-producer"
    """Producer group of all sends."""

    namespace: str = ""
    """Prefix of topics and groups on the wire, the older form of a namespace; empty for none."""

    namespace_v2: str = ""
    """The newer form of a namespace, sent beside topics and groups."""

    credentials: Credentials | None = None
    """Access key and secret key; None for a cluster without access control."""

    tls: ClientTls | None = None
    """TLS settings; None for plain connections."""

    connect_timeout_ms: int = 3_000
    """Longest time to open a connection."""

    retry_times_when_send_failed: int = 2
    """Retries of a synchronous send, with another queue or broker, within its timeout."""

    retry_times_when_send_async_failed: int = 2
    """Retries of an asynchronous send."""

    retry_next_server: bool = False
    """True: retry with another broker also if one stored the message with a weaker guarantee than configured."""

    auto_batch: bool = True
    """True: messages to one topic that are sent while others are on their way leave together, in one request. Each has
    its own result. False: each message is a request."""

    max_message_size: int = 4 << 20
    """Largest body in bytes. The broker has a limit of its own."""

    compress_threshold: int = 4_096
    """Body size in bytes from which the client compresses a body."""

    compression_type: CompressionType = CompressionType.ZLIB
    """Compression of bodies."""

    compression_level: int = 5
    """Level of the compression, in the scale of its type."""

    default_topic_queue_nums: int = 4
    """Queues of a topic that its first message creates."""

    auto_create_topic_enable: bool = True
    """False: messages to a topic that is not in the cluster are refused, unless ``topics`` names it, or a member of a
    group reads it."""

    topics: tuple[str, ...] = ()
    """Topics that the first message may create in any case, and without a log event."""

    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """Table of delay levels of the cluster's brokers. A message with a level that it does not have is refused."""

    clamp_delay_level: bool = False
    """True: such a message is sent, and a broker of RocketMQ gives it the highest level that it has."""

    rebalance_interval_ms: int = 20_000
    """Milliseconds between two rebalances of a consumer group."""

    lock_interval_ms: int = 20_000
    """Milliseconds between two renewals of queue locks, for orderly consumers."""

    lock_live_ms: int = 30_000
    """Milliseconds after which a queue lock is no longer valid without a renewal."""

    pull_batch_size: int = 32
    """Messages of one pull. A broker returns 32 at most unless it is configured otherwise."""

    pull_threshold_messages: int = 1_000
    """Messages of one queue that are pulled ahead; with this many the client stops pulling from the queue."""

    pull_threshold_bytes: int = 100 << 20
    """The same limit in bytes of bodies."""

    suspend_ms: int = 15_000
    """Longest time that a broker may hold a pull while there is no message."""

    pull_timeout_ms: int = 30_000
    """Timeout of a pull, and of a query that reads all pending messages of a broker."""

    retry_after_error_ms: int = 1_000
    """Time after which a failed pull is repeated."""

    offset_path: Path | None = None
    """Directory with the offsets of broadcasting groups; None: ``~/.rocketmq_offsets``.

    A relative one is resolved when the settings are created."""

    pending_index: Path | None = None
    """File with an index of the pending messages of a RocketMQ cluster; None: each query reads all of them, up to
    ``pending_read_limit``."""

    tools_group: str = "TOOLS_CONSUMER"
    """Consumer group of `Broker.pull`. Every broker has it from the start."""

    send_avoid_ms: int = 30_000
    """Time for which a broker that failed a send is not used while another broker is available."""

    @property
    def offset_folder(self) -> Path:
        """Directory with the offsets of broadcasting groups.

        Raises:
            ConfigurationError: It is in the home folder, and the user has no home folder.
        """
        if self.offset_path is not None:
            return self.offset_path
        instead = "set offset_path, in application.yml mqtemplate.cluster.offset-path"
        return home_folder("the offsets of a broadcasting group", instead) / ".rocketmq_offsets"

    @property
    def max_body_bytes(self) -> int:
        """Largest body that is decompressed."""
        return max_body_bytes(self.max_decompressed_size, self.max_message_size)

    def __post_init__(self) -> None:
        if self.offset_path is not None:
            object.__setattr__(self, "offset_path", absolute_path(self.offset_path))
        if self.pending_index is not None:
            object.__setattr__(self, "pending_index", absolute_path(self.pending_index))
        if self.address_map:
            from mqtemplate.remoting.sockets import AddressMap  # an embedded broker loads these settings too

            AddressMap(self.address_map)
        if not self.name_servers:
            raise ConfigurationError(
                "a remote broker needs the address of a name server; give name_servers=('host:port',)"
            )
        if self.namespace and self.namespace_v2:
            raise ConfigurationError("namespace and namespace_v2 are two forms of one setting; keep one of them")


# --- namespace ------------------------------------------------------------------------------------


_KIND_PREFIXES = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


class QueueFields(TypedDict):
    """Fields that name a queue in the header of a request."""

    topic: str
    queue_id: int
    broker_name: str


class Namespace:
    """Translation of topic and group names between the application and the wire.

    On the wire, the namespace stands before the name and after ``%RETRY%`` or ``%DLQ%``. RocketMQ's own topics and
    groups have no namespace.

    Args:
        name: The namespace; empty leaves all names as they are.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}%" if name else ""

    def wrap(self, name: str) -> str:
        """Return the name of a topic or group on the wire."""
        if not self._prefix or not name or _is_system(name):
            return name
        kind, rest = _split(name)
        return name if rest.startswith(self._prefix) else f"{kind}{self._prefix}{rest}"

    def unwrap(self, name: str) -> str:
        """Return the application's name of a topic or group; names of other namespaces stay as they are."""
        if not self._prefix:
            return name
        kind, rest = _split(name)
        return kind + rest.removeprefix(self._prefix)

    def queue_fields(self, queue: MessageQueue) -> QueueFields:
        """Return the header fields of *queue*, with the name of its topic on the wire."""
        return {"topic": self.wrap(queue.topic), "queue_id": queue.queue_id, "broker_name": queue.broker_name}

    def wrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return *queue* with the name of its topic on the wire."""
        return MessageQueue(self.wrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue

    def unwrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return *queue* with the application's name of its topic."""
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue


def _is_system(name: str) -> bool:
    return name in SYSTEM_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX) or is_system_group(name)


def _split(name: str) -> tuple[str, str]:
    for kind in _KIND_PREFIXES:
        if name.startswith(kind):
            return kind, name[len(kind) :]
    return "", name

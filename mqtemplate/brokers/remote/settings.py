"""Settings of the remote broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.compression import CompressionType
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.settings import Credentials
from mqtemplate.remoting.tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Addresses of a RocketMQ cluster, and how the client uses it. Defaults are those of RocketMQ's Java client.

    Attributes:
        name_servers: ``host:port`` of each; the client uses one until it fails.
        producer_group: Producer group of this client.
        namespace: Prefix of topics and groups on the wire, RocketMQ's older form; empty for none.
        namespace_v2: Namespace in RocketMQ's newer form, an extra field of each request.
        connect_timeout_ms: Time limit for a new connection.
        request_timeout_ms: Time limit of a request that has no other limit.
        retry_times_when_send_failed: Further attempts of `Broker.send` at another queue or broker, within its timeout.
        retry_times_when_send_async_failed: The same for `Broker.send_async`.
        retry_next_server: Also try another broker after a response such as ``FLUSH_DISK_TIMEOUT``.
        max_message_size: Largest body in bytes; the broker has a limit of its own.
        compress_threshold: Bodies of this size in bytes or more are compressed.
        default_topic_queue_nums: Number of queues of a topic that its first message creates.
        poll_name_server_interval_ms: Interval of route updates.
        heartbeat_broker_interval_ms: Interval of heartbeats.
        rebalance_interval_ms: Interval of rebalances; changes in a group cause further ones.
        persist_consumer_offset_interval_ms: Interval at which committed offsets are sent to the brokers.
        lock_interval_ms: Interval at which queue locks are renewed.
        lock_live_ms: A queue lock that was not renewed for this time counts as lost.
        pull_batch_size: Largest number of messages of one pull; brokers limit it to 32 unless configured otherwise.
        pull_threshold_messages: Pulling from a queue pauses when this many of its messages are prefetched.
        pull_threshold_bytes: The same in bytes of bodies.
        suspend_ms: Time for which a broker may hold a pull until a message arrives.
        pull_timeout_ms: Time limit of a pull; longer than *suspend_ms*.
        retry_after_error_ms: Pause before a failed pull is repeated.
        offset_path: Directory with the offsets of broadcasting groups.
        tools_group: Consumer group of `Broker.pull`; every RocketMQ broker has this group.
        send_avoid_ms: After a failed send, the producer prefers other brokers for this time.
    """

    name_servers: tuple[str, ...]
    producer_group: str = "mqtemplate-producer"
    namespace: str = ""
    namespace_v2: str = ""
    credentials: Credentials | None = None
    tls: ClientTls | None = None
    connect_timeout_ms: int = 3_000
    request_timeout_ms: int = 3_000
    retry_times_when_send_failed: int = 2
    retry_times_when_send_async_failed: int = 2
    retry_next_server: bool = False
    max_message_size: int = 4 << 20
    compress_threshold: int = 4_096
    compression_type: CompressionType = CompressionType.ZLIB
    compression_level: int = 5
    default_topic_queue_nums: int = 4
    poll_name_server_interval_ms: int = 30_000
    heartbeat_broker_interval_ms: int = 30_000
    rebalance_interval_ms: int = 20_000
    persist_consumer_offset_interval_ms: int = 5_000
    lock_interval_ms: int = 20_000
    lock_live_ms: int = 30_000
    pull_batch_size: int = 32
    pull_threshold_messages: int = 1_000
    pull_threshold_bytes: int = 100 << 20
    suspend_ms: int = 15_000
    pull_timeout_ms: int = 30_000
    retry_after_error_ms: int = 1_000
    offset_path: Path = field(default_factory=lambda: Path.home() / ".rocketmq_offsets")
    tools_group: str = "TOOLS_CONSUMER"
    send_avoid_ms: int = 30_000

    def __post_init__(self) -> None:
        if not self.name_servers:
            raise ConfigurationError(
                "a remote broker needs the address of a name server; give name_servers=('host:port',)"
            )
        if self.namespace and self.namespace_v2:
            raise ConfigurationError("namespace and namespace_v2 are two forms of one setting; keep one of them")

"""What a remote broker can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.errors import ConfigurationError
from mqtemplate.record.compression import CompressionType
from mqtemplate.remoting import ClientTls, Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Where a RocketMQ cluster is, and how to use it. Defaults are those of RocketMQ's Java client.

    Attributes:
        name_servers: ``host:port`` each; one is used until it fails.
        producer_group: Whom the cluster knows the sender as.
        namespace: Prefix of topics and groups on the wire, the older form; empty for none.
        namespace_v2: The newer form, told beside them.
        request_timeout_ms: Of all calls that have no limit of their own.
        retry_times_when_send_failed: How often a send tries another queue or broker, within its time.
        retry_times_when_send_async_failed: The same for `Broker.send_async`.
        retry_next_server: Try another broker also where one answered that a message is not as safe as it was set to be.
        max_message_size: Bytes of a body; the broker has a limit of its own.
        compress_threshold: Bytes from which a body is compressed.
        default_topic_queue_nums: How many queues a topic gets that its first message makes.
        pull_batch_size: Messages that one pull asks for; brokers give 32 at most unless they were told otherwise.
        pull_threshold_messages: Messages of a queue that are fetched ahead; so many more are not asked for.
        pull_threshold_bytes: The same in bytes of bodies.
        suspend_ms: How long a broker may keep a pull open while there is nothing.
        retry_after_error_ms: When a pull that failed is tried again.
        offset_path: The folder with the progress of broadcasting groups.
        tools_group: Whom `Broker.pull` reads as; brokers know this one from the start.
        send_avoid_ms: How long a broker that failed a send is passed over where there is another.
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
            raise ConfigurationError("namespace and namespace_v2 say the same in two forms; keep one of them")

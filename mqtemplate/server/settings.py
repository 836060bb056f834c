"""What a broker server can be told, beside what its engine was."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerServerSettings:
    """Sizes in bytes, times in milliseconds. Names are those of RocketMQ's ``BrokerConfig`` where it has the thing.

    The address that clients are told is the engine's ``listen_host``: it stands in routes, records and message ids.
    Where its port is 0, or the one of *listen* is, routes tell the port that the server really has.

    Attributes:
        listen: Where the server waits for clients; port 0 lets the system choose.
        cluster_name: Goes into the property ``CLUSTER`` of each message, and into routes.
        auto_create_topic_enable: Whether a first message makes its topic.
        default_topic_queue_nums: Queues of such a topic; the client may ask for fewer.
        auto_create_subscription_group: Whether a first heartbeat makes its group.
        enable_property_filter: Whether consumers may select by SQL92.
        recall_message_enable: Whether producers may call waiting messages back.
        trace_on: Whether clients that trace their messages are to do so.
        max_pull_count: Messages in one answer, whatever the client wishes.
        max_pull_bytes: Bytes in one answer; one message is given in any case.
        max_held_pulls: Pulls that may wait for messages at one time; one more is told that the broker is busy.
        client_expire_ms: A client that is silent for so long is no member of its groups any more.
        client_scan_interval_ms: How often that is looked at.
        rebalance_lock_max_live_ms: A queue's lock ends so long after it was last taken.

    Raises:
        ConfigurationError: One of them cannot be.
    """

    listen: HostAddress = HostAddress("127.0.0.1", 10911)
    cluster_name: str = "DefaultCluster"
    auto_create_topic_enable: bool = True
    default_topic_queue_nums: int = 8
    auto_create_subscription_group: bool = True
    enable_property_filter: bool = True
    recall_message_enable: bool = True
    region_id: str = "DefaultRegion"
    trace_on: bool = True
    max_pull_count: int = 32
    max_pull_bytes: int = 256 << 10
    max_held_pulls: int = 100_000
    client_expire_ms: int = 120_000
    client_scan_interval_ms: int = 10_000
    rebalance_lock_max_live_ms: int = 60_000

    def __post_init__(self) -> None:
        for name in (
            "default_topic_queue_nums",
            "max_pull_count",
            "max_pull_bytes",
            "max_held_pulls",
            "client_expire_ms",
            "client_scan_interval_ms",
            "rebalance_lock_max_live_ms",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"{name.replace('_', '-')} must be 1 or more, got {value}")
        if not self.cluster_name:
            raise ConfigurationError("cluster-name is empty; give a name such as DefaultCluster")

"""Settings of a broker server."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerServerSettings:
    """Settings that a broker server has in addition to those of its engine.

    Sizes are in bytes, times in milliseconds. The names are those of RocketMQ's ``BrokerConfig`` where they exist.

    Clients connect to the engine's ``listen_host``: it is part of routes, records and message IDs. If its port is 0, or
    equal to the port of *listen*, routes have the port that the server really listens on.

    Attributes:
        listen: Address of the listener socket. With port 0 the operating system chooses the port.
        cluster_name: Cluster name in routes, and in the property ``CLUSTER`` of each message.
        auto_create_topic_enable: A message to a missing topic creates the topic.
        default_topic_queue_nums: Maximum number of queues of such a topic. The client may request fewer.
        auto_create_subscription_group: A request that names a missing consumer group creates the group.
        enable_property_filter: Consumers may select messages by SQL92.
        recall_message_enable: Producers may recall delayed messages.
        trace_on: Clients with message tracing trace the messages that they send to this broker.
        max_pull_count: Maximum number of messages in one pull response.
        max_pull_bytes: Maximum size of one pull response. The first message is returned whatever its size.
        max_held_pulls: Maximum number of pulls that are held at one time. Another one is refused with ``SYSTEM_BUSY``.
        client_expire_ms: A client without a heartbeat for this time is removed from its groups.
        client_scan_interval_ms: Time between two checks for such clients.
        rebalance_lock_max_live_ms: Time after which the lock of a queue expires if its owner does not renew it.

    Raises:
        ConfigurationError: A number is not positive, or the cluster name is empty.
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
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < 1:  # bool is a subclass of int
                raise ConfigurationError(f"{name.replace('_', '-')} must be 1 or more, got {value}")
        if not self.cluster_name:
            raise ConfigurationError("cluster-name is empty; give a name such as DefaultCluster")

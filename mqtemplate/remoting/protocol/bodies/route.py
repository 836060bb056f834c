"""Bodies of topics, routes and brokers.

Source: RocketMQ ``remoting: protocol/route``, ``protocol/body``, ``common: TopicConfig``.
"""

from __future__ import annotations

from dataclasses import field

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.codes import Perm


class QueueData(JsonBody):
    """Queues of a topic on one broker.

    Attributes:
        perm: Bits of `codes.Perm`.
    """

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = Perm.READ | Perm.WRITE
    topic_sys_flag: int = 0


class BrokerData(JsonBody):
    """Addresses of a broker.

    Attributes:
        broker_addrs: Broker id -> ``host:port``. 0 is the master; producers ignore a broker without it.
    """

    cluster: str | None = None
    broker_name: str
    broker_addrs: dict[int, str]
    enable_acting_master: bool = False


class TopicRouteData(JsonBody):
    """Route of a topic. Peers from 4.9.4 on get it in standard JSON.

    Attributes:
        order_topic_conf: ``broker:queues``, separated by ``;``, for an ordered topic.
    """

    queue_datas: list[QueueData]
    broker_datas: list[BrokerData]
    filter_server_table: dict[str, list[str]] = field(default_factory=dict)
    order_topic_conf: str | None = None


class ClusterInfo(JsonBody):
    """All brokers of the name server.

    Attributes:
        broker_addr_table: Addresses by broker name.
        cluster_addr_table: Cluster -> broker names.
    """

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = field(default_factory=dict)


class KVTable(JsonBody):
    """Texts by name: a broker's runtime statistics, or the entries of a name server."""

    table: dict[str, str] = field(default_factory=dict)


class TopicList(JsonBody):
    """Names of topics."""

    topic_list: list[str] = field(default_factory=list)
    broker_addr: str | None = None


class DataVersion(JsonBody):
    """Version of a table; it shows which of two tables is newer."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0


class TopicConfig(JsonBody):
    """Settings of a topic on one broker.

    Attributes:
        topic_filter_type: ``SINGLE_TAG`` or ``MULTI_TAG``.
    """

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = Perm.READ | Perm.WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)


class TopicConfigSerializeWrapper(JsonBody):
    """All topics of a broker."""

    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    data_version: DataVersion = field(default_factory=DataVersion)


class CreateTopicListRequestBody(JsonBody):
    """Settings of several topics, to create or to change."""

    topic_config_list: list[TopicConfig]


class RegisterBrokerBody(JsonBody):
    """Topics that a broker registers with a name server, in the uncompressed form."""

    topic_config_serialize_wrapper: TopicConfigSerializeWrapper
    filter_server_list: list[str] = field(default_factory=list)


class TopicOffset(JsonBody):
    """Offsets of one queue: its first message, the next message; and the time of the last message in ms."""

    min_offset: int
    max_offset: int
    last_update_timestamp: int = 0


class TopicStatsTable(JsonBody):
    """Offsets of all queues of a topic on one broker. Tools treat an empty table as an error."""

    offset_table: dict[MessageQueue, TopicOffset]
    topic_put_tps: float | None = None


class SubscriptionData(JsonBody):
    """Subscription of a consumer to a topic.

    Attributes:
        sub_string: ``*``, or tags separated by ``||``, or an SQL92 expression.
        code_set: `mqtemplate.hashes.java_string_hash` of each tag.
        sub_version: Creation time in milliseconds. Pulls repeat it; the larger one is the newer subscription.
        expression_type: ``TAG`` or ``SQL92``.
    """

    topic: str
    sub_string: str = "*"
    tags_set: list[str] = field(default_factory=list)
    code_set: list[int] = field(default_factory=list)
    sub_version: int = 0
    expression_type: str = "TAG"
    class_filter_mode: bool = False


class ConsumeQueueData(JsonBody):
    """One unit of a consume queue, and the result of a group's filter for it."""

    physic_offset: int
    physic_size: int
    tags_code: int
    eval: bool = False


class QueryConsumeQueueResponseBody(JsonBody):
    """Units of a consume queue."""

    queue_data: list[ConsumeQueueData]
    max_queue_index: int
    min_queue_index: int
    subscription_data: SubscriptionData | None = None


class BrokerStatsItem(JsonBody):
    """Sum, rate per second and average of one statistic over a period."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(JsonBody):
    """One statistic of a broker over the last minute, hour and day."""

    stats_minute: BrokerStatsItem
    stats_hour: BrokerStatsItem
    stats_day: BrokerStatsItem

"""Headers of topics, brokers and name servers.

Source: RocketMQ ``remoting: protocol/header``.
"""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader


class GetRouteInfoRequestHeader(RpcRequestHeader):
    """Query for a topic's route.

    Attributes:
        accept_standard_json_only: True requests standard JSON, which clients from 4.9.4 on get anyway.
    """

    topic: str
    accept_standard_json_only: bool | None = None


class CreateTopicRequestHeader(RpcRequestHeader):
    """Request to create a topic or to change it.

    Attributes:
        topic_filter_type: ``SINGLE_TAG`` or ``MULTI_TAG``.
        attributes: ``+name=value`` and ``-name``, separated by commas.
    """

    topic: str
    default_topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str
    topic_sys_flag: int | None = None
    order: bool
    attributes: str | None = None


class TopicNameRequestHeader(RpcRequestHeader):
    """Name of a topic, for requests without other fields: for its settings, statistics and groups, or to delete it."""

    topic: str


class DeleteTopicFromNamesrvRequestHeader(RpcRequestHeader):
    """Request to remove a topic from the name server's routes."""

    topic: str
    cluster_name: str | None = None


class GetTopicsByClusterRequestHeader(CommandHeader):
    """Query for the topics of a cluster."""

    cluster: str


class GetAllTopicConfigRequestHeader(CommandHeader):
    """Query for all topics, starting at number ``topic_seq``; 4.9 sends no fields at all."""

    topic_seq: int = 0
    data_version: str | None = None
    max_topic_num: int | None = None


class GetAllTopicConfigResponseHeader(CommandHeader):
    """Number of all topics, including those that the body leaves out."""

    total_topic_num: int | None = None


class GetBrokerConfigResponseHeader(CommandHeader):
    """Version of a broker's settings, as the JSON of a `DataVersionBody`. The settings themselves are the body."""

    version: str


class QueryConsumeQueueRequestHeader(RpcRequestHeader):
    """Query for units of a consume queue, starting at ``index``."""

    topic: str | None = None
    queue_id: int = 0
    index: Long = 0
    count: int = 0
    consumer_group: str | None = None


class ViewBrokerStatsDataRequestHeader(CommandHeader):
    """Query for one statistic of a broker."""

    stats_name: str
    stats_key: str


# --- name server ------------------------------------------------------------------------------------


class KVNamespaceRequestHeader(CommandHeader):
    """Query for all entries of a namespace of the name server's key-value settings."""

    namespace: str


class KVConfigKeyRequestHeader(KVNamespaceRequestHeader):
    """Request to read or to delete one entry."""

    key: str


class PutKVConfigRequestHeader(KVConfigKeyRequestHeader):
    """Request to set one entry."""

    value: str


class GetKVConfigResponseHeader(CommandHeader):
    """Value of one entry."""

    value: str | None = None


class BrokerNameRequestHeader(CommandHeader):
    """Request to remove the write permission of a broker's topics, or to restore it."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(CommandHeader):
    """Number of topics that lost their write permission."""

    wipe_topic_count: int


class AddWritePermOfBrokerResponseHeader(CommandHeader):
    """Number of topics that regained their write permission."""

    add_topic_count: int


class BrokerRequestHeader(CommandHeader):
    """Identity of a broker: to unregister it, and to query the version of its topics.

    Attributes:
        broker_id: 0 is a master.
    """

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


class RegisterBrokerRequestHeader(BrokerRequestHeader):
    """Registration of a broker with a name server, sent every 30 s.

    Attributes:
        body_crc32: CRC-32 of the body with the top bit cleared; 0 if there is no body.
    """

    ha_server_addr: str
    heartbeat_timeout_millis: Long | None = None
    compressed: bool = False
    body_crc32: int = 0


class RegisterBrokerResponseHeader(CommandHeader):
    """Address of the master, for a slave that registers."""

    master_addr: str | None = None


class QueryDataVersionResponseHeader(CommandHeader):
    """True if the broker's topics differ from those that the name server has."""

    changed: bool

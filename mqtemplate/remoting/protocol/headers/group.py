"""Headers about clients, groups and offsets.

Source: RocketMQ ``remoting: protocol/header``; sections 7, 11, 12 and 18 of the specification.
"""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import BoundaryType, CommandHeader, Long, header, wire
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader, TopicRequestHeader


@header
class HeartbeatResponseHeader(CommandHeader):
    """What a broker of 5.x says to a heartbeat; one that leaves all out gets full heartbeats for ever."""

    supports_v2: bool | None = wire("IS_SUPPORT_HEART_BEAT_V2", default=None)
    subscriptions_changed: bool | None = wire("IS_SUB_CHANGE", default=None)


@header
class UnregisterClientRequestHeader(RpcRequestHeader):
    """A client leaves one group, of producers or of consumers."""

    client_id: str = wire("clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


@header
class ConsumerGroupRequestHeader(RpcRequestHeader):
    """Who is in a group, who is connected, or (from a broker) that this has changed."""

    consumer_group: str


@header
class ProducerGroupRequestHeader(RpcRequestHeader):
    """Who sends for a group."""

    producer_group: str


@header
class GroupRequestHeader(RpcRequestHeader):
    """A group's topics, or its settings."""

    group: str


@header
class TopicQueueRequestHeader(TopicRequestHeader):
    """A queue's smallest offset, or the time of its first message."""

    topic: str
    queue_id: int


@header
class GetMaxOffsetRequestHeader(TopicQueueRequestHeader):
    """A queue's next free offset.

    Attributes:
        committed: Of what consumers can see, not of what is stored.
    """

    committed: bool = True


@header
class SearchOffsetRequestHeader(TopicQueueRequestHeader):
    """The queue offset at a time.

    Attributes:
        timestamp: Ms, when messages were stored.
    """

    timestamp: Long
    boundary_type: BoundaryType | None = None
    lite_topic: str | None = None


@header
class QueryConsumerOffsetRequestHeader(TopicQueueRequestHeader):
    """How far a group has come.

    Attributes:
        set_zero_if_not_found: False: say that there is nothing, also where a young queue would give 0.
    """

    consumer_group: str
    set_zero_if_not_found: bool | None = None


@header
class UpdateConsumerOffsetRequestHeader(TopicQueueRequestHeader):
    """A group has come so far: ``commit_offset`` is the next offset to read, not the last one read."""

    consumer_group: str
    commit_offset: Long


@header
class OffsetResponseHeader(CommandHeader):
    """The one answer to all questions for a queue offset."""

    offset: Long


@header
class GetEarliestMsgStoretimeResponseHeader(CommandHeader):
    """Ms; -1 of an empty queue."""

    timestamp: Long


@header
class ResetOffsetRequestHeader(TopicRequestHeader):
    """Send a group back, or forward, to a time.

    Attributes:
        queue_id: -1 for all.
        offset: Where to, instead of a time.
        timestamp: Ms; -1 for the end.
    """

    topic: str
    group: str
    queue_id: int = -1
    offset: Long | None = None
    timestamp: Long
    is_force: bool


@header
class GetConsumerStatusRequestHeader(TopicRequestHeader):
    """Ask consumers for their offsets."""

    topic: str
    group: str
    client_addr: str | None = None


@header
class GetConsumerRunningInfoRequestHeader(RpcRequestHeader):
    """Ask one consumer how it is.

    Attributes:
        jstack_enable: With the stacks of its threads.
    """

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


@header
class GetConsumeStatsRequestHeader(TopicRequestHeader):
    """How far a group is behind.

    Attributes:
        topic_list: Topics, separated by ``;``.
    """

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


@header
class GetConsumeStatsInBrokerHeader(CommandHeader):
    """How far all groups are behind."""

    is_order: bool


@header
class QueryConsumeTimeSpanRequestHeader(TopicRequestHeader):
    """From when to when a topic's messages are, and where a group stands between."""

    topic: str
    group: str


@header
class QuerySubscriptionByConsumerRequestHeader(TopicRequestHeader):
    """What a group has subscribed of a topic."""

    group: str
    topic: str | None = None


@header
class QueryCorrectionOffsetHeader(TopicRequestHeader):
    """Offsets of one group with others taken into account.

    Attributes:
        filter_groups: Groups, separated by commas.
    """

    filter_groups: str | None = None
    compare_group: str
    topic: str


@header
class CloneGroupOffsetRequestHeader(RpcRequestHeader):
    """Give one group the offsets of another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


@header
class DeleteSubscriptionGroupRequestHeader(RpcRequestHeader):
    """Forget a group.

    Attributes:
        clean_offset: Its offsets too.
    """

    group_name: str
    clean_offset: bool = False


@header
class GetAllSubscriptionGroupRequestHeader(CommandHeader):
    """All groups, from the ``group_seq``-th on; 4.9 sends no fields at all."""

    group_seq: int = 0
    data_version: str | None = None
    max_group_num: int | None = None


@header
class GetAllSubscriptionGroupResponseHeader(CommandHeader):
    total_group_num: int

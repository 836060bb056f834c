"""Headers of clients, consumer groups and offsets.

Source: RocketMQ ``remoting: protocol/header``.
"""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import BoundaryType, CommandHeader, Long, wire
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader


class UnregisterClientRequestHeader(RpcRequestHeader):
    """Notice that a client leaves one group of producers or of consumers."""

    client_id: str = wire("clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class ConsumerGroupRequestHeader(RpcRequestHeader):
    """Query for the members of a group or for their connections; from a broker: notice that the members changed."""

    consumer_group: str


class ProducerGroupRequestHeader(RpcRequestHeader):
    """Query for the producers of a group."""

    producer_group: str


class GroupRequestHeader(RpcRequestHeader):
    """Query for a group's topics or for its settings."""

    group: str


class TopicQueueRequestHeader(RpcRequestHeader):
    """Query for a queue's smallest offset or for the store time of its first message."""

    topic: str
    queue_id: int


class GetMaxOffsetRequestHeader(TopicQueueRequestHeader):
    """Query for a queue's end: the offset of the next message.

    Attributes:
        committed: True: the end that consumers can read; False: the end that is stored.
    """

    committed: bool = True


class SearchOffsetRequestHeader(TopicQueueRequestHeader):
    """Search for the queue offset at a store time, in milliseconds."""

    timestamp: Long
    boundary_type: BoundaryType | None = None


class QueryConsumerOffsetRequestHeader(TopicQueueRequestHeader):
    """Query for a group's committed offset.

    Attributes:
        set_zero_if_not_found: False: report a missing offset even for a young queue, where the broker would return 0.
    """

    consumer_group: str
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequestHeader(TopicQueueRequestHeader):
    """Commit of a group's offset: the offset of the next message to read, not of the last one read."""

    consumer_group: str
    commit_offset: Long


class OffsetResponseHeader(CommandHeader):
    """Response to each query for a queue offset."""

    offset: Long


class GetEarliestMsgStoretimeResponseHeader(CommandHeader):
    """Store time of a queue's first message in milliseconds; -1 if the queue is empty."""

    timestamp: Long


class ResetOffsetRequestHeader(RpcRequestHeader):
    """Request to set a group's offsets to a time in the past or future.

    Attributes:
        queue_id: -1 for all queues.
        offset: New offset, instead of one found by time.
        timestamp: Milliseconds; -1 for the end.
    """

    topic: str
    group: str
    queue_id: int = -1
    offset: Long | None = None
    timestamp: Long
    is_force: bool


class GetConsumerStatusRequestHeader(RpcRequestHeader):
    """Query for the offsets that consumers hold."""

    topic: str
    group: str
    client_addr: str | None = None


class GetConsumerRunningInfoRequestHeader(RpcRequestHeader):
    """Query for the state of one consumer.

    Attributes:
        jstack_enable: True to include the stacks of its threads.
    """

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class GetConsumeStatsRequestHeader(RpcRequestHeader):
    """Query for a group's lag.

    Attributes:
        topic_list: Topics, separated by ``;``.
    """

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetConsumeStatsInBrokerHeader(CommandHeader):
    """Query for the lag of all groups of a broker."""

    is_order: bool


class QueryConsumeTimeSpanRequestHeader(RpcRequestHeader):
    """Query for the times of a topic's first and last message and of the message at a group's offset."""

    topic: str
    group: str


class QuerySubscriptionByConsumerRequestHeader(RpcRequestHeader):
    """Query for a group's subscription to a topic."""

    group: str
    topic: str | None = None


class QueryCorrectionOffsetHeader(RpcRequestHeader):
    """Query for the offsets of one group, corrected by the offsets of others.

    Attributes:
        filter_groups: Groups, separated by commas.
    """

    filter_groups: str | None = None
    compare_group: str
    topic: str


class CloneGroupOffsetRequestHeader(RpcRequestHeader):
    """Request to copy the offsets of one group to another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class DeleteSubscriptionGroupRequestHeader(RpcRequestHeader):
    """Request to delete a group.

    Attributes:
        clean_offset: True to delete its offsets too.
    """

    group_name: str
    clean_offset: bool = False


class GetAllSubscriptionGroupRequestHeader(CommandHeader):
    """Query for all groups, starting at number ``group_seq``; 4.9 sends no fields at all."""

    group_seq: int = 0
    data_version: str | None = None
    max_group_num: int | None = None


class GetAllSubscriptionGroupResponseHeader(CommandHeader):
    """Number of all groups, including those that the body leaves out."""

    total_group_num: int

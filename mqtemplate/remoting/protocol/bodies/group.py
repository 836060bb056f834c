"""Bodies of clients, consumer groups and offsets.

Fields with a fixed list of words (``CLUSTERING``, ``CONSUME_PASSIVELY``, ``JAVA``) are texts here, since a newer peer
may use other words.

Source: RocketMQ ``remoting: protocol/heartbeat``, ``protocol/body``, ``protocol/admin``, ``protocol/subscription``.
"""

from __future__ import annotations

from dataclasses import field

from mqtemplate.message import MessageQueue
from mqtemplate.numbers import parse_number
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.bodies.route import DataVersionBody, SubscriptionData
from mqtemplate.remoting.protocol.headers.fields import wire

# --- clients ----------------------------------------------------------------------------------------


class ProducerData(JsonBody):
    """One producer group of a client."""

    group_name: str


class ConsumerData(JsonBody):
    """One consumer group of a client.

    Attributes:
        consume_type: ``CONSUME_PASSIVELY`` for push, ``CONSUME_ACTIVELY`` for pull, ``CONSUME_POP``.
        message_model: ``CLUSTERING`` or ``BROADCASTING``; `mqtemplate.broker.MessageModel`.
        consume_from_where: Also three deprecated words; `mqtemplate.broker.ConsumeFromWhere`.
        subscription_data_set: A clustering push consumer includes its own retry topic.
    """

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False


class HeartbeatData(JsonBody):
    """Heartbeat of a client, with its groups.

    Attributes:
        heartbeat_fingerprint: Not 0 for version 2.
        without_sub: True in version 2 if nothing has changed: the subscriptions are left out but still valid.
    """

    client_id: str = wire("clientID")
    producer_data_set: list[ProducerData] = field(default_factory=list)
    consumer_data_set: list[ConsumerData] = field(default_factory=list)
    heartbeat_fingerprint: int = 0
    without_sub: bool = False


class CheckClientRequestBody(JsonBody):
    """Request of a consumer to check its subscription's expression."""

    client_id: str
    group: str
    subscription_data: SubscriptionData
    namespace: str | None = None


class GetConsumerListByGroupResponseBody(JsonBody):
    """Client ids of a group's members."""

    consumer_id_list: list[str]


class ClientConnection(JsonBody):
    """One connected client.

    Attributes:
        client_addr: ``address:port``, as the broker sees it.
        language: Name of a `codes.LanguageCode`.
    """

    client_id: str
    client_addr: str
    language: str = "JAVA"
    version: int = 0


class ConsumerConnection(JsonBody):
    """Connected consumers of a group, and their subscriptions. See `ConsumerData`."""

    connection_set: list[ClientConnection] = field(default_factory=list)
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


class ProducerConnection(JsonBody):
    """Connected producers of a group."""

    connection_set: list[ClientConnection] = field(default_factory=list)


class ProducerInfo(JsonBody):
    """One connected producer."""

    client_id: str
    remote_ip: str | None = wire("remoteIP", default=None)
    language: str | None = None
    version: int = 0
    last_update_timestamp: int = 0


class ProducerTableInfo(JsonBody):
    """Connected producers of all groups, by group."""

    data: dict[str, list[ProducerInfo]] = field(default_factory=dict)


class GroupList(JsonBody):
    """Names of consumer groups."""

    group_list: list[str] = field(default_factory=list)


# --- locks and offsets ------------------------------------------------------------------------------


class LockBatchRequestBody(JsonBody):
    """Queues of an ordered group that a client wants to lock or to unlock."""

    consumer_group: str
    client_id: str
    mq_set: list[MessageQueue]
    only_this_broker: bool = False


class LockBatchResponseBody(JsonBody):
    """Queues that the client has locked now."""

    lock_ok_mq_set: list[MessageQueue] = wire("lockOKMQSet")


class ResetOffsetBody(JsonBody):
    """New offset of each queue."""

    offset_table: dict[MessageQueue, int]


class ResetOffsetForC(JsonBody):
    """New offset of one queue."""

    topic: str
    broker_name: str
    queue_id: int
    offset: int


class ResetOffsetBodyForC(JsonBody):
    """New offset of each queue, for clients written in C++."""

    offset_table: list[ResetOffsetForC]


class GetConsumerStatusBody(JsonBody):
    """Offsets that one client holds, or, from a broker, the offsets of all clients by client id."""

    message_queue_table: dict[MessageQueue, int] = field(default_factory=dict)
    consumer_table: dict[str, dict[MessageQueue, int]] = field(default_factory=dict)


class ConsumerOffsetSerializeWrapper(JsonBody):
    """All offsets of a broker: ``topic@group`` -> queue id -> offset of the next message to read."""

    offset_table: dict[str, dict[int, int]] = field(default_factory=dict)
    data_version: DataVersionBody | None = None


class QueryCorrectionOffsetBody(JsonBody):
    """Offsets by queue id."""

    correction_offsets: dict[int, int] = field(default_factory=dict)


class OffsetWrapper(JsonBody):
    """Offsets of one queue: its end, the committed, the pulled; and the last consumed message's store time in ms."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int | None = None
    last_timestamp: int = 0


class ConsumeStats(JsonBody):
    """Lag of a group by queue, including the queues of its retry topic."""

    offset_table: dict[MessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0


class ConsumeStatsList(JsonBody):
    """Lag of all groups of a broker, by group."""

    consume_stats_list: list[dict[str, list[ConsumeStats]]] = field(default_factory=list)
    broker_addr: str | None = None
    total_diff: int = 0


class QueueTimeSpan(JsonBody):
    """Store times of a queue's first and last message and of the one at a group's offset, in milliseconds."""

    message_queue: MessageQueue
    min_time_stamp: int = 0
    max_time_stamp: int = 0
    consume_time_stamp: int = 0
    delay_time: int = 0


class QueryConsumeTimeSpanBody(JsonBody):
    """Time span of each queue of a topic."""

    consume_time_span_set: list[QueueTimeSpan] = field(default_factory=list)


class QuerySubscriptionResponseBody(JsonBody):
    """Subscription of a group to a topic."""

    group: str
    topic: str
    subscription_data: SubscriptionData | None = None


# --- POP --------------------------------------------------------------------------------------------


class BatchAck(JsonBody):
    """Acknowledgement of several messages of one queue that were popped together.

    Attributes:
        retry: Kind of the topic: `headers.pop`.
        start_offset, revive_queue_id, pop_time, invisible_time: Parts of the receipt handle.
        bit_set: Bytes in Base64. Bit *n* stands for the queue offset *start_offset* + *n*; bit 0 is the lowest one.
    """

    consumer_group: str = wire("c")
    topic: str = wire("t")
    retry: str = wire("r", default="0")
    start_offset: int = wire("so")
    queue_id: int = wire("q")
    revive_queue_id: int = wire("rq")
    pop_time: int = wire("pt")
    invisible_time: int = wire("it")
    bit_set: str = wire("b", default="")


class BatchAckMessageRequestBody(JsonBody):
    """Acknowledgement of messages of several queues."""

    broker_name: str | None = None
    acks: list[BatchAck] = field(default_factory=list)


class SetMessageRequestModeRequestBody(JsonBody):
    """Way in which the members of a group get the messages of a topic.

    Attributes:
        mode: ``PULL`` or ``POP``.
        pop_share_queue_num: Of each member's queues, the number of other members that pop from them too. 0: all members
            pop from all queues.
    """

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: int = 0


class QueryAssignmentRequestBody(JsonBody):
    """Query of a member for the queues of a topic that it may use.

    Attributes:
        strategy_name: ``AVG`` or ``AVG_BY_CIRCLE``.
        message_model: ``CLUSTERING`` or ``BROADCASTING``.
    """

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


class MessageQueueAssignment(JsonBody):
    """A queue of a member, and the way in which it gets the messages. Queue ID -1 stands for all queues of a broker."""

    message_queue: MessageQueue
    mode: str = "PULL"
    attachments: dict[str, str] | None = None


class QueryAssignmentResponseBody(JsonBody):
    """Assigned queues. Without the field a client keeps the queues that it has."""

    message_queue_assignments: list[MessageQueueAssignment] | None = None


# --- state of one consumer --------------------------------------------------------------------------


class ProcessQueueInfo(JsonBody):
    """A queue that is assigned to a consumer; times in milliseconds. ``droped`` is RocketMQ's spelling."""

    commit_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mib: int = wire("cachedMsgSizeInMiB", default=0)
    transaction_msg_min_offset: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_count: int = 0
    locked: bool = False
    try_unlock_times: int = 0
    last_lock_timestamp: int = 0
    droped: bool = False
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0


class PopProcessQueueInfo(JsonBody):
    """A queue from which a consumer pops."""

    wait_ack_count: int = 0
    droped: bool = False
    last_pop_timestamp: int = 0


class ConsumeStatistics(JsonBody):
    """Statistics of one topic: times in milliseconds, rates per second."""

    pull_rt: float = wire("pullRT", default=0.0)
    pull_tps: float = wire("pullTPS", default=0.0)
    consume_rt: float = wire("consumeRT", default=0.0)
    consume_ok_tps: float = wire("consumeOKTPS", default=0.0)
    consume_failed_tps: float = wire("consumeFailedTPS", default=0.0)
    consume_failed_msgs: int = 0


class ConsumerRunningInfo(JsonBody):
    """State of one consumer.

    Attributes:
        properties: Its settings; tools read ``PROP_CONSUME_TYPE``, ``PROP_CLIENT_VERSION`` and
            ``PROP_CONSUMER_START_TIMESTAMP``.
        status_table: Statistics by topic.
        jstack: Stacks of its threads, if the request included them.
    """

    properties: dict[str, str] = field(default_factory=dict)
    subscription_set: list[SubscriptionData] = field(default_factory=list)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatistics] = field(default_factory=dict)
    user_consumer_info: dict[str, str] = field(default_factory=dict)
    jstack: str | None = None


# --- settings of groups -----------------------------------------------------------------------------


class ExponentialRetryPolicy(JsonBody):
    """First and longest delay before a retry in milliseconds, and the factor between two retries."""

    initial: int = 5_000
    max: int = 7_200_000
    multiplier: int = 2


class RetryOffsets(JsonBody):
    """Delay before each retry in milliseconds."""

    next: list[int] = field(default_factory=list)


class GroupRetryPolicy(JsonBody):
    """Retry policy of a group; ``type`` is ``CUSTOMIZED`` or ``EXPONENTIAL`` and selects one of the two others."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: RetryOffsets | None = None


class SubscriptionGroupConfig(JsonBody):
    """Settings of a consumer group on one broker."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    group_retry_policy: GroupRetryPolicy | None = None
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def priority_factor(self) -> int:
        """Share of the pops, in percent, that read a topic with priorities from its most urgent queue on."""
        factor = parse_number(self.attributes.get("priority.factor"))
        return 100 if factor is None else factor


class SubscriptionGroupWrapper(JsonBody):
    """All groups of a broker.

    Attributes:
        forbidden_table: Group -> topic -> bits of forbidden operations.
    """

    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    forbidden_table: dict[str, dict[str, int]] = field(default_factory=dict)
    data_version: DataVersionBody = field(default_factory=DataVersionBody)


class SubscriptionGroupList(JsonBody):
    """Settings of several groups, to create or to change."""

    group_config_list: list[SubscriptionGroupConfig]

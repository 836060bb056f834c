"""Bodies about clients, groups and how far they have come.

Words from a fixed list (``CLUSTERING``, ``CONSUME_PASSIVELY``, ``JAVA``) are plain texts here: a newer peer may know
more of them than we do. The enums give those that we know.

Source: RocketMQ ``remoting: protocol/heartbeat``, ``protocol/body``, ``protocol/admin``, ``protocol/subscription``.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody, body
from mqtemplate.remoting.protocol.bodies.route import DataVersion, SubscriptionData
from mqtemplate.remoting.protocol.headers.fields import wire


class ConsumeType(StrEnum):
    """How a consumer gets its messages; push is the passive one."""

    CONSUME_ACTIVELY = "CONSUME_ACTIVELY"
    CONSUME_PASSIVELY = "CONSUME_PASSIVELY"
    CONSUME_POP = "CONSUME_POP"


class CMResult(StrEnum):
    """What became of a message that a consumer was to handle at once."""

    CR_SUCCESS = "CR_SUCCESS"
    CR_LATER = "CR_LATER"
    CR_ROLLBACK = "CR_ROLLBACK"
    CR_COMMIT = "CR_COMMIT"
    CR_THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    CR_RETURN_NULL = "CR_RETURN_NULL"


# --- who is there -----------------------------------------------------------------------------------


@body
class ProducerData(JsonBody):
    group_name: str


@body
class ConsumerData(JsonBody):
    """One client's part in one group.

    Attributes:
        message_model: ``CLUSTERING`` or ``BROADCASTING``; `mqtemplate.broker.MessageModel`.
        consume_from_where: Also three old words; `mqtemplate.broker.ConsumeFromWhere`.
        subscription_data_set: Of a clustering push consumer its own retry topic too.
    """

    group_name: str
    consume_type: str = ConsumeType.CONSUME_PASSIVELY
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False


@body
class HeartbeatData(JsonBody):
    """A client is alive, and is this.

    Attributes:
        heartbeat_fingerprint: Not 0: version 2.
        without_sub: Version 2, nothing has changed: the subscriptions are left out and must not be taken for none.
    """

    client_id: str = wire("clientID")
    producer_data_set: list[ProducerData] = field(default_factory=list)
    consumer_data_set: list[ConsumerData] = field(default_factory=list)
    heartbeat_fingerprint: int = 0
    without_sub: bool = False


@body
class CheckClientRequestBody(JsonBody):
    """A consumer asks whether its expression will do."""

    client_id: str
    group: str
    subscription_data: SubscriptionData
    namespace: str | None = None


@body
class GetConsumerListByGroupResponseBody(JsonBody):
    consumer_id_list: list[str]


@body
class Connection(JsonBody):
    """One client.

    Attributes:
        client_addr: ``address:port``, as the broker sees it.
        language: Name of a `codes.LanguageCode`.
    """

    client_id: str
    client_addr: str
    language: str = "JAVA"
    version: int = 0


@body
class ConsumerConnection(JsonBody):
    """Who consumes for a group, and what. See `ConsumerData`."""

    connection_set: list[Connection] = field(default_factory=list)
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


@body
class ProducerConnection(JsonBody):
    connection_set: list[Connection] = field(default_factory=list)


@body
class ProducerInfo(JsonBody):
    client_id: str
    remote_ip: str | None = wire("remoteIP", default=None)
    language: str | None = None
    version: int = 0
    last_update_timestamp: int = 0


@body
class ProducerTableInfo(JsonBody):
    """Producer group -> who sends for it."""

    data: dict[str, list[ProducerInfo]] = field(default_factory=dict)


@body
class GroupList(JsonBody):
    group_list: list[str] = field(default_factory=list)


# --- locks and offsets ------------------------------------------------------------------------------


@body
class LockBatchRequestBody(JsonBody):
    """Of a lock and of an unlock."""

    consumer_group: str
    client_id: str
    mq_set: list[MessageQueue]
    only_this_broker: bool = False


@body
class LockBatchResponseBody(JsonBody):
    """The queues that the client has locked now, each as it was asked for."""

    lock_ok_mq_set: list[MessageQueue] = wire("lockOKMQSet")


@body
class ResetOffsetBody(JsonBody):
    """Where each queue goes on."""

    offset_table: dict[MessageQueue, int]


@body
class ResetOffsetForC(JsonBody):
    topic: str
    broker_name: str
    queue_id: int
    offset: int


@body
class ResetOffsetBodyForC(JsonBody):
    """The same for clients written in C++."""

    offset_table: list[ResetOffsetForC]


@body
class GetConsumerStatusBody(JsonBody):
    """Offsets, as one client knows them, and (from a broker) by client."""

    message_queue_table: dict[MessageQueue, int] = field(default_factory=dict)
    consumer_table: dict[str, dict[MessageQueue, int]] = field(default_factory=dict)


@body
class ConsumerOffsetSerializeWrapper(JsonBody):
    """All offsets of a broker: ``topic@group`` -> queue id -> the next offset to read."""

    offset_table: dict[str, dict[int, int]] = field(default_factory=dict)
    data_version: DataVersion | None = None


@body
class QueryCorrectionOffsetBody(JsonBody):
    """By queue id."""

    correction_offsets: dict[int, int] = field(default_factory=dict)


@body
class OffsetWrapper(JsonBody):
    """One queue of a group: the broker's end, what was committed, what was pulled, and the time (ms) of the latter."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int | None = None
    last_timestamp: int = 0


@body
class ConsumeStats(JsonBody):
    """How far a group is behind; its retry topic's queues belong to it."""

    offset_table: dict[MessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0


@body
class ConsumeStatsList(JsonBody):
    """Group -> its figures, for each group of a broker."""

    consume_stats_list: list[dict[str, list[ConsumeStats]]] = field(default_factory=list)
    broker_addr: str | None = None
    total_diff: int = 0
    total_inflight_diff: int | None = None


@body
class QueueTimeSpan(JsonBody):
    """Times in ms of a queue's first and last message and of the one that a group is at."""

    message_queue: MessageQueue
    min_time_stamp: int = 0
    max_time_stamp: int = 0
    consume_time_stamp: int = 0
    delay_time: int = 0


@body
class QueryConsumeTimeSpanBody(JsonBody):
    consume_time_span_set: list[QueueTimeSpan] = field(default_factory=list)


@body
class QuerySubscriptionResponseBody(JsonBody):
    group: str
    topic: str
    subscription_data: SubscriptionData | None = None


# --- how one consumer is ----------------------------------------------------------------------------


@body
class ProcessQueueInfo(JsonBody):
    """A queue that a consumer has; times in ms. ``droped`` is upstream's spelling."""

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


@body
class PopProcessQueueInfo(JsonBody):
    wait_ack_count: int = 0
    droped: bool = False
    last_pop_timestamp: int = 0


@body
class ConsumeStatus(JsonBody):
    """Of one topic: times in ms, rates per second."""

    pull_rt: float = wire("pullRT", default=0.0)
    pull_tps: float = wire("pullTPS", default=0.0)
    consume_rt: float = wire("consumeRT", default=0.0)
    consume_ok_tps: float = wire("consumeOKTPS", default=0.0)
    consume_failed_tps: float = wire("consumeFailedTPS", default=0.0)
    consume_failed_msgs: int = 0


@body
class ConsumerRunningInfo(JsonBody):
    """How one consumer is.

    Attributes:
        properties: Its settings; tools read ``PROP_CONSUME_TYPE``, ``PROP_CLIENT_VERSION`` and
            ``PROP_CONSUMER_START_TIMESTAMP``.
        status_table: By topic.
        jstack: The stacks of its threads, if asked for.
    """

    properties: dict[str, str] = field(default_factory=dict)
    subscription_set: list[SubscriptionData] = field(default_factory=list)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    user_consumer_info: dict[str, str] = field(default_factory=dict)
    jstack: str | None = None


@body
class ConsumeMessageDirectlyResult(JsonBody):
    """What a consumer did with a message it was handed; see `CMResult`."""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: int = 0


# --- settings of groups -----------------------------------------------------------------------------


@body
class ExponentialRetryPolicy(JsonBody):
    """Ms, ms, and a factor."""

    initial: int = 5_000
    max: int = 7_200_000
    multiplier: int = 2


@body
class RetryOffsets(JsonBody):
    """Ms until each retry."""

    next: list[int] = field(default_factory=list)


@body
class GroupRetryPolicy(JsonBody):
    """``type`` is ``CUSTOMIZED`` or ``EXPONENTIAL`` and says which of the others is meant."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: RetryOffsets | None = None


@body
class SubscriptionGroupConfig(JsonBody):
    """A group on one broker."""

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


@body
class SubscriptionGroupWrapper(JsonBody):
    """All groups of a broker.

    Attributes:
        forbidden_table: Group -> topic -> bits of what it may not do.
    """

    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    forbidden_table: dict[str, dict[str, int]] = field(default_factory=dict)
    data_version: DataVersion = field(default_factory=DataVersion)


@body
class SubscriptionGroupList(JsonBody):
    group_config_list: list[SubscriptionGroupConfig]


# --- users and rights, ACL 2.0 ----------------------------------------------------------------------


@body
class UserInfo(JsonBody):
    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


@body
class AclEntry(JsonBody):
    """What may, or may not (``decision``), be done to a resource, and from where."""

    resource: str | None = None
    actions: list[str] = field(default_factory=list)
    source_ips: list[str] = field(default_factory=list)
    decision: str | None = None


@body
class AclPolicy(JsonBody):
    policy_type: str | None = None
    entries: list[AclEntry] = field(default_factory=list)


@body
class AclInfo(JsonBody):
    """The rights of a subject, ``User:name``."""

    subject: str | None = None
    policies: list[AclPolicy] = field(default_factory=list)

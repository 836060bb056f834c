"""Headers about messages: send, pull, give back, end a transaction, reply, recall, look up.

Source: RocketMQ ``remoting: protocol/header``; sections 8, 10 and 13 to 18 of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long, header, wire


@header
class RpcRequestHeader(CommandHeader):
    """What many requests carry along and a server may pass over.

    Attributes:
        broker_name: Whom the client believes it talks to.
        namespace: Namespace of version 2.
        namespaced: The names are in their namespace already.
    """

    broker_name: str | None = wire("bname", default=None)
    namespace: str | None = wire("ns", default=None)
    namespaced: bool | None = wire("nsd", default=None)


@header
class TopicRequestHeader(RpcRequestHeader):
    """One about a topic.

    Attributes:
        logical: The queue ids are those of a static topic.
    """

    logical: bool | None = wire("lo", default=None)


@header
class SendMessageRequestHeader(TopicRequestHeader):
    """Of a send and of a reply, with long names.

    Attributes:
        default_topic: Whose settings a topic gets that this message makes; normally ``TBW102``.
        queue_id: Negative: the broker picks one.
        sys_flag: Bits of `mqtemplate.record.codec.SysFlag`.
        born_timestamp: Ms, by the sender.
        flag: The user's number.
        properties: See `properties.encode_properties_text`.
        max_reconsume_times: Only for messages to a retry topic.
        batch: The body is one of `messages.encode_batch`.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: Long
    flag: int
    properties: str | None = None
    reconsume_times: int | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: int | None = None


@header
class SendMessageRequestHeaderV2(SendMessageRequestHeader):
    """The same with names of one letter, as the codes 310, 320 and 325 have it."""

    wire_names: ClassVar[Mapping[str, str]] = {
        "producer_group": "a",
        "topic": "b",
        "default_topic": "c",
        "default_topic_queue_nums": "d",
        "queue_id": "e",
        "sys_flag": "f",
        "born_timestamp": "g",
        "flag": "h",
        "properties": "i",
        "reconsume_times": "j",
        "unit_mode": "k",
        "max_reconsume_times": "l",
        "batch": "m",
        "broker_name": "n",
    }


@header
class SendMessageResponseHeader(CommandHeader):
    """What a broker says of a message it took. Java's producers fail without the first three.

    Attributes:
        msg_id: The broker's id, `mqtemplate.message.offset_msg_id`; of a batch, joined by commas.
        queue_offset: Of a batch, the first; of a half message, the place in the half queue.
        transaction_id: The sender's id of the message.
        msg_region, trace_on: ``DefaultRegion``, and ``false`` to switch off the sender's tracing of this message.
    """

    msg_id: str
    queue_id: int
    queue_offset: Long
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    msg_region: str | None = wire("MSG_REGION", default=None)
    trace_on: str | None = wire("TRACE_ON", default=None)


@header
class PullMessageRequestHeader(TopicRequestHeader):
    """Also of a lite pull.

    Attributes:
        max_msg_nums, max_msg_bytes: Wishes; 2147483647 is a normal one, so nothing may be reserved by them.
        sys_flag: Bits of `codes.PullSysFlag`, which say what of the rest is meant.
        sub_version: Of the subscription, as the heartbeat told it.
    """

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: Long
    max_msg_nums: int
    sys_flag: int
    commit_offset: Long
    suspend_timeout_millis: Long
    subscription: str | None = None
    sub_version: Long
    expression_type: str | None = None
    max_msg_bytes: int | None = None
    request_source: int | None = None
    proxy_froward_client_id: str | None = None
    lite_topic: str | None = None


@header
class PullMessageResponseHeader(CommandHeader):
    """The first four belong to every answer with code 0, 19, 20 or 21: Java's consumers fail without them.

    Attributes:
        suggest_which_broker_id: Whom to ask next; 0 is the master, and the only one there is of a single node.
    """

    suggest_which_broker_id: Long
    next_begin_offset: Long
    min_offset: Long
    max_offset: Long
    offset_delta: Long | None = None
    topic_sys_flag: int | None = None
    group_sys_flag: int | None = None
    forbidden_type: int | None = None


@header
class ConsumerSendMsgBackRequestHeader(RpcRequestHeader):
    """A consumer gives a message back.

    Attributes:
        offset: The physical offset of the message: it, and no id, says which one is meant.
        delay_level: 0: the broker decides; negative: to the dead letters at once.
    """

    offset: Long
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None


@header
class EndTransactionRequestHeader(RpcRequestHeader):
    """How a transaction ended.

    Attributes:
        tran_state_table_offset: Place of the half message in the half queue.
        commit_log_offset: Its physical offset.
        commit_or_rollback: 0 unknown, 8 commit, 12 roll back; `mqtemplate.record.codec.SysFlag`.
        msg_id: The sender's id.
    """

    topic: str | None = None
    producer_group: str
    tran_state_table_offset: Long
    commit_log_offset: Long
    commit_or_rollback: int
    from_transaction_check: bool = False
    msg_id: str
    transaction_id: str | None = None


@header
class CheckTransactionStateRequestHeader(RpcRequestHeader):
    """A broker asks a producer how a transaction ended; the body is the half message."""

    topic: str | None = None
    tran_state_table_offset: Long
    commit_log_offset: Long
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


@header
class ReplyMessageRequestHeader(TopicRequestHeader):
    """A broker hands a reply to whoever asked; the body is the reply's, compressed if it was.

    Attributes:
        born_host, store_host: ``address:port``.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: Long
    flag: int
    properties: str | None = None
    reconsume_times: int | None = None
    unit_mode: bool = False
    born_host: str
    store_host: str
    store_timestamp: Long


@header
class RecallMessageRequestHeader(TopicRequestHeader):
    """Cancel a waiting message; the handle came with its `SendMessageResponseHeader`."""

    producer_group: str | None = None
    topic: str
    recall_handle: str


@header
class RecallMessageResponseHeader(CommandHeader):
    """The sender's id of the message that was called back."""

    msg_id: str
    msg_region: str | None = wire("MSG_REGION", default=None)


@header
class QueryMessageRequestHeader(TopicRequestHeader):
    """Find messages by key.

    Attributes:
        begin_timestamp, end_timestamp: Ms, when they were stored.
        unique: The key is a sender's id.
    """

    topic: str
    key: str
    max_num: int
    begin_timestamp: Long
    end_timestamp: Long
    index_type: str | None = None
    last_key: str | None = None
    unique: bool | None = wire("_UNIQUE_KEY_QUERY", default=None, exact=True)


@header
class QueryMessageResponseHeader(CommandHeader):
    """How far the index has come."""

    index_last_update_timestamp: Long
    index_last_update_phyoffset: Long


@header
class ViewMessageRequestHeader(CommandHeader):
    """Attributes: offset: The physical offset."""

    topic: str | None = None
    offset: Long


@header
class ConsumeMessageDirectlyResultRequestHeader(TopicRequestHeader):
    """Have one consumer handle one message, now; the body of the request that reaches it is the message."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    target_broker_name: str | None = wire("brokerName", default=None)
    topic: str | None = None
    topic_sys_flag: int | None = None
    group_sys_flag: int | None = None

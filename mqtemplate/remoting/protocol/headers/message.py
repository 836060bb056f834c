"""Headers of messages: send, pull, send back, end a transaction, reply, recall, query.

A header declares the fields that this library reads or writes. It ignores others, as any receiver must.

Source: RocketMQ ``remoting: protocol/header``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long, wire


class RpcRequestHeader(CommandHeader):
    """Name of the broker that the client addresses, which a server may ignore. Most requests have it."""

    broker_name: str | None = wire("bname", default=None)


class MessageRequestHeader(RpcRequestHeader):
    """Fields of a message that a send and a reply share.

    Attributes:
        default_topic: Topic whose settings a new topic gets if this message creates it; normally ``TBW102``.
        queue_id: If negative, the broker chooses a queue.
        sys_flag: Bits of `mqtemplate.record.codec.SysFlag`.
        born_timestamp: Milliseconds, set by the producer.
        flag: The application's number.
        properties: Text of `properties.encode_properties_text`.
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


class SendMessageRequestHeader(MessageRequestHeader):
    """Header of a send, and of a producer's reply, with long names.

    Attributes:
        batch: True if the body is one of `messages.encode_batch`.
        max_reconsume_times: Only for messages to a retry topic.
    """

    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: int | None = None


class SendMessageRequestHeaderV2(SendMessageRequestHeader):
    """The same header with names of one letter, for the request codes 310, 320 and 325."""

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


class SendMessageResponseHeader(CommandHeader):
    """Header of the response to a send. Java's producers fail without the first three fields.

    Attributes:
        msg_id: Id created by the broker, `mqtemplate.message.offset_msg_id`; the ids of a batch are joined by commas.
        queue_offset: Of a batch's first message; of a half message in the half topic's queue.
        transaction_id: Id that the producer gave the message; of a batch the one in the header of the request.
        msg_region, trace_on: ``DefaultRegion``; ``false`` switches off the producer's trace of this message.
        pending: Our own, of a message with a pending key: `own_requests.encode_outcome`.
    """

    msg_id: str
    queue_id: int
    queue_offset: Long
    transaction_id: str | None = None
    recall_handle: str | None = None
    msg_region: str | None = wire("MSG_REGION", default=None)
    trace_on: str | None = wire("TRACE_ON", default=None)
    pending: str | None = wire("mqtPending", default=None)


class PullMessageRequestHeader(RpcRequestHeader):
    """Header of a pull and of a lite pull.

    Attributes:
        max_msg_nums, max_msg_bytes: Limits of the response. 2147483647 is common: do not allocate memory by them.
        sys_flag: Bits of `codes.PullSysFlag`, which tell the broker which other fields are valid.
        sub_version: Version of the subscription, as in the heartbeat.
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


class PullMessageResponseHeader(CommandHeader):
    """Header of the response to a pull. With the codes 0, 19, 20 and 21 Java's consumers fail without these fields.

    Attributes:
        suggest_which_broker_id: Broker for the next pull; 0 is the master, which a single node always suggests.
    """

    suggest_which_broker_id: Long
    next_begin_offset: Long
    min_offset: Long
    max_offset: Long


class ConsumerSendMsgBackRequestHeader(RpcRequestHeader):
    """Request of a consumer to send a message back, so that it is delivered again later.

    Attributes:
        offset: Physical offset of the message. It identifies the message; the ids do not.
        delay_level: 0: the broker chooses; negative: to the dead-letter topic at once.
        delay_ms: Exact delay instead of a level. This field and the next one are our own, for a server that announced
            ``RETRY_DELAY``; RocketMQ ignores them.
        properties: Properties to add to the message.
    """

    offset: Long
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    delay_ms: Long | None = wire("mqtemplateDelayMs", default=None)
    properties: str | None = wire("mqtemplateProperties", default=None)


class EndTransactionRequestHeader(RpcRequestHeader):
    """Outcome of a transaction, reported by its producer.

    Attributes:
        tran_state_table_offset: Queue offset of the half message in the half topic.
        commit_log_offset: Physical offset of the half message.
        commit_or_rollback: 0 unknown, 8 commit, 12 rollback; see `mqtemplate.record.codec.SysFlag`.
        msg_id: Id that the producer gave the message.
    """

    topic: str | None = None
    producer_group: str
    tran_state_table_offset: Long
    commit_log_offset: Long
    commit_or_rollback: int
    from_transaction_check: bool = False
    msg_id: str
    transaction_id: str | None = None


class CheckTransactionStateRequestHeader(RpcRequestHeader):
    """Transaction check: the broker asks a producer for the outcome. The body is the half message."""

    topic: str | None = None
    tran_state_table_offset: Long
    commit_log_offset: Long
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class ReplyMessageRequestHeader(MessageRequestHeader):
    """Delivery of a reply to the client that sent the request. The body is the reply's, compressed if it was.

    Attributes:
        born_host, store_host: ``address:port``.
    """

    unit_mode: bool = False
    born_host: str
    store_host: str
    store_timestamp: Long


class RecallMessageRequestHeader(RpcRequestHeader):
    """Request to cancel a delayed message; its `SendMessageResponseHeader` had the handle."""

    producer_group: str | None = None
    topic: str
    recall_handle: str


class RecallMessageResponseHeader(CommandHeader):
    """Id that the producer gave the cancelled message."""

    msg_id: str
    msg_region: str | None = wire("MSG_REGION", default=None)


class QueryMessageRequestHeader(RpcRequestHeader):
    """Query for messages by key.

    Attributes:
        begin_timestamp, end_timestamp: Range of store times, in milliseconds.
        unique: True if the key is a message id that a producer gave.
    """

    topic: str
    key: str
    max_num: int
    begin_timestamp: Long
    end_timestamp: Long
    unique: bool | None = wire("_UNIQUE_KEY_QUERY", default=None, exact=True)


class QueryMessageResponseHeader(CommandHeader):
    """Progress of the broker's index."""

    index_last_update_timestamp: Long
    index_last_update_phyoffset: Long


class ViewMessageRequestHeader(CommandHeader):
    """Query for the message at a physical offset."""

    topic: str | None = None
    offset: Long


class ConsumeMessageDirectlyResultRequestHeader(RpcRequestHeader):
    """Request that one consumer handles one message now. The broker forwards it with the message as the body."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    topic: str | None = None

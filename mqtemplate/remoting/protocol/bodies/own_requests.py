"""Requests of this library only: pending messages and their changes, sequenced sends, blocks of records, reloads.

RocketMQ has neither these requests nor these fields. A client sends them only to a server that announced the
capability, and the server announces its capabilities only to a client that requests them in a heartbeat.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import StrEnum
from typing import TypedDict, TypeVar

from mqtemplate.errors import PendingKeyError, RemoteProtocolError, UnsupportedError
from mqtemplate.pending import PendingDecision, PendingOutcome
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long, wire
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader

# --- headers --------------------------------------------------------------------------------------


MAX_HANDLES = 256
"""Most handles in one request. A client sends several requests for more."""

MAX_BLOCK_BYTES = 4 << 20
"""Most bytes of records in one block, unless a single record has more."""

_CAPABILITIES = "mqtemplateCapabilities"


class HeartbeatRequestHeader(CommandHeader):
    """Header of a heartbeat. RocketMQ's clients send none, and its brokers ignore it."""

    requests_capabilities: bool = wire(_CAPABILITIES, default=False)


class HeartbeatResponseHeader(CommandHeader):
    """Response to a heartbeat whose client requests the capabilities.

    Attributes:
        capabilities: Names of `mqtemplate.broker.Capability`, joined by commas; None from a broker of RocketMQ.
        warnings: Texts for the log of the client, one in a line: members of its groups have other subscriptions.
    """

    capabilities: str | None = wire(_CAPABILITIES, default=None)
    warnings: str | None = wire("mqtemplateWarnings", default=None)


class Refusal(StrEnum):
    """Why a server refuses a request, for clients that act on it. The text of the response is for people."""

    DIFFERENT_SUBSCRIPTIONS = "DIFFERENT_SUBSCRIPTIONS"
    RECALL_DISABLED = "RECALL_DISABLED"
    PENDING_KEY = "PENDING_KEY"
    PENDING_KEY_UNKNOWN = "PENDING_KEY_UNKNOWN"


class RefusalHeader(CommandHeader):
    """Header of a refusal. RocketMQ's clients ignore it.

    Attributes:
        refusal: Name of a `Refusal`; None from a broker of RocketMQ.
        group: The group whose subscriptions differ.
        pending: For ``PENDING_KEY``: the message that is pending, as `encode_pending_error` returns it.
    """

    refusal: str | None = wire("mqtemplateRefusal", default=None)
    group: str | None = wire("mqtemplateGroup", default=None)
    pending: str | None = wire("mqtPending", default=None)


class CancelDelayedMessageRequestHeader(RpcRequestHeader):
    """Request to cancel the pending messages that *handle* names, or that have *key*.

    Attributes:
        handle: At most `MAX_HANDLES` handles of messages of this broker, joined by commas.
        key: A key or a message id.
        topic: With *key*: only messages for this topic.
        namespace: With *key*: only messages for topics of this namespace.
    """

    handle: str | None = None
    key: str | None = None
    topic: str | None = None
    namespace: str | None = wire("mqtemplateNamespace", default=None)


class RescheduleDelayedMessageRequestHeader(CancelDelayedMessageRequestHeader):
    """Request to change the deliver time of pending messages.

    Attributes:
        deliver_time: Milliseconds; a time in the past means now.
    """

    deliver_time: Long


class ChangeAction(StrEnum):
    """First part of a request to change and to send."""

    CANCEL = "CANCEL"
    RESCHEDULE = "RESCHEDULE"
    SEND_IF = "SEND_IF"


class ChangeAndSendRequestHeader(CancelDelayedMessageRequestHeader):
    """Request to change pending messages and to store others, all of it or nothing.

    The body has the messages, with their topics and queues: see `mqtemplate.remoting.protocol.sequenced`. A queue ID
    below 0 lets the server choose the queue.

    Attributes:
        action: Name of a `ChangeAction`.
        deliver_time: For ``RESCHEDULE``: milliseconds; a time in the past means now.
        state: For ``SEND_IF``: name of the `mqtemplate.pending.PendingState` that is the condition.
    """

    action: str
    deliver_time: Long | None = None
    state: str | None = None
    born_timestamp: Long


class PendingQueryRequestHeader(RpcRequestHeader):
    """Conditions that pending messages must match; see `mqtemplate.pending.PendingQuery`. Times are in milliseconds.

    Attributes:
        compared_property: A property and its value, ``name=value``. A server that has compared it repeats it in the
            response; an older one ignores it, and would list other messages too.
    """

    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    compared_property: str | None = wire("property", default=None)
    before_time: Long | None = None
    after_time: Long | None = None
    newest: int | None = None
    namespace: str | None = wire("mqtemplateNamespace", default=None)


class GetPendingMessagesRequestHeader(PendingQueryRequestHeader):
    """Request for one page of the matching messages, in the order of their deliver times.

    Attributes:
        max_count: Most messages of the page. The server may return fewer; the cursor tells that there are more.
        cursor: Cursor after the last message that the client has; None for the first page.
        max_records: Most messages that the server compares for this response. A client that sends it goes on from the
            cursor of the response. An older client does not, and gets a whole page; an older server ignores it.
    """

    max_count: int
    cursor: str | None = None
    max_records: int | None = None


class CountPendingMessagesRequestHeader(PendingQueryRequestHeader):
    """Request to count the matching messages.

    Attributes:
        bucket_millis: Length of the time spans to count by.
        cursor: Cursor of the response before; None for the first request.
        max_records: As for a page. Without it the response has all counts.
    """

    bucket_millis: Long
    cursor: str | None = None
    max_records: int | None = None


class GetPendingPositionsRequestHeader(PendingQueryRequestHeader):
    """Request for the positions of pending messages in the files of the server, for readers on its machine.

    Attributes:
        after_due: Due time of the last position that the client has; -1 for the first ones.
        after_offset: Its physical offset.
    """

    after_due: Long = -1
    after_offset: Long = -1
    max_count: int = 100_000


class SendSequencedRequestHeader(RpcRequestHeader):
    """Request to store numbered messages, except those that are stored: see `mqtemplate.message.SendSequence`.

    The body has their topics and queues: see `mqtemplate.remoting.protocol.sequenced`.

    Attributes:
        first: Number of the first message.
    """

    producer_group: str
    app_id: str
    version: Long
    partition: int
    first: Long
    born_timestamp: Long


class SendSequencedResponseHeader(CommandHeader):
    """Response to a sequenced send: number of messages that it stored, and of those that were stored before."""

    stored: int
    repeated: int


class GetRecordBlockRequestHeader(RpcRequestHeader):
    """Request for the records of one queue from *queue_offset* on, below *end_offset*.

    Attributes:
        max_bytes: Most bytes of records; at most `MAX_BLOCK_BYTES`. The first record is returned whatever its size.
    """

    topic: str
    queue_id: int
    queue_offset: Long
    end_offset: Long
    max_bytes: int = MAX_BLOCK_BYTES


class GetRecordBlockResponseHeader(CommandHeader):
    """Header of a block. The body is the number of records (i4), the size of each (i4), and the records.

    Attributes:
        next_offset: Queue offset for the next request.
    """

    next_offset: Long
    min_offset: Long
    max_offset: Long


class HandOverRequestHeader(RpcRequestHeader):
    """Request of a hand-over; the body and the body of the response are JSON.

    Attributes:
        action: Name of a method of `mqtemplate.broker.hand_over.OldBroker`.
        owner: Owner of the lock.
        topic: With *msg_id*: topic of the message.
    """

    action: str
    owner: str | None = None
    msg_id: str | None = None
    topic: str | None = None


# --- bodies ---------------------------------------------------------------------------------------


class ScheduleChangeData(JsonBody):
    """Result of a cancel or a reschedule; see `mqtemplate.pending.ScheduleChange`.

    Attributes:
        status: Name of a `mqtemplate.pending.ScheduleChangeStatus`.
    """

    status: str
    count: int = 0
    handles: list[str] = field(default_factory=list)


class StoredMessageData(JsonBody):
    """One message that a request to change and to send has stored.

    Attributes:
        handle: Handle of a delayed message.
    """

    msg_id: str
    offset_msg_id: str
    topic: str
    queue_id: int
    queue_offset: int
    handle: str | None = None


class ChangeAndSendData(JsonBody):
    """Result of a request to change and to send.

    Attributes:
        status: Name of a `mqtemplate.pending.ScheduleChangeStatus`; for ``SEND_IF`` of a
            `mqtemplate.pending.PendingState`.
        count: Number of changed messages.
        handles: Their handles, after a reschedule.
        sent: The stored messages, in their order; empty if nothing was changed, or the condition did not hold.
        is_flushed: False: they are stored, and were not flushed in time.
    """

    status: str
    count: int = 0
    handles: list[str] = field(default_factory=list)
    sent: list[StoredMessageData] = field(default_factory=list)
    is_flushed: bool = True


class MessageOutcomeData(JsonBody):
    """Outcome of one message with a pending key; see `mqtemplate.pending.PendingOutcome`.

    Attributes:
        decision: Name of a `mqtemplate.pending.PendingDecision`; None for a message without a pending key.
    """

    decision: str | None = None
    replaced: list[str] = field(default_factory=list)
    already_delivered: bool = False


class OutcomeData(MessageOutcomeData):
    """Outcome of a send with a pending key.

    Attributes:
        msg_id: Ids of the messages, joined by commas: of a message that is kept or postponed, the id of that one.
        each: Of a batch: the outcome of each message.
    """

    msg_id: str
    each: list[MessageOutcomeData] = field(default_factory=list)


class _OutcomeFields(TypedDict):
    decision: str
    replaced: list[str]
    already_delivered: bool


class PendingErrorData(JsonBody):
    """The attributes of a `mqtemplate.errors.PendingKeyError`."""

    key: str
    topic: str
    handle: str
    msg_id: str
    deliver_time: int


class PendingMessageData(JsonBody):
    """One pending message; see `mqtemplate.pending.PendingMessage`.

    Attributes:
        cursor: Cursor after this message.
    """

    topic: str
    msg_id: str
    tags: str | None = None
    keys: str | None = None
    pending_key: str | None = None
    deliver_time: int
    delay_level: int
    roll_count: int
    born_timestamp: int
    store_timestamp: int
    body_size: int
    handle: str
    cursor: str


class PendingMessagesData(JsonBody):
    """One page of pending messages.

    Attributes:
        has_more: True if there may be matching messages after the last one.
        cursor: Where the next request starts, if that is not after the last message: a request with ``max_records``
            ended before the page was full.
        compared_property: The property of the request, which the server has compared.
    """

    messages: list[PendingMessageData]
    has_more: bool = False
    cursor: str | None = None
    compared_property: str | None = None


class PendingCountsData(JsonBody):
    """Numbers of pending messages; see `mqtemplate.pending.PendingCounts`.

    Attributes:
        cursor: Where the next request starts: a request with ``max_records`` has counted a part. None after the last.
        compared_property: The property of the request, which the server has compared.
    """

    total: int
    buckets: dict[int, int]
    cursor: str | None = None
    compared_property: str | None = None


class GetGroupDeliveriesRequestHeader(CommandHeader):
    """Request for the messages that members of a group have received by POP, and not acknowledged."""

    consumer_group: str


class InFlightData(JsonBody):
    """One of these messages; see `mqtemplate.broker.InFlightMessage`. Times are in milliseconds."""

    stored_topic: str
    queue_id: int
    queue_offset: int
    topic: str
    msg_id: str
    keys: str
    client: str
    since: int
    until: int
    is_renewed: bool
    attempt: int
    message_group: str | None = None
    blocked: int = 0


class GroupDeliveriesData(JsonBody):
    """Messages of a group that reads by POP; see `mqtemplate.broker.GroupDeliveries`.

    Attributes:
        reads_by_pop: False: the group has never read by POP.
    """

    reads_by_pop: bool
    in_flight: int = 0
    waiting: int = 0
    expired: int = 0
    held: int = 0
    messages: list[InFlightData] = field(default_factory=list)


_Answer = TypeVar("_Answer", PendingMessagesData, PendingCountsData)


def checked_answer(request: PendingQueryRequestHeader, answer: _Answer) -> _Answer:
    """Return the answer to a query, if the server has compared the property of the query.

    Raises:
        UnsupportedError: It has not: the answer has messages that do not match, and a change would reach them.
    """
    if answer.compared_property != request.compared_property:
        raise UnsupportedError(
            f"the server does not compare properties of pending messages (got {request.compared_property!r}): it has "
            "an older version; update it, or filter by topic, tag, key or time"
        )
    return answer


# --- outcomes of sends with a pending key -----------------------------------------------------------


def encode_outcome(outcome: PendingOutcome, msg_id: str) -> str:
    """Return the outcome of a send for the header of its response.

    Args:
        msg_id: See `OutcomeData`.
    """
    each = [MessageOutcomeData() if one is None else MessageOutcomeData(**_outcome_fields(one)) for one in outcome.each]
    return OutcomeData(**_outcome_fields(outcome), msg_id=msg_id, each=each).encode().decode()


def decode_outcome(text: str) -> tuple[PendingOutcome, str]:
    """Return the outcome of a send, and the ids of its messages.

    Raises:
        RemoteProtocolError: The text is not an outcome.
    """
    data = OutcomeData.decode(text.encode())
    outcome = _outcome(data)
    if outcome is None:
        raise RemoteProtocolError(f"the outcome of a send with a pending key has no decision: {text[:200]!r}")
    return replace(outcome, each=tuple(map(_outcome, data.each))), data.msg_id


def _outcome_fields(outcome: PendingOutcome) -> _OutcomeFields:
    return {
        "decision": outcome.decision.name,
        "replaced": list(outcome.replaced),
        "already_delivered": outcome.already_delivered,
    }


def _outcome(data: MessageOutcomeData) -> PendingOutcome | None:
    if data.decision is None:
        return None
    decision = PendingDecision.__members__.get(data.decision)
    if decision is None:
        raise RemoteProtocolError(f"the outcome of a send has the unknown decision {data.decision!r}")
    return PendingOutcome(decision, tuple(data.replaced), data.already_delivered)


def encode_pending_error(error: PendingKeyError) -> str:
    """Return the attributes of an error for the header of a refusal."""
    data = PendingErrorData(
        key=error.key, topic=error.topic, handle=error.handle, msg_id=error.msg_id, deliver_time=error.deliver_ms
    )
    return data.encode().decode()


class ReloadedConfig(JsonBody):
    """Result of a reload of the configuration. It has keys, and no values.

    Attributes:
        changed: What is in force now: keys, and the certificate.
        needs_restart: Keys that have changed, and act at the next start only.
        problems: Why something stays as it was, each with what to do.
    """

    changed: list[str] = field(default_factory=list)
    needs_restart: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

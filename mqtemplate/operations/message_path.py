"""Path of one message: send, delay, delivery, retries, dead letter, from the records that the broker still has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mqtemplate.errors import MQTemplateError, UnknownNameError
from mqtemplate.message import MessageExt, Property
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.dead_letters import RESENT_FROM
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_MAX_RECORDS = 64
"""Most records of the message that are read from one topic."""
_MAX_GROUPS = 50


class StepKind(Enum):
    """Kind of a step on the path of a message."""

    SENT = "sent"
    DELAYED = "delayed"
    RESCHEDULED = "rescheduled"
    CANCELLED = "cancelled"
    PENDING = "pending"
    STORED = "stored"
    DELIVERED = "delivered"
    RETRY_DELAYED = "retry delayed"
    RETRY_DELIVERED = "retry delivered"
    DEAD_LETTER = "dead letter"
    SENT_AGAIN = "sent again"


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step on the path of a message.

    Attributes:
        time_ms: Time of the step (epoch ms); for a pending message its deliver time.
        due_ms: Deliver time of a delayed message.
        group: Group of a retry or of a dead letter.
        record: The record of the step; None for ``SENT`` and ``PENDING``.
        handle: Handle of a pending message.
    """

    kind: StepKind
    time_ms: int
    topic: str
    due_ms: int | None = None
    group: str | None = None
    record: MessageExt | None = None
    handle: str | None = None

    @property
    def late_ms(self) -> int | None:
        """Time from the deliver time to the delivery; None for other steps."""
        is_delivery = self.kind in (StepKind.DELIVERED, StepKind.RETRY_DELIVERED)
        return None if self.due_ms is None or not is_delivery else max(0, self.time_ms - self.due_ms)


@dataclass(frozen=True, slots=True)
class GroupReading:
    """Progress of a group relative to one stored message.

    Attributes:
        is_consumed: The committed offset of the group is after the message.
    """

    group: str
    is_consumed: bool


@dataclass(frozen=True, slots=True)
class MessagePath:
    """Steps of one message, and the groups that read its topic.

    Attributes:
        steps: By time.
        readings: Groups of the topic, relative to the last record of the message there.
    """

    msg_id: str
    topic: str
    steps: tuple[PathStep, ...]
    readings: tuple[GroupReading, ...]


def message_path(access: BrokerAccess, msg_id: str, topic: str) -> MessagePath:
    """Return the path of the message with an id that was sent to *topic*.

    Records that retention has deleted are missing.

    Raises:
        UnknownNameError: No record of the message exists.
    """
    groups = _groups(access, topic)
    retries = [RETRY_TOPIC_PREFIX + group for group in groups]
    letters = [DLQ_TOPIC_PREFIX + group for group in groups]
    existing = set(access.admin.topic_names())
    records = {
        name: _records(access, name, msg_id)
        for name in (SCHEDULE_TOPIC, TIMER_TOPIC, topic, *retries, *letters)
        if name in existing or name in (SCHEDULE_TOPIC, TIMER_TOPIC)
    }
    delayed = sorted(records[SCHEDULE_TOPIC] + records[TIMER_TOPIC], key=_position)
    delayed = [each for each in delayed if _is_for(each, topic, retries)]
    levels = _levels(access, delayed)
    steps = [
        *_delayed_steps(levels, delayed),
        *_stored_steps(levels, records.get(topic, []), delayed),
        *(_retry_step(levels, each, delayed) for name in retries for each in records.get(name, [])),
        *(_letter_step(each) for name in letters for each in records.get(name, [])),
        *_pending_steps(access, msg_id, {topic, *retries}),
    ]
    if not steps:
        raise UnknownNameError(f"message {msg_id!r} of topic {topic!r} has no record; retention deleted it")
    first = min((each.record for each in steps if each.record is not None), key=_position, default=None)
    if first is not None:
        steps.append(PathStep(StepKind.SENT, first.born_timestamp, topic))
    steps.sort(key=_order)
    readings = tuple(_readings(access, groups, records.get(topic, [])))
    return MessagePath(msg_id, topic, tuple(steps), readings)


def _groups(access: BrokerAccess, topic: str) -> Sequence[str]:
    try:
        return access.admin.groups_of(topic)[:_MAX_GROUPS]
    except UnknownNameError:
        return []


def _records(access: BrokerAccess, topic: str, msg_id: str) -> list[MessageExt]:
    return list(access.broker.reader.messages_by_key(topic, msg_id, _MAX_RECORDS, unique=True))


def _position(record: MessageExt) -> tuple[int, int]:
    return record.store_timestamp, record.physical_offset


def _is_for(record: MessageExt, topic: str, retries: Sequence[str]) -> bool:
    real = record.properties.get(Property.REAL_TOPIC)
    return real == topic or real in retries


def _order(step: PathStep) -> tuple[int, int, int]:
    """Return the sort key: by time, the send first and what is pending last."""
    rank = {StepKind.SENT: 0, StepKind.PENDING: 2}.get(step.kind, 1)
    return step.time_ms, rank, 0 if step.record is None else step.record.physical_offset


# --- delays -------------------------------------------------------------------------------------


def _levels(access: BrokerAccess, delayed: Sequence[MessageExt]) -> Sequence[int]:
    """Return the delays of the levels, asked from the broker if a record does not have its own: as RocketMQ's."""
    has_level = any(each.topic == SCHEDULE_TOPIC and Property.LEVEL_DELAY_MS not in each.properties for each in delayed)
    return (access.admin.delay_levels_ms() if has_level else None) or access.broker.delay_levels_ms


def _delayed_steps(levels: Sequence[int], delayed: Sequence[MessageExt]) -> Iterator[PathStep]:
    """Yield the steps of records in the topics of the delay services.

    A reschedule stores a new record and then a delete marker for the old one; a cancel stores the marker only.
    """
    is_replaced = False
    for record in delayed:
        real = record.properties.get(Property.REAL_TOPIC, "")
        due_ms, group = _due_ms(levels, record), _retry_group(real)
        if Property.TIMER_DEL_UNIQKEY in record.properties:
            if not is_replaced:
                yield PathStep(StepKind.CANCELLED, record.store_timestamp, real, None, group, record)
            is_replaced = False
            continue
        is_replaced = Property.REPLACED_LEVEL in record.properties
        kind = StepKind.DELAYED if group is None else StepKind.RETRY_DELAYED
        yield PathStep(
            StepKind.RESCHEDULED if is_replaced else kind, record.store_timestamp, real, due_ms, group, record
        )


def _due_ms(levels: Sequence[int], record: MessageExt) -> int | None:
    """Return the deliver time of a delayed record; None if it is unknown."""
    if record.topic != SCHEDULE_TOPIC:
        return parse_number(
            record.properties.get(Property.TIMER_DELIVER_MS) or record.properties.get(Property.TIMER_OUT_MS)
        )
    delay_ms = parse_number(record.properties.get(Property.LEVEL_DELAY_MS))
    if delay_ms is None and record.queue_id < len(levels):
        delay_ms = levels[record.queue_id]
    return None if delay_ms is None else record.store_timestamp + delay_ms


def _retry_group(topic: str) -> str | None:
    return topic.removeprefix(RETRY_TOPIC_PREFIX) if topic.startswith(RETRY_TOPIC_PREFIX) else None


def _due_of(
    levels: Sequence[int], stored: MessageExt, topic: str, delayed: Sequence[MessageExt]
) -> tuple[bool, int | None]:
    """Return True if a stored record was delayed before, and its deliver time."""
    before = [
        each
        for each in delayed
        if each.properties.get(Property.REAL_TOPIC) == topic
        and Property.TIMER_DEL_UNIQKEY not in each.properties
        and _position(each) < _position(stored)
        and each.reconsume_times == stored.reconsume_times
    ]
    return bool(before), _due_ms(levels, before[-1]) if before else None


# --- stored records -----------------------------------------------------------------------------


def _stored_steps(
    levels: Sequence[int], stored: Sequence[MessageExt], delayed: Sequence[MessageExt]
) -> Iterator[PathStep]:
    for record in stored:
        if RESENT_FROM in record.properties:
            yield PathStep(StepKind.SENT_AGAIN, record.store_timestamp, record.topic, record=record)
            continue
        was_delayed, due_ms = _due_of(levels, record, record.topic, delayed)
        was_delayed = was_delayed or Property.REAL_TOPIC in record.properties
        kind = StepKind.DELIVERED if was_delayed else StepKind.STORED
        yield PathStep(kind, record.store_timestamp, record.topic, due_ms, record=record)


def _retry_step(levels: Sequence[int], record: MessageExt, delayed: Sequence[MessageExt]) -> PathStep:
    _, due_ms = _due_of(levels, record, record.topic, delayed)
    kind = StepKind.SENT_AGAIN if RESENT_FROM in record.properties else StepKind.RETRY_DELIVERED
    return PathStep(kind, record.store_timestamp, record.topic, due_ms, _retry_group(record.topic), record)


def _letter_step(record: MessageExt) -> PathStep:
    group = record.topic.removeprefix(DLQ_TOPIC_PREFIX)
    return PathStep(StepKind.DEAD_LETTER, record.store_timestamp, record.topic, group=group, record=record)


def _pending_steps(access: BrokerAccess, msg_id: str, topics: set[str]) -> Iterator[PathStep]:
    try:
        found: Sequence[PendingMessage] = access.broker.delayed.pending(PendingQuery(key=msg_id), _MAX_RECORDS).messages
    except MQTemplateError:  # a broker that cannot list them, or has too many to read
        return
    for each in found:
        if each.topic in topics:
            group = _retry_group(each.topic)
            yield PathStep(StepKind.PENDING, each.deliver_ms, each.topic, each.deliver_ms, group, handle=each.handle)


def _readings(access: BrokerAccess, groups: Sequence[str], stored: Sequence[MessageExt]) -> Iterator[GroupReading]:
    last = max(stored, key=_position, default=None)
    if last is None:
        return
    for group in groups:
        committed = access.broker.groups.committed_offset(group, last.message_queue)
        yield GroupReading(group, committed is not None and committed > last.queue_offset)

"""Pending messages: queries about delayed messages, and the results of cancelling and rescheduling them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum

from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, Property, key_text, property_text, split_keys
from mqtemplate.results import PendingDecision, PendingOutcome, SendResult
from mqtemplate.user_code import shown

__all__ = [
    "MOST_UNREAD",
    "ON_TIME_MS",
    "BrokerDelays",
    "ConditionalSend",
    "IndexState",
    "LevelBacklog",
    "OnPending",
    "PendingCounts",
    "PendingDecision",
    "PendingMessage",
    "PendingOutcome",
    "PendingPage",
    "PendingQuery",
    "PendingState",
    "ScheduleChange",
    "ScheduleChangeStatus",
    "check_page_size",
    "pending_key_properties",
    "total_change",
]


class ScheduleChangeStatus(Enum):
    """Result of a cancel or a reschedule. Exactly one applies, and it never changes later.

    ``CANCELLED`` and ``RESCHEDULED``: the message was pending, and this or an earlier call changed it.
    ``ALREADY_DELIVERED``: the message is in its topic. ``MOVED``: a hand-over moves it to another broker, or has moved
    it; change it there. ``UNKNOWN``: the broker has no such message, or retention deleted it.
    """

    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    ALREADY_DELIVERED = "already delivered"
    MOVED = "moved to another broker"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """Response to a cancel or a reschedule.

    Attributes:
        count: Number of pending messages that this call changed; a key may match several.
        handles: After a reschedule: the handles of the rescheduled messages.
        broker: During a hand-over: name of the broker that had the messages, ``old:NAME`` for the old one; both names
            with a comma if both had some. None without a hand-over, and if no broker has the message.
        sent: Results of the messages of ``then``, in their order. They are stored together with the change, or not at
            all: empty if the call changed nothing.
    """

    status: ScheduleChangeStatus
    count: int = 0
    handles: tuple[str, ...] = ()
    broker: str | None = None
    sent: tuple[SendResult, ...] = ()


class PendingState(StrEnum):
    """State of a delayed message, as a condition of a send and as its result."""

    PENDING = "pending"
    DELIVERED = "delivered"
    CANCELLED = "cancelled"
    MOVED = "moved"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ConditionalSend:
    """Response to a send that depends on the state of a delayed message.

    Attributes:
        state: State of the delayed message when the broker decided.
        sent: Results of the messages, in their order; empty if the condition did not hold.
    """

    state: PendingState
    sent: tuple[SendResult, ...] = ()


# --- one pending message by key -----------------------------------------------------------------------


class OnPending(StrEnum):
    """Rule for a send with a pending key if a message with this key is pending in the topic."""

    REPLACE = "replace"
    """Cancel the pending message and store the new one."""
    KEEP = "keep"
    """Store nothing. The result names the pending message."""
    POSTPONE = "postpone"
    """Give the pending message, with its body, the deliver time of the new one. The result names it."""
    REFUSE = "refuse"
    """Store nothing and raise `PendingKeyError`."""


def pending_key_properties(
    pending_key: object, on_pending: object, no_later_than: Duration | None, *, is_strict: object = False
) -> dict[str, str]:
    """Return the properties that request one pending message by key; empty without a key.

    Raises:
        MessageError: One of the options has an invalid value, or is given without the one that it needs.
    """
    if not isinstance(is_strict, bool):
        raise MessageError(f"on_pending_strict must be True or False, got {shown(is_strict)}")
    if pending_key is None:
        given = [f"on_pending={shown(on_pending)}"] if on_pending is not None else []
        given += [f"no_later_than={shown(no_later_than)}"] if no_later_than is not None else []
        given += ["on_pending_strict=True"] if is_strict else []
        if given:
            raise MessageError(f"{' and '.join(given)} needs pending_key=, the key under which one message is pending")
        return {}
    key = property_text("pending_key", pending_key)
    if not key:
        raise MessageError("pending_key is empty; pass a text, such as the id of a cart, or leave it out")
    chosen, value = OnPending.REPLACE, "replace"
    if on_pending is not None:
        if not isinstance(on_pending, str) or on_pending not in list(OnPending):
            known = ", ".join(repr(each.value) for each in OnPending)
            raise MessageError(f"on_pending must be one of {known}, got {shown(on_pending)}")
        chosen = OnPending(on_pending)
        value = chosen.value
    properties = {Property.PENDING_KEY: key, Property.ON_PENDING: value}
    if is_strict:
        properties[Property.ON_PENDING_STRICT] = "true"
    if no_later_than is not None:
        if chosen is not OnPending.POSTPONE:
            raise MessageError(
                f"no_later_than limits how far a message is postponed, so it needs on_pending='postpone', got "
                f"{chosen.value!r}; remove it"
            )
        latest_ms = option_ms("no_later_than", no_later_than, MessageError)
        if latest_ms < 1:
            raise MessageError(f"no_later_than must be 1 ms or longer, got {shown(no_later_than)}")
        properties[Property.NO_LATER_THAN] = str(latest_ms)
    return properties


def total_change(changes: Sequence[ScheduleChange], order: Sequence[ScheduleChangeStatus]) -> ScheduleChange:
    """Return one result for several changes. If one of them changed a message, its status counts.

    Args:
        order: Where nothing was changed, the first of these statuses that one of *changes* has counts.
    """
    done = [change for change in changes if change.count]
    statuses = {change.status for change in done or changes}
    status = next((status for status in order if status in statuses), ScheduleChangeStatus.UNKNOWN)
    names = dict.fromkeys(change.broker for change in done or changes if change.broker and change.status is status)
    handles = tuple(handle for change in done for handle in change.handles)
    return ScheduleChange(status, sum(change.count for change in done), handles, ", ".join(names) or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingQuery:
    """Filter for pending messages. A message must match all values that are given.

    Attributes:
        topic: The topic that receives the message when it is due.
        key: One of the keys of the message, or its message id.
        tag: The tag of the message.
        with_property: Name and value of a property of the message, such as ``("tenant", "T")``.
        before_ms: Due before this time (epoch ms).
        after_ms: Due at this time or later (epoch ms).
        newest: With *key*: look only at this number of the newest delayed messages that have it, whether they are still
            pending or not. A key that each of thousands of messages had is found as fast as one that is unique.
        namespace: Prefix of the topic on the wire. A remote broker sets its own; others do not need it.

    Raises:
        MessageError: *key* is empty, has a blank, or is not a single value; *newest* is below 1, or without a key; or
            *with_property* lacks the name or the value.
    """

    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    with_property: tuple[str, str] | None = None
    before_ms: int | None = None
    after_ms: int | None = None
    newest: int | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            object.__setattr__(self, "key", key_text(self.key))
        if self.newest is not None and (self.key is None or self.newest < 1):
            raise MessageError(f"newest must be 1 or more, and needs a key, got {self.newest} with key {self.key!r}")
        if self.with_property is not None and not all(self.with_property):
            raise MessageError(f"with_property must have a name and a value, got {self.with_property!r}")

    def matches(self, message: Message, topic: str, msg_id: str, due_ms: int) -> bool:
        """Return True for a decoded message that is pending for a topic. *newest* and *namespace* are not compared."""
        return (
            self.topic in (None, topic)
            and self.tag in (None, message.tags)
            and (self.with_property is None or self.with_property in message.properties.items())
            and (self.key is None or self.key in (msg_id, *split_keys(message.keys)))
            and (self.after_ms is None or due_ms >= self.after_ms)
            and (self.before_ms is None or due_ms < self.before_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessage:
    """One pending message.

    If its record cannot be read, only its deliver time and its handle are known, and the message id is empty.

    Attributes:
        topic: The topic that receives the message when it is due.
        deliver_ms: Deliver time (epoch ms).
        delay_level: The delay level; 0 for a timer.
        roll_count: Number of times that the timer was stored again before it is due.
        handle: Handle for `cancel` and `reschedule`.
        body_size: Bytes of the body as stored.
        pending_key: At most one message of the topic is pending under this key; None if it was sent without one.
        broker: During a hand-over: name of the broker that has it, ``old:NAME`` for the old one; None otherwise.
    """

    topic: str
    msg_id: str
    tags: str | None = None
    keys: str | None = None
    deliver_ms: int
    delay_level: int = 0
    roll_count: int = 0
    born_timestamp: int = 0
    store_timestamp: int = 0
    body_size: int = 0
    handle: str
    pending_key: str | None = None
    broker: str | None = None

    @property
    def deliver_at(self) -> datetime:
        """``deliver_ms`` as a datetime in UTC."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.deliver_ms)


def check_page_size(max_count: int) -> None:
    """Check the number of messages of a page.

    Raises:
        MessageError: It is below 1.
    """
    if max_count < 1:
        raise MessageError(f"max_count must be 1 or more, got {max_count}")


@dataclass(frozen=True, slots=True)
class PendingPage:
    """One page of pending messages, ordered by deliver time.

    Attributes:
        cursor: Argument for the call that returns the next page; None on the last page.
    """

    messages: tuple[PendingMessage, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class PendingCounts:
    """Numbers of pending messages.

    Attributes:
        buckets: Start of each time span (epoch ms) that has due messages -> their number; ascending.
    """

    total: int
    buckets: dict[int, int]


# --- state of a broker's delay services -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """State of the local index of the pending messages of a RocketMQ cluster.

    Attributes:
        path: The file.
        size: Its bytes.
        read: Records of the brokers that were read in the current or last pass.
        total: Records of that pass.
        is_complete: False until the end of all queues was reached once.
        notes: Sentences about parts that this account may not read.
    """

    path: str
    size: int
    read: int
    total: int
    is_complete: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelBacklog:
    """One delay level of one broker.

    Attributes:
        delay_ms: Its delay; None if the broker does not report its settings.
        pending: Messages that are not delivered yet.
        late_ms: Time by which the oldest of them is overdue; 0 if none is, None if it is unknown.
    """

    level: int
    delay_ms: int | None
    pending: int
    late_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDelays:
    """State of the delay services of one broker, as it reports them.

    Attributes:
        has_timers: False for a broker without arbitrary delays: RocketMQ 4, or ``timerWheelEnable`` is off.
        timer_behind_ms: Age of the slot of the timer wheel that it delivers now.
        timer_unread: Stored timers that are not on the wheel yet.
        timer_pending: Timers on the wheel. One beyond its window counts once, and a recalled one is subtracted.
        put_rate: Timers that it put on the wheel, per second.
        delivered_rate: Timers that it delivered or stored again, per second.
        most_in_slot: ``timerCongestNumEachSlot``: timers of one second from which it refuses more; None for no limit.
        levels: The levels that were used.
        problem: The reason why nothing is known: the broker refuses, or does not answer.
    """

    broker: str
    has_timers: bool = False
    timer_behind_ms: int = 0
    timer_unread: int = 0
    timer_pending: int = 0
    put_rate: float = 0.0
    delivered_rate: float = 0.0
    most_in_slot: int | None = None
    levels: tuple[LevelBacklog, ...] = ()
    problem: str | None = None

    @property
    def late_ms(self) -> int:
        """Time by which deliveries are late; less than `ON_TIME_MS` is normal."""
        return max([self.timer_behind_ms if self.has_timers else 0, *(each.late_ms or 0 for each in self.levels)])

    @property
    def causes(self) -> list[str]:
        """Reasons why it is late, or will be; empty if it is on time."""
        found = []
        if self.has_timers and self.timer_unread > MOST_UNREAD:
            found.append(
                f"{self.timer_unread:,} stored timers are not on its wheel yet: more arrive than it puts there "
                f"({self.put_rate:,.0f} per second); those that are due meanwhile are late"
            )
        if self.has_timers and self.timer_behind_ms > ON_TIME_MS:
            pace = f"it delivers {self.delivered_rate:,.0f} per second"
            if self.delivered_rate == 0:
                pace = "it delivers none now: its disk may be full, or timerStopDequeue is on, or it is no master"
            found.append(f"its timer wheel is {self.timer_behind_ms // 1_000:,} s behind; {pace}")
        late = [each for each in self.levels if (each.late_ms or 0) > ON_TIME_MS]
        if late:
            names = ", ".join(f"{each.level} by {(each.late_ms or 0) // 1_000:,} s" for each in late)
            found.append(f"delay levels are late: {names}; it delivers each level one message after the other")
        return found


ON_TIME_MS = 3_000
"""Deliveries of RocketMQ are up to about two seconds late without a cause: slots of one second, and its polling."""
MOST_UNREAD = 10_000

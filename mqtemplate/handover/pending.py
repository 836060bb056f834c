"""Pending messages of both brokers during a hand-over: queries and changes over their union."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from mqtemplate.broker import Broker, DelayedMessages, QueuedMessage, ReleaseCauses, refuse_then
from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, TransitEnd, TransitMessage
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle, encode_handle
from mqtemplate.errors import BrokerError, MessageError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.handover.old_broker import OLD_PREFIX
from mqtemplate.message import Message, Property
from mqtemplate.pending import (
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
    check_page_size,
    total_change,
)
from mqtemplate.topics import TIMER_TOPIC
from mqtemplate.user_code import shown

_log = get_logger("mqtemplate.handover")

_CANCELLED, _RESCHEDULED = ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED
_DELIVERED, _UNKNOWN = ScheduleChangeStatus.ALREADY_DELIVERED, ScheduleChangeStatus.UNKNOWN
_MOVED = ScheduleChangeStatus.MOVED
_MOST_INFORMATIVE = (_CANCELLED, _RESCHEDULED, _DELIVERED, _MOVED, _UNKNOWN)
"""Order of the statuses where nothing was changed: what was moved may be delivered at the new broker."""
_SENT_MS = 30_000  # a new mover needs some time to find out what the one before it has sent
_SENT_STEP_S = 0.02
_MOST_IN_TRANSIT = 4_096
_MOST_ROUNDS = 3
_DURING = "a broker during a hand-over"


class HandOverDelayed(DelayedMessages):
    """Control over the pending messages of both brokers.

    A change asks the old broker first. If it has moved the message, the new one is asked. While the message is on its
    way, in the hands of the mover, the call waits for its arrival.

    Args:
        has_mover: False: nothing was ever moved.
    """

    def __init__(self, old: Broker, new: Broker, *, has_mover: bool) -> None:
        self._old, self._new, self._has_mover = old, new, has_mover

    @property
    def release_causes(self) -> ReleaseCauses | None:
        return self._new.delayed.release_causes

    # --- changes -------------------------------------------------------------------------------

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        refuse_then(then, _DURING)

        def cancel(delayed: DelayedMessages, named: _ByName) -> ScheduleChange:
            return delayed.cancel(named.handle, key=named.key, topic=named.topic)

        return self._change(cancel, handle, key, topic)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        refuse_then(then, _DURING)

        def reschedule(delayed: DelayedMessages, named: _ByName) -> ScheduleChange:
            return delayed.reschedule(named.handle, deliver_ms, key=named.key, topic=named.topic)

        return self._change(reschedule, handle, key, topic)

    def _change(self, change: _Change, handle: str | None, key: str | None, topic: str | None) -> ScheduleChange:
        key = check_selection(handle, key)
        if key is not None:
            return self._change_by_key(change, _ByName(key=key, topic=topic))
        assert handle is not None
        return total_change([self._change_by_handle(change, part) for part in handle.split(",")], _MOST_INFORMATIVE)

    def _change_by_handle(self, change: _Change, handle: str) -> ScheduleChange:
        """Change one message. Only a broker that has a message of its name changes it, so asking both is safe."""
        named = decode_handle(handle)
        if named.broker_name == self._new.name != self._old.name:
            return self._of_sent(change, handle, named)
        of_old, refusal = self._of_old(change, _ByName(handle))
        if of_old.status is _MOVED:
            return self._of_moved(change, named)
        if refusal is None and of_old.status is not _UNKNOWN:
            return of_old
        return _checked([self._of_new(change, _ByName(handle))], refusal)

    def _of_sent(self, change: _Change, handle: str, named: RecallHandle) -> ScheduleChange:
        """Change a message that was sent to the new broker. If the hand-over was aborted, it may be in the old one.

        The old one is asked first then: RocketMQ answers a recall before it looks for the message.
        """
        by_id = _ByName(key=named.msg_id, topic=named.topic)
        state = self._old.hand_over.state() if self._has_mover else None
        if state is None or len(state.switches) == 1:
            return self._of_new(change, _ByName(handle))
        self._wait_until_sent(self._old, named.msg_id, named.topic)
        of_old, refusal = self._of_old(change, by_id)
        if of_old.status is _UNKNOWN and refusal is None:
            of_new = self._of_new(change, _ByName(handle))
            if of_new.status is not _MOVED:
                return of_new
            self._wait_until_sent(self._new, named.msg_id, named.topic)  # it was on its way back
            of_old, refusal = self._of_old(change, by_id)
        return self._of_moved(change, named) if of_old.status is _MOVED else _checked([of_old], refusal)

    def _of_moved(self, change: _Change, named: RecallHandle) -> ScheduleChange:
        """Change a message that is in transit, or was moved; perhaps it comes back, since the hand-over is aborted."""
        by_id = _ByName(key=named.msg_id, topic=named.topic)
        self._wait_until_sent(self._old, named.msg_id, named.topic)
        moved = self._old.hand_over.moved(named.msg_id, named.topic)
        if moved is not None and moved.end is TransitEnd.MOVED:
            of_new = self._of_new(change, by_id if moved.handle is None else _ByName(moved.handle))
            if of_new.status is _MOVED:
                self._wait_until_sent(self._new, named.msg_id, named.topic)
            elif of_new.count or not self._old.hand_over.is_reserved(named.msg_id, named.topic):
                return of_new
            self._wait_until_sent(self._old, named.msg_id, named.topic)  # RocketMQ has let it go: it was recalled
        of_old, refusal = self._of_old(change, by_id)
        return _checked([of_old], refusal)

    def _change_by_key(self, change: _Change, named: _ByName) -> ScheduleChange:
        assert named.key is not None
        query = PendingQuery(key=named.key, topic=named.topic)
        changes: list[ScheduleChange] = []
        refusal: BrokerError | None = None
        for _ in range(_MOST_ROUNDS):
            for broker, each in self._transits(query):
                self._wait_until_sent(broker, each.msg_id, each.topic)
            of_old, refusal = self._of_old(change, named)
            changes.append(of_old)
            try:
                changes.append(self._of_new(change, named))
            except UnsupportedError:
                if not of_old.count:
                    raise
            if refusal is not None or not self._transits(query):  # one that was taken meanwhile was not changed
                break
        return _checked(changes, refusal)

    def _wait_until_sent(self, broker: Broker, msg_id: str, topic: str) -> None:
        """Wait until a message is not in transit from a broker any more.

        Raises:
            HandOverError: It still is; a mover that has just stopped, or the other broker, does not answer.
        """
        part, clock = broker.hand_over, broker.clock
        target = self._new if broker is self._old else self._old
        until_ms = clock.steady_ms() + _SENT_MS
        while part.is_reserved(msg_id, topic):
            if clock.steady_ms() >= until_ms:
                raise HandOverError(
                    f"message {msg_id} for topic {topic!r} is on its way from broker {broker.name!r} to "
                    f"{target.name!r}, and has not arrived within {_SENT_MS // 1_000} s; it cannot be changed now. "
                    "Nothing is lost: try again when that broker answers (mqtemplate hand-over status has the reason)"
                )
            clock.sleep(_SENT_STEP_S)

    def _of_old(self, change: _Change, named: _ByName) -> tuple[ScheduleChange, BrokerError | None]:
        """Return the result at the old broker, and the error if it cannot be reached: then the new one is asked."""
        try:
            return _of(OLD_PREFIX + self._old.name, change(self._old.delayed, named)), None
        except BrokerError as exc:
            return ScheduleChange(_UNKNOWN), exc

    def _of_new(self, change: _Change, named: _ByName) -> ScheduleChange:
        return _of(self._new.name, change(self._new.delayed, named))

    # --- queries -------------------------------------------------------------------------------

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        check_page_size(max_count)
        at = _Cursor() if cursor is None else _Cursor.parse(cursor)
        # In this order a message that moves meanwhile is found once or twice, and not missed.
        old = _Side(self._old, OLD_PREFIX + self._old.name, at.old, query, max_count, on_compared)
        in_transit = [each for each in self._in_transit(query) if _position(each) > at.transit]
        new = _Side(self._new, self._new.name, at.new, query, max_count, on_compared)
        found = sorted([*old.messages, *in_transit, *new.messages], key=_due)
        taken = {id(message) for message in found[:max_count]}
        sent = [each for each in in_transit if id(each) in taken]
        rows = _newest_places(new.take(taken), sent, old.take(taken))
        transit = max(map(_position, sent), default=at.transit)
        rest = _Cursor(old.cursor, new.cursor, transit, has_transit=len(sent) < len(in_transit))
        return PendingPage(tuple(sorted(rows, key=_due)), rest.text)

    def _in_transit(self, query: PendingQuery) -> list[PendingMessage]:
        """Return the messages that match and are in transit: neither broker lists them."""
        return [self._shown(each) for _, each in self._transits(query)]

    def _transits(self, query: PendingQuery) -> list[tuple[Broker, TransitMessage]]:
        """Return the messages in transit that match, each with the broker that it leaves."""
        if not self._has_mover:
            return []
        try:
            state = self._old.hand_over.state()
            leaving = [self._old]
            if state is not None and state.phase is HandOverPhase.ABORTING and self._new.hand_over.state() is not None:
                leaving.append(self._new)
            found = [(broker, each) for broker in leaving for each in broker.hand_over.transit(_MOST_IN_TRANSIT)]
        except (UnsupportedError, BrokerError) as exc:
            _log.debug("hand_over.transit_unknown", reason=str(exc))  # a change of a message in transit says so
            return []
        return [
            (broker, each)
            for broker, each in found
            if query.matches(each.message, each.topic, each.msg_id, each.deliver_ms)
        ]

    def _shown(self, transit: TransitMessage) -> PendingMessage:
        message = transit.message
        handle = RecallHandle(transit.topic, self._old.name, transit.deliver_ms, transit.msg_id)
        return PendingMessage(
            topic=transit.topic,
            msg_id=transit.msg_id,
            tags=message.tags,
            keys=message.keys,
            deliver_ms=transit.deliver_ms,
            delay_level=transit.delay_level,
            body_size=len(message.body),
            handle=encode_handle(handle),
            broker=OLD_PREFIX + self._old.name,
        )

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        buckets: Counter[int] = Counter()
        for broker in (self._old, self._new):  # a message that moves meanwhile may be counted twice
            buckets.update(broker.delayed.count_pending(query, bucket_ms, on_compared=on_compared).buckets)
        buckets.update(each.deliver_ms // bucket_ms * bucket_ms for each in self._in_transit(query))
        return PendingCounts(buckets.total(), dict(sorted(buckets.items())))

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        raise UnsupportedError(
            "positions of pending messages are in the files of one broker, and during a hand-over there are two; read "
            "one of them by its own address, or wait until the hand-over has ended"
        )


def recallable(broker: Broker, topics: Sequence[str], earliest_ms: int, most: int) -> list[Message]:
    """Return the first pending timers of a cluster of RocketMQ that it can recall: due at *earliest_ms* or later."""
    found: list[Message] = []
    for topic in topics:
        query = PendingQuery(topic=topic, after_ms=earliest_ms)
        for each in broker.delayed.pending(query, most - len(found)).messages:
            records = [] if each.delay_level else broker.find_records((TIMER_TOPIC,), each.msg_id).messages
            records = [record for record in records if Property.TIMER_DEL_UNIQKEY not in record.properties]
            if records:
                newest = max(records, key=lambda record: record.store_timestamp)
                found.append(Message(topic, newest.body, dict(newest.properties), newest.flag))
        if len(found) >= most:
            break
    return found


def is_pending(broker: Broker, each: TransitMessage) -> bool:
    """Return True if a broker still has a message that comes back."""
    return bool(broker.delayed.pending(PendingQuery(topic=each.topic, key=each.msg_id)).messages)


def recall_times(broker: Broker, each: TransitMessage) -> list[int]:
    """Return when a message was due in the new broker, each time that RocketMQ has recalled it there.

    RocketMQ deletes all records of a message in the slot of a recall, also those that are stored there later.
    """
    if each.recalled_ms is None:
        return []
    records = broker.find_records((TIMER_TOPIC,), each.msg_id).messages
    marks = [record.properties for record in records if Property.TIMER_DEL_UNIQKEY in record.properties]
    return [each.recalled_ms, *(int(mark.get(Property.TIMER_OUT_MS, 0)) + 1 for mark in marks)]


# --- results of changes ---------------------------------------------------------------------------


class _ByName(NamedTuple):
    """Pending messages: by a handle, or by a key."""

    handle: str | None = None
    key: str | None = None
    topic: str | None = None


_Change: TypeAlias = Callable[[DelayedMessages, _ByName], ScheduleChange]


def _of(broker_name: str, change: ScheduleChange) -> ScheduleChange:
    """Return a result with the broker that had the message."""
    return change if change.status is _UNKNOWN else replace(change, broker=broker_name)


def _checked(changes: Sequence[ScheduleChange], refusal: BrokerError | None) -> ScheduleChange:
    """Return one result. If the old broker may have the message and cannot be reached, raise its error."""
    total = total_change(changes, _MOST_INFORMATIVE)
    if refusal is not None and not total.count:
        raise refusal
    return total


# --- pages ----------------------------------------------------------------------------------------

_END = ""
"""Cursor of a broker that has no further messages."""


def _due(message: PendingMessage) -> int:
    return message.deliver_ms


def _newest_places(*places: Sequence[PendingMessage]) -> list[PendingMessage]:
    """Return each message once, as the first of several places has it. Unreadable ones have no id."""
    found: dict[object, PendingMessage] = {}
    for message in (message for place in places for message in place):
        found.setdefault((message.topic, message.msg_id) if message.msg_id else message.handle, message)
    return list(found.values())


def _position(message: PendingMessage) -> tuple[int, str]:
    """Return the position of a message among those in transit."""
    return message.deliver_ms, message.msg_id


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Cursor over both brokers.

    Attributes:
        old: Cursor of the old broker; None at its start, `_END` at its end.
        new: Cursor of the new broker.
        transit: Position of the last message in transit that was returned.
        has_transit: There are further ones.
    """

    old: str | None = None
    new: str | None = None
    transit: tuple[int, str] = (-1, "")
    has_transit: bool = False

    @property
    def text(self) -> str | None:
        """The cursor for the next page; None after the last one."""
        if self.old == self.new == _END and not self.has_transit:
            return None
        values = json.dumps([self.old, self.new, *self.transit]).encode()
        return base64.urlsafe_b64encode(values).decode()

    @classmethod
    def parse(cls, text: str) -> _Cursor:
        """Return the cursor of the page before.

        Raises:
            MessageError: The text is not a cursor.
        """
        try:
            old, new, due_ms, msg_id = json.loads(base64.urlsafe_b64decode(text.encode()))
            cursors_are_text = all(each is None or isinstance(each, str) for each in (old, new))
            if not (cursors_are_text and isinstance(due_ms, int) and isinstance(msg_id, str)):
                raise ValueError("its values have other types")
        except (ValueError, TypeError) as exc:
            raise MessageError(
                f"{shown(text)} is not a cursor of a page ({exc}); pass the cursor of the page before, or None"
            ) from exc
        return cls(old, new, (due_ms, msg_id))


class _Side:
    """The next messages of one broker, for one page.

    Attributes:
        messages: At most as many as the page has.
        cursor: Cursor after the messages that were taken.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        cursor: str | None,
        query: PendingQuery,
        max_count: int,
        on_compared: Callable[[int], None] | None,
    ) -> None:
        self._name = name
        self.cursor = cursor
        self._list = partial(broker.delayed.pending, query, on_compared=on_compared)
        self._page = PendingPage((), None) if cursor == _END else self._list(max_count, cursor)
        self.messages = self._named(self._page)

    def _named(self, page: PendingPage) -> list[PendingMessage]:
        return [replace(message, broker=self._name) for message in page.messages]

    def take(self, taken: set[int]) -> list[PendingMessage]:
        """Return the messages that the page takes, and move the cursor after them.

        A cursor is known for the end of a page only. So if the page takes a part, that part is listed again.

        Args:
            taken: Identities of the messages that the page takes of both brokers.
        """
        count = sum(id(message) in taken for message in self.messages)
        messages, page = self.messages, self._page
        if count < len(messages):
            if count == 0:
                return []
            page = self._list(count, self.cursor)
            messages = self._named(page)
        self.cursor = _END if page.cursor is None else page.cursor
        return messages

"""Pending messages for administrators: pages, counts, search, and changes of many messages."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from mqtemplate.converters.readable import span_text, time_text
from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.errors import MessageError, UnknownNameError, UnsupportedError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import OldValue
from mqtemplate.operations.bulk import OnProgress, no_progress, only_one, paced
from mqtemplate.operations.changes import Change, ChangePreview, ChangeResult, PreviewCounter
from mqtemplate.operations.messages import sent_again_properties
from mqtemplate.pending import (
    OnPending,
    PendingDecision,
    PendingMessage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.results import SendResult
from mqtemplate.template import RocketMQTemplate, Send
from mqtemplate.topics import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_PAGE = 500
_ID_BEGINNING = re.compile(r"[0-9A-F]{8,32}", re.ASCII)


class PendingAction(Enum):
    """Action of a change on a pending message."""

    CANCEL = "cancel"
    DELIVER = "deliver"
    SHIFT = "shift"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of pending messages.

    Attributes:
        shift_ms: For `PendingAction.SHIFT`: how much later; negative for earlier.
        to_ms: For `PendingAction.MOVE`: the new deliver time (epoch ms).
    """

    action: PendingAction
    shift_ms: int = 0
    to_ms: int = 0

    def deliver_ms(self, message: PendingMessage, now_ms: int) -> int | None:
        """Return the new deliver time (epoch ms) of a message; None if it shall be cancelled."""
        match self.action:
            case PendingAction.CANCEL:
                return None
            case PendingAction.DELIVER:
                return now_ms
            case PendingAction.MOVE:
                return self.to_ms
            case PendingAction.SHIFT:
                return max(0, message.deliver_ms + self.shift_ms)


class DueChange(NamedTuple):
    """New deliver time of one pending message.

    Attributes:
        deliver_ms: Deliver time (epoch ms); None if the message shall be cancelled.
    """

    handle: str
    deliver_ms: int | None


@dataclass(frozen=True, slots=True)
class BulkChange:
    """Result of a change of many pending messages.

    Attributes:
        counts: Number of messages by the status of their change.
        unsupported: Number of messages that the broker cannot change, such as those with a delay level of RocketMQ.
        handles: After a reschedule: the new handles.
        changed: Number of messages that it has changed.
        sent: Results of the messages that were stored together with a cancel.
    """

    counts: dict[ScheduleChangeStatus, int]
    unsupported: int = 0
    handles: tuple[str, ...] = ()
    changed: int = 0
    sent: tuple[SendResult, ...] = ()

    @property
    def total(self) -> int:
        """Number of messages."""
        return sum(self.counts.values()) + self.unsupported

    @property
    def text(self) -> str:
        """The result for a reader."""
        parts = [f"{count:,} {status.value}" for status, count in self.counts.items()]
        if self.unsupported:
            parts.append(f"{self.unsupported:,} that this broker cannot change")
        return ", ".join(parts) or "no message was pending any more"

    @property
    def status(self) -> ScheduleChangeStatus:
        """Status of one of the messages: one that was changed, if there is one."""
        done = (ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED)
        found = [*(each for each in self.counts if each in done), *self.counts]
        return found[0] if found else ScheduleChangeStatus.UNKNOWN


@dataclass(frozen=True, slots=True)
class DelayedOperations:
    """Pending messages of one broker or cluster."""

    access: BrokerAccess

    # --- queries -------------------------------------------------------------------------------

    def all(
        self, query: PendingQuery, max_count: int | None = None, on_compared: OnProgress | None = None
    ) -> Iterator[PendingMessage]:
        """Yield all pending messages that match, by deliver time; at most *max_count*.

        Args:
            on_compared: See `DelayedMessages.pending`.
        """
        delayed, cursor, left = self.access.broker.delayed, None, max_count
        while left is None or left > 0:
            count = _PAGE if left is None else min(_PAGE, left)
            page = delayed.pending(query, count, cursor, on_compared=on_compared)
            yield from page.messages
            left = None if left is None else left - len(page.messages)
            cursor = page.cursor
            if cursor is None:
                return

    def find(self, name: str, topic: str | None = None, *, with_retries: bool = True) -> list[PendingMessage]:
        """Return the pending messages with a handle, a key or a message id; or else the one whose id begins so.

        Args:
            with_retries: By key, retries too. A change leaves them out, unless their topic is given: their messages
                were delivered.

        Raises:
            UnknownNameError: None is pending, or several ids begin so.
        """
        handle = _parse_handle(name)
        if handle is None:
            found = list(self.all(PendingQuery(key=name, topic=topic))) or self._beginning(name, topic)
            if topic is None and not with_retries:
                found = [each for each in found if not each.topic.startswith(RETRY_TOPIC_PREFIX)]
        elif _is_key(handle.msg_id):
            found = list(self.all(PendingQuery(key=handle.msg_id, topic=handle.topic)))
            found = [each for each in found if each.handle == name] or found
        else:  # its producer wrote an id by which nothing is found
            found = [each for each in self.all(PendingQuery(topic=handle.topic)) if each.handle == name]
        if not found:
            raise UnknownNameError(
                f"no pending message has the handle, key or id {name!r}; it was delivered or cancelled"
            )
        return found

    def _beginning(self, text: str, topic: str | None) -> list[PendingMessage]:
        """Return the message whose id begins with a text of eight characters or more.

        Raises:
            UnknownNameError: There are several.
        """
        if not _ID_BEGINNING.fullmatch(text):
            return []
        found = [each for each in self.all(PendingQuery(topic=topic)) if each.msg_id.startswith(text)]
        if found:
            only_one(text, (each.msg_id for each in found))
        return found

    def chosen(self, handles: Iterable[str]) -> Iterator[PendingMessage]:
        """Yield the messages with these handles that are still pending."""
        for text in handles:
            handle = decode_handle(text)
            page = self.access.broker.delayed.pending(PendingQuery(key=handle.msg_id, topic=handle.topic))
            offset = handle.physical_offset
            yield from [each for each in page.messages if decode_handle(each.handle).physical_offset == offset][:1]

    def stored(self, message: PendingMessage) -> MessageExt | None:
        """Return the stored message with its body, as it is in the system topic; None if it cannot be found."""
        if not _is_key(message.msg_id):
            return None
        topic = SCHEDULE_TOPIC if message.delay_level else TIMER_TOPIC
        found = self.access.broker.reader.messages_by_key(topic, message.msg_id, 64, unique=True)
        offset = decode_handle(message.handle).physical_offset
        return next((each for each in found if each.physical_offset == offset), found[0] if found else None)

    # --- changes -------------------------------------------------------------------------------

    def cancel(self, name: str, topic: str | None = None, then: Sequence[Send] = ()) -> ScheduleChange:
        """Cancel the pending messages with a handle, a key or a message id; see `RocketMQTemplate.cancel`."""
        broker = self.access.open_for_changes()
        named: dict[str, Any] = {"handle": name} if _parse_handle(name) is not None else {"key": name, "topic": topic}
        return RocketMQTemplate(broker).cancel(**named, then=then) if then else broker.delayed.cancel(**named)

    def reschedule(self, name: str, deliver_ms: int, topic: str | None = None) -> ScheduleChange:
        """Change the deliver time (epoch ms) of pending messages; see `DelayedMessages.reschedule`."""
        broker = self.access.open_for_changes()
        if _parse_handle(name) is not None:
            return broker.delayed.reschedule(name, deliver_ms)
        return broker.delayed.reschedule(key=name, deliver_ms=deliver_ms, topic=topic)

    def change_all(
        self,
        messages: Iterable[PendingMessage],
        change: PendingChange,
        rate: float | None = None,
        on_progress: OnProgress = no_progress,
    ) -> BulkChange:
        """Change many pending messages, at most *rate* per second."""
        now_ms = self.access.broker.clock.now_ms()
        moves = (DueChange(each.handle, change.deliver_ms(each, now_ms)) for each in messages)
        return self.move_all(moves, rate, on_progress)

    def move_all(
        self,
        moves: Iterable[DueChange],
        rate: float | None = None,
        on_progress: OnProgress = no_progress,
        *,
        must_support: bool = False,
    ) -> BulkChange:
        """Give pending messages new deliver times, or cancel them, at most *rate* per second.

        Args:
            must_support: A message that the broker cannot change is an error; otherwise it is counted.

        Raises:
            UnsupportedError: See *must_support*.
        """
        broker = self.access.open_for_changes()
        counts: Counter[ScheduleChangeStatus] = Counter()
        handles: list[str] = []
        unsupported = changed = 0
        for handle, deliver_ms in paced(moves, rate, broker.clock):
            try:
                if deliver_ms is None:
                    result = broker.delayed.cancel(handle)
                else:
                    result = broker.delayed.reschedule(handle, deliver_ms)
            except UnsupportedError:
                if must_support:
                    raise
                unsupported += 1
            else:
                counts[result.status] += 1
                changed += result.count
                handles += result.handles
            on_progress(1)
        return BulkChange(dict(counts), unsupported, tuple(handles), changed)


# --- changes with a preview ---------------------------------------------------------------------

_TITLES = {
    PendingAction.CANCEL: "Cancel",
    PendingAction.DELIVER: "Deliver now",
    PendingAction.SHIFT: "Move the deliver times of",
    PendingAction.MOVE: "Change the deliver times of",
}
MOST_COUNTED = 20_000
"""Messages that a preview reads to count them by topic and tag: of a million it would take most of a minute."""
_UNDO_MOVE = "It can be undone: messages that are still pending get their old deliver times."
_UNDO_CANCEL = (
    "A cancelled message never comes back, but it can be undone in this way: copies with new ids are sent, due at the "
    "old times, as long as retention keeps the records of the messages."
)


class PendingMessagesChange(Change):
    """Change of pending messages: by handle, key or id, or of all that match a filter.

    Args:
        reached: Returns the messages. It is called twice: for the preview, and for the change.
        target: Fields of the audit log: the name, or the filter.
        is_named: The messages were named by handle, key or id.
        total: Their number, if it is known and large: the preview counts only the first ones by topic and tag.
            `carry_out` checks the number before the first message changes.
    """

    def __init__(
        self,
        access: BrokerAccess,
        reached: Callable[[BrokerAccess], Iterable[PendingMessage]],
        change: PendingChange,
        target: Mapping[str, object],
        *,
        rate: float | None = None,
        is_named: bool = False,
        total: int | None = None,
    ) -> None:
        super().__init__(f"delayed.{change.action.value}", target, is_named=is_named)
        self.change = change
        self._access = access
        self._reached = reached
        self._rate = rate
        self._total = total
        self._now_ms = access.broker.clock.now_ms()

    @property
    def title(self) -> str:
        by = f" by {span_text(self.change.shift_ms)}" if self.change.action is PendingAction.SHIFT else ""
        to = f" to {time_text(self.change.to_ms)}" if self.change.action is PendingAction.MOVE else ""
        return f"{_TITLES[self.change.action]} {self.preview.amount}{by}{to}"

    @cached_property
    def preview(self) -> ChangePreview:
        counter = PreviewCounter()
        for each in islice(self._reached(self._access), None if self._total is None else MOST_COUNTED):
            counter.add(each.topic, each.tags, each.deliver_ms)
        is_cancel = self.change.action is PendingAction.CANCEL
        undo = _UNDO_CANCEL if is_cancel else _UNDO_MOVE
        notes = change_limits(self._access, self.change)
        found = counter.preview("pending message", "due", notes=notes, undo=undo)
        if self._total is None:
            return found
        notes = (*notes, f"By topic and tag are the first {counter.count:,}.")
        return replace(found, count=self._total, last_ms=None, notes=notes)

    def old_values(self) -> Iterator[OldValue]:
        for each in self._reached(self._access):
            due = {"due": each.deliver_ms, "new": self.change.deliver_ms(each, self._now_ms)}
            yield {"handle": each.handle, "topic": each.topic, **due}

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        moves = (DueChange(each["handle"], each["new"]) for each in old())
        done = DelayedOperations(self._access).move_all(moves, self._rate, on_progress, must_support=self.is_named)
        facts = {status.value: count for status, count in done.counts.items()}
        return ChangeResult(done.text, facts | {"unsupported": done.unsupported}, done)


class CancelAndSend(PendingMessagesChange):
    """Cancel of named messages, and messages that are stored in the same step if one of them is cancelled."""

    def __init__(
        self,
        access: BrokerAccess,
        reached: Callable[[BrokerAccess], Iterable[PendingMessage]],
        then: Sequence[Send],
        target: Mapping[str, object],
        *,
        is_named: bool = False,
    ) -> None:
        super().__init__(access, reached, PendingChange(PendingAction.CANCEL), target, is_named=is_named)
        self._then = then

    @property
    def title(self) -> str:
        return f"{super().title}, and send {', '.join(repr(each.destination) for each in self._then)}"

    @cached_property
    def preview(self) -> ChangePreview:
        note = (
            "What is sent is sent in the same step, and only if a message is cancelled. An undo does not take it back."
        )
        found = super().preview
        return replace(found, notes=(*found.notes, note))

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        handles = [each["handle"] for each in old()]
        template = RocketMQTemplate(self._access.open_for_changes())
        change = template.cancel(",".join(handles), then=self._then)
        on_progress(len(handles))
        counts = {change.status: change.count or len(handles)}
        if late := len(handles) - change.count if change.count else 0:
            counts[ScheduleChangeStatus.ALREADY_DELIVERED] = late
        done = BulkChange(counts, changed=change.count, sent=change.sent)
        facts = {status.value: count for status, count in counts.items()}
        return ChangeResult(done.text, facts | {"sent": len(change.sent)}, done)


def change_limits(access: BrokerAccess, change: PendingChange) -> tuple[str, ...]:
    """Return what a broker of RocketMQ does not guarantee for a change; empty for other brokers."""
    if access.broker.delay_console is None:
        return ()
    of_levels = (
        "A message with a delay level stays as it is: RocketMQ changes timers only. It is counted in the result."
    )
    if change.action is PendingAction.CANCEL:
        confirmed = (
            "RocketMQ confirms a cancel before it has found the message: one that is due within the next second may be "
            "delivered all the same."
        )
        return confirmed, of_levels
    two_steps = (
        "RocketMQ has no request for this: the message is sent again with its new time, then the old one is cancelled. "
        "If this process is killed in between, both are delivered, with equal ids."
    )
    return two_steps, of_levels


class DueTimesRestored(PendingMessagesChange):
    """Undoing of a change of deliver times: messages that are still pending get their old ones.

    Args:
        values: Returns the old values of the change.
    """

    def __init__(
        self, access: BrokerAccess, values: Callable[[], Iterable[OldValue]], target: Mapping[str, object]
    ) -> None:
        self._values = values
        super().__init__(access, self._still_pending, PendingChange(PendingAction.MOVE), target)

    @property
    def title(self) -> str:
        return f"Give {self.preview.amount} the old deliver times"

    @cached_property
    def preview(self) -> ChangePreview:
        found = super().preview
        gone = sum(1 for _ in self._values()) - found.count
        notes = (f"{gone:,} of the messages are not pending any more, and stay as they are.",) if gone else ()
        return replace(found, notes=notes)

    def _still_pending(self, access: BrokerAccess) -> Iterator[PendingMessage]:
        pending = DelayedOperations(access)
        for value in self._values():
            yield from self._current(pending, value)

    @staticmethod
    def _current(pending: DelayedOperations, value: OldValue) -> list[PendingMessage]:
        """Return the message of an old value as it is now. Its handle has changed, its id has not."""
        handle = decode_handle(value["handle"])
        if not _is_key(handle.msg_id):
            return list(pending.chosen([value["handle"]]))[:1]
        found = pending.access.broker.delayed.pending(PendingQuery(key=handle.msg_id, topic=handle.topic)).messages
        return [each for each in found if decode_handle(each.handle).msg_id == handle.msg_id][:1]

    def old_values(self) -> Iterator[OldValue]:
        pending = DelayedOperations(self._access)
        for value in self._values():
            for each in self._current(pending, value):
                yield {"handle": each.handle, "topic": each.topic, "due": each.deliver_ms, "new": value["due"]}


CANCEL_UNDONE = "cancel_undone_of"
"""Property of a copy of a cancelled message: the id of that message."""


class CancelUndone(Change):
    """Undoing of a cancel: copies of the messages with new ids, due at the old times.

    - A message is left out if retention has deleted its record, or if it was a retry.
    - A copy has the pending key of its message, and is not sent if another message is pending under it by now.
    - The id of a copy follows from the cancel and the message. So an undo that was interrupted can be repeated: copies
      that it has sent are found by their ids, and are not sent again.

    Args:
        values: Returns the old values of the cancel.
    """

    def __init__(
        self, access: BrokerAccess, values: Callable[[], Iterable[OldValue]], target: Mapping[str, object]
    ) -> None:
        super().__init__("delayed.restore", target, can_be_undone=False)
        self._access = access
        self._values = values

    @property
    def title(self) -> str:
        return f"Send copies of {self.preview.amount} with new ids, due at the old times"

    @cached_property
    def preview(self) -> ChangePreview:
        counter, total, overdue, lost, sent, keyed = PreviewCounter(), 0, 0, 0, 0, 0
        now_ms = self._access.broker.clock.now_ms()
        for value in self._values():
            total += 1
            if self._is_sent(value):
                sent += 1
                continue
            if not self._is_cancelled(value):
                continue
            record = self._record(value)
            if record is None:
                lost += 1
                continue
            counter.add(value["topic"], record.tags, value["due"])
            overdue += value["due"] <= now_ms
            keyed += Property.PENDING_KEY in record.properties
        notes = []
        if lost:
            notes.append(f"{lost:,} of the messages cannot be restored: they are retries, or retention deleted them.")
        if sent:
            notes.append(f"{sent:,} of the messages have a copy already, of an undo that was interrupted.")
        if spared := total - lost - sent - counter.count:
            notes.append(f"{spared:,} of the messages were not cancelled: they are pending, or were delivered.")
        if overdue:
            notes.append(f"{overdue:,} of them were due meanwhile, and are delivered at once.")
        if keyed:
            notes.append(f"{keyed:,} of them have a pending key: none is sent while another is pending under its key.")
        undo = "The copies can only be cancelled, by the keys or the new ids."
        return counter.preview("cancelled message", "due", notes=tuple(notes), undo=undo)

    def _copy_id(self, value: OldValue) -> str:
        """Return the id of the copy of a message: the same one in each undo of this cancel."""
        source = f"{self.target.get('undo_of')} {value['handle']}".encode()
        return hashlib.blake2b(source, digest_size=16).hexdigest().upper()

    def _is_sent(self, value: OldValue) -> bool:
        """Return True if an earlier undo of this cancel has sent the copy of a message."""
        topics, copy_id = (TIMER_TOPIC, SCHEDULE_TOPIC, value["topic"]), self._copy_id(value)
        reader = self._access.broker.reader
        return any(reader.messages_by_key(topic, copy_id, 1, unique=True) for topic in topics)

    def _is_cancelled(self, value: OldValue) -> bool:
        """Return False for a message that is pending or in its topic, after a cancel that has failed, or came late."""
        broker, handle = self._access.broker, decode_handle(value["handle"])
        if not _is_key(handle.msg_id):
            return True
        pending = broker.delayed.pending(PendingQuery(key=handle.msg_id, topic=handle.topic)).messages
        is_pending = any(each.msg_id == handle.msg_id for each in pending)
        return not is_pending and not broker.reader.messages_by_key(handle.topic, handle.msg_id, 1, unique=True)

    def _record(self, value: OldValue) -> MessageExt | None:
        """Return the record of a cancelled message, from the topic of delayed messages."""
        handle = decode_handle(value["handle"])
        if not _is_key(handle.msg_id) or handle.topic.startswith(RETRY_TOPIC_PREFIX):
            return None
        found: list[MessageExt] = []
        for topic in (TIMER_TOPIC, SCHEDULE_TOPIC):
            found += self._access.broker.reader.messages_by_key(topic, handle.msg_id, 64, unique=True)
        # The delete marker of the message has its id, too.
        found = [each for each in found if Property.TIMER_DEL_UNIQKEY not in each.properties]
        exact = (each for each in found if each.physical_offset == handle.physical_offset)
        return next(exact, found[0] if found else None)

    def old_values(self) -> Iterator[OldValue]:
        for value in self._values():
            if not self._is_sent(value) and self._is_cancelled(value) and self._record(value) is not None:
                yield value

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        broker, sent, kept = self._access.open_for_changes(), 0, 0
        for value in old():
            record = self._record(value)
            if record is None:
                continue
            properties = sent_again_properties(record)
            properties |= {
                CANCEL_UNDONE: record.msg_id,
                Property.UNIQ_KEY: self._copy_id(value),
                Property.TIMER_DELIVER_MS: str(value["due"]),
            }
            if (key := record.properties.get(Property.PENDING_KEY)) is not None:
                properties |= {Property.PENDING_KEY: key, Property.ON_PENDING: OnPending.KEEP.value}
            result = broker.sends.send(Message(value["topic"], record.body, properties, record.flag))
            is_kept = result.pending is not None and result.pending.decision is PendingDecision.KEPT
            sent, kept = sent + (not is_kept), kept + is_kept
            on_progress(1)
        if not kept:
            return ChangeResult(f"sent {sent:,} copies", {"sent": sent})
        text = f"sent {sent:,} copies; {kept:,} were not sent, since another message is pending under the pending key"
        return ChangeResult(text, {"sent": sent, "kept": kept})


def _is_key(msg_id: str) -> bool:
    """Return True for an id that a query by key takes."""
    return bool(msg_id) and " " not in msg_id


def _parse_handle(text: str) -> RecallHandle | None:
    """Return the handle in *text*; None if it is a key or an id."""
    try:
        return decode_handle(text)
    except MessageError:
        return None

"""Pending messages for administrators: pages, counts, search, and changes of many messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.errors import MessageError, UnknownNameError, UnsupportedError
from mqtemplate.message import MessageExt
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import OnProgress, no_progress, paced
from mqtemplate.pending import (
    PendingMessage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_PAGE = 500


class PendingAction(Enum):
    """Action of a change on a pending message."""

    CANCEL = "cancel"
    DELIVER = "deliver"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of pending messages.

    Attributes:
        shift_ms: For `PendingAction.SHIFT`: how much later; negative for earlier.
    """

    action: PendingAction
    shift_ms: int = 0

    def deliver_ms(self, message: PendingMessage, now_ms: int) -> int | None:
        """Return the new deliver time (epoch ms) of a message; None if it shall be cancelled."""
        if self.action is PendingAction.CANCEL:
            return None
        return now_ms if self.action is PendingAction.DELIVER else max(0, message.deliver_ms + self.shift_ms)


@dataclass(frozen=True, slots=True)
class BulkChange:
    """Result of a change of many pending messages.

    Attributes:
        counts: Number of messages by the status of their change.
        unsupported: Number of messages that the broker cannot change, such as those with a delay level of RocketMQ.
        handles: After a reschedule: the new handles.
    """

    counts: dict[ScheduleChangeStatus, int]
    unsupported: int = 0
    handles: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of messages."""
        return sum(self.counts.values()) + self.unsupported


@dataclass(frozen=True, slots=True)
class DelayedOperations:
    """Pending messages of one broker or cluster."""

    access: BrokerAccess

    # --- queries -------------------------------------------------------------------------------

    def all(self, query: PendingQuery, max_count: int | None = None) -> Iterator[PendingMessage]:
        """Yield all pending messages that match, by deliver time; at most *max_count*."""
        broker, cursor, left = self.access.broker, None, max_count
        while left is None or left > 0:
            page = broker.delayed.pending(query, _PAGE if left is None else min(_PAGE, left), cursor)
            yield from page.messages
            left = None if left is None else left - len(page.messages)
            cursor = page.cursor
            if cursor is None:
                return

    def find(self, name: str, topic: str | None = None) -> list[PendingMessage]:
        """Return the pending messages with a handle, a key or a message id.

        Raises:
            UnknownNameError: None is pending.
        """
        handle = _parse_handle(name)
        if handle is None:
            found = self.access.broker.delayed.pending(PendingQuery(key=name, topic=topic)).messages
        elif _is_key(handle.msg_id):
            found = self.access.broker.delayed.pending(PendingQuery(key=handle.msg_id, topic=handle.topic)).messages
        else:  # its producer wrote an id by which nothing is found
            found = tuple(each for each in self.all(PendingQuery(topic=handle.topic)) if each.handle == name)
        if not found:
            raise UnknownNameError(
                f"no pending message has the handle, key or id {name!r}; it was delivered or cancelled"
            )
        return list(found)

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

    def cancel(self, name: str, topic: str | None = None) -> ScheduleChange:
        """Cancel the pending messages with a handle, a key or a message id; see `DelayedMessages.cancel`."""
        broker = self.access.open_for_changes()
        if _parse_handle(name) is not None:
            return broker.delayed.cancel(name)
        return broker.delayed.cancel(key=name, topic=topic)

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
        broker = self.access.open_for_changes()
        now_ms = broker.clock.now_ms()
        counts: Counter[ScheduleChangeStatus] = Counter()
        handles: list[str] = []
        unsupported = 0
        for message in paced(messages, rate, broker.clock):
            deliver_ms = change.deliver_ms(message, now_ms)
            try:
                if deliver_ms is None:
                    changed = broker.delayed.cancel(message.handle)
                else:
                    changed = broker.delayed.reschedule(message.handle, deliver_ms)
            except UnsupportedError:
                unsupported += 1
            else:
                counts[changed.status] += 1
                handles += changed.handles
            on_progress(1)
        return BulkChange(dict(counts), unsupported, tuple(handles))


def _is_key(msg_id: str) -> bool:
    """Return True for an id that a query by key takes."""
    return bool(msg_id) and " " not in msg_id


def _parse_handle(text: str) -> RecallHandle | None:
    """Return the handle in *text*; None if it is a key or an id."""
    try:
        return decode_handle(text)
    except MessageError:
        return None

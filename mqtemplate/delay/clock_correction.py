"""Delayed messages that were stored while the clock was ahead: they are released their delay after it was set right."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from mqtemplate.delay.pending_rows import PendingEntry
from mqtemplate.errors import CorruptRecordError, StoreFullError
from mqtemplate.event_log import get_logger
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import TIMER_DELAY_MS, TIMER_DELAY_SEC, find_property
from mqtemplate.services import ClockWatch
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC

_log = get_logger("mqtemplate.delay")

_RETRY_MS = 1_000  # when the disk was full
_PIECE = 256
"""Messages that one step examines or releases: some milliseconds in which none is released on time."""
_RELATIVE_MS = 10_000
"""A timer counts from its store time if it is due its delay after it; the append may have waited for this long."""

ReleaseNow = Callable[[Sequence[StoredRecord]], object]


class PendingStore(Protocol):
    """The delay service of one system topic, as far as it is used here; see `DelayStore`."""

    source_topic: str

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while pending messages are read."""

    def catch_up(self) -> None:
        """With the lock: read all messages that are in the source topic by now."""

    def find(self, record: StoredRecord) -> PendingEntry | None:
        """With the lock, after `catch_up`: return the entry of a record; None if it is not pending."""


class ClockCorrection:
    """Service that releases messages whose due time a clock set that was ahead.

    Such a message has a level, or a timer that counts from the send, and a store time that is in the future now. When
    it was stored is unknown, but that was before the next record that has a time of the past, and before now. So its
    delay counts from there: it is never early, and late by less than its delay. A deliver time that the producer gave
    is kept. RocketMQ releases such a level at once. Source: ``ScheduleMessageService.correctDeliverTimestamp``.

    - The messages are searched when the service starts, and when the clock was set. Nothing is read before.
    - The times are in memory only. After a restart they are computed again from the commit log.

    Args:
        delay_stores: The two delay services.
        release_now: Releases those of the records that are pending.
    """

    name = "delay.clock"

    def __init__(self, store: MessageStore, delay_stores: Iterable[PendingStore], release_now: ReleaseNow) -> None:
        self._store = store
        self._delay_stores = list(delay_stores)
        self._release_now = release_now
        self._watch = ClockWatch(store.clock)
        self._is_started = False
        self._unread: deque[tuple[PendingStore, ConsumeQueue, range]] = deque()
        self._due: list[tuple[int, int]] = []  # heap: corrected due time, physical offset

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the thread that releases delayed messages steps this service with them."""

    def step(self) -> int | None:
        now_ms = self._store.clock.now_ms()
        if self._watch.moved_ms() or not self._is_started:
            self._is_started = True
            self._search(now_ms)
        self._read_piece(now_ms)
        try:
            self._release_due(now_ms)
        except StoreFullError as exc:
            _log.warning("release.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        if self._unread:
            return now_ms
        return self._due[0][0] if self._due else None

    def _search(self, now_ms: int) -> None:
        """Find the parts of the queues whose records are in the future."""
        self._due.clear()
        self._unread.clear()
        steps = self._store.clock_steps
        if max([self._store.last_store_timestamp, *(step.before_ms for step in steps)]) <= now_ms:
            return
        for delay_store in self._delay_stores:
            for queue_id in self._store.queue_ids(delay_store.source_topic):
                queue = self._store.consume_queue(delay_store.source_topic, queue_id)
                offsets = range(queue.min_offset, queue.max_offset)
                for span in steps.spans(offsets, partial(queue.first_at, "physical_offset")):
                    start = span.start + bisect_right(span, now_ms, key=partial(self._time_at, queue))
                    if start < span.stop:
                        self._unread.append((delay_store, queue, range(start, span.stop)))
        if self._unread:
            count = sum(len(part) for _, _, part in self._unread)
            _log.warning("delay.clock_was_ahead", messages=count, reason="their store times are in the future")

    def _time_at(self, queue: ConsumeQueue, queue_offset: int) -> int:
        record = self._record_at(queue, queue_offset)
        return 0 if record is None else record.store_timestamp

    def _record_at(self, queue: ConsumeQueue, queue_offset: int) -> StoredRecord | None:
        """Return a record; None for one that is unreadable, or whose unit is marked as done."""
        for physical_offset, _, _ in queue.unit_tuples(queue_offset, 1):
            try:
                return self._store.read_at(physical_offset)
            except CorruptRecordError:  # its release reports it
                return None
        return None

    def _read_piece(self, now_ms: int) -> None:
        if not self._unread:
            return
        delay_store, queue, part = self._unread.popleft()
        if len(part) > _PIECE:
            self._unread.appendleft((delay_store, queue, part[_PIECE:]))
        records = [self._record_at(queue, queue_offset) for queue_offset in part[:_PIECE]]
        with delay_store.lock:
            delay_store.catch_up()
            for record in records:
                entry = None if record is None else delay_store.find(record)
                if record is None or entry is None:
                    continue
                delay_ms = _delay_ms(record, entry.due_ms)
                stored_ms = self._store.clock_steps.latest_ms(record.physical_offset, now_ms)
                if delay_ms is not None and stored_ms + delay_ms < entry.due_ms:
                    heapq.heappush(self._due, (stored_ms + delay_ms, record.physical_offset))

    def _release_due(self, now_ms: int) -> None:
        if not self._due or self._due[0][0] > now_ms:
            return
        due = [each for each in heapq.nsmallest(_PIECE, self._due) if each[0] <= now_ms]
        records = [self._store.read_at(physical_offset) for _, physical_offset in due]
        self._release_now([record for record in records if record is not None])
        for _ in due:  # after the release: it may fail
            heapq.heappop(self._due)


def _delay_ms(record: StoredRecord, due_ms: int) -> int | None:
    """Return the delay of a message; None if it is a timer for a time that the producer gave."""
    if record.topic == SCHEDULE_TOPIC:
        return max(due_ms - record.store_timestamp, 0)
    for name, unit_ms in ((TIMER_DELAY_SEC, 1_000), (TIMER_DELAY_MS, 1)):
        delay = parse_number(find_property(record.properties_bytes, name) or "")
        if delay is not None and abs(record.store_timestamp + delay * unit_ms - due_ms) <= _RELATIVE_MS:
            return delay * unit_ms
    return None

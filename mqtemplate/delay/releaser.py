"""Release of due records: their copies are built, alike ones as one array, and appended together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mqtemplate.delay.causes import observe_all
from mqtemplate.delay.release import (
    DEAD_LETTER_TOPIC,
    LEVEL_DELAY_PAIR,
    DueRecord,
    PoisonError,
    dead_letter_draft,
    release_stamps,
    released_draft,
    rolled_draft,
)
from mqtemplate.errors import CorruptRecordError, MessageError
from mqtemplate.event_log import get_logger
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.released_copies import AlikeCopies, RecordShape, ReleasedCopies
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.record_reads import read_records
from mqtemplate.topics import TIMER_TOPIC

_log = get_logger("mqtemplate.delay")

MAX_RELEASE_COUNT = 1_000
"""Messages in one append. More due messages are left for the next step."""
_MAX_RELEASE_BYTES = 4 << 20
_MAX_ADDED_BYTES = 256  # more bytes of a copy than of its record: a longer topic, stamps
_MIN_RUN = 32
"""Fewest records of one shape for which building one array is cheaper than building each copy (measured)."""


class Releaser:
    """Builds copies of due records and appends them.

    A record that cannot be released is logged and counted. If it is readable, its copy goes to the dead-letter topic.
    It never blocks the other messages.

    Args:
        source_topic: System topic of the due records. A record of another topic is not released.
        service: Name of the delay service, for log events.

    Attributes:
        end: Physical offset after the newest record that replaced a pending one.
    """

    def __init__(self, store: MessageStore, source_topic: str, service: str) -> None:
        self._store = store
        self._source_topic = source_topic
        self._service = service
        self.end = 0
        self._unconfirmed: set[str] = set()  # topics of appended copies whose consumers are not notified yet
        self._released = store.metrics.counter("delay.released")
        self._rolled = store.metrics.counter("delay.rolled")
        self._poison = store.metrics.counter("delay.poison")
        self._lag_ms = store.metrics.histogram("delay.lag_ms")

    def count_fitting(self, sizes: Sequence[int]) -> int:
        """Return how many records of these sizes fit into one append; at least one."""
        # A release is appended as a whole, and no file of the commit log may be too small for it.
        max_bytes = min(_MAX_RELEASE_BYTES, self._store.sizes.commit_log // 4)
        total = 0
        for count, size in enumerate(sizes[:MAX_RELEASE_COUNT]):
            total += size + _MAX_ADDED_BYTES
            if total > max_bytes and count:
                return count
        return min(len(sizes), MAX_RELEASE_COUNT)

    def release(
        self, due: Sequence[DueRecord], now_ms: int, due_ms: NDArray[np.int64]
    ) -> list[RecordDraft | AlikeCopies]:
        """Append the copies of *due*, all or none, and return them.

        Args:
            due_ms: Due times that the lag metric counts.

        Raises:
            StoreFullError: The disk is full. Nothing was released; call again later.
        """
        copies = self.copies(due, now_ms)
        if copies:
            self.end = self._append(copies)
            self._unconfirmed.update([each.topic for each in copies])
        rolled_count = sum([each.topic == TIMER_TOPIC for each in copies])
        dead_count = sum([each.topic == DEAD_LETTER_TOPIC for each in copies])
        count = count_copies(copies)
        self._rolled.add(rolled_count)
        self._released.add(count - rolled_count - dead_count)
        if len(due_ms):
            lags_ms = self._store.clock.now_ms() - due_ms
            observe_all(self._lag_ms, lags_ms)
            _log.debug("message.released", service=self._service, count=count, lag_ms=int(lags_ms[0]))
        return copies

    def confirm(self, *, has_more: bool) -> None:
        """Notify the consumers of released messages once the copies are as durable as the flush mode requires.

        Args:
            has_more: More messages are due. Then do not wait for fsync: the next copies are built during the flush.
        """
        topics, self._unconfirmed = self._unconfirmed, set()
        if topics and has_more:
            self._store.confirm_async(self.end, topics)
        elif topics:
            self._store.confirm(self.end, topics)

    def _append(self, copies: Sequence[RecordDraft | AlikeCopies]) -> int:
        drafts = [each for each in copies if isinstance(each, RecordDraft)]
        if len(drafts) < len(copies):
            return self._store.put(ReleasedCopies(copies)).end
        try:
            return self._store.put(Drafts(drafts)).end
        except MessageError as exc:
            if len(drafts) > 1:
                raise
            source_offset = drafts[0].prepared_transaction_offset - 1
            self._reject(drafts[0].topic, source_offset, str(exc))
            return self._store.end_offset

    # --- copies --------------------------------------------------------------------------------

    def copies(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft | AlikeCopies]:
        """Return the copies of these records, in their order. Many alike records in a row become one `AlikeCopies`."""
        copies: list[RecordDraft | AlikeCopies] = []
        # Only records of one size can have one shape. Rolled and poison records are always copied one by one.
        sizes = np.array([0 if item.rolls or item.is_poison else item.size for item in due], np.int64)
        bounds = np.flatnonzero(np.diff(sizes, prepend=-1, append=-1)).tolist()
        for start, end in pairwise(bounds):
            same_size = due[start:end]
            copies += self._copies(same_size, now_ms) if sizes[start] else self._one_by_one(same_size, now_ms)
        return copies

    def _copies(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft | AlikeCopies]:
        """Return the copies of records of one size."""
        copies: list[RecordDraft | AlikeCopies] = []
        # A failed search for a run costs a read of the window. So each failure doubles the step to the next search and
        # narrows the window to the smallest run; a success widens it again.
        at, window, step = 0, len(due), _MIN_RUN
        while at < len(due):
            run = self._run(due[at : at + window], now_ms)
            if run is None:
                copies += self._one_by_one(due[at : at + step], now_ms)
                at += step
                window, step = _MIN_RUN, 2 * step
            else:
                copies.append(run)
                at += len(run)
                window, step = 4 * len(run), _MIN_RUN
        return copies

    def _one_by_one(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft]:
        drafts = [self._draft(item, now_ms) for item in due]
        return [draft for draft in drafts if draft is not None]

    def _run(self, due: Sequence[DueRecord], now_ms: int) -> AlikeCopies | None:
        """Return the copies of the leading records that have one shape; None if they are few.

        A record with any fault ends the run. `_draft` meets it next, and reports the fault.
        """
        if len(due) < _MIN_RUN:
            return None
        item = due[0]
        try:
            record = self._store.read(item.physical_offset, item.size)
            stamps = release_stamps(record, item, now_ms)
            draft = released_draft(record, stamps)
        except (CorruptRecordError, PoisonError):
            return None
        offsets = np.array([each.physical_offset for each in due], np.int64)
        rows = read_rows(self._store, offsets, item.size)
        if rows is None or record.topic != self._source_topic:
            return None
        shape = RecordShape(record, rows[0].tobytes())
        gap = _gap(record.properties_bytes, draft.properties, stamps)
        count = shape.count_matching(rows, offsets) if gap is not None else 0
        stamp_rows = _stamp_rows(record, due[:count], now_ms) if count >= _MIN_RUN else None
        if gap is None or stamp_rows is None:
            return None
        columns = slice(shape.properties_at + gap.start, shape.properties_at + gap.stop)
        return AlikeCopies(draft, shape, rows[:count], columns, stamp_rows)

    def _draft(self, item: DueRecord, now_ms: int) -> RecordDraft | None:
        try:
            record = self._store.read(item.physical_offset, item.size)
        except CorruptRecordError as exc:
            self._reject(self._source_topic, item.physical_offset, exc.reason, due=item.due_ms)
            return None
        if record.topic != self._source_topic:
            reason = f"the record at this offset belongs to topic {record.topic}"
            self._reject(self._source_topic, item.physical_offset, reason, due=item.due_ms)
            return None
        try:
            if item.is_poison:
                raise PoisonError("its deliver time is missing or not a number")
            if item.rolls:
                return rolled_draft(record, item.enqueue_ms, now_ms)
            return released_draft(record, release_stamps(record, item, now_ms))
        except PoisonError as exc:
            self._reject(self._source_topic, item.physical_offset, str(exc), record, due=item.due_ms)
            return dead_letter_draft(record)

    def _reject(
        self, topic: str, physical_offset: int, reason: str, record: StoredRecord | None = None, **fields: int
    ) -> None:
        self._poison.add()
        if record is not None:
            fields |= {"queue": record.queue_id, "offset": record.queue_offset}
        _log.error(
            "message.rejected",
            reason=reason,
            topic=topic,
            physical_offset=physical_offset,
            dead_letter_topic=None if record is None else DEAD_LETTER_TOPIC,
            **fields,
        )


def count_copies(copies: Iterable[RecordDraft | AlikeCopies]) -> int:
    """Return the number of records in *copies*."""
    return sum([1 if isinstance(each, RecordDraft) else len(each) for each in copies])


def read_rows(store: MessageStore, physical_offsets: NDArray[np.int64], size: int) -> NDArray[np.uint8] | None:
    """Read *size* bytes at each physical offset, unchecked, as rows; None if the log does not have them all.

    Records that are near each other are read at once.
    """
    data = read_records(store, physical_offsets.tolist(), size)
    return None if data is None else np.frombuffer(data, np.uint8).reshape(-1, size)


def _stamp_rows(record: StoredRecord, due: Sequence[DueRecord], now_ms: int) -> np.ndarray | None:
    """Return the stamps of copies of records like *record*: one row for all, or one each; None if lengths differ."""
    # A spike has few distinct times, so stamps are encoded once for each.
    times = [(item.due_ms, item.enqueue_ms) for item in due]
    first = dict(zip(times, due, strict=True))
    stamps = {each: release_stamps(record, item, now_ms) for each, item in first.items()}
    if len(set(map(len, stamps.values()))) > 1:
        return None
    rows = [stamps[each] for each in times] if len(set(stamps.values())) > 1 else list(stamps.values())[:1]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def _gap(properties: bytes, copied: bytes, stamps: bytes) -> slice | None:
    """Return the part of *properties* that a copy leaves out: the level's delay, and nothing of a timer's.

    Returns:
        None if the copy's properties are not the rest and *stamps*. Then records cannot be copied by columns.
    """
    length = len(properties) + len(stamps) - len(copied)
    at = properties.rfind(LEVEL_DELAY_PAIR) + 1 if length else len(properties)
    kept = properties[:at] + properties[at + length :]
    return slice(at, at + length) if length >= 0 and copied == kept + stamps else None

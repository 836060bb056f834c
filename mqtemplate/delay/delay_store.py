"""Common half of both delay services: their interface, the lookup of their records, and the append of their copies.

`Releaser` builds the copies of due records, many alike ones as one array, and appends them together.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mqtemplate.delay.copies import (
    LEVEL_DELAY_PAIR,
    PoisonError,
    dead_letter_draft,
    release_stamps,
    released_draft,
    rolled_draft,
)
from mqtemplate.delay.pending_rows import DueRecord, LatenessCauses, PendingEntry, PendingPiece, observe_all
from mqtemplate.errors import CorruptRecordError, MessageError, StoreFullError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import split_keys
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.properties import KEYS, PENDING_KEY, REAL_TOPIC, TIMER_DEL_UNIQKEY, UNIQ_KEY, find_property
from mqtemplate.record.record_arrays import AlikeCopies, RecordShape, ReleasedCopies
from mqtemplate.store.commit_log import read_records
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import TIMER_TOPIC, UNDELIVERABLE_TOPIC

_log = get_logger("mqtemplate.delay")

MAX_RECORDS_OF_KEY = 100_000


class RecordLookup:
    """Reads records by physical offset or by key, and skips unreadable ones: their release reports them."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def at(self, physical_offset: int, size: int = 0) -> StoredRecord | None:
        """Return the record at an offset; None if it is unreadable.

        Args:
            size: Bytes of the record, if known: this saves one read.
        """
        try:
            if size:
                return self._store.read(physical_offset, size)
            return self._store.read_at(physical_offset)
        except CorruptRecordError:
            return None

    def by_key(self, topic: str, key: str, max_count: int = MAX_RECORDS_OF_KEY) -> Iterator[StoredRecord]:
        """Yield the records of *topic* that may have *key*, the newest first. The index stores hashes of keys only.

        Args:
            max_count: Most records that are read.
        """
        for physical_offset in self._store.index.find(topic, key, max_count=max_count):
            record = self.at(physical_offset)
            if record is not None and record.topic == topic:
                yield record


def has_key(record: StoredRecord, key: str) -> bool:
    """Return True if *key* is the message id or one of the keys of a record."""
    properties = record.properties_bytes
    if find_property(properties, UNIQ_KEY) == key:
        return True
    return key in split_keys(find_property(properties, KEYS))


def is_marker(record: StoredRecord) -> bool:
    """Return True if a record is a delete marker, ours or RocketMQ's, and not a message."""
    return find_property(record.properties_bytes, TIMER_DEL_UNIQKEY) is not None


MAX_RELEASE_COUNT = 1_000
"""Messages in one append. More due messages are left for the next step."""
_MAX_RELEASE_BYTES = 4 << 20
_MAX_ADDED_BYTES = 256  # more bytes of a copy than of its record: a longer topic, stamps
_FEWEST_ALIKE = 32
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
        dead_count = sum([each.topic == UNDELIVERABLE_TOPIC for each in copies])
        count = count_copies(copies)
        self._rolled.add(rolled_count)
        self._released.add(count - rolled_count - dead_count)
        if len(due_ms):
            lags_ms = self._store.clock.now_ms() - due_ms
            observe_all(self._lag_ms, lags_ms)
            _log.debug("message.released", service=self._service, count=count, lag_ms=int(lags_ms[0]))
        return copies

    def take_unconfirmed(self) -> set[str]:
        """With the lock of the delay store: return the topics of copies that `confirm` has to announce."""
        topics, self._unconfirmed = self._unconfirmed, set()
        return topics

    def confirm(self, topics: set[str], *, has_more: bool) -> None:
        """Notify the consumers of released messages once the copies are as durable as the flush mode requires.

        Args:
            has_more: More messages are due. Then do not wait for fsync: the next copies are built during the flush.
        """
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
        # A failed search for alike records costs a read of the window. So each failure doubles the step to the next
        # search and narrows the window to the fewest; a success widens it again.
        at, window, step = 0, len(due), _FEWEST_ALIKE
        while at < len(due):
            alike = self._alike(due[at : at + window], now_ms)
            if alike is None:
                copies += self._one_by_one(due[at : at + step], now_ms)
                at += step
                window, step = _FEWEST_ALIKE, 2 * step
            else:
                copies.append(alike)
                at += len(alike)
                window, step = 4 * len(alike), _FEWEST_ALIKE
        return copies

    def _one_by_one(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft]:
        drafts = [self._draft(item, now_ms) for item in due]
        return [draft for draft in drafts if draft is not None]

    def _alike(self, due: Sequence[DueRecord], now_ms: int) -> AlikeCopies | None:
        """Return the copies of the leading records that have one shape; None if they are few.

        A record with any fault ends them. `_draft` meets it next, and reports the fault.
        """
        if len(due) < _FEWEST_ALIKE:
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
        stamp_rows = _stamp_rows(record, due[:count], now_ms) if count >= _FEWEST_ALIKE else None
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
            dead_letter_topic=None if record is None else UNDELIVERABLE_TOPIC,
            **fields,
        )


def count_copies(copies: Iterable[RecordDraft | AlikeCopies]) -> int:
    """Return the number of records in *copies*."""
    return sum([1 if isinstance(each, RecordDraft) else len(each) for each in copies])


def read_rows(store: MessageStore, physical_offsets: NDArray[np.int64], size: int) -> NDArray[np.uint8] | None:
    """Read *size* bytes at each physical offset, unchecked, as rows; None if the log does not have them all."""
    data = read_records(store.read_bytes, physical_offsets.tolist(), size)
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


FLUSH_TIMEOUT_MS = 60_000
_RETRY_MS = 1_000  # when the disk was full


class DelayStore(ABC):
    """A service that stores messages until they are due, and releases them then.

    One thread calls `step`. Any thread may call the other methods.

    Attributes:
        name: Name of the service, for log events.
        source_topic: System topic in which its messages are stored.
        window_ms: Length of the roll window: messages that are due later are parked. 0 without one.
        lock: Held while a message is released, cancelled or moved. It makes two steps atomic: appending the record that
            replaces a pending one, and removing the pending one. Reentrant.
    """

    name: str
    source_topic: str
    window_ms = 0

    def __init__(self, store: MessageStore, causes: LatenessCauses | None = None) -> None:
        self._store = store
        self._causes = LatenessCauses(store.metrics) if causes is None else causes
        self.lock = threading.RLock()
        self._releaser = Releaser(store, self.source_topic, self.name)
        self._is_started = False
        self._wake: Callable[[], None] = lambda: None
        self._stalled_log = LimitedLog(_log, store.clock.steady_ms, burst=1)  # a full disk refuses each step
        store.metrics.gauge("delay.enqueue_lag", self._enqueue_lag, service=self.name)
        store.metrics.gauge("delay.dequeue_lag_ms", self._dequeue_lag_ms, service=self.name)

    # --- the service ---------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        """See `Service`."""
        self._wake = wake

    def start(self) -> None:
        """Continue where the last process stopped, and watch for new messages. Calling it again is harmless.

        Call it right after the store was loaded, before any message is put.
        """
        if self._is_started:
            return
        self._is_started = True
        self._causes.broker_started(self._store.last_run_ms, self._store.clock.now_ms())
        self._releaser.end = self._store.end_offset
        self._recover()
        self._store.watch(self.source_topic, self._on_new_messages)

    @abstractmethod
    def _recover(self) -> None:
        """Derive the state from the files and from the replayed records."""

    def _on_new_messages(self) -> None:
        self._wake()

    def step(self) -> int | None:
        """Release due messages, a bounded number. Return the time of the next call (epoch ms)."""
        self.start()
        now_ms = self._store.clock.now_ms()
        next_ms: int | None = now_ms + _RETRY_MS
        stalled: StoreFullError | None = None
        # `DelayController` takes this lock, too. Whichever comes second finds that the message is gone.
        with self.lock:
            try:
                next_ms = self._release_due(now_ms)
            except StoreFullError as exc:
                stalled = exc
            topics = self._releaser.take_unconfirmed()  # also of other threads: `catch_up` may release
        if stalled is not None:
            self._stalled_log.warning("release.stalled", service=self.name, reason=str(stalled))
        self._releaser.confirm(topics, has_more=next_ms is not None and next_ms <= now_ms)
        return next_ms

    def _dequeue_lag_ms(self) -> int:
        """Return by how much the next message is overdue."""
        with self.lock:
            return max(0, self._store.clock.now_ms() - self._next_due_ms())

    @abstractmethod
    def _enqueue_lag(self) -> int:
        """Return the number of stored messages that the service has not read."""

    @abstractmethod
    def _next_due_ms(self) -> int:
        """With the lock: return the due time of the next message; `NEVER_MS` without one."""

    @abstractmethod
    def _release_due(self, now_ms: int) -> int | None:
        """With the lock: release a bounded number of messages. Return the time of the next call."""

    # --- single messages -----------------------------------------------------------------------

    @abstractmethod
    def catch_up(self) -> None:
        """With the lock: read all messages that are in the source topic by now."""

    @abstractmethod
    def find(self, record: StoredRecord) -> PendingEntry | None:
        """With the lock, after `catch_up`: return the entry of a record of the source topic; None if not pending."""

    def find_now(self, record: StoredRecord) -> PendingEntry | None:
        """With the lock: do the same, without reading all messages first if that is not needed."""
        self.catch_up()
        return self.find(record)

    def remove(self, record: StoredRecord) -> None:
        """With the lock, after the record that replaces *record* was appended: never release *record*.

        The next checkpoint writes that to the service's files. Until then a recovery finds it in the commit log.
        """
        self._remove(record)
        key = find_property(record.properties_bytes, PENDING_KEY)
        if key is not None:  # a record that is in memory with its properties counts as pending
            topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
            self._store.index.recent_keys.forget_properties(topic, key, record.physical_offset)

    @abstractmethod
    def _remove(self, record: StoredRecord) -> None:
        """See `remove`."""

    def may_wait(self, slot_ms: int) -> bool:
        """With the lock: return True if a pending timer of this slot can be removed by `remove_waiting`."""
        return False

    def remove_waiting(self, physical_offset: int, topic: str) -> None:
        """Do the same as `remove` without reading: for a pending timer that is not parked, and whose slot `may_wait`.

        Args:
            topic: The real topic of the message.
        """
        raise AssertionError(f"{self.name} has no messages that may wait")

    @abstractmethod
    def mark_cancelled(self, record: StoredRecord) -> None:
        """With the lock: mark *record* as cancelled on disk, if RocketMQ has no other way to find out.

        Call it only when a power failure can no longer take the record that replaced *record*: the mark may outlive it.
        """

    # --- all messages --------------------------------------------------------------------------

    def count_pending(self) -> int:
        """Return the number of pending messages."""
        with self.lock:
            if self._is_started:
                self.catch_up()
            return self._count()

    @abstractmethod
    def _count(self) -> int:
        """With the lock: return the number of pending messages, new ones left out."""

    @abstractmethod
    def pending(self, after_ms: int, before_ms: int) -> Iterator[PendingPiece]:
        """Yield what is pending and due in ``after_ms <= due < before_ms``, floors ascending.

        The lock is held for each piece, not for the whole iteration: a message that is released between two pieces may
        be yielded or not. One piece is in memory at a time.
        """

    @abstractmethod
    def pending_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        """Return the pending messages whose records are in this part of the commit log, as `PENDING_DTYPE`."""

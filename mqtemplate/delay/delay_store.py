"""Common interface of both delay services, and the lookup of their records by physical offset or by key."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from mqtemplate.delay.causes import LatenessCauses
from mqtemplate.delay.pending_rows import PendingEntry, PendingPiece
from mqtemplate.delay.release import Releaser
from mqtemplate.errors import CorruptRecordError, StoreFullError
from mqtemplate.event_log import get_logger
from mqtemplate.message import split_keys
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import KEYS, TIMER_DEL_UNIQKEY, UNIQ_KEY, find_property
from mqtemplate.store.message_store import MessageStore

_MAX_RECORDS_OF_KEY = 100_000


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

    def by_key(self, topic: str, key: str) -> Iterator[StoredRecord]:
        """Yield the records of *topic* that may have *key*, the newest first. The index stores hashes of keys only."""
        for physical_offset in self._store.index.find(topic, key, max_count=_MAX_RECORDS_OF_KEY):
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


_log = get_logger("mqtemplate.delay")

FLUSH_TIMEOUT_MS = 60_000
_RETRY_MS = 1_000  # when the disk was full


class DelayStore(ABC):
    """A service that stores messages until they are due, and releases them then.

    One thread calls `step`. Any thread may call the other methods.

    Attributes:
        name: Name of the service, for log events.
        source_topic: System topic in which its messages are stored.
        lock: Held while a message is released, cancelled or moved. It makes two steps atomic: appending the record that
            replaces a pending one, and removing the pending one. Reentrant.
    """

    name: str
    source_topic: str

    def __init__(self, store: MessageStore, causes: LatenessCauses | None = None) -> None:
        self._store = store
        self._causes = LatenessCauses(store.metrics) if causes is None else causes
        self.lock = threading.RLock()
        self._releaser = Releaser(store, self.source_topic, self.name)
        self._is_started = False
        self._wake: Callable[[], None] = lambda: None
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
        try:
            # `DelayController` takes this lock, too. Whichever comes second finds that the message is gone.
            with self.lock:
                next_ms = self._release_due(now_ms)
        except StoreFullError as exc:
            _log.warning("release.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        self._releaser.confirm(has_more=next_ms is not None and next_ms <= now_ms)
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

    @abstractmethod
    def remove(self, record: StoredRecord) -> None:
        """With the lock, after the record that replaces *record* was appended: never release *record*.

        The next checkpoint writes that to the service's files. Until then a recovery finds it in the commit log.
        """

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
        be yielded or not. Memory is that of one piece.
        """

    @abstractmethod
    def pending_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        """Return the pending messages whose records are in this part of the commit log, as `PENDING_DTYPE`."""

"""The journal of POP: the changes of all progress in a system topic, and a snapshot that a start begins with.

A change is durable with the flush of the commit log that producers wait for. So an acknowledgement costs no flush of
its own, and a start knows what was acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from mqtemplate.engine.pop.pop_queue import Event
from mqtemplate.engine.pop.progress import FORGOTTEN, PopProgress, QueueKey
from mqtemplate.errors import CorruptRecordError, StoreError, StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.record.codec import Drafts, RecordDraft
from mqtemplate.services import AfterChangeService
from mqtemplate.store.cleaning import KeptMessages
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import TopicTable, check_names, format_errors, read_table
from mqtemplate.topics import POP_PROGRESS_TOPIC

_log = get_logger("mqtemplate.broker")

WhenDurable: TypeAlias = Callable[[Exception | None], None]
"""Called when a change survives a crash, or with the error of the disk."""

SNAPSHOT_FILE = "config/popProgress.json"
_SNAPSHOT_MS = 60_000
_MAX_BODY_BYTES = 64 << 10
_MAX_MERGED = 500
_UNITS_PER_PAGE = 1_024
_BYTES_PER_BODY = 100
"""About the memory of an object, beside its bytes."""
_dumps = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: texts of clients may have no UTF-8


class PopJournal:
    """Writes the events of `PopQueue`, and repeats them at the start. A `Service`: its step writes what was noted.

    - All events since the last step are one record: a list of ``[group, topic, queue id, [event, …]]``.
    - The snapshot has the state of all queues, and the queue offset of the first record that may not be in it. Events
      that are in both do not matter, see `PopQueue`.
    - If the snapshot is damaged, the whole journal is repeated. If the start of the journal was deleted as well, groups
      continue at their committed offsets, and get messages again that they acknowledged after those.

    Args:
        max_unwritten_bytes: Size of the events that wait in memory while the store refuses them. Above it, `check`
            raises an error, and no delivery starts or changes.

    Attributes:
        snapshots: Service that writes the snapshot a minute after a change.
    """

    name = "broker.pop_journal"

    def __init__(self, store: MessageStore, topics: TopicTable, max_unwritten_bytes: int = 4 << 20) -> None:
        self._store = store
        self._topics = topics
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._snapshot_lock = threading.Lock()
        self._events: dict[QueueKey, list[Event]] = {}
        self._callbacks: list[WhenDurable] = []
        self._writers = 0  # threads that write at the end of what they do: the service need not wake
        self._unwritten: deque[bytes] = deque()  # bodies that the store refused
        self._unwritten_bytes = 0
        self._max_unwritten_bytes = max_unwritten_bytes
        self._error: StoreError | None = None
        self._on_written: Callable[[], None] = lambda: None
        self._end = 0
        self._is_loading = False
        self._has_topic = False
        self._is_newer = False
        self._progress: PopProgress | None = None
        self._wake: Callable[[], None] = lambda: None
        self.snapshots = AfterChangeService("broker.pop_snapshot", self.save, store.clock, _SNAPSHOT_MS)
        store.metrics.gauge("pop.unwritten_bytes", lambda: self._unwritten_bytes)

    # --- writing -------------------------------------------------------------------------------

    def note(self, key: QueueKey, event: Event) -> None:
        """Note an event. The caller has the lock of the queue, so events of a queue are in order."""
        if self._is_loading:
            return
        with self._lock:
            is_first = not self._events
            events = self._events.get(key)
            if events is None:
                self._events[key] = [event]
            elif event[0] == "D" == events[-1][0] and len(events[-1]) < _MAX_MERGED:
                events[-1] += event[1:]
            else:
                events.append(event)
            is_first = is_first and not self._writers
        if is_first:
            self._wake()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Append in this thread, at the end of the block, what is noted in the block.

        For a thread that notes much at once: to wake the thread of the service costs more than the record does.
        """
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            # Race: another thread that notes its event now is not the first one, or it wakes the service.
            with self._lock:
                self._writers -= 1
            self.write_events()

    def confirm(self, when_durable: WhenDurable) -> None:
        """Call *when_durable* once all events so far are as durable as the flush mode requires."""
        with self._lock:
            self._callbacks.append(when_durable)
            is_first = len(self._callbacks) == 1 and not self._writers
        if self._store.clock.is_virtual:
            self.write()
        elif is_first:
            self._wake()

    def write(self) -> None:
        """Append all events so far.

        Raises:
            StoreError: They were not stored. The next call tries again.
        """
        with self._write_lock:
            with self._lock:
                events, self._events = self._events, {}
                callbacks, self._callbacks = self._callbacks, []
            error: StoreError | None = None
            was_refused = self._error is not None
            self._add_unwritten(self._bodies_of(events))
            try:
                self._append_unwritten()
            except StoreError as exc:
                error = exc
            self._error, end = error, self._end
        if error is not None:
            _call(callbacks, error)
            raise error
        if was_refused:
            _log.info("pop.progress_written", reason="the store accepts the progress of POP again")
            self._on_written()
        if callbacks:
            self._store.confirm_async(end, (), lambda failed: _call(callbacks, failed))

    def _add_unwritten(self, bodies: list[bytes]) -> None:
        self._unwritten += bodies
        self._unwritten_bytes += sum(map(len, bodies)) + _BYTES_PER_BODY * len(bodies)

    def write_events(self) -> None:
        """Append all events so far, without waiting for the flush: a kill of the process does not lose them.

        After an error the next step tries again, and reports it.
        """
        if self._events or self._callbacks:
            try:
                self.write()
            except StoreError:
                self._wake()

    def _append_unwritten(self) -> None:
        while self._unwritten:
            self._end = self._store.put(self._draft(self._unwritten[0]), though_full=True).end
            self._unwritten_bytes -= len(self._unwritten.popleft()) + _BYTES_PER_BODY

    @property
    def error(self) -> str | None:
        """Why the progress is not written at the moment; None if it is."""
        error = self._error
        return None if error is None else f"{self._unwritten_bytes} bytes of POP progress are not written: {error}"

    def check(self) -> None:
        """Check that a delivery may start or change: too many events may wait for the store already.

        Raises:
            StoreError: They do. Acknowledgements are still noted: there are no more of them than deliveries.
        """
        if self._unwritten_bytes >= self._max_unwritten_bytes:
            raise StoreError(
                f"no message is delivered by POP: {self._unwritten_bytes} bytes of progress wait for the store, "
                f"allowed are {self._max_unwritten_bytes} (pop-unwritten-max-bytes). The store refuses them: "
                f"{self._error}; deliveries continue when it accepts them"
            )

    def on_written(self, written: Callable[[], None]) -> None:
        """Call *written* when the store accepts the progress again after it refused it."""
        self._on_written = written

    def _draft(self, body: bytes) -> RecordDraft:
        if not self._has_topic:
            self._topics.create(POP_PROGRESS_TOPIC, 1)
            self._has_topic = True
        self._is_newer = True
        self.snapshots.changed()
        return RecordDraft(POP_PROGRESS_TOPIC, 0, body, b"", born_timestamp=self._store.clock.now_ms())

    def append_copy(self, copy: RecordDraft, key: QueueKey, queue_offset: int) -> int:
        """Append the copy of a message and the note that the message is done, as one write: a kill leaves both or none.

        The caller has the lock of the queue. Return the physical offset after both.

        Raises:
            MessageError: The copy is too large.
            StoreError: Nothing was stored.
        """
        with self._write_lock:
            with self._lock:
                events, self._events = self._events, {}
            self._add_unwritten(self._bodies_of(events))
            self._append_unwritten()  # earlier events of the queue come first
            (done,) = self._bodies_of({key: [["D", queue_offset]]})
            self._end = self._store.put(Drafts([copy, self._draft(done)])).end
            return self._end

    def _bodies_of(self, events: dict[QueueKey, list[Event]]) -> list[bytes]:
        return _bodies(events, min(_MAX_BODY_BYTES, self._store.sizes.commit_log // 4))

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        # After an error also without events: a copy of a message may have written them, and pops wait for the report.
        if self._events or self._callbacks or self._unwritten or self._error is not None:
            self.write()
        return None

    # --- snapshot ------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the snapshot, if the journal has newer records.

        Raises:
            StoreError: It was not written; the one before stays.
        """
        assert self._progress is not None, "the journal was loaded"
        with self._snapshot_lock:
            self.write()
            if not self._is_newer:
                return
            self._is_newer = False
            try:
                first = self._store.consume_queue(POP_PROGRESS_TOPIC, 0).max_offset
                queues = []
                for tracked in self._progress:
                    with tracked.lock:
                        queues.append([*tracked.key, tracked.state.snapshot()])
                self._store.flush()  # the snapshot must not be ahead of the messages
                least_pop_ms = self._progress.least_pop_ms
                table = {"journalOffset": first, "leastPopMs": least_pop_ms, "queues": queues}
                self._store.store_files.write_bytes(SNAPSHOT_FILE, _dumps(table).encode())
            except BaseException:
                self._is_newer = True
                raise

    # --- start ---------------------------------------------------------------------------------

    def load(self, progress: PopProgress) -> None:
        """Restore the progress of an earlier run."""
        self._progress = progress
        if not self._store.has_queue(POP_PROGRESS_TOPIC, 0):
            return
        queue = self._store.consume_queue(POP_PROGRESS_TOPIC, 0)
        self._is_loading = True
        try:
            first = self._load_snapshot(progress)
            if first is None or first < queue.min_offset:
                progress.clear()
                if queue.min_offset > 0:
                    _log.error("pop.progress_lost", reason=f"{SNAPSHOT_FILE} and the start of the journal are missing")
                    first = queue.max_offset
                else:
                    first = 0
            for at, body in self._bodies(first):
                self._repeat(progress, at, body)
        finally:
            self._is_loading = False
        self._is_newer = True
        if first > queue.max_offset:  # the log was cut: new records would be before the ones that are read
            self.save()
        else:
            self.snapshots.changed()

    def _load_snapshot(self, progress: PopProgress) -> int | None:
        """Apply the snapshot. Return the queue offset of the first record after it; None if it cannot be read."""
        try:
            table = read_table(self._store.store_files, SNAPSHOT_FILE)
            if not table:
                return None
            with format_errors(SNAPSHOT_FILE):
                progress.least_pop_ms = int(table.get("leastPopMs", 0))
                self._apply(progress, table["queues"])
                return int(table["journalOffset"])
        except StoreFormatError as exc:
            _log.warning("pop.snapshot_unreadable", reason=str(exc), hint="the whole journal is read instead")
            return None

    def _bodies(self, first: int) -> Iterator[tuple[int, bytes]]:
        queue, at = self._store.consume_queue(POP_PROGRESS_TOPIC, 0), first
        while units := queue.unit_tuples(at, _UNITS_PER_PAGE):
            for physical_offset, size, _ in units:
                try:
                    yield at, self._store.read(physical_offset, size).body
                except CorruptRecordError as exc:
                    _log.error("pop.progress_lost", queue_offset=at, reason=exc.reason)
                at += 1

    def _repeat(self, progress: PopProgress, at: int, body: bytes) -> None:
        try:
            self._apply(progress, json.loads(body))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as exc:
            _log.error("pop.progress_lost", queue_offset=at, reason=f"the record is not one of this journal: {exc}")

    @staticmethod
    def _apply(progress: PopProgress, queues: Any) -> None:
        for group, topic, queue_id, events in queues:
            key = QueueKey(str(group), str(topic), int(queue_id))
            check_names("topic", [key.topic])
            for event in events:
                if event[:1] == [FORGOTTEN]:
                    progress.least_pop_ms = max(progress.least_pop_ms, *map(int, event[1:] or (0,)))
                    progress.drop(key)
                else:
                    progress.restore(key).apply(event)

    def kept(self, others: KeptMessages) -> KeptMessages:
        """Return what the cleaning of the store must keep: *others*, and records newer than the snapshot."""
        return _KeptWithJournal(self, others)


class _KeptWithJournal:
    """Implements `KeptMessages`: the snapshot replaces the records of the journal before they are deleted."""

    def __init__(self, journal: PopJournal, others: KeptMessages) -> None:
        self._journal = journal
        self._others = others
        self.pending_bytes = others.pending_bytes

    def copy_forward(self, physical_start: int, physical_end: int) -> bool:
        """Write the snapshot, then copy the others."""
        self._journal.save()
        return self._others.copy_forward(physical_start, physical_end)


def _bodies(events: dict[QueueKey, list[Event]], max_bytes: int) -> list[bytes]:
    """Return the bodies of records with these events."""
    bodies: list[bytes] = []
    parts: list[str] = []
    size = 0
    for key, each in events.items():
        head = _dumps([*key])[:-1]
        texts: list[str] = []
        for event in each:
            text = _dumps(event)
            if texts and size + len(text) > max_bytes:
                parts.append(f"{head},[{','.join(texts)}]]")
                bodies.append(f"[{','.join(parts)}]".encode())
                parts, texts, size = [], [], 0
            texts.append(text)
            size += len(text) + 1
        parts.append(f"{head},[{','.join(texts)}]]")
        size += len(head) + 5
        if size > max_bytes:
            bodies.append(f"[{','.join(parts)}]".encode())
            parts, size = [], 0
    if parts:
        bodies.append(f"[{','.join(parts)}]".encode())
    return bodies


def _call(callbacks: list[WhenDurable], error: Exception | None) -> None:
    for callback in callbacks:
        try:
            callback(error)
        except Exception:
            _log.exception("pop.callback_failed")

"""Group commit: many producers share one ``fdatasync`` of the commit log. RocketMQ: ``GroupCommitService``.

`is_lost_write` tells a record that no flush has completed before the power failed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError
from mqtemplate.record.codec import BadRecordError, parse_record
from mqtemplate.services import wall_time
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.settings import FlushDiskType, StoreSettings

WhenFlushed = Callable[[StoreError | None], None]
"""Called with None when the bytes are on the disk, with the error if the flush failed."""


class _Waiter:
    """A thread that waits for its bytes, blocked on a lock of its own.

    Attributes:
        next: The waiter that this one wakes after it was woken itself.
        leads: It has to run the next flush.
        error: The flush failed.
    """

    __slots__ = ("end", "error", "leads", "next", "wake_lock")

    def __init__(self, end: int) -> None:
        self.end = end
        self.wake_lock = threading.Lock()
        self.wake_lock.acquire()
        self.next: _Waiter | None = None
        self.leads = False
        self.error: StoreError | None = None


class GroupCommit:
    """Leader and followers: the first thread that arrives flushes for all threads, the others block.

    While the leader is in ``fdatasync``, which releases the interpreter lock, other threads append more records. When
    the flush returns, the leader wakes the first thread whose bytes it flushed. Each of those wakes the next. The last
    one wakes a thread whose bytes were not flushed, and that leads the next flush. By then the others have appended
    their next records. Only one thread is woken at a time, because only one can hold the interpreter lock: if all were
    woken at once, each would block twice.

    There is no thread for flushing, so an idle system needs no switch of threads.

    After a failed flush nothing counts as durable, whatever the next flush returns: `MappedFile.flush` first has to
    write the bytes again. Each waiting thread gets the error, and ``flushed`` stays as it was. The records stay in the
    log, because other records may follow them. They become readable with the next flush that succeeds.

    Args:
        flush: Make all bytes of the log durable and return their end, or raise `StoreError`.

    Attributes:
        flushed: Physical offset up to which the log is on the disk.
        has_leader: True while a thread flushes.
        error: The error of the last flush; None if it succeeded.
    """

    def __init__(self, flush: Callable[[], int]) -> None:
        self._flush = flush
        self._mutex = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._callbacks: list[tuple[int, WhenFlushed]] = []
        self.has_leader = False
        self.flushed = 0
        self.error: StoreError | None = None

    def wait(self, end: int, timeout_ms: int) -> bool:
        """Return True when all bytes before *end* are durable, False after *timeout_ms*.

        Raises:
            StoreError: The disk failed.
        """
        with self._mutex:
            if self.flushed >= end:
                return True
            waiter = _Waiter(end) if self.has_leader else None
            if waiter is None:
                self.has_leader = True
            else:
                self._waiters.append(waiter)
        if waiter is None:
            self._lead()
            return True
        return self._follow(waiter, timeout_ms)

    def _follow(self, waiter: _Waiter, timeout_ms: int) -> bool:
        try:
            if not waiter.wake_lock.acquire(timeout=timeout_ms / 1_000) and self._withdraw(waiter):
                return False
        except BaseException:  # Ctrl-C: other threads may depend on this one to wake them, or to lead
            if not self._withdraw(waiter):
                self._pass_on(waiter)
            raise
        self._pass_on(waiter)
        if waiter.error is not None:
            raise waiter.error
        return True

    def _withdraw(self, waiter: _Waiter) -> bool:
        """Remove a waiter. Return False if a leader has removed it already: then it has to pass on."""
        with self._mutex:
            if waiter not in self._waiters:
                return False
            self._waiters.remove(waiter)
            return True

    def _pass_on(self, waiter: _Waiter) -> None:
        """Wake the next waiter, or lead."""
        if waiter.next is not None:
            waiter.next.wake_lock.release()
        if waiter.leads:
            self._lead()

    def _lead(self) -> None:
        error: StoreError | None = None
        flushed = self.flushed
        try:
            flushed = max(flushed, self._flush())
        except StoreError as exc:
            error = StoreError(
                f"cannot flush the commit log: {exc.__cause__ or exc}; the message is written, but not "
                "safe: it is delivered when a later flush succeeds, and is lost if the power fails before. What was "
                "acknowledged is safe. See the system's log for the cause, then send again"
            )
            error.__cause__ = exc
        except BaseException:  # Ctrl-C: the other threads still need a leader
            self._end_lead(flushed, error)
            raise
        self._end_lead(flushed, error)
        if error is not None:
            raise error

    def _end_lead(self, flushed: int, error: StoreError | None) -> None:
        """Wake the threads that waited for this flush, and choose the next leader."""
        with self._mutex:
            self.flushed, self.error = flushed, error
            if not self._waiters and not self._callbacks:  # one thread sends
                self.has_leader = False
                return
            served = [waiter for waiter in self._waiters if error is not None or waiter.end <= flushed]
            self._waiters = [waiter for waiter in self._waiters if error is None and waiter.end > flushed]
            next_leader = self._waiters.pop(0) if self._waiters else None
            self.has_leader = next_leader is not None
            due = [call for end, call in self._callbacks if error is not None or end <= flushed]
            self._callbacks = [item for item in self._callbacks if error is None and item[0] > flushed]
        _wake_in_turn(served, next_leader, error)
        for call in due:
            call(error)

    def call_when_flushed(self, end: int, call: WhenFlushed) -> None:
        """Call *call* once all bytes before *end* are durable, or with the error if the disk refuses.

        It runs in the thread that flushes. This method requests no flush.
        """
        with self._mutex:
            if self.flushed < end:
                self._callbacks.append((end, call))
                return
        call(None)


def _wake_in_turn(served: Sequence[_Waiter], next_leader: _Waiter | None, error: StoreError | None) -> None:
    """Wake the first waiter, and let each wake the next one."""
    for waiter in served:
        waiter.error = error
    chain = list(served)
    if next_leader is not None:
        next_leader.leads = True
        chain.append(next_leader)
    for waiter, following in itertools.pairwise(chain):
        waiter.next = following
    if chain:
        chain[0].wake_lock.release()


class FlushService:
    """Service that flushes the log.

    With ``ASYNC_FLUSH`` it flushes periodically, else on request of a producer that does not wait.
    """

    name = "store.flush"

    def __init__(self, commit: GroupCommit, end: Callable[[], int], clock: Clock, settings: StoreSettings) -> None:
        self._commit = commit
        self._end = end
        self._clock = clock
        self._is_periodic = settings.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        self._interval_ms = settings.flush_interval_commit_log_ms
        self._due_ms: int | None = None
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def changed(self) -> None:
        """Plan a flush, after the first write since the last one."""
        if self._is_periodic and self._due_ms is None:
            self._due_ms = self._clock.steady_ms() + self._interval_ms
            self._wake()

    def request(self) -> None:
        """Flush as soon as possible."""
        self._due_ms = self._clock.steady_ms()
        self._wake()

    def step(self) -> int | None:
        now = self._clock.steady_ms()
        if self._due_ms is not None and self._due_ms <= now:
            self._due_ms = None
            end = self._end()
            if self._commit.flushed < end:
                try:
                    self._commit.wait(end, 60_000)
                except BaseException:
                    self._due_ms = now + self._interval_ms  # the flush failed; try again
                    raise
                if self._is_periodic:
                    self._due_ms = now + self._interval_ms
        return wall_time(self._clock, self._due_ms)


# --- writes that a power failure left incomplete -----------------------------------------------------

_SECTOR = 512
"""The smallest unit that a disk writes completely or not at all."""


def is_lost_write(file: MappedFile, at: int, end: int) -> bool:
    """Return True if the record at byte *at* is invalid because a part of it never reached the disk.

    A disk writes whole sectors. A sector that was not written has its old bytes: first of earlier records, then zeros
    up to its end. So at least one sector has only zeros from *at* or its start up to its end.

    Args:
        end: Start of the next whole record, or end of the file.
    """
    first_end = at - at % _SECTOR + _SECTOR
    head = file.view[at : min(first_end, end)]
    # The first bytes of the size are zero in most valid records, so four zeros or fewer prove nothing.
    if not any(head) and (len(head) > 4 or _is_valid_with_size(file.view[at:end], len(head))):
        return True
    return any(
        not any(file.view[sector : sector + _SECTOR])
        for sector in range(first_end, min(end, file.size) - _SECTOR + 1, _SECTOR)
    )


def _is_valid_with_size(data: bytes, lost: int) -> bool:
    """Return True if the record is valid once the first *lost* bytes of its size are restored."""
    try:
        parse_record(len(data).to_bytes(4, "big")[:lost] + data[lost:])
    except BadRecordError:
        return False
    return True

"""When a record is on the disk: many senders share one ``fdatasync``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from mqtemplate.errors import StoreError

WhenFlushed = Callable[[StoreError | None], None]


class _Waiter:
    """A sender that waits for its bytes, asleep on a lock of its own.

    Attributes:
        after: Whom it wakes when it wakes itself.
        leads: It is to flush, for itself and for whoever waits by then.
        error: What the disk said, if its bytes are not safe.
    """

    __slots__ = ("after", "end", "error", "leads", "wake_event")

    def __init__(self, end: int) -> None:
        self.end = end
        self.wake_event = threading.Lock()
        self.wake_event.acquire()
        self.after: _Waiter | None = None
        self.leads = False
        self.error: StoreError | None = None


class GroupCommit:
    """Leader and followers: the first sender that comes flushes for all, the others sleep.

    While the leader is in ``fdatasync`` (which lets other threads run) more records arrive. When it is back it wakes
    the first of those it served, each of them wakes the next, and the last wakes one that was not served, who leads
    the next flush: by then the others have written what comes next. One thread wakes at a time, since only one could
    run; waking all at once would have them wait twice, for their bytes and then for the interpreter lock.

    There is no thread of its own, and no hand-over on an idle system.

    A flush that failed has made nothing durable, whatever the next one says: what it was to write stays in doubt until
    `MappedFile.flush` has given it to the disk again and heard no error. Whoever waited is told, and ``flushed`` stays
    where it was. The records stay in the log, since others may lie behind them: they become visible with the next
    flush that succeeds.

    Args:
        flush: Make everything up to the log's end durable; gives that end, or raises `StoreError`.
    """

    def __init__(self, flush: Callable[[], int]) -> None:
        self._flush = flush
        self._mutex = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._callbacks: list[tuple[int, WhenFlushed]] = []
        self._has_leader = False
        self.flushed = 0

    def wait(self, end: int, timeout_ms: int) -> bool:
        """Return True when everything before *end* is durable, False if that took too long.

        Raises:
            StoreError: The disk refused.
        """
        with self._mutex:
            if self.flushed >= end:
                return True
            waiter = _Waiter(end) if self._has_leader else None
            if waiter is None:
                self._has_leader = True
            else:
                self._waiters.append(waiter)
        if waiter is None:
            self._lead()
            return True
        return self._follow(waiter, timeout_ms)

    def _follow(self, waiter: _Waiter, timeout_ms: int) -> bool:
        try:
            if not waiter.wake_event.acquire(timeout=timeout_ms / 1_000) and self._leave(waiter):
                return False
        except BaseException:  # Ctrl-C: others may rely on this one to wake them, or to lead
            if not self._leave(waiter):
                self._pass_on(waiter)
            raise
        self._pass_on(waiter)
        if waiter.error is not None:
            raise waiter.error
        return True

    def _leave(self, waiter: _Waiter) -> bool:
        """Get out of the line; False if its turn had come."""
        with self._mutex:
            if waiter not in self._waiters:
                return False
            self._waiters.remove(waiter)
            return True

    def _pass_on(self, waiter: _Waiter) -> None:
        """Do what others rely on: wake the next, or lead."""
        if waiter.after is not None:
            waiter.after.wake_event.release()
        if waiter.leads:
            self._lead()

    def _lead(self) -> None:
        error: StoreError | None = None
        flushed = self.flushed
        try:
            flushed = max(flushed, self._flush())
        except StoreError as exc:
            error = StoreError(
                f"the disk refused to flush the commit log: {exc.__cause__ or exc}; the message is written, but not "
                "safe: it arrives when a later flush succeeds, and is lost if the power fails before. What was "
                "acknowledged is safe. Look for the disk's trouble in the system's log, then send again"
            )
            error.__cause__ = exc
        except BaseException:  # Ctrl-C: the others still wait for somebody to lead
            self._end_lead(flushed, error)
            raise
        self._end_lead(flushed, error)
        if error is not None:
            raise error

    def _end_lead(self, flushed: int, error: StoreError | None) -> None:
        """Tell those who waited for this flush, and name who leads the next."""
        with self._mutex:
            self.flushed = flushed
            served = [waiter for waiter in self._waiters if error is not None or waiter.end <= flushed]
            self._waiters = [waiter for waiter in self._waiters if error is None and waiter.end > flushed]
            next_leader = self._waiters.pop(0) if self._waiters else None
            self._has_leader = next_leader is not None
            due = [call for end, call in self._callbacks if error is not None or end <= flushed]
            self._callbacks = [item for item in self._callbacks if error is None and item[0] > flushed]
        _wake_in_turn(served, next_leader, error)
        for call in due:
            call(error)

    def when(self, end: int, call: WhenFlushed) -> None:
        """Call *call*, in whichever thread flushes, once everything before *end* is durable, or with the error if the
        disk refuses. Somebody must flush."""
        with self._mutex:
            if self.flushed < end:
                self._callbacks.append((end, call))
                return
        call(None)


def _wake_in_turn(served: Sequence[_Waiter], next_leader: _Waiter | None, error: StoreError | None) -> None:
    """Wake the first, and let each wake the one behind it."""
    for waiter in served:
        waiter.error = error
    chain = list(served)
    if next_leader is not None:
        next_leader.leads = True
        chain.append(next_leader)
    for waiter, after in itertools.pairwise(chain):
        waiter.after = after
    if chain:
        chain[0].wake_event.release()

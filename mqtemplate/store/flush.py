"""When a record is on the disk: many senders share one ``fdatasync``."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mqtemplate.errors import StoreError

__all__ = ["GroupCommit", "WhenFlushed"]


WhenFlushed = Callable[[StoreError | None], None]


class _Waiter:
    """A sender that waits for its bytes, asleep on a lock of its own; whoever ends the wait releases it."""

    __slots__ = ("bell", "end", "error", "leads")

    def __init__(self, end: int) -> None:
        self.end = end
        self.bell = threading.Lock()
        self.bell.acquire()
        self.leads = False
        self.error: StoreError | None = None


class GroupCommit:
    """Leader and followers: the first sender that comes flushes for all, the others sleep.

    While the leader is in ``fdatasync`` (which lets other threads run) more records arrive; when it is back it wakes
    whom it served, and hands the lead to one it did not. No thread of its own, no hand-over on an idle system.

    Args:
        flush: Make everything up to the log's end durable; gives that end.
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
        if not waiter.bell.acquire(timeout=timeout_ms / 1_000) and not self._give_up(waiter):
            return False
        if waiter.leads:
            self._lead()
        elif waiter.error is not None:
            raise waiter.error
        return True

    def _give_up(self, waiter: _Waiter) -> bool:
        """Leave the queue after a time-out; True if the bell rang in that very moment."""
        with self._mutex:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return False
        return True

    def _lead(self) -> None:
        error: StoreError | None = None
        flushed = self.flushed
        try:
            flushed = self._flush()
        except OSError as exc:
            error = StoreError(
                f"the disk refused to flush the commit log: {exc}; messages not yet acknowledged may be lost"
            )
            error.__cause__ = exc
        with self._mutex:
            self.flushed = flushed
            served = [waiter for waiter in self._waiters if error is not None or waiter.end <= flushed]
            self._waiters = [waiter for waiter in self._waiters if error is None and waiter.end > flushed]
            next_leader = self._waiters.pop(0) if self._waiters else None
            self._has_leader = next_leader is not None
            due = [call for end, call in self._callbacks if error is not None or end <= flushed]
            self._callbacks = [item for item in self._callbacks if error is None and item[0] > flushed]
        for waiter in served:
            waiter.error = error
            waiter.bell.release()
        if next_leader is not None:
            next_leader.leads = True
            next_leader.bell.release()
        for call in due:
            call(error)
        if error is not None:
            raise error

    def when(self, end: int, call: WhenFlushed) -> None:
        """Call *call*, in whichever thread flushes, once everything before *end* is durable, or with the error if the
        disk refuses. Somebody must flush."""
        with self._mutex:
            if self.flushed < end:
                self._callbacks.append((end, call))
                return
        call(None)

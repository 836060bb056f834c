"""Knows which handlers run since when, and takes the messages away from those that hang."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Generic, TypeVar

from mqtemplate.clock import Clock

_Work = TypeVar("_Work")


class Running(Generic[_Work]):
    """One call of a handler. Its work belongs to whoever claims it first: the thread when it ends, or the watchdog."""

    __slots__ = ("_claim", "since_ms", "substitute", "thread_id", "work")

    def __init__(self, work: Sequence[_Work], since_ms: int, thread_id: int) -> None:
        self.work = work
        self.since_ms = since_ms
        self.thread_id = thread_id
        self.substitute = False
        self._claim = [None]

    def claim(self) -> bool:
        """Take the work; False if somebody did before."""
        try:
            self._claim.pop()  # one step of the interpreter: two threads cannot both succeed
        except IndexError:
            return False
        return True

    def stack(self) -> str:
        """Where its thread is now."""
        frame = sys._current_frames().get(self.thread_id)
        return "".join(traceback.format_stack(frame)) if frame else ""


class Watchdog(Generic[_Work]):
    """The handlers that run.

    Args:
        timeout_ms: How long one may take.
    """

    def __init__(self, timeout_ms: int, clock: Clock) -> None:
        self._timeout_ms = timeout_ms
        self._now_ms = clock.now_ms
        self._running: dict[int, Running[_Work]] = {}

    def begin(self, work: Sequence[_Work]) -> Running[_Work]:
        thread_id = threading.get_ident()
        running = self._running[thread_id] = Running(work, self._now_ms(), thread_id)
        return running

    def end(self, running: Running[_Work]) -> bool:
        """Note that a handler came back; False if its work was taken away meanwhile."""
        if self._running.get(running.thread_id) is running:
            del self._running[running.thread_id]
        return running.claim()

    def overdue(self) -> list[Running[_Work]]:
        """Those that take too long; each is named once."""
        latest = self._now_ms() - self._timeout_ms
        late = [running for running in list(self._running.values()) if running.since_ms < latest]
        for running in late:
            self._running.pop(running.thread_id, None)
        return late

    def abandon(self) -> int:
        """Nothing that still runs counts any more; returns how many pieces of work that are."""
        left = [running for running in list(self._running.values()) if running.claim()]
        self._running.clear()
        return sum(len(running.work) for running in left)

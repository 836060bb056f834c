"""Watchdog for hanging handlers: it takes the messages away from handlers that run too long."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mqtemplate.clock import Clock

if TYPE_CHECKING:
    import asyncio

_Work = TypeVar("_Work")

ReplaceThread = Callable[[], Callable[[], None] | None]
"""Function that starts a thread in place of a hanging one. It returns a function that ends the replacement, or None
if there may be no more threads."""


class RunningCall(Generic[_Work]):
    """One call of a handler. The first thread that claims its work owns it: the consume thread, or the watchdog's."""

    __slots__ = ("_claim", "_end_replacement", "since_ms", "task", "thread_id", "work")

    def __init__(self, work: Sequence[_Work], since_ms: int, thread_id: int) -> None:
        self.work = work
        self.since_ms = since_ms
        self.thread_id = thread_id
        self.task: asyncio.Task[Any] | None = None  # set if the handler is a task on an event loop
        self._claim = [None]
        self._end_replacement: Callable[[], None] | None = None

    def claim(self) -> bool:
        """Claim the work. Return False if another thread has claimed it."""
        try:
            self._claim.pop()  # one step of the interpreter: two threads cannot both succeed
        except IndexError:
            return False
        return True

    def take_away(self, replace_thread: ReplaceThread) -> bool:
        """Claim the work for the watchdog, and replace its thread. Return False if the handler returned first."""
        self._end_replacement = replace_thread()  # before the claim: a thread that loses the claim reads it
        if self.claim():
            return True
        self.end_replacement()
        return False

    def end_replacement(self) -> None:
        """End the replacement thread, since this call's own thread is back."""
        if self._end_replacement is not None:
            self._end_replacement()

    def stack(self) -> str:
        """Return the current stack of its thread, or of its task."""
        if self.task is not None:
            return "".join(line for frame in _frames(self.task) for line in traceback.format_stack(frame, 1))
        frame = sys._current_frames().get(self.thread_id)
        return "".join(traceback.format_stack(frame)) if frame else ""


def _frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of the coroutines that a task awaits, the outermost first; the task itself knows only that."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        prefix = next((name for name in ("cr", "gi", "ag") if hasattr(awaited, f"{name}_frame")), None)
        if prefix is None:
            return
        if (frame := getattr(awaited, f"{prefix}_frame")) is not None:
            yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


class Watchdog(Generic[_Work]):
    """Handlers that run now.

    Args:
        timeout_ms: Time after which a handler counts as hanging.
    """

    def __init__(self, timeout_ms: int, clock: Clock) -> None:
        self._timeout_ms = timeout_ms
        self._now_ms = clock.steady_ms
        self._running: dict[int, RunningCall[_Work]] = {}
        self._hanging: set[RunningCall[_Work]] = set()  # found by `hanging`, and not finished

    def start(self, work: Sequence[_Work], task_number: int | None = None) -> RunningCall[_Work]:
        """Note that this thread calls a handler now.

        Args:
            task_number: Number of a task, below 0, if it runs on an event loop: many of them share a thread.
        """
        thread_id = threading.get_ident() if task_number is None else task_number
        running = self._running[thread_id] = RunningCall(work, self._now_ms(), thread_id)
        return running

    def finish(self, running: RunningCall[_Work]) -> bool:
        """Note that a handler returned. Return False if its work was taken away before."""
        if self._running.get(running.thread_id) is running:
            del self._running[running.thread_id]
        else:
            self._hanging.discard(running)
        if running.claim():
            return True
        running.end_replacement()
        return False

    @property
    def hanging_count(self) -> int:
        """Number of handlers that were found to hang and have not returned."""
        return len(self._hanging)

    def hanging(self) -> list[RunningCall[_Work]]:
        """Return the handlers that hang. Each one is returned once."""
        latest = self._now_ms() - self._timeout_ms
        late = [running for running in list(self._running.values()) if running.since_ms < latest]
        for running in late:
            self._running.pop(running.thread_id, None)
            self._hanging.add(running)
        return late

    def abandon(self) -> None:
        """Take the work away from all handlers that run."""
        for running in list(self._running.values()):
            running.claim()
        self._running.clear()

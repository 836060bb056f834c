"""Consume threads on a virtual clock: one runs at a time, in the same order each time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context

from mqtemplate.clock import VirtualClock


class VirtualThreads:
    """Consume threads of one listener on a virtual clock.

    A thread handles one piece of work. It runs only while the stepping thread waits for it, so one thread runs at a
    time, and the order is the same each time. When its handler awaits something, it pauses, and `VirtualLoop.step`
    resumes it.

    Args:
        run_next: Takes the next piece of work and does it. Returns False if there is none.
        maximum: Number of threads, and so of handlers that run at once.
        on_free: Called when a thread that had paused ends.
        on_error: Called with its error, if it has one.
    """

    def __init__(
        self,
        run_next: Callable[[], bool],
        maximum: int,
        clock: VirtualClock,
        on_free: Callable[[], None],
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._run_next = run_next
        self._maximum = maximum
        self._clock = clock
        self._on_free = on_free
        self._on_error = on_error
        self._paused = 0

    def run_next(self) -> bool:
        """Do the next piece of work until it ends or pauses. Return False if there is none, or no thread is free."""
        if self._paused >= self._maximum:
            return False
        thread = VirtualThread(self._run_next, self._ended)
        thread.start_until_pause()
        if not thread.has_ended:
            self._paused += 1
            return True
        return thread.result()

    def resize(self, maximum: int) -> None:
        """Change the number of threads. Handlers above it finish."""
        self._maximum = maximum

    def finish(self, wait_ms: int) -> None:
        """Let time pass until all threads have ended, at most *wait_ms*."""
        if self._paused and wait_ms:
            self._clock.wait_for(lambda: not self._paused, self._clock.now_ms() + wait_ms)

    def _ended(self, error: BaseException | None) -> None:
        self._paused -= 1
        if error is not None:
            self._on_error(error)
        self._on_free()


class VirtualThread(threading.Thread):
    """Thread that runs while another one waits in `start_until_pause` or `resume`."""

    def __init__(self, work: Callable[[], bool], on_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(name="mqtemplate-virtual-consume", daemon=True)
        self._work = work
        self._on_end = on_end
        self._context = copy_context()
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._outcome: Future[bool] = Future()

    @property
    def has_ended(self) -> bool:
        """True after its work."""
        return self._outcome.done()

    def result(self) -> bool:
        """Return what the work returned, or raise its error."""
        return self._outcome.result()

    def start_until_pause(self) -> None:
        """Start it, and wait until it pauses or ends."""
        self.start()
        self._has_paused.acquire()

    def resume(self) -> None:
        """Let it go on, and wait until it pauses or ends."""
        self._may_run.release()
        self._has_paused.acquire()
        if self.has_ended:
            self._on_end(self._outcome.exception())

    def pause(self) -> None:
        """Wait in this thread until another one calls `resume`."""
        self._has_paused.release()
        self._may_run.acquire()

    def run(self) -> None:
        try:
            self._outcome.set_result(self._context.run(self._work))
        except BaseException as error:
            self._outcome.set_exception(error)
        finally:
            self._has_paused.release()

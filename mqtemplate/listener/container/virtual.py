"""Event loop and consume threads on a virtual clock: a handler that sleeps takes no real time."""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import handler_loops, running_loop
from mqtemplate.listener.container.loops import HandlerLoop, cancel_others
from mqtemplate.user_code import is_interrupt


class VirtualThreads:
    """Consume threads of one listener on a virtual clock.

    A thread handles one piece of work. It runs only while the stepping thread waits for it, so one thread runs at a
    time, and the order is the same each time. When its handler awaits something, it pauses, and `VirtualLoop.step`
    resumes it.

    Args:
        run_next: Takes the next piece of work and does it. Returns False if nothing is ready.
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
        """Do the next piece of work until it ends or pauses. Return False if nothing is ready, or no thread is free."""
        if self._paused >= self._maximum:
            return False
        thread = VirtualThread(self._run_next, self._ended)
        thread.start_until_pause()
        if not thread.outcome.done():
            self._paused += 1
            return True
        return thread.outcome.result()

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
    """Thread that runs while another one waits in `start_until_pause` or `resume`.

    Attributes:
        outcome: What the work returned, or its error; done after the work.
    """

    def __init__(self, work: Callable[[], bool], on_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(name="mqtemplate-virtual-consume", daemon=True)
        self._work = work
        self._on_end = on_end
        self._of_caller = copy_context()
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self.outcome: Future[bool] = Future()

    def start_until_pause(self) -> None:
        """Start it, and wait until it pauses or ends."""
        self.start()
        self._has_paused.acquire()

    def resume(self) -> None:
        """Let it go on, and wait until it pauses or ends."""
        self._may_run.release()
        self._has_paused.acquire()
        if self.outcome.done():
            self._on_end(self.outcome.exception())

    def pause(self) -> None:
        """Wait in this thread until another one calls `resume`."""
        self._has_paused.release()
        self._may_run.acquire()

    def run(self) -> None:
        try:
            self.outcome.set_result(self._of_caller.run(self._work))
        except BaseException as error:
            self.outcome.set_exception(error)
        finally:
            self._has_paused.release()


_log = get_logger("mqtemplate.listener")
_Ts = TypeVarTuple("_Ts")
_T = TypeVar("_T")
_REAL_WAIT_S = 1.0
_THREAD_WAIT_S = 30.0
_YEAR_MS = 366 * 86_400_000
_TOLERANCE_S = 0.0001

# `asyncio.sleep` schedules this private function of CPython; timeouts schedule others. In a version without it each
# timer of a handler counts as a sleep, so that a step waits for no socket while a handler has a timeout.
_WAKE_OF_SLEEP: Any = getattr(asyncio.futures, "_set_result_unless_cancelled", None)
_RUN: ContextVar[object] = ContextVar("mqtemplate_virtual_run", default=None)
"""Identity of the handler or hook to which a task belongs. A task may outlive it."""


class VirtualLoop(HandlerLoop):
    """Event loop with the time of a virtual clock, and a `Service`: the harness steps it.

    ``asyncio.sleep(3)`` in a handler ends when the harness has moved the clock by three seconds.

    A handler may also wait for something real. While a thread of ``asyncio.to_thread`` works for a handler, the step
    waits for it, at most `_THREAD_WAIT_S`. While handlers wait, and none of them sleeps or awaits a reply, it may be
    for a socket: the step waits at most `_REAL_WAIT_S`.
    """

    name = "listeners.event_loop"

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._loop: _ClockEventLoop | None = None
        self._runs: set[object] = set()  # that have not ended
        self._finished: deque[VirtualThread] = deque()
        self._after_step: list[Callable[[], object]] = []
        self._wake: Callable[[], None] = lambda: None

    # --- coroutines --------------------------------------------------------------------------------

    def run(self, awaitable: Awaitable[object]) -> object:
        return super().run(self._as_run(awaitable))

    async def _as_run(self, awaitable: Awaitable[object]) -> object:
        run = object()
        _RUN.set(run)
        self._runs.add(run)
        try:
            return await awaitable
        finally:
            self._runs.discard(run)

    def wait(self, future: Future[object]) -> object:
        """Pause a `VirtualThread`. Another thread lets time pass."""
        thread = threading.current_thread()
        if isinstance(thread, VirtualThread):
            future.add_done_callback(lambda _: self._finished.append(thread))
            thread.pause()
        else:
            self._complete(future)
        return future.result()

    def _complete(self, future: Future[object]) -> None:
        """Let time pass until a coroutine has ended: with the harness, or without one only for this loop."""
        due_ms = self.step()
        while not future.done() and not self._clock.wait_for(future.done, self._clock.now_ms() + _YEAR_MS):
            if due_ms is None or self._clock.is_driven:
                future.cancel()
                raise UnsupportedError(
                    "a coroutine on the virtual clock waits for something that no timer and no service does within a "
                    "year; make a Harness before, or let the coroutine end"
                )
            self._clock.set_ms(max(due_ms, self._clock.now_ms()))
            due_ms = self.step()

    def is_current(self) -> bool:
        return self._loop is not None and running_loop() is self._loop

    def open(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = _ClockEventLoop(self._clock, self._woken, self._runs)
            self._clock.services.append(self)
        return self._loop

    def _woken(self) -> None:
        self._wake()  # of the current harness

    # --- steps -------------------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        """Run the coroutines, and the consume threads whose coroutine has ended, until all of them wait."""
        loop = self._loop
        if loop is None:
            return None
        due_ms = loop.run_until_idle()
        while self._finished:
            self._finished.popleft().resume()
            due_ms = loop.run_until_idle()
        while self._after_step:
            self._after_step.pop(0)()
            due_ms = None
        return due_ms

    def call_outside(self, function: Callable[[], object]) -> None:
        self._after_step.append(function)

    def cancel(self) -> None:
        super().cancel()
        if not self.is_current():
            self.step()

    def stop(self) -> None:
        loop = self._loop
        if loop is None:
            return
        if self.is_current():  # a handler stops the application
            self.call_outside(lambda: self._close(loop))
        else:
            self._close(loop)

    def _close(self, loop: _ClockEventLoop) -> None:
        cancelling = asyncio.run_coroutine_threadsafe(cancel_others(), loop)
        while not cancelling.done() or self._finished:
            loop.run_until_idle()
            while self._finished:
                self._finished.popleft().resume()
        loop.close()
        handler_loops.discard(self)
        self._clock.services.remove(self)
        self._loop = None


class _ClockEventLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with the time of a virtual clock. `run_until_idle` runs it until it would sleep.

    Attributes:
        clock: The clock; futures of the template compare it with theirs.

    Args:
        runs: Handlers and hooks that have not ended.
    """

    def __init__(self, clock: VirtualClock, wake: Callable[[], None], runs: Set[object]) -> None:
        self.clock = clock
        self._wake = wake
        self._runs = runs
        self._start_ms = clock.now_ms()
        super().__init__(_IdleSelector(self._would_sleep))
        self._sleeps: list[tuple[object, asyncio.TimerHandle]] = []
        self._in_threads: list[tuple[object, asyncio.Future[Any]]] = []
        self._waited_in_vain = False
        self._sleep_s: float | None = None

    def time(self) -> float:
        return (self.clock.now_ms() - self._start_ms) / 1_000

    def run_until_idle(self) -> int | None:
        """Run all callbacks that are due. Return the time of the next timer, or None."""
        if running_loop() is None:
            self._run()
        else:  # An async test moves the clock. A thread can run one loop only, so a second thread runs this one.
            with ThreadPoolExecutor(max_workers=1) as helper:
                helper.submit(self._run).result()
        if self._sleep_s is None:
            return None
        return self._start_ms + math.ceil(round((self.time() + self._sleep_s) * 1_000, 2))

    def _run(self) -> None:
        """Run until the loop would sleep, also if a task that a handler has started raises ``SystemExit``."""
        while True:
            try:
                self.run_forever()
                return
            except BaseException as error:
                if is_interrupt(error):
                    raise
                _log.exception("listener.task_failed", hint="a task that a handler has started raised it")

    def _would_sleep(self, seconds: float | None) -> float:
        """Stop the loop, unless a handler waits for something real. Return how long to wait for that."""
        self._sleep_s = seconds
        if not self._waited_in_vain:
            self._waited_in_vain = True  # until something runs
            if wait_s := self._real_wait_s():
                return wait_s
        self.stop()
        return 0

    def _real_wait_s(self) -> float:
        self._in_threads = [each for each in self._in_threads if each[0] in self._runs and not each[1].done()]
        self._sleeps = [each for each in self._sleeps if each[0] in self._runs and self._is_sleeping(each[1])]
        if self._in_threads:
            return _THREAD_WAIT_S
        return _REAL_WAIT_S if self._runs and not self._sleeps and not self.clock.awaited else 0

    def _is_sleeping(self, timer: asyncio.TimerHandle) -> bool:
        return not timer.cancelled() and timer.when() > self.time()

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        # The clock has whole milliseconds, and floats are not exact: a timer must be due in its millisecond.
        when = math.ceil(round(when * 1_000, 3)) / 1_000 - _TOLERANCE_S
        timer = super().call_at(when, callback, *args, context=context)
        if (_WAKE_OF_SLEEP is None or callback is _WAKE_OF_SLEEP) and (run := _RUN.get()) is not None:
            self._sleeps.append((run, timer))
        return timer

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._waited_in_vain = False
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._waited_in_vain = False
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self._wake()
        return handle

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        if (run := _RUN.get()) is not None:
            self._in_threads.append((run, future))
        return future


class _IdleSelector(selectors.DefaultSelector):
    """Selector that reports when the loop would sleep.

    Args:
        would_sleep: Gets the time that the loop would sleep (seconds; None for ever). Returns the real time to wait.
    """

    def __init__(self, would_sleep: Callable[[float | None], float]) -> None:
        super().__init__()
        self._would_sleep = would_sleep

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        return super().select(self._would_sleep(timeout))

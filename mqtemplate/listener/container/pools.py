"""Workers of one listener: consume threads, or tasks on the event loop of its ``async def`` handlers."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.consume_service import ConsumeService, RunningCall
from mqtemplate.listener.container.loops import HandlerLoop
from mqtemplate.listener.failures.failure import Failure
from mqtemplate.message import MessageExt
from mqtemplate.processes import call_after_fork
from mqtemplate.user_code import is_interrupt

if TYPE_CHECKING:
    from mqtemplate.listener.container.consume_modes import ConcurrentConsumeService

_log = get_logger("mqtemplate.listener")
_TICK_S = 0.001
_BUSY_PROCESS = 0.7  # of one core


class ConsumePool(ABC):
    """Workers of one listener, threads or tasks: at most *number* at a time, and more in place of hanging ones.

    Args:
        number: Maximum number of workers.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(self, name: str, number: int, maximum: int) -> None:
        self._name = name
        self._number = number
        self._maximum = max(number, maximum)
        self._lock = threading.Lock()
        self._hanging = 0
        self._abandoned = False
        call_after_fork(self)

    @abstractmethod
    def after_fork(self) -> None:
        """Handle no further message in a forked child. See `UsedByOneProcess`."""

    @abstractmethod
    def wake(self) -> None:
        """Let a worker take the work that is ready."""

    @abstractmethod
    def supervise(self) -> bool:
        """Let more workers take work if it stays ready. Return True to be called again in about a millisecond."""

    @abstractmethod
    def resize(self, number: int, maximum: int) -> None:
        """Change the number of workers. Workers above it finish their work; none is interrupted."""

    @abstractmethod
    def finish(self, timeout_s: float) -> int:
        """Wait until no work is ready and no worker runs, at most *timeout_s*. Return how many still run."""

    @abstractmethod
    def abandon(self) -> None:
        """Let the workers that still run end after their handlers."""

    @abstractmethod
    def add_worker(self) -> None:
        """Start one more worker, if there may be more and work is ready.

        Raises:
            RuntimeError: No thread can be started.
        """

    def replace(self) -> Callable[[], None] | None:
        """Start a worker in place of a hanging one; None if there are *maximum*.

        Returns:
            A function for the hanging worker to call when it is back; then one worker ends.
        """
        with self._lock:
            if self._number + self._hanging >= self._maximum:
                return None
            self._hanging += 1
        try:
            self.add_worker()
        except RuntimeError:  # no thread can be started; the message is taken away from the hanging one all the same
            self._end_replacement()
            return None
        return self._end_replacement

    def _end_replacement(self) -> None:
        with self._lock:
            self._hanging = max(0, self._hanging - 1)


class ConsumeThreadPool(ConsumePool):
    """Threads that are woken as the work needs them.

    Waking a thread for each message would cost more than most handlers do. So a thread that is awake takes a new
    message, and one thread is woken if none is awake. While messages stay ready, the polling thread calls
    `supervise` about each millisecond, which wakes more threads:

    - at once if all threads that are awake hang in long handlers, or if the handlers leave the processor idle;
    - else one each `_HELP_INTERVAL_S`, since threads do not help handlers that keep the processor busy.

    Args:
        number: Maximum number of threads.
        maximum: Maximum number of threads with those that `replace` starts.
    """

    _HELP_INTERVAL_S = 0.01

    def __init__(self, name: str, work: ConsumeService[Any, Any], number: int, maximum: int) -> None:
        super().__init__(name, number, maximum)
        self._work = work
        self._wake_event: SimpleQueue[None] = SimpleQueue()  # one entry wakes one sleeping thread
        self._threads: list[threading.Thread] = []
        self._awake = 0
        self._stopping = False
        self._must_leave = False  # abandoned, or more threads are awake than there may be
        self._ramp = 1
        self._last_tick = (0.0, 0.0, -1)  # time, processor time of the process, pieces taken
        self._last_help = 0.0

    def after_fork(self) -> None:
        """Let the thread end that forked in a handler: it handles no further message. See `UsedByOneProcess`."""
        self._lock = threading.Lock()  # a thread that is missing here may hold the other one
        self._stopping = self._abandoned = self._must_leave = True

    def wake(self) -> None:
        """Wake a thread for work that arrived, unless one is awake."""
        if self._awake == 0:
            self.add_worker()

    def supervise(self) -> bool:
        """Wake more threads if work stays ready. Return True to be called again in about a millisecond."""
        if not self._work.ready_count or self._awake >= self._number + self._hanging:
            self._ramp = 1
            return False
        now, (tick, cpu, taken) = time.monotonic(), self._last_tick
        if now - tick < _TICK_S:
            return True
        cpu_now, taken_now = time.process_time(), self._work.taken
        self._last_tick = (now, cpu_now, taken_now)
        if now - tick > 20 * _TICK_S:
            return True  # too long ago to compare with
        is_stuck = taken_now == taken
        is_idle = (cpu_now - cpu) < _BUSY_PROCESS * (now - tick)
        if is_stuck or is_idle or now - self._last_help > self._HELP_INTERVAL_S:
            self._last_help = now
            for _ in range(self._ramp):
                self.add_worker()
            self._ramp = min(self._ramp * 2, 16) if is_stuck or is_idle else 1
        return True

    def resize(self, number: int, maximum: int) -> None:
        """Change the number of threads. Threads above it end when their handlers return; none is interrupted.

        When this returns, no work starts while *number* threads or more are in handlers that do not hang.
        """
        with self._lock:
            self._number, self._maximum = number, max(number, maximum)
            self._ramp = 1
            self._check_excess()
        if self._work.ready_count:
            self.add_worker()

    def _end_replacement(self) -> None:
        super()._end_replacement()
        with self._lock:
            self._check_excess()

    def _check_excess(self) -> None:
        """With the lock: let threads end if more are awake than there may be."""
        has_excess = self._awake > self._number + self._hanging
        self._must_leave = self._abandoned or has_excess
        self._work.must_yield = has_excess

    def finish(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in threads:
            self._wake_event.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def abandon(self) -> None:
        self._abandoned = self._must_leave = True

    def add_worker(self) -> None:
        """Wake a thread that sleeps, or start one, unless as many are awake as there may be."""
        with self._lock:
            if self._stopping or self._awake >= self._number + self._hanging:
                return
            self._awake += 1
            if self._awake <= len(self._threads):
                self._wake_event.put(None)
                return
            thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # no memory for it, or the interpreter is shutting down
            with self._lock:
                self._threads.remove(thread)
                self._awake -= 1
            raise

    def _loop(self) -> None:
        while True:
            self._run_ready_work()
            with self._lock:
                self._awake -= 1
                self._check_excess()
                may_continue = not self._abandoned and self._awake < self._number + self._hanging
                if self._work.ready_count and may_continue:
                    # A race: work arrived while this thread still counted as awake, so `wake` woke no other one.
                    self._awake += 1
                    continue
                if self._stopping or len(self._threads) > self._number + self._hanging:
                    self._threads.remove(threading.current_thread())
                    return
            self._sleep()

    def _sleep(self) -> None:
        while True:
            try:
                self._wake_event.get()
                return
            except BaseException:  # raised into this thread by another one, as time limits do that come too late
                _log.exception("listener.worker_failed", worker=self._name)

    def _run_ready_work(self) -> None:
        while not self._must_leave:
            try:
                if not self._work.run_next():
                    return
            except BaseException:
                # What handlers raise is caught before. This comes from a broker that cannot be reached, or from
                # another thread that raises it in this one.
                _log.exception("listener.worker_failed", worker=self._name)


# --- tasks on an event loop ----------------------------------------------------------------------

_SETTLING_THREADS = 4
StartTask = Callable[[MessageExt, asyncio.AbstractEventLoop], "asyncio.Task[Failure | None]"]
"""Function that creates the task for one message."""

_Running = RunningCall[Any]


class AsyncConsumePool(ConsumePool):
    """Tasks of one listener on the event loop of the handlers, at most *number* at a time.

    A `ConsumeThreadPool` would pass each message from a consume thread to the loop and its result back. Here the loop
    takes the messages itself. Calls that wait for the broker, such as sending failed messages back, are in threads.

    Args:
        number: Maximum number of tasks.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(
        self,
        name: str,
        work: ConcurrentConsumeService[Any],
        start_task: StartTask,
        loop: HandlerLoop,
        number: int,
        maximum: int,
    ) -> None:
        super().__init__(name, number, maximum)
        self._work = work
        self._start_task = start_task
        self._handler_loop = loop
        self._loop = loop.open()
        self._tasks: set[asyncio.Task[Failure | None]] = set()
        self._ending = 0  # messages that are settled in threads
        self._is_scheduled = False
        self._idle: threading.Event | None = None
        self._threads: ThreadPoolExecutor | None = None

    def after_fork(self) -> None:
        """Handle nothing in a forked child. See `UsedByOneProcess`."""
        self._abandoned = True

    def wake(self) -> None:
        """Let the loop take the messages that are ready."""
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._handler_loop.open().call_soon_threadsafe(self._fill)
            except ListenerError as error:  # the program has closed its loop
                self._is_scheduled = False
                self._fail_ready(error)

    def _fail_ready(self, error: ListenerError) -> None:
        while not self._abandoned and (running := self._work.begin_next()) is not None:
            self._settle(running, Failure((running.work[0][1],), error))

    def supervise(self) -> bool:
        """Return False: a task that ends takes the next message at once."""
        return False

    def add_worker(self) -> None:
        self.wake()

    def resize(self, number: int, maximum: int) -> None:
        """Change the number of tasks. Tasks above it finish their messages, and none starts until fewer run."""
        with self._lock:
            self._number, self._maximum = number, max(number, maximum)
        self.wake()

    def finish(self, timeout_s: float) -> int:
        if timeout_s > 0 and not self._loop.is_closed():
            self._idle = threading.Event()
            self._loop.call_soon_threadsafe(self._fill)
            self._idle.wait(timeout_s)
        return len(self._tasks) + self._ending

    def abandon(self) -> None:
        self._abandoned = True
        if self._tasks:
            self._handler_loop.running.add(self)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def cancel(self) -> None:
        """Cancel the tasks that still run. The loop of the handlers calls it at its end."""
        if not self._loop.is_closed():
            for task in tuple(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    # --- on the loop -------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._is_scheduled = False
        while not self._abandoned and len(self._tasks) < self._number + self._hanging:
            running = self._work.begin_next()
            if running is None:
                break
            try:
                task = self._start_task(running.work[0][1], self._loop)
            except BaseException as error:  # of what is around the handler, such as a trace
                if is_interrupt(error):
                    self._work.give_back(running)
                    raise
                self._settle_in_thread(running, Failure((running.work[0][1],), error))
                continue
            running.task = task
            self._tasks.add(task)
            task.add_done_callback(lambda task, running=running: self._done(task, running))  # type: ignore[misc]
        if self._idle is not None and not self._tasks and not self._ending and not self._work.ready_count:
            self._idle.set()

    def _done(self, task: asyncio.Task[Failure | None], running: _Running) -> None:
        self._tasks.discard(task)
        message = running.work[0][1]
        if task.cancelled():
            failure: Failure | None = Failure((message,), asyncio.CancelledError())
        elif (error := task.exception()) is None:
            failure = task.result()
        elif is_interrupt(error):  # Ctrl-C ends the loop, and nothing of it is the message's fault
            self._work.give_back(running)
            return
        else:  # something around the handler raised it
            failure = Failure((message,), error)
        if failure is None and not self._work.waits_to_settle:
            self._settle(running, None)
        elif not self._abandoned:
            self._settle_in_thread(running, failure)
        self._fill()

    def _settle_in_thread(self, running: _Running, failure: Failure | None) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_SETTLING_THREADS, f"{self._name}-settling")
        try:
            settling = self._loop.run_in_executor(self._threads, self._settle, running, failure)
        except RuntimeError:  # no thread can be started
            self._settle(running, failure)
            return
        self._ending += 1
        settling.add_done_callback(self._settled)

    def _settle(self, running: _Running, failure: Failure | None) -> None:
        try:
            self._work.end(running, failure)
        except BaseException as error:
            # What handlers raise is in the failure. This comes from a broker that cannot be reached.
            if is_interrupt(error):
                raise
            _log.exception("listener.worker_failed", worker=self._name)

    def _settled(self, _: asyncio.Future[None]) -> None:
        self._ending -= 1
        self._fill()

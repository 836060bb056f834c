"""Background services: a step method that does the work that is due, and a thread that calls it in a loop."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.event_log import get_logger
from mqtemplate.processes import call_after_fork
from mqtemplate.user_code import error_text, type_name

__all__ = [
    "AfterChangeService",
    "ClockStepWatch",
    "ClockWatch",
    "PeriodicService",
    "ReportError",
    "Service",
    "ServiceRunner",
    "ServiceThread",
    "WakeEvent",
    "join_woken",
    "wall_time",
]


_log = get_logger("mqtemplate.services")

_AFTER_ERROR_MS = 1_000
_REPORT_MS = 60_000
_WAKE_S = 0.1

ReportError: TypeAlias = Callable[["Service", Exception, int], None]
"""Function (service, error, repeated) that logs a failed step: *repeated* steps failed alike since the last call."""


class Service(Protocol):
    """Background work that is due at certain times.

    On a system clock a `ServiceThread` calls ``step``; on a virtual clock a test harness does.
    """

    name: str

    def step(self) -> int | None:
        """Do the work that is due now. Never sleep.

        Returns:
            The time (epoch ms) of the next step. A time that is not in the future means that more work is due now.
            None means that no step is needed before the service calls its wake function.
        """

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Set the function that the service calls when work arrives before the time that ``step`` returned."""


class WakeEvent:
    """Wakes the one thread that waits for it.

    If no thread waits, the next `wait` returns at once. Several `set` calls before a `wait` count as one.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # locked = not set. One lock is cheaper than the condition of threading.Event
        self._lock.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or let the next `wait` return at once."""
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread released the lock after the check
                self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Return True once the event is set, and reset it; return False after *timeout_s*."""
        return self._lock.acquire(timeout=timeout_s)


def join_woken(threads: Iterable[threading.Thread], wake: Callable[[], None], most_s: float) -> None:
    """Wait for the end of threads that *wake* lets end, for each at most *most_s*; not for the current thread.

    *wake* is called again and again: a thread that does not wait yet would miss one call.
    """
    for thread in threads:
        deadline = time.monotonic() + most_s
        while thread is not threading.current_thread() and thread.is_alive() and time.monotonic() < deadline:
            wake()
            thread.join(_WAKE_S)


def wall_time(clock: Clock, due_ms: int | None) -> int | None:
    """Return the time (epoch ms) at which `Clock.steady_ms` is *due_ms*, for `Service.step`; None for None.

    A service that works at intervals stores steady times, so that setting the wall clock neither delays nor repeats
    its work.
    """
    return None if due_ms is None else clock.now_ms() + due_ms - clock.steady_ms()


class ClockWatch:
    """Notices that the wall clock was set forward or back: it moved by another amount than the time that passed."""

    _STEP_MS = 100  # less is the time between two readings, or a clock that is slowed down or sped up

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lead_ms = self._read()

    def _read(self) -> int:
        return self._clock.now_ms() - self._clock.steady_ms()

    def moved_ms(self) -> int:
        """Return by how much the clock was set since the last call: back if negative, 0 if it was not."""
        before_ms, self._lead_ms = self._lead_ms, self._read()
        moved_ms = self._lead_ms - before_ms
        return moved_ms if self._clock.is_virtual or abs(moved_ms) > self._STEP_MS else 0


class ClockStepWatch:
    """Wakes threads within a second after the wall clock was set, as by NTP or while the machine was suspended.

    A thread that waits for a wall time waits as long as that takes by a monotonic clock. So one thread of the process
    compares both clocks each second, while others wait. The waiting threads themselves need not wake up for that.

    Args:
        interval_s: Time between two comparisons; None: only `check` compares them.
    """

    def __init__(self, interval_s: float | None = 1.0) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watches: dict[Callable[[], None], ClockWatch] = {}
        self._running: tuple[threading.Thread, WakeEvent] | None = None
        call_after_fork(self)

    def after_fork(self) -> None:
        """Forget the threads of the parent process."""
        self._lock = threading.Lock()
        self._watches, self._running = {}, None

    def add(self, clock: Clock, wake: Callable[[], None]) -> None:
        """Call *wake* each time after *clock* was set."""
        with self._lock:
            self._watches[wake] = ClockWatch(clock)
            if self._running is None and self._interval_s is not None:
                end = WakeEvent()
                thread = threading.Thread(target=self._run, args=(end,), name="mqtemplate-clock", daemon=True)
                thread.start()
                self._running = thread, end

    def remove(self, wake: Callable[[], None]) -> None:
        """Do not call *wake* any more."""
        with self._lock:
            self._watches.pop(wake, None)
            if self._watches or self._running is None:
                return
            (thread, end), self._running = self._running, None
        end.set()
        thread.join()

    def check(self) -> None:
        """Compare the clocks now."""
        for wake, watch in list(self._watches.items()):
            if watch.moved_ms():
                wake()

    def _run(self, end: WakeEvent) -> None:
        assert self._interval_s is not None
        while not end.wait(self._interval_s):
            self.check()


_CLOCK_STEPS = ClockStepWatch()


class AfterChangeService:
    """Runs an action some time after a change, once for all changes in between. Without changes it sleeps.

    If the action raises, it runs again after the same interval.

    Args:
        action: Called in the thread that steps the service.
        interval_ms: Time from the first change to the action.
    """

    def __init__(self, name: str, action: Callable[[], None], clock: Clock, interval_ms: int) -> None:
        self.name = name
        self._action = action
        self._clock = clock
        self._interval_ms = interval_ms
        self._wake: Callable[[], None] = lambda: None
        self._due_ms: int | None = None  # steady

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def changed(self) -> None:
        """Schedule the action, unless it is scheduled already."""
        if self._due_ms is None:
            self._due_ms = self._clock.steady_ms() + self._interval_ms
            self._wake()

    def step(self) -> int | None:
        if self._due_ms is not None and self._due_ms <= self._clock.steady_ms():
            self._due_ms = None  # before the action: a change during the action schedules another one
            try:
                self._action()
            except BaseException:
                self._due_ms = self._clock.steady_ms() + self._interval_ms
                raise
        return wall_time(self._clock, self._due_ms)


class ServiceThread:
    """A thread that steps services: it sleeps until the first one is due and wakes when work arrives.

    If a step raises, the thread repeats it a second later. The other services are not affected. That holds for every
    class of exception: a step may call code of the application. In a process that is forked by a step the thread ends.

    A cause such as a full disk lets each step fail until an operator acts. So *on_error* gets the first error of each
    class from a service, and then one a minute with the number of the others. When no step has failed for a minute,
    that is logged, too.

    Args:
        clock_steps: Wakes the thread when the wall clock is set.
    """

    _RETRY_MS = 1_000
    _LONGEST_SLEEP_S = 60.0

    def __init__(
        self,
        name: str,
        services: list[Service],
        clock: Clock,
        on_error: ReportError,
        clock_steps: ClockStepWatch = _CLOCK_STEPS,
    ) -> None:
        self._services = services
        self._clock = clock
        self._failures = _RepeatedFailures(clock, on_error)
        self._clock_steps = clock_steps
        self._wake_event = WakeEvent()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        for service in services:
            service.on_wake(self.wake)

    def start(self) -> None:
        """Start the thread."""
        self._clock_steps.add(self._clock, self.wake)
        self._thread.start()

    def wake(self) -> None:
        """Step all services now."""
        self._wake_event.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the thread after the current step."""
        self._stopping = True
        self._clock_steps.remove(self.wake)
        self._wake_event.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        pid = os.getpid()
        while not self._stopping and os.getpid() == pid:
            next_steps = [due_ms for service in self._services if (due_ms := self._step(service)) is not None]
            due_ms = min(next_steps, default=None)
            sleep_s = self._LONGEST_SLEEP_S if due_ms is None else self._clock.seconds_until(due_ms)
            if sleep_s > 0:
                self._wake_event.wait(min(sleep_s, self._LONGEST_SLEEP_S))

    def _step(self, service: Service) -> int | None:
        try:
            next_ms = service.step()
        except Exception as exc:
            self._failures.failed(service, exc)
        except BaseException as exc:  # not for the process: signals arrive in the main thread
            error = RuntimeError(f"the service raised {error_text(exc)}")
            error.__cause__ = exc
            self._failures.failed(service, error)
        else:
            self._failures.succeeded(service)
            return next_ms
        return self._clock.now_ms() + self._RETRY_MS


@dataclass(slots=True)
class _FailedSteps:
    """Failed steps of one service, all with an error of one class.

    Attributes:
        reported_ms: Steady time of the last report.
        failed_ms: Steady time of the last failed step.
        count: Number of failed steps.
        repeated: Number of those since the last report.
    """

    reported_ms: int
    failed_ms: int
    count: int = 1
    repeated: int = 0


class _RepeatedFailures:
    """The failures of the services of one thread: each class of error is reported once in an interval.

    A service works again when no step has failed for the interval. A single step that succeeds may have had no work.
    """

    def __init__(self, clock: Clock, report: ReportError) -> None:
        self._clock = clock
        self._report = report
        self._found: dict[tuple[int, str], _FailedSteps] = {}  # id of the service, class of the error

    def failed(self, service: Service, error: Exception) -> None:
        now_ms = self._clock.steady_ms()
        key = id(service), type_name(error)
        found = self._found.get(key)
        if found is None:
            self._found[key] = _FailedSteps(now_ms, now_ms)
            self._report(service, error, 0)
            return
        found.failed_ms, found.count, found.repeated = now_ms, found.count + 1, found.repeated + 1
        if now_ms >= found.reported_ms + _REPORT_MS:
            repeated, found.reported_ms, found.repeated = found.repeated, now_ms, 0
            self._report(service, error, repeated)

    def succeeded(self, service: Service) -> None:
        if not self._found:
            return
        now_ms = self._clock.steady_ms()
        for key, found in list(self._found.items()):
            if key[0] == id(service) and now_ms >= found.failed_ms + _REPORT_MS:
                del self._found[key]
                _log.info("service.works_again", service=service.name, error=key[1], failed_steps=found.count)


class ServiceRunner:
    """Start and stop of one service: on a system clock it has a thread, on a virtual clock a harness steps it.

    It may be started again after a stop.
    """

    def __init__(self, service: Service, clock: Clock, thread: str, on_error: ReportError) -> None:
        self._service = service
        self._clock = clock
        self._thread_name = thread
        self._on_error = on_error
        self._stop: Callable[[], None] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._stop is not None:
            return
        if isinstance(self._clock, VirtualClock):
            self._clock.services.append(self._service)
            self._stop = partial(self._clock.services.remove, self._service)
        else:
            thread = ServiceThread(self._thread_name, [self._service], self._clock, self._on_error)
            self._stop = thread.stop
            thread.start()

    def stop(self) -> None:
        """Stop it, if it runs."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


@dataclass(eq=False)
class PeriodicService:
    """A `Service` that runs an action each *interval_ms*, and when it is triggered.

    Args:
        action: Returns the pause until the next run in ms, or None for the interval. After an exception, it runs again
            in a second.
    """

    name: str
    action: Callable[[], int | None]
    clock: Clock
    interval_ms: int

    def __post_init__(self) -> None:
        self._due_ms = self.clock.steady_ms() + self.interval_ms
        self._is_triggered = False
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def trigger(self) -> None:
        """Run the action at the next step, and have that step taken at once."""
        self._is_triggered = True
        self._wake()

    def step(self) -> int | None:
        if self._is_triggered or self._due_ms <= self.clock.steady_ms():
            self._is_triggered = False  # before the action: a trigger while it runs causes another run
            self._due_ms = self.clock.steady_ms() + _AFTER_ERROR_MS
            pause_ms = self.action()
            self._due_ms = self.clock.steady_ms() + (self.interval_ms if pause_ms is None else pause_ms)
        return self.clock.now_ms() if self._is_triggered else wall_time(self.clock, self._due_ms)

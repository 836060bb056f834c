"""Work that goes on by itself: a step that does what is due, and a thread that is only a loop around it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from mqtemplate.clock import Clock

__all__ = ["AfterChangeService", "Service", "ServiceThread", "WakeEvent"]


class Service(Protocol):
    """Something with work that falls due.

    ``step`` does what is due now and returns the millisecond at which it wants to be called next:
    a time not after now means "there is more at once", None means "not before somebody wakes me".
    It never sleeps. On a virtual clock a harness calls it; on the real one a `ServiceThread` does.
    """

    name: str

    def step(self) -> int | None: ...

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Take the function to call when work arrives before the time ``step`` returned."""


class WakeEvent:
    """Wakes the one thread that waits for it. A ring that nobody waits for is kept for the next wait, once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread rang in between
                self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Return True when it rings, or rang since the last wait; False after *timeout_s*."""
        return self._lock.acquire(timeout=timeout_s)


class AfterChangeService:
    """Runs an action an interval after the first change since it last ran; without changes it sleeps.

    An action that raises is due again an interval later.

    Args:
        action: Runs in whichever thread steps the service.
        interval_ms: How long changes may gather.
    """

    def __init__(self, name: str, action: Callable[[], None], clock: Clock, interval_ms: int) -> None:
        self.name = name
        self._action = action
        self._clock = clock
        self._interval_ms = interval_ms
        self._wake: Callable[[], None] = lambda: None
        self._due_ms: int | None = None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def changed(self) -> None:
        if self._due_ms is None:
            self._due_ms = self._clock.now_ms() + self._interval_ms
            self._wake()

    def step(self) -> int | None:
        if self._due_ms is not None and self._due_ms <= self._clock.now_ms():
            self._due_ms = None
            try:
                self._action()
            except BaseException:
                self._due_ms = self._clock.now_ms() + self._interval_ms  # what changed is still to be done
                raise
        return self._due_ms


class ServiceThread:
    """Runs services in one thread: step them, sleep until the first is due, wake when work arrives.

    A step that raises is reported to *on_error* and tried again a second later; the others go on.
    """

    _RETRY_MS = 1_000
    _LONGEST_SLEEP_S = 60.0  # a wall clock that was set forward is noticed after this long

    def __init__(
        self, name: str, services: list[Service], clock: Clock, on_error: Callable[[Service, Exception], None]
    ) -> None:
        self._services = services
        self._clock = clock
        self._on_error = on_error
        self._wake_event = WakeEvent()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        for service in services:
            service.on_wake(self.wake)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake_event.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the step that is running end, then end the thread."""
        self._stopping = True
        self._wake_event.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stopping:
            wake_at = [due for service in self._services if (due := self._step(service)) is not None]
            due_ms = min(wake_at, default=None)
            sleep_s = self._LONGEST_SLEEP_S if due_ms is None else self._clock.seconds_until(due_ms)
            if sleep_s > 0:
                self._wake_event.wait(min(sleep_s, self._LONGEST_SLEEP_S))

    def _step(self, service: Service) -> int | None:
        try:
            return service.step()
        except Exception as exc:
            self._on_error(service, exc)
            return self._clock.now_ms() + self._RETRY_MS

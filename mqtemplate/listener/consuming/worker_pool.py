"""Threads that handle messages: as few awake as keep up, as many as the listener allows when handlers wait."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Protocol

import structlog

_log = structlog.stdlib.get_logger("mqtemplate.listener")

_TICK_S = 0.001
_BUSY_PROCESS = 0.7  # of one core


class Work(Protocol):
    """What waits for a thread."""

    def run_next(self) -> bool:
        """Take the next piece and handle it; False if there is none."""

    @property
    def waiting(self) -> int:
        """How many pieces wait."""

    @property
    def taken(self) -> int:
        """How many pieces were ever taken: it stands still while all threads are busy with long ones."""


class WorkerPool:
    """Threads that wait for work, woken as the work needs them.

    Waking a thread for each message would cost more than most handlers do. So a message first goes to whoever is
    awake, and one is woken if nobody is. While messages go on waiting, `supervise` (called by the thread that fetches,
    about each millisecond) wakes more: at once when all that are awake hang in long handlers, and as long as the
    handlers leave the processor idle. Handlers that keep the processor busy get no help from threads, so they get
    one a hundredth of a second only.

    Args:
        number: Threads at most.
        maximum: The ceiling that `replace` may go to.
    """

    _IMPATIENCE_S = 0.01

    def __init__(self, name: str, work: Work, number: int, maximum: int) -> None:
        self._name = name
        self._work = work
        self._number = number
        self._maximum = max(number, maximum)
        self._lock = threading.Lock()
        self._wake_event: SimpleQueue[None] = SimpleQueue()  # one entry wakes one sleeper
        self._threads: list[threading.Thread] = []
        self._awake = 0
        self._lost = 0
        self._stopping = False
        self._abandoned = False
        self._ramp = 1
        self._last_tick = (0.0, 0.0, -1)  # time, processor time of the process, pieces taken
        self._last_help = 0.0

    def wake(self) -> None:
        """Work arrived: make sure that somebody sees it."""
        if self._awake == 0:
            self._add_awake()

    def supervise(self) -> bool:
        """Wake helpers if work is left waiting. Returns whether to look again in about a millisecond."""
        if not self._work.waiting or self._awake >= self._number + self._lost:
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
        if is_stuck or is_idle or now - self._last_help > self._IMPATIENCE_S:
            self._last_help = now
            for _ in range(self._ramp):
                self._add_awake()
            self._ramp = min(self._ramp * 2, 16) if is_stuck or is_idle else 1
        return True

    def replace(self) -> bool:
        """A thread hangs and was given up: let another take its place, if the ceiling allows."""
        with self._lock:
            if self._number + self._lost >= self._maximum:
                return False
            self._lost += 1
        self._add_awake()
        return True

    def found(self) -> None:
        """A thread that was replaced came back; one may go."""
        with self._lock:
            self._lost = max(0, self._lost - 1)

    def stop(self, timeout_s: float) -> int:
        """Let the threads finish what waits, for at most *timeout_s*; returns how many still hang in a handler."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in threads:
            self._wake_event.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._abandoned = True
        return sum(thread.is_alive() for thread in threads)

    def _add_awake(self) -> None:
        with self._lock:
            if self._stopping or self._awake >= self._number + self._lost:
                return
            self._awake += 1
            if self._awake <= len(self._threads):
                self._wake_event.put(None)
                return
            thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
        thread.start()

    def _loop(self) -> None:
        while True:
            self._work_off()
            with self._lock:
                self._awake -= 1
                if self._work.waiting and not self._abandoned:
                    self._awake += 1  # it arrived while this thread was about to sleep, and nobody rang the bell
                    continue
                if self._stopping or self._is_surplus():
                    self._threads.remove(threading.current_thread())
                    return
            self._wake_event.get()

    def _is_surplus(self) -> bool:
        return len(self._threads) > self._number + self._lost

    def _work_off(self) -> None:
        while not self._abandoned:
            try:
                if not self._work.run_next():
                    return
            except Exception:
                # A handler's errors never come this far: it is the broker that cannot be talked to.
                _log.exception("listener.worker_failed", worker=self._name)

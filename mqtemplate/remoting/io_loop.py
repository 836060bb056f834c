"""The I/O thread of a server or a client: sockets, callbacks of other threads, and timers.

The loop may wait without sleeping, while events follow each other closely. Linux: ``net.core.busy_poll``.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from logging import ERROR
from selectors import BaseSelector, SelectorKey
from typing import Protocol

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.user_code import error_text

# --- timers ---------------------------------------------------------------------------------------


class Timer:
    """A callback at a time. Any thread may cancel it, also several times."""

    __slots__ = ("_callback", "_timers", "due_ms")

    def __init__(self, due_ms: float, callback: Callable[[], None], timers: Timers) -> None:
        self.due_ms = due_ms
        self._callback: Callable[[], None] | None = callback
        self._timers = timers

    @property
    def is_cancelled(self) -> bool:
        """True if the timer was cancelled or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Drop the callback, so that the objects it refers to are freed at once."""
        if self._callback is not None:
            self._callback = None
            self._timers.count_cancelled()

    def run(self) -> None:
        """Call the callback, unless the timer was cancelled or has run."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Timers:
    """Timers in the order of their times. Thread-safe.

    Most timers are cancelled, since most responses arrive in time. When more than half of the entries are cancelled,
    the heap is rebuilt without them. So its size follows the pending requests, not the requests within the longest
    timeout.
    """

    _MIN_CANCELLED = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        """Return the number of entries, including cancelled ones."""
        return len(self._heap)

    def add(self, due_ms: float, callback: Callable[[], None]) -> Timer:
        """Return a new timer."""
        timer = Timer(due_ms, callback, self)
        with self._lock:
            heapq.heappush(self._heap, (due_ms, next(self._order), timer))
        return timer

    def next_due_ms(self) -> float | None:
        """Return the time of the first timer, or None without timers."""
        with self._lock:
            while self._heap and self._heap[0][2].is_cancelled:
                heapq.heappop(self._heap)
                self._cancelled -= 1
            return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[Timer]:
        """Remove and return the timers that are due, the earliest first."""
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_ms:
                timer = heapq.heappop(self._heap)[2]
                if timer.is_cancelled:
                    self._cancelled -= 1
                else:
                    due.append(timer)
        return due

    def count_cancelled(self) -> None:
        """Count one more cancelled timer, and rebuild the heap if it has too many of them."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled > self._MIN_CANCELLED and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
                heapq.heapify(self._heap)
                self._cancelled = 0


# --- turns ----------------------------------------------------------------------------------------


TURN_S = 0.001
"""Time for which the I/O thread works for one connection before others have their turn. All of them wait for it."""
_LONGEST_REST_S = 0.05


class TurnTaker(Protocol):
    """Owner of work that waits for its turn."""

    def take_turn(self) -> None:
        """Do one piece of work, which should take no longer than `TURN_S`. Called in the loop's thread."""

    def abort(self, reason: str) -> None:
        """Close the socket, since `take_turn` raised an unexpected exception."""


class FairTurns:
    """Work that waits until the sockets that became ready are served: addresses take turns. Not thread-safe.

    A client that sends all the time would hold those that send now and then, and a client with many connections would
    have many turns. So such work is done after the rest of each round. It takes a quarter of the time of the rest at
    most, but at least one turn.

    A turn is one long piece of work of an address, or short ones that take a quarter of `TURN_S` together: with one
    short piece in each turn, those of ten clients at one address waited for ten rounds of all addresses.

    All threads share the interpreter: beside one that takes turns all the time, each system call of another I/O thread
    takes many times longer. If that had requests during the turns, the next turn waits for as long as they took.

    Args:
        other_requests: Returns the number of requests of the other I/O threads so far.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, other_requests: Callable[[], int] = lambda: 0
    ) -> None:
        self._now_s = now_s
        self._other_requests = other_requests
        self._rests_until_s = 0.0
        self._waiting: dict[str, deque[TurnTaker]] = {}  # by address; the next address is the first

    def __bool__(self) -> bool:
        """Return True if work waits."""
        return bool(self._waiting)

    def add(self, address: str, taker: TurnTaker) -> None:
        """Let *taker* wait for a turn of its address."""
        self._waiting.setdefault(address, deque()).append(taker)

    def run(self, take_turn: Callable[[TurnTaker], None], seconds: float) -> None:
        """Let one after the other take a turn for *seconds*, and for `TURN_S` at least. Have no effect in a rest.

        Each address has one turn before the first one has the next.
        """
        start_s, requests = self._now_s(), self._other_requests()
        if start_s < self._rests_until_s:
            return
        self._take_turns(take_turn, start_s + max(seconds, TURN_S))
        if self._other_requests() > requests:
            now_s = self._now_s()
            self._rests_until_s = now_s + min(now_s - start_s, _LONGEST_REST_S)

    def finish(self, take_turn: Callable[[TurnTaker], None]) -> None:
        """Let all of them take their turns."""
        self._take_turns(take_turn, float("inf"))

    def wait_s(self) -> float:
        """Return the time until the next turn; 0 without a rest."""
        return max(self._rests_until_s - self._now_s(), 0.0) if self._rests_until_s else 0.0

    def _take_turns(self, take_turn: Callable[[TurnTaker], None], end_s: float) -> None:
        while self._waiting:
            address = next(iter(self._waiting))
            now_s = self._take_turn_of(address, self._waiting.pop(address), take_turn, end_s)
            if now_s >= end_s:
                break

    def _take_turn_of(
        self, address: str, takers: deque[TurnTaker], take_turn: Callable[[TurnTaker], None], end_s: float
    ) -> float:
        """Let the work of one address take its turn. Return the time."""
        now_s = self._now_s()
        end_s = min(end_s, now_s + TURN_S / 4)
        while takers:
            take_turn(takers.popleft())
            now_s = self._now_s()
            if now_s >= end_s:
                break
        takers.extend(self._waiting.pop(address, ()))  # work that this work has added
        if takers:
            self._waiting[address] = takers  # the last one now
        return now_s


# --- waiting for sockets --------------------------------------------------------------------------


_Ready = list[tuple[SelectorKey, int]]

_TRIAL = 32
"""Waits that poll before their number of events is judged. A client that was asleep takes a few to become faster."""
_PAUSE = 512
"""Waits without polling after a trial in which polling did not pay, so that few polls find nothing."""
_MOST_REQUESTS = 2
"""With more requests for each wait, polling ends waits early: fewer requests are read together, so each costs more."""
_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)  # not on Windows


class BusyPoll:
    """Wait of a selector that polls for some time before it sleeps.

    To put a thread to sleep and to wake it takes longer than to process a small request, so a client that sends one
    request after the other gets its responses sooner, for more processor time. Polling pauses where it finds few
    events, and where many clients send at the same time: their requests arrive together if the thread sleeps.

    Args:
        longest_s: Time to poll; 0 to sleep always.
        requests: Returns the number of requests so far.
    """

    def __init__(self, selector: BaseSelector, longest_s: float, requests: Callable[[], int]) -> None:
        self._select = selector.select
        self._longest_s = longest_s
        self._requests = requests
        self._requests_before = 0  # at the start of the trial
        self._polls = self._found = 0
        self._pause: float = 0 if longest_s else float("inf")  # waits

    def wait(self, timeout_s: float | None) -> _Ready:
        """Wait for events and return them; none after *timeout_s*, or up to ``longest_s`` later."""
        if timeout_s == 0:
            return self._select(0)
        if self._pause:
            self._pause -= 1
            return self._select(timeout_s)
        if not self._polls:
            self._requests_before = self._requests()
        ready = self._poll()
        self._polls += 1
        self._found += bool(ready)
        if self._polls == _TRIAL:
            self._end_trial()
        return ready or self._select(timeout_s)

    def _end_trial(self) -> None:
        requests = self._requests() - self._requests_before
        pays = 2 * self._found >= _TRIAL and requests <= _MOST_REQUESTS * _TRIAL
        self._pause = 0 if pays else _PAUSE
        self._polls = self._found = 0

    def _poll(self) -> _Ready:
        end_s = time.monotonic() + self._longest_s
        while not (ready := self._select(0)) and time.monotonic() < end_s:
            _yield()  # the scheduler may have chosen this processor for the thread of a client that the response woke
        return ready


# --- loop -----------------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remoting")

# The selectors of macOS (kqueue) and Windows (select) refuse a socket without events.
_TAKES_NO_EVENTS = selectors.DefaultSelector.__name__ == "EpollSelector"
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_BUFFER_BYTES = 256 * 1024


class Handler(Protocol):
    """Owner of a watched socket."""

    def on_ready(self, events: int) -> None:
        """Handle `READ` and `WRITE`: those events that are watched and have occurred. Called in the loop's thread."""

    def abort(self, reason: str) -> None:
        """Close the socket, since `on_ready` raised an unexpected exception."""


class IoLoop:
    """Thread that all sockets of one server, or of one client, share.

    - Only its own thread may call `watch` and `unwatch`; any thread may call `call_soon`, `call_later` and `wake`.
    - An exception of a handler, a callback or a timer is logged, and the loop continues.
    - Delays are measured on the monotonic clock, so that a change of the wall clock ends no connection. On a virtual
      clock they are measured on that one: `wake` the loop after advancing it.

    Args:
        busy_poll_s: Time for which the thread polls the sockets before it sleeps; see `BusyPoll`. 0: it sleeps at once.
        requests: Returns the number of requests so far; see `BusyPoll`.
        other_requests: The same of the other I/O threads; see `FairTurns`.

    Attributes:
        buffer: Buffer to receive into. A handler may use it while it is called.
        turns: Work of clients that have much of it. Only the loop's own thread may add some.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        busy_poll_s: float = 0.0,
        requests: Callable[[], int] = lambda: 0,
        other_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._name = name
        self._clock = clock
        self._limited_log = LimitedLog(_log, lambda: int(self.now_ms()))  # a peer may repeat what raised an exception
        self.busy_poll_s = busy_poll_s
        self._requests = requests
        self._timers = Timers()
        self.turns = FairTurns(other_requests=other_requests)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._wake_writer: socket.socket | None = None
        self._is_woken = False
        self._sleeps_until_ms = float("inf")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread_id: int | None = None

    # --- for any thread -----------------------------------------------------------------------------

    @property
    def is_current_thread(self) -> bool:
        """True in the loop's own thread."""
        return threading.get_ident() == self._thread_id

    def start(self) -> None:
        """Start the thread. Callbacks that were added before run first."""
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._wait = BusyPoll(self._selector, self.busy_poll_s, self._requests).wait
        self._selector.register(self._wake_reader, READ, _WakeHandler(self._wake_reader))
        self._is_woken = False
        self._thread.start()

    def stop(self) -> None:
        """Run the callbacks that were added, end the thread, and join it. Has no effect before `start`."""
        self._is_stopping = True
        self.wake()
        if self._thread.is_alive() and not self.is_current_thread:
            self._thread.join()

    def now_ms(self) -> float:
        """Return the time in milliseconds since an arbitrary start."""
        return self._clock.now_ms() if self._clock.is_virtual else time.monotonic() * 1_000

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call *callback* in the loop's thread, after those that were added before."""
        self._callbacks.append(callback)
        if threading.get_ident() != self._thread_id:
            self.wake()

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        """Call *callback* in the loop's thread after *delay_ms* at the earliest."""
        timer = self._timers.add(self.now_ms() + delay_ms, callback)
        if timer.due_ms < self._sleeps_until_ms:
            self.wake()
        return timer

    def wake(self) -> None:
        """Make the loop check callbacks and timers now."""
        if not self._is_woken:
            self._is_woken = True
            if self._wake_writer is None:
                return  # not started yet
            # OSError: the pipe is full, so the loop wakes anyway, or the pipe is closed, since the loop has ended.
            with contextlib.suppress(OSError):
                self._wake_writer.send(b"!")

    # --- for the loop's own thread ------------------------------------------------------------------

    def watch(self, sock: socket.socket, events: int, handler: Handler) -> None:
        """Call *handler* when *sock* is ready for *events*, which replace the events of an earlier call.

        Without events it is not called, except by epoll, for a connection that has ended.
        """
        if not events and not _TAKES_NO_EVENTS:
            self.unwatch(sock)
            return
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, handler)
        else:
            self._selector.register(sock, events, handler)

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching *sock*. This must happen before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while not self._is_stopping:
            timeout_s = self._select_timeout_s()
            ready = self._selector.select(timeout_s) if self.turns else self._wait(timeout_s)  # no polling in a rest
            start_s = time.monotonic() if self.turns else 0.0
            for key, events in ready:
                self._sleeps_until_ms = 0.0
                try:
                    key.data.on_ready(events)
                except BaseException as exc:  # whatever its class: all connections need this thread
                    self._abort(key.data, exc)
            self._sleeps_until_ms = 0.0
            self._run_callbacks()
            for timer in self._timers.take_due(self.now_ms()):
                self._call(timer.run)
            if self.turns:
                self.turns.run(self._take_turn, (time.monotonic() - start_s) / 4 if start_s else 0.0)
        self._run_callbacks()
        self.turns.finish(self._take_turn)  # connections that are closed have no more work
        self._selector.close()
        self._wake_reader.close()
        if self._wake_writer is not None:
            self._wake_writer.close()

    def _select_timeout_s(self) -> float | None:
        # Race: from this line on, a thread that adds a timer wakes the loop. Set it later, and a timer that is added
        # after the next line would be missed until the loop wakes for another reason.
        self._sleeps_until_ms = float("inf")
        due_ms = self._timers.next_due_ms()
        if self._callbacks or self._is_stopping:
            return 0.0
        turn_s = self.turns.wait_s() if self.turns else None
        if due_ms is None or turn_s == 0.0:
            return turn_s
        self._sleeps_until_ms = due_ms
        if self._clock.is_virtual:
            return 0.0 if due_ms <= self.now_ms() else turn_s
        due_s = max(due_ms - self.now_ms(), 0.0) / 1_000
        return due_s if turn_s is None else min(due_s, turn_s)

    def _run_callbacks(self) -> None:
        # Race: reset before the callbacks are counted, so that the thread that adds the next one wakes the loop again.
        self._is_woken = False
        for _ in range(len(self._callbacks)):
            self._call(self._callbacks.popleft())

    def _take_turn(self, taker: TurnTaker) -> None:
        try:
            taker.take_turn()
        except BaseException as exc:
            self._abort(taker, exc)

    def _abort(self, handler: Handler | TurnTaker, exc: BaseException) -> None:
        self._limited_log.log(ERROR, "remoting.handler_failed", loop=self._name, exc_info=exc)
        self._call(partial(handler.abort, error_text(exc)))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException as exc:
            self._limited_log.log(ERROR, "remoting.work_failed", loop=self._name, exc_info=exc)


class _WakeHandler:
    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def on_ready(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4_096)

    def abort(self, reason: str) -> None:
        """Do nothing: the loop closes the pipe."""

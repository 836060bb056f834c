"""One thread that waits for sockets, for the time, and for work that other threads hand in."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from mqtemplate.clock import Clock
from mqtemplate.remoting.timers import Timer, Timers

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_BUFFER_BYTES = 256 * 1024


class Handler(Protocol):
    """Whose socket is watched."""

    def on_ready(self, events: int) -> None:
        """`READ` and `WRITE`, as far as both are asked for and can be done; in the loop's thread."""

    def abort(self, reason: str) -> None:
        """End it: `on_ready` raised what nobody foresaw."""


class IoLoop:
    """The thread that all sockets of one server, or of one client, share.

    - `watch` and `forget` belong to its own thread; `call_soon`, `call_later` and `wake` may be called by any.
    - What a handler, a work or a timer raises is logged, and the loop goes on.
    - Spans are counted on the monotonic clock: a wall clock that was set forward drops nobody. On a virtual clock they
      are counted on that; `wake` the loop after moving it.

    Attributes:
        buffer: To receive into; whoever is being called may use it.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._name = name
        self._clock = clock
        self._timers = Timers()
        self._work: deque[Callable[[], None]] = deque()
        self._bell_writer: socket.socket | None = None
        self._rung = False
        self._sleeps_until_ms = float("inf")
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread_id: int | None = None

    # --- for any thread -----------------------------------------------------------------------------

    @property
    def is_current_thread(self) -> bool:
        return threading.get_ident() == self._thread_id

    def start(self) -> None:
        """Begin; what was handed in before is done now."""
        self._selector = selectors.DefaultSelector()
        self._bell_reader, self._bell_writer = socket.socketpair()
        self._bell_reader.setblocking(False)
        self._bell_writer.setblocking(False)
        self._selector.register(self._bell_reader, READ, _WakeEvent(self._bell_reader))
        self._rung = False
        self._thread.start()

    def stop(self) -> None:
        """Do the work that was handed in, end the thread, and wait for it. Nothing, if it was not started."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and not self.is_current_thread:
            self._thread.join()

    def now_ms(self) -> float:
        """Milliseconds since some instant."""
        return self._clock.now_ms() if self._clock.is_virtual else time.monotonic() * 1_000

    def call_soon(self, work: Callable[[], None]) -> None:
        """Do it in the loop's thread, after what was handed in before."""
        self._work.append(work)
        if threading.get_ident() != self._thread_id:
            self.wake()

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        """Do it in the loop's thread, not before *delay_ms* have passed."""
        timer = self._timers.add(self.now_ms() + delay_ms, callback)
        if timer.due_ms < self._sleeps_until_ms:
            self.wake()
        return timer

    def wake(self) -> None:
        """Let it look for work and for what is due."""
        if not self._rung:
            self._rung = True
            if self._bell_writer is None:
                return  # not started yet
            with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
                self._bell_writer.send(b"!")

    # --- for the loop's own thread ------------------------------------------------------------------

    def watch(self, sock: socket.socket, events: int, handler: Handler) -> None:
        """Call *handler* when *sock* is ready for *events*; again for other events."""
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, handler)
        else:
            self._selector.register(sock, events, handler)

    def forget(self, sock: socket.socket) -> None:
        """Watch it no longer; before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        while not self._stopping:
            for key, events in self._selector.select(self._sleep_s()):
                self._sleeps_until_ms = 0.0
                try:
                    key.data.on_ready(events)
                except Exception as exc:
                    _log.exception("remoting.handler_failed", loop=self._name)
                    self._guarded(partial(key.data.abort, f"{type(exc).__name__}: {exc}"))
            self._sleeps_until_ms = 0.0
            self._do_work()
            for timer in self._timers.take_due(self.now_ms()):
                self._guarded(timer.run)
        self._do_work()
        self._selector.close()
        self._bell_reader.close()
        if self._bell_writer is not None:
            self._bell_writer.close()

    def _sleep_s(self) -> float | None:
        """How long nothing is due. From here on whoever hands in work or an earlier timer rings the wake_event."""
        self._sleeps_until_ms = float("inf")  # first: a timer added from now on wakes the loop
        due_ms = self._timers.next_due_ms()
        if self._work or self._stopping:
            return 0.0
        if due_ms is None:
            return None
        self._sleeps_until_ms = due_ms
        if self._clock.is_virtual:
            return 0.0 if due_ms <= self.now_ms() else None
        return max(due_ms - self.now_ms(), 0.0) / 1_000

    def _do_work(self) -> None:
        self._rung = False  # before the work is looked for: what comes later rings again
        for _ in range(len(self._work)):
            self._guarded(self._work.popleft())

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            _log.exception("remoting.work_failed", loop=self._name)


class _WakeEvent:
    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def on_ready(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4_096)

    def abort(self, reason: str) -> None:
        """Nothing to end."""

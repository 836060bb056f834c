"""Signals and the end of a process: they stop the application in order, so it drains and commits.

In `run`, the first Ctrl-C or SIGTERM requests an orderly stop, and the second one ends the process at once.

Elsewhere `atexit` covers a main thread that ends or raises. SIGTERM would end the process without it, so it becomes
`SystemExit` in the main thread. That happens only if the application was started in the main thread, and nothing else
in the process (such as a web server) handles the signal.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.context")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WAKE_S, _WAKES = 0.05, 100
LONGEST_WAIT_S = 0.25
"""Python handles a signal between two instructions: one that arrives just before a wait blocks is handled when the
wait ends."""


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals inside the context, in the main thread; afterwards their former handlers are back."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _interrupt_main_thread() -> None:
    raise KeyboardInterrupt


@contextmanager
def _prompt_handlers(is_handled: Callable[[], bool]) -> Iterator[None]:
    """Let the main thread handle a signal soon, also if it arrives just before that thread waits for a lock.

    Python would call the handler after the wait, which may be hours. So a thread that learns of each signal at once
    wakes the main thread by a signal of its own, whose handler does nothing, until the handler was called.
    """
    is_possible = hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()
    if not is_possible or signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        yield
        return
    main_thread, (reading, writing) = threading.get_ident(), socket.socketpair()
    ended = threading.Event()

    def wake_main_thread() -> None:
        while number := reading.recv(1):
            for _ in range(_WAKES if number[0] in _SIGNALS else 0):  # the application may have a handler of its own
                if is_handled() or ended.is_set():
                    break
                signal.pthread_kill(main_thread, signal.SIGURG)
                ended.wait(_WAKE_S)

    with reading, handled_signals(lambda number, frame: None, signal.SIGURG):
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=wake_main_thread, name="mqtemplate-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(before)
            writing.close()
            thread.join()


class StopRequests:
    """Requests to stop the application, from threads and signals, and the wait for the first one.

    Attributes:
        signalled: True after a signal.
    """

    def __init__(self) -> None:
        # Not an Event: a signal handler may put into a SimpleQueue while the thread that it interrupts waits on it.
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.signalled = False
        self._interrupt: Callable[[], object] | None = None

    def request(self, reason: str) -> None:
        """Request the stop; any thread may call this, several times too."""
        self._reasons.put(reason)

    def wait(self) -> str:
        """Wait for the first request and return its reason."""
        while True:
            with suppress(queue.Empty):
                return self._reasons.get(timeout=LONGEST_WAIT_S)

    def wait_up_to(self, seconds: float) -> bool:
        """Wait for a request, but no longer than *seconds*. Return True if there is one."""
        try:
            self._reasons.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """Handle the signals inside the context. Only the main thread can; in another one their handlers stay."""
        if threading.current_thread() is not threading.main_thread():
            _log.debug("application.no_signals", reason="not in the main thread; end it with stop()")
            yield
            return
        with handled_signals(self._handle, *_SIGNALS):
            yield

    @contextmanager
    def interrupting(self, interrupt: Callable[[], object] = _interrupt_main_thread) -> Iterator[None]:
        """Interrupt the user's code inside the context at the first signal.

        Args:
            interrupt: Called by the signal handler, in the main thread. By default it raises `KeyboardInterrupt` there.
        """
        self._interrupt = interrupt
        try:
            with _prompt_handlers(lambda: self.signalled):
                yield
        finally:
            self._interrupt = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # Python runs a handler only between two instructions, and too late for a blocking call that is just about to
        # start: the kernel itself has to end the process at the second signal.
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.signalled = True
        self.request(signal.Signals(number).name)
        if self._interrupt is not None:
            self._interrupt()


class ProcessExit:
    """The stops to call when the process ends. A forked child calls none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: list[Callable[[], object]] = []
        self._pid = 0

    def add(self, stop: Callable[[], object]) -> Callable[[], None]:
        """Call *stop* at the end of the process. Return a function that removes it."""
        with self._lock:
            if self._pid != os.getpid():
                if self._pid == 0:
                    atexit.register(self._at_exit)
                self._pid, self._stops = os.getpid(), []
            self._stops.append(stop)
        self._handle_sigterm()

        def remove() -> None:
            with self._lock:
                if stop in self._stops:
                    self._stops.remove(stop)
            self._restore_sigterm()

        return remove

    def _at_exit(self) -> None:
        while self._pid == os.getpid() and self._stops:
            stop = self._stops.pop()
            try:
                stop()
            except Exception:
                _log.exception("application.stop_failed", part="application")

    def _handle_sigterm(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _restore_sigterm(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not self._stops and in_main_thread and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        if self._pid != os.getpid() or not self._stops:
            os.kill(os.getpid(), number)
            return
        raise SystemExit(128 + number)  # as a shell reports a process that a signal ended


_PROCESS_EXIT = ProcessExit()


def stop_at_exit(stop: Callable[[], object]) -> Callable[[], None]:
    """Call *stop* when this process ends, by its main thread or by SIGTERM. Return a function that removes it."""
    return _PROCESS_EXIT.add(stop)

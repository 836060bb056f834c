"""Ctrl-C and SIGTERM: the first signal requests an orderly stop, the second one ends the process at once."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.context")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_WAIT_S = 0.25


def _interrupt_main_thread() -> None:
    raise KeyboardInterrupt


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
            # Python handles a signal between two instructions: one that arrives just before a wait blocks is handled
            # when the wait ends.
            with suppress(queue.Empty):
                return self._reasons.get(timeout=_LONGEST_WAIT_S)

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
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self, interrupt: Callable[[], object] = _interrupt_main_thread) -> Iterator[None]:
        """Interrupt the user's code inside the context at the first signal.

        Args:
            interrupt: Called by the signal handler, in the main thread. By default it raises `KeyboardInterrupt` there.
        """
        self._interrupt = interrupt
        try:
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

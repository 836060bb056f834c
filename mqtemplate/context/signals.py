"""Ctrl-C and SIGTERM: the first asks for an orderly stop, the second ends the process at once."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog

_log = structlog.stdlib.get_logger("mqtemplate.context")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Where everybody who wants the application to end says so, and where it waits for that.

    Attributes:
        signalled: Whether a signal came.
    """

    def __init__(self) -> None:
        # Unlike an Event, a SimpleQueue may be used by a signal handler while the same thread waits on it.
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.signalled = False
        self._interrupts_main = False

    def request(self, reason: str) -> None:
        """Ask for the end; from any thread, more than once if need be."""
        self._reasons.put(reason)

    def wait(self) -> str:
        """Wait for the first request; returns its reason."""
        return self._reasons.get()

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """Take the signals while inside. Only the main thread can; from another one they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            _log.debug("application.no_signals", reason="not in the main thread; end it with stop()")
            yield
            return
        before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt, since the main thread is in code that is not ours."""
        self._interrupts_main = True
        try:
            yield
        finally:
            self._interrupts_main = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signalled = True
        self.request(signal.Signals(number).name)
        if self._interrupts_main:
            raise KeyboardInterrupt

"""The end of a process whose application is not in `run`: it is stopped in order, so it drains and commits.

`atexit` covers a main thread that ends or raises. SIGTERM would end the process without it, so it becomes `SystemExit`
in the main thread. That happens only if the application was started in the main thread, and nothing else in the process
(such as a web server) handles the signal.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.context")


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

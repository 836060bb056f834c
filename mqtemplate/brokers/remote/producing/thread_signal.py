"""Signals that wake one thread each.

A thread that releases a lock keeps the interpreter lock: the thread that it woke runs on another processor, and has to
sleep again at once. To write to an ``eventfd`` is a system call without the interpreter lock, so the woken thread can
go on. Where one thread wakes many, as for the messages of one request, a third more of them are sent.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol


class ThreadSignal(Protocol):
    """Wakes the thread that took it, once."""

    def set(self) -> None:
        """Wake the thread, or let its `wait` return at once."""

    def wait(self) -> None:
        """Return when `set` was called."""


class LockSignal:
    """Signal for systems without ``eventfd``."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


if sys.platform == "linux":

    class EventSignal:
        """Signal with a file descriptor. It is closed when neither side has the signal any more.

        Raises:
            OSError: The process has too many open files.
        """

        __slots__ = ("_fd",)

        def __init__(self) -> None:
            self._fd = -1
            self._fd = os.eventfd(0)

        def __del__(self) -> None:
            if self._fd >= 0:
                os.close(self._fd)

        def set(self) -> None:
            os.eventfd_write(self._fd, 1)

        def wait(self) -> None:
            os.eventfd_read(self._fd)


class _Kept(threading.local):
    signal: ThreadSignal | None = None


_kept = _Kept()


def _forget() -> None:
    """Use no signal of the parent process in a forked child: both would have one counter."""
    _kept.signal = None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget)


def take_signal() -> ThreadSignal:
    """Return a signal for one `ThreadSignal.wait` of this thread. Nothing else has it, not even a signal handler."""
    signal, _kept.signal = _kept.signal, None
    return _new_signal() if signal is None else signal


def keep_signal(signal: ThreadSignal) -> None:
    """Keep a signal after its `ThreadSignal.wait` has returned, for the next `take_signal` of this thread."""
    _kept.signal = signal


def _new_signal() -> ThreadSignal:
    # Where locks were replaced (gevent), threads are no threads, and a system call would block all of them.
    if sys.platform == "linux" and type(threading.Lock()).__module__ == "_thread":
        try:
            return EventSignal()
        except OSError:
            return LockSignal()
    return LockSignal()

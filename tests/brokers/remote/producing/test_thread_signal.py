"""Signals that wake one thread each."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.brokers.remote.producing.auto_batch import LockSignal, ThreadSignal, keep_signal, take_signal
from tests.forking import in_child

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="eventfd is a system call of Linux")

if sys.platform == "linux":
    from mqtemplate.brokers.remote.producing.auto_batch import EventSignal


def in_thread(work: Callable[[], object]) -> None:
    """Run *work* in a thread of its own, which has no signal yet."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(30)


@pytest.fixture(params=["event", "lock"])
def make(request: pytest.FixtureRequest) -> Callable[[], ThreadSignal]:
    if request.param == "lock":
        return LockSignal
    if sys.platform != "linux":
        pytest.skip("eventfd is a system call of Linux")
    return EventSignal


def test_a_signal_wakes_the_thread_that_waits(make: Callable[[], ThreadSignal]) -> None:
    """Again and again, before the thread waits or after."""
    there, back = make(), make()
    rounds: list[int] = []

    def answer() -> None:
        for number in range(100):
            there.wait()
            rounds.append(number)
            back.set()

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        for number in range(100):
            there.set()
            back.wait()
            assert rounds == list(range(number + 1))
        answering.result(30)


def test_a_signal_that_was_set_before_is_not_lost(make: Callable[[], ThreadSignal]) -> None:
    signal = make()
    signal.set()
    in_thread(signal.wait)


def test_a_thread_keeps_one_signal_and_uses_it_again() -> None:
    def work() -> None:
        first = take_signal()
        keep_signal(first)
        assert take_signal() is first

    in_thread(work)


def test_a_signal_that_is_in_use_is_not_taken_again() -> None:
    """A handler of the operating system's signals may send while its thread waits for a send."""

    def work() -> None:
        outer, inner = take_signal(), take_signal()
        assert inner is not outer
        inner.set()
        inner.wait()
        keep_signal(inner)
        outer.set()
        outer.wait()

    in_thread(work)


def test_each_thread_has_its_own() -> None:
    signals: list[ThreadSignal] = []

    def work() -> None:
        signals.append(take_signal())
        keep_signal(signals[-1])

    in_thread(work)
    in_thread(work)

    assert signals[0] is not signals[1]


@on_linux
def test_the_file_is_closed_when_nobody_has_the_signal() -> None:
    files: list[int] = []

    def work() -> None:
        signal = take_signal()
        files.append(signal._fd)  # type: ignore[attr-defined]
        keep_signal(signal)
        os.fstat(files[0])

    in_thread(work)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


@on_linux
def test_without_a_free_file_descriptor_a_lock_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", fail)

    def work() -> None:
        assert isinstance(take_signal(), LockSignal)

    in_thread(work)


@on_linux
def test_where_locks_are_replaced_no_system_call_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent replaces locks, and its threads all block when one of them waits in a system call."""
    real = threading.Lock

    class GreenLock:
        def __init__(self) -> None:
            self._lock = real()

        def acquire(self) -> bool:
            return self._lock.acquire()

    def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Lock", GreenLock)
            assert isinstance(take_signal(), LockSignal)

    in_thread(work)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_does_not_use_the_signal_of_its_parent() -> None:
    """Both would read one counter, and one of them would wait for ever."""

    def work() -> None:
        signal = take_signal()
        keep_signal(signal)
        assert in_child(lambda: str(take_signal() is signal)) == "False"
        assert take_signal() is signal

    in_thread(work)

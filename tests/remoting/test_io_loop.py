"""The I/O loop: callbacks run in order, timers by the loop's clock, and no exception ends the loop."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.remoting.io_loop import READ, IoLoop
from tests.waiting import PATIENCE_S


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    loop = IoLoop("test", SystemClock())
    loop.start()
    yield loop
    loop.stop()


def test_callbacks_of_each_thread_run_in_its_order(loop: IoLoop) -> None:
    done: list[tuple[int, int]] = []
    finished: queue.Queue[None] = queue.Queue()

    def add_callbacks(thread: int) -> None:
        for number in range(500):
            loop.call_soon(lambda item=(thread, number): done.append(item))
        loop.call_soon(lambda: finished.put(None))

    threads = [threading.Thread(target=add_callbacks, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        finished.get(timeout=PATIENCE_S)
        thread.join()

    assert len(done) == 2_000
    for thread in range(4):
        assert [number for origin, number in done if origin == thread] == list(range(500))


def test_an_earlier_timer_wakes_a_loop_that_sleeps_for_a_later_one(loop: IoLoop) -> None:
    done: queue.Queue[str] = queue.Queue()
    late = loop.call_later(3_600_000, lambda: done.put("late"))

    loop.call_later(1, lambda: done.put("early"))

    assert done.get(timeout=PATIENCE_S) == "early"
    late.cancel()


def test_the_exception_of_a_callback_is_logged_and_the_next_callback_runs(loop: IoLoop) -> None:
    done: queue.Queue[str] = queue.Queue()

    with capture_logs() as logs:
        loop.call_soon(lambda: 1 // 0)
        loop.call_later(0, lambda: {}["nothing"])
        loop.call_later(1, lambda: done.put("still here"))
        assert done.get(timeout=PATIENCE_S) == "still here"

    assert [entry["event"] for entry in logs] == ["remoting.work_failed"] * 2


def test_a_handler_that_raises_an_exception_is_aborted(loop: IoLoop) -> None:
    left, right = socket.socketpair()
    ended: queue.Queue[str] = queue.Queue()

    class Broken:
        def on_ready(self, events: int) -> None:
            raise RuntimeError("unexpected")

        def abort(self, reason: str) -> None:
            loop.unwatch(left)
            ended.put(reason)

    with left, right, capture_logs() as logs:
        loop.call_soon(lambda: loop.watch(left, READ, Broken()))
        right.send(b"!")
        assert ended.get(timeout=PATIENCE_S) == "RuntimeError: unexpected"

    assert logs[0]["event"] == "remoting.handler_failed"


def test_on_a_virtual_clock_timers_run_after_it_was_advanced() -> None:
    clock = VirtualClock()
    loop = IoLoop("test", clock)
    done: queue.Queue[str] = queue.Queue()
    loop.start()
    loop.call_later(60_000, lambda: done.put("a minute"))
    loop.call_soon(lambda: done.put("at once"))
    assert done.get(timeout=PATIENCE_S) == "at once"
    assert done.empty()

    clock.move_ms(60_000)
    loop.wake()

    assert done.get(timeout=PATIENCE_S) == "a minute"
    loop.stop()


def test_callbacks_added_before_the_stop_run_before_the_thread_ends() -> None:
    loop = IoLoop("test", SystemClock())
    done: list[int] = []
    loop.call_soon(lambda: done.append(1))

    loop.start()
    loop.call_soon(lambda: done.append(2))
    loop.stop()

    assert done == [1, 2]
    loop.wake()  # a late call has no effect
    loop.call_soon(lambda: done.append(3))
    assert done == [1, 2]


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    loop = IoLoop("test", SystemClock())

    loop.stop()

    assert not loop.is_current_thread

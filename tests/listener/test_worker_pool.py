"""Few threads for quick work, all of them for work that waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from mqtemplate.listener.consuming.worker_pool import WorkerPool

PATIENCE_S = 30


class Line:
    """Work for a pool: functions in a row."""

    def __init__(self) -> None:
        self.pieces: deque[Callable[[], object]] = deque()
        self.taken = 0
        self.threads: set[int] = set()

    @property
    def waiting(self) -> int:
        return len(self.pieces)

    def run_next(self) -> bool:
        try:
            piece = self.pieces.popleft()
        except IndexError:
            return False
        self.taken += 1
        self.threads.add(threading.get_ident())
        piece()
        return True


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def make_pool(line: Line) -> Iterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(number: int, maximum: int = 64) -> WorkerPool:
        pools.append(WorkerPool("test", line, number, maximum))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop(PATIENCE_S)


def supervise_until(pool: WorkerPool, event: threading.Event) -> None:
    """What the fetching thread does, as long as it takes."""
    while not event.wait(0.001):
        pool.supervise()


def test_one_thread_is_enough_for_quick_work(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(20)
    done = threading.Event()

    for _ in range(1_000):
        line.pieces.append(lambda: None)
        pool.wake()
    line.pieces.append(done.set)
    pool.wake()

    assert done.wait(PATIENCE_S)
    assert len(line.threads) == 1


def test_a_thread_that_hangs_gets_help(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    """The second piece ends the first: without another thread neither would end."""
    pool = make_pool(2)
    go_on, done = threading.Event(), threading.Event()

    line.pieces += [lambda: go_on.wait(PATIENCE_S) and done.set(), go_on.set]
    pool.wake()
    supervise_until(pool, done)

    assert len(line.threads) == 2


def test_there_are_never_more_than_asked_for(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(3)
    three = threading.Barrier(3)
    count = threading.Semaphore(3)
    too_many: list[bool] = []
    done = threading.Event()

    def piece() -> None:
        too_many.append(not count.acquire(blocking=False))
        three.wait(PATIENCE_S)
        count.release()
        three.wait(PATIENCE_S)

    line.pieces += [piece] * 9
    line.pieces.append(done.set)
    pool.wake()
    supervise_until(pool, done)

    assert not any(too_many)


def test_a_lost_thread_is_replaced_up_to_the_ceiling(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(1, 2)
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    line.pieces += [hang, done.set]
    pool.wake()
    assert begun.wait(PATIENCE_S)

    assert pool.replace()
    assert done.wait(PATIENCE_S)
    assert not pool.replace()

    go_on.set()
    pool.found()


def test_an_error_that_escapes_costs_no_thread(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(1)
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("broker gone")

    line.pieces += [fail, done.set]
    pool.wake()

    assert done.wait(PATIENCE_S)
    assert len(line.threads) == 1


def test_a_stop_finishes_what_waits(line: Line, make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(2)
    done: list[int] = []
    line.pieces += [lambda: done.append(1)] * 100
    pool.wake()

    assert pool.stop(PATIENCE_S) == 0
    assert len(done) == 100

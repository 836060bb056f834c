"""Consume threads: few for quick handlers, all of them for handlers that wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from mqtemplate.listener.container.consume_service import ConsumeThreadPool
from tests.waiting import PATIENCE_S

MakePool = Callable[..., ConsumeThreadPool]


class Work:
    """Functions for a pool to call, in their order."""

    def __init__(self) -> None:
        self.pieces: deque[Callable[[], object]] = deque()
        self.taken = 0
        self.threads: set[int] = set()

    @property
    def ready_count(self) -> int:
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
def work() -> Work:
    return Work()


@pytest.fixture
def make_pool(work: Work) -> Iterator[MakePool]:
    pools: list[ConsumeThreadPool] = []

    def make(number: int, maximum: int = 64) -> ConsumeThreadPool:
        pools.append(ConsumeThreadPool("test", work, number, maximum))
        return pools[-1]

    yield make
    for pool in pools:
        pool.finish(PATIENCE_S)
        pool.abandon()


def supervise_until(pool: ConsumeThreadPool, event: threading.Event) -> None:
    """Supervise the pool as the polling thread does."""
    while not event.wait(0.001):
        pool.supervise()


def test_one_thread_is_enough_for_quick_work(work: Work, make_pool: MakePool) -> None:
    pool = make_pool(20)
    done = threading.Event()

    for _ in range(1_000):
        work.pieces.append(lambda: None)
        pool.wake()
    work.pieces.append(done.set)
    pool.wake()

    assert done.wait(PATIENCE_S)
    assert len(work.threads) == 1


def test_a_second_thread_is_woken_if_the_first_one_hangs(work: Work, make_pool: MakePool) -> None:
    """The second function ends the first one. With one thread neither would end."""
    pool = make_pool(2)
    proceed, done = threading.Event(), threading.Event()

    work.pieces += [lambda: proceed.wait(PATIENCE_S) and done.set(), proceed.set]
    pool.wake()
    supervise_until(pool, done)

    assert len(work.threads) == 2


def test_there_are_never_more_threads_than_configured(work: Work, make_pool: MakePool) -> None:
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

    work.pieces += [piece] * 9
    work.pieces.append(done.set)
    pool.wake()
    supervise_until(pool, done)

    assert not any(too_many)


def test_a_hanging_thread_is_replaced_up_to_the_maximum(work: Work, make_pool: MakePool) -> None:
    pool = make_pool(1, 2)
    started, proceed, done = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        proceed.wait(PATIENCE_S)

    work.pieces += [hang, done.set]
    pool.wake()
    assert started.wait(PATIENCE_S)

    end_replacement = pool.replace()
    assert end_replacement is not None
    assert done.wait(PATIENCE_S)
    assert pool.replace() is None

    proceed.set()
    end_replacement()
    assert pool.replace() is not None


def test_an_error_of_the_broker_ends_no_thread(work: Work, make_pool: MakePool) -> None:
    pool = make_pool(1)
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("broker gone")

    work.pieces += [fail, done.set]
    pool.wake()

    assert done.wait(PATIENCE_S)
    assert len(work.threads) == 1


def test_a_pool_finishes_the_ready_work(work: Work, make_pool: MakePool) -> None:
    pool = make_pool(2)
    done: list[int] = []
    work.pieces += [lambda: done.append(1)] * 100
    pool.wake()

    assert pool.finish(PATIENCE_S) == 0
    assert len(done) == 100

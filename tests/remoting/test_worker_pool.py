"""Threads that several connections share: one of them, with any number of requests, does not hold the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.message import HostAddress
from mqtemplate.remoting import RemotingServerSettings
from mqtemplate.remoting.protocol import RemotingCommand, encode_command
from mqtemplate.remoting.worker_pool import HeavyWork, ProcessorTime, WorkerPool
from tests.remoting.conftest import OpenPeer, StartServer
from tests.remoting.wire import SLOW
from tests.waiting import PATIENCE_S, eventually

MakePool = Callable[..., WorkerPool]


class Peer:
    """What the pool needs of a connection."""

    def __init__(self, number: int, ip: str = "127.0.0.1") -> None:
        self.id = number
        self.remote = HostAddress(ip, number)


HOSTILE: Any = Peer(1)
NEIGHBOUR: Any = Peer(2)
HEAVY: list[Any] = [Peer(number, "127.0.1.1") for number in (11, 12, 13)]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools = []

    def make(
        threads: int = 1,
        jobs: int = 1_000,
        waiting: int = 1_000,
        max_bytes: int = 1_000,
        heavy: HeavyWork | None = None,
    ) -> WorkerPool:
        pools.append(WorkerPool("test", threads, jobs, waiting, max_bytes, heavy or HeavyWork()))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop(PATIENCE_S)


def test_connections_take_turns(make_pool: MakePool) -> None:
    """The neighbour's request waits for one request of the other connection, not for all that arrived before it."""
    pool, done = make_pool(), queue.Queue[str]()
    for number in range(5):
        pool.submit(HOSTILE, lambda number=number: done.put(f"hostile {number}"))
    for number in range(2):
        pool.submit(NEIGHBOUR, lambda number=number: done.put(f"neighbour {number}"))

    pool.start()

    order = [done.get(timeout=PATIENCE_S) for _ in range(7)]
    assert order[:4] == ["hostile 0", "neighbour 0", "hostile 1", "neighbour 1"]
    assert order[4:] == ["hostile 2", "hostile 3", "hostile 4"]


def test_one_connection_has_half_of_the_threads(make_pool: MakePool) -> None:
    pool, started, gate, done = make_pool(4), queue.Queue[int](), threading.Event(), queue.Queue[str]()
    pool.start()

    def block(number: int) -> None:
        started.put(number)
        gate.wait(PATIENCE_S)

    for number in range(10):
        assert pool.submit(HOSTILE, lambda number=number: block(number))
    assert [started.get(timeout=PATIENCE_S) for _ in range(2)] == [0, 1]
    pool.submit(NEIGHBOUR, lambda: done.put("done"))

    assert done.get(timeout=PATIENCE_S) == "done"
    assert started.empty()
    gate.set()
    assert [started.get(timeout=PATIENCE_S) for _ in range(8)] == list(range(2, 10))


def test_heavy_addresses_have_one_thread_together(make_pool: MakePool) -> None:
    """A client that opens a connection for each request is as heavy as one with a single connection."""
    pool, started, gate, done = (
        make_pool(4, heavy=always_heavy()),
        queue.Queue[int](),
        threading.Event(),
        queue.Queue[str](),
    )
    pool.start()

    def block(number: int) -> None:
        started.put(number)
        gate.wait(PATIENCE_S)

    pool.submit(HEAVY[0], lambda: block(0))
    assert started.get(timeout=PATIENCE_S) == 0
    for number in (1, 2):
        pool.submit(HEAVY[number], lambda number=number: block(number))
    pool.submit(NEIGHBOUR, lambda: done.put("neighbour"))

    assert done.get(timeout=PATIENCE_S) == "neighbour"
    assert started.empty()
    gate.set()
    assert [started.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]


def test_heavy_work_of_two_pools_runs_one_piece_at_a_time(make_pool: MakePool) -> None:
    heavy = always_heavy()
    first, second = make_pool(heavy=heavy), make_pool(heavy=heavy)
    started, gate = queue.Queue[str](), threading.Event()
    for pool in (first, second):
        pool.start()

    first.submit(HEAVY[0], lambda: (started.put("first"), gate.wait(PATIENCE_S)))
    assert started.get(timeout=PATIENCE_S) == "first"
    second.submit(HEAVY[1], lambda: started.put("second"))
    eventually(lambda: second._is_heavy_running, "the other pool has taken its work")
    is_held = started.empty()
    gate.set()

    assert is_held
    assert started.get(timeout=PATIENCE_S) == "second"


def always_heavy() -> HeavyWork:
    """Return one for which any address of the heavy peers has taken much time."""
    used = ProcessorTime(lambda: 100.0)
    used.add("127.0.1.1", 10.0)
    return HeavyWork(processor_time=used)


@pytest.mark.parametrize(("requests", "rests"), [(1, [0.03]), (0, [])])
def test_heavy_work_is_followed_by_a_rest_if_the_io_thread_had_requests(requests: int, rests: list[float]) -> None:
    """A busy thread takes its part of the interpreter from the I/O thread."""
    assert rests_after([0.03], requests) == rests


def test_rests_of_short_work_are_joined() -> None:
    """A flood of small requests costs more between the pieces of work than in them, and no thread sleeps for 50 us."""
    assert rests_after([0.0006, 0.0012, 0.0018, 0.0024]) == [0.0012, 0.0012]


@pytest.mark.parametrize(("requests", "rests"), [(1, [0.004, 0.003]), (0, [])])
def test_long_work_of_a_quiet_client_rests_between_its_parts(requests: int, rests: list[float]) -> None:
    """It rests for as long as the part took, if the I/O thread had requests meanwhile, and not after short parts."""
    times = iter([0.004, 0.004, 0.0042, 0.007, 0.007, 0.008])
    rested: list[float] = []
    heavy = HeavyWork(thread_time=lambda: next(times), rest=lambda s: rested.append(round(s, 6)))

    def work() -> None:
        for _ in range(3):
            heavy.count_inline(requests)
            heavy.pause()

    heavy.run(work, "127.0.1.1", is_heavy=False)

    assert rested == rests
    assert not list(times)


def test_a_pause_outside_of_work_has_no_effect() -> None:
    """The I/O thread registers small clients itself."""
    rested: list[float] = []
    heavy = HeavyWork(thread_time=lambda: 7.0, rest=rested.append)
    heavy.run(heavy.count_inline, "127.0.1.1", is_heavy=False)

    heavy.pause()

    assert rested == []


def rests_after(times_s: list[float], requests: int = 1) -> list[float]:
    """Return the rests if the thread had used these processor times at the end of its pieces of heavy work."""
    times = iter(times_s)
    rested: list[float] = []
    heavy = HeavyWork(thread_time=lambda: next(times), rest=lambda s: rested.append(round(s, 6)))
    for _ in times_s:
        heavy.run(lambda: heavy.count_inline(requests), "127.0.1.1", is_heavy=True)
    return rested


def test_processor_time_counts_half_after_each_second() -> None:
    now = [100.0]
    used = ProcessorTime(lambda: now[0])
    used.add("10.0.0.1", 0.15)

    assert used.is_heavy("10.0.0.1")
    assert not used.is_heavy("10.0.0.2")
    now[0] += 1
    assert not used.is_heavy("10.0.0.1")
    used.add("10.0.0.1", 0.03)
    assert used.is_heavy("10.0.0.1")


def test_many_addresses_are_heavy_together() -> None:
    """Twenty addresses that take a part of a processor each leave nothing to the I/O thread."""
    used = ProcessorTime(lambda: 100.0)
    for number in range(20):
        used.add(f"10.0.0.{number}", 0.01)
    used.add("10.0.1.1", 0.001)

    assert used.is_heavy("10.0.0.7")
    assert not used.is_heavy("10.0.1.1")


def test_addresses_that_need_no_time_any_more_are_forgotten() -> None:
    now = [100.0]
    used = ProcessorTime(lambda: now[0])
    for number in range(1_000):
        used.add(f"10.0.0.{number}", 0.01)

    now[0] += 60
    used.add("10.0.1.1", 0.2)

    assert list(used._used) == ["10.0.1.1"]


def test_the_queue_is_bounded_in_total_for_one_connection_and_in_bytes(make_pool: MakePool) -> None:
    pool = make_pool(jobs=3, waiting=2, max_bytes=10)

    assert [pool.submit(HOSTILE, lambda: None) for _ in range(3)] == [True, True, False]
    assert [pool.submit(NEIGHBOUR, lambda: None) for _ in range(2)] == [True, False]

    large = make_pool(max_bytes=10)
    assert [large.submit(HOSTILE, lambda: None, 6) for _ in range(3)] == [True, True, False]
    large.forget(HOSTILE)
    assert large.submit(NEIGHBOUR, lambda: None, 6)


def test_the_work_of_a_closed_connection_is_dropped(make_pool: MakePool) -> None:
    pool, done = make_pool(jobs=2), queue.Queue[str]()
    pool.submit(HOSTILE, lambda: done.put("hostile"))
    pool.submit(HOSTILE, lambda: done.put("hostile"))

    pool.forget(HOSTILE)
    pool.forget(NEIGHBOUR)  # had none
    pool.submit(NEIGHBOUR, lambda: done.put("neighbour"))
    pool.start()

    assert done.get(timeout=PATIENCE_S) == "neighbour"
    pool.stop(PATIENCE_S)
    assert done.empty()
    assert not pool.submit(NEIGHBOUR, lambda: None)


def test_an_error_of_one_request_does_not_end_the_thread(make_pool: MakePool) -> None:
    pool, done = make_pool(), queue.Queue[str]()
    with capture_logs() as events:
        pool.start()
        pool.submit(HOSTILE, lambda: 1 // 0)
        pool.submit(HOSTILE, lambda: done.put("next"))
        assert done.get(timeout=PATIENCE_S) == "next"

    assert [event["event"] for event in events] == ["remoting.work_failed"]


def test_a_stop_waits_for_no_request_that_does_not_end(start_server: StartServer, open_peer: OpenPeer) -> None:
    """The server ends within its drain time, whatever a client requested."""
    server = start_server(RemotingServerSettings(drain_ms=1))
    peer = open_peer(server)
    peer.send(b"".join(encode_command(RemotingCommand(SLOW, opaque=number, body=b"x")) for number in range(50)))
    eventually(lambda: sum(each.unanswered for each in server.connections()) == 50, "all requests arrived")

    with capture_logs() as events:
        server.stop()

    assert [event["running"] for event in events if event["event"] == "remoting.work_abandoned"] == [2]
    assert peer.is_closed_by_peer()
    for _ in range(2):
        server.gate.put(None)

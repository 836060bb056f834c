"""The I/O loop: callbacks run in order, timers by the loop's clock, and no exception ends the loop."""

from __future__ import annotations

import gc
import itertools
import queue
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import READ, TURN_S, FairTurns, IoLoop
from mqtemplate.remoting.settings import FIRST_TLS_BYTE, ConnectionLimits, LoadedTls, TlsMode
from mqtemplate.remoting.sockets import PlainStream
from mqtemplate.remoting.tcp_server import Handshake
from tests.waiting import PATIENCE_S, eventually


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


# --- turns ----------------------------------------------------------------------------------------


class Turns:
    """`FairTurns` whose work takes *turn_s* on a clock of its own.

    Attributes:
        taken: Names of those that took a turn, in order.
        requests: Of other I/O threads: *requests_per_turn* more after each turn.
    """

    def __init__(self, turn_s: float) -> None:
        self.now_s = 0.0
        self.taken: list[str] = []
        self.requests_per_turn = self.requests = 0
        self._turn_s = turn_s
        self._turns = FairTurns(lambda: self.now_s, lambda: self.requests)
        self.wait_s = self._turns.wait_s

    def add(self, address: str, *names: str) -> None:
        for name in names:
            self._turns.add(address, Taker(name))

    def run(self, seconds: float) -> list[str]:
        """Return the names of those that took a turn."""
        before = len(self.taken)
        self._turns.run(self._take, seconds)
        return self.taken[before:]

    def _take(self, taker: object) -> None:
        assert isinstance(taker, Taker)
        self.taken.append(taker.name)
        self.now_s += self._turn_s
        self.requests += self.requests_per_turn


class Taker:
    def __init__(self, name: str) -> None:
        self.name = name

    def take_turn(self) -> None:
        """Do nothing: only the order counts."""

    def abort(self, reason: str) -> None:
        """Do nothing: no turn fails."""


def test_addresses_take_turns_however_many_connections_each_has() -> None:
    turns = Turns(TURN_S)
    turns.add("10.0.0.1", "a1", "a2", "a3", "a4")
    turns.add("10.0.0.2", "b1")
    turns.add("10.0.0.3", "c1", "c2")

    assert turns.run(60) == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_an_address_does_several_short_pieces_of_work_in_a_turn() -> None:
    """Of ten new clients at one address, beside forty addresses with long work, the last was served after ten rounds
    of all: its first message took 7 s.
    """
    turns = Turns(TURN_S / 32)
    turns.add("10.0.0.1", *(f"a{number}" for number in range(10)))
    turns.add("10.0.0.2", "b0", "b1")

    assert turns.run(60) == [*(f"a{number}" for number in range(8)), "b0", "b1", "a8", "a9"]


def test_work_that_the_work_of_an_address_adds_waits_for_its_next_turn() -> None:
    taken = []
    turns = FairTurns(lambda: 0.0)

    def take(taker: object) -> None:
        assert isinstance(taker, Taker)
        taken.append(taker.name)
        if taker.name == "a1":
            turns.add("10.0.0.1", Taker("a3"))

    for name in ("a1", "a2"):
        turns.add("10.0.0.1", Taker(name))
    turns.add("10.0.0.2", Taker("b1"))

    turns.finish(take)

    assert taken == ["a1", "a2", "b1", "a3"]


def test_turns_end_when_their_time_is_over_and_continue_with_the_next_address() -> None:
    turns = Turns(TURN_S)
    turns.add("10.0.0.1", "a1", "a2")
    turns.add("10.0.0.2", "b1", "b2")

    assert [turns.run(0) for _ in range(4)] == [["a1"], ["b1"], ["a2"], ["b2"]]
    assert turns.run(0) == []


def test_short_work_shares_the_time_of_one_turn() -> None:
    """Handshakes of many clients are short: one in each round would be too few."""
    turns = Turns(TURN_S / 4)
    turns.add("10.0.0.1", *(f"a{number}" for number in range(10)))

    assert turns.run(0) == ["a0", "a1", "a2", "a3"]
    assert len(turns.run(TURN_S * 1.25)) == 5


def test_turns_rest_for_as_long_as_they_took_if_another_io_thread_had_requests() -> None:
    """The gRPC thread had turns all the time, beside which each request to the other port took many times longer."""
    turns = Turns(0.002)
    turns.add("10.0.0.1", "a1", "a2", "a3")
    turns.requests_per_turn = 1

    assert turns.run(0) == ["a1"]
    assert turns.wait_s() == pytest.approx(0.002)
    turns.now_s += 0.001
    assert turns.run(0) == []  # a socket was ready meanwhile
    turns.now_s += 0.001
    assert turns.wait_s() == pytest.approx(0)
    assert turns.run(0) == ["a2"]


def test_turns_follow_each_other_if_the_other_io_thread_has_no_requests() -> None:
    turns = Turns(0.002)
    turns.add("10.0.0.1", "a1", "a2")
    turns.requests = 7

    assert (turns.run(0), turns.wait_s()) == (["a1"], 0)
    turns.requests += 1  # while this one waited for its sockets
    assert (turns.run(0), turns.wait_s()) == (["a2"], 0)


def test_a_rest_is_limited() -> None:
    turns = Turns(9.0)
    turns.add("10.0.0.1", "a1")
    turns.requests_per_turn = 1
    turns.run(0)

    assert turns.wait_s() == pytest.approx(0.05)


def test_a_loop_serves_its_sockets_in_a_rest(loop: IoLoop) -> None:
    """The time of the turns goes back to its start, so the rest does not end."""
    served: queue.Queue[str] = queue.Queue()
    requests = itertools.count()
    times = itertools.chain([1.0, 1.0, 2.0, 1_000.0], itertools.repeat(1.0))
    loop.turns = FairTurns(lambda: next(times), lambda: next(requests))
    left, right = socket.socketpair()

    class Other:
        def on_ready(self, events: int) -> None:
            served.put(left.recv(1).decode())

        def abort(self, reason: str) -> None:
            served.put(reason)

    class Waiting:
        def take_turn(self) -> None:
            served.put("turn")

        def abort(self, reason: str) -> None:
            served.put(reason)

    loop.call_soon(lambda: loop.watch(left, READ, Other()))
    loop.call_soon(lambda: [loop.turns.add(f"10.0.0.{number}", Waiting()) for number in range(2)])
    assert served.get(timeout=PATIENCE_S) == "turn"
    for text in ("a", "b"):
        right.send(text.encode())
        assert served.get(timeout=PATIENCE_S) == text
    loop.call_soon(lambda: served.put("callback"))
    assert served.get(timeout=PATIENCE_S) == "callback"

    loop.call_soon(lambda: loop.unwatch(left))
    loop.stop()
    assert served.get(timeout=PATIENCE_S) == "turn"  # a stop waits for no rest
    left.close()
    right.close()


def test_a_socket_that_is_ready_is_served_before_each_turn(loop: IoLoop) -> None:
    """Work for a thousand turns of one client waits; in each round the sockets of the others come first."""
    left, right = socket.socketpair()
    order: queue.Queue[str] = queue.Queue()

    class Other:
        def on_ready(self, events: int) -> None:
            left.recv(1)
            order.put("other")

        def abort(self, reason: str) -> None:
            order.put(reason)

    class Busy:
        turns = 0

        def take_turn(self) -> None:
            self.turns += 1
            order.put("busy")
            right.send(b"x")
            if self.turns < 5:
                loop.turns.add("10.0.0.1", self)

        def abort(self, reason: str) -> None:
            order.put(reason)

    hours = itertools.count(0, 3_600)
    loop.turns = FairTurns(lambda: next(hours))  # each turn takes all the time
    loop.call_soon(lambda: loop.watch(left, READ, Other()))
    loop.call_soon(lambda: loop.turns.add("10.0.0.1", Busy()))

    assert [order.get(timeout=PATIENCE_S) for _ in range(10)] == ["busy", "other"] * 5
    loop.call_soon(lambda: loop.unwatch(left))
    loop.stop()
    left.close()
    right.close()


def test_a_client_whose_turn_raises_an_exception_is_aborted(loop: IoLoop) -> None:
    ended: queue.Queue[str] = queue.Queue()

    class Broken:
        def take_turn(self) -> None:
            raise RuntimeError("unexpected")

        def abort(self, reason: str) -> None:
            ended.put(reason)

    with capture_logs() as logs:
        loop.call_soon(lambda: loop.turns.add("10.0.0.1", Broken()))
        assert "unexpected" in ended.get(timeout=PATIENCE_S)

    assert logs[0]["event"] == "remoting.handler_failed"


def test_handshakes_that_wait_for_their_turns_are_not_reported_again(loop: IoLoop) -> None:
    """The key exchange of TLS takes a millisecond, and one client may open hundreds of connections."""
    reported: list[object] = []
    finished: queue.Queue[object] = queue.Queue()
    log = LimitedLog(get_logger("test"), lambda: 0)

    class Reported(Handshake):
        def on_ready(self, events: int) -> None:
            reported.append(self)
            super().on_ready(events)

    pairs = [socket.socketpair() for _ in range(10)]
    tls = LoadedTls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), TlsMode.PERMISSIVE, None)
    hours = itertools.count(0, 3_600)
    loop.turns = FairTurns(lambda: next(hours))  # each turn takes all the time
    for left, right in pairs:
        left.setblocking(False)
        right.send(bytes([FIRST_TLS_BYTE]) * 20)
        remote = HostAddress("10.0.0.1", 1)
        loop.call_soon(Reported(left, remote, loop, tls, ConnectionLimits(), finished.put, log).start)

    assert [finished.get(timeout=PATIENCE_S) for _ in pairs] == [None] * len(pairs)  # no version of TLS

    assert len(reported) == len(pairs)
    loop.stop()
    for sock in itertools.chain(*pairs):
        sock.close()


class NoTurns(FairTurns):
    def add(self, address: str, taker: object) -> None:
        raise AssertionError(f"{address} waits for a turn")


def test_the_protocol_of_a_new_connection_is_detected_without_a_turn(loop: IoLoop) -> None:
    """A new client waited for a round of all addresses with work, before its first request waited for one."""
    finished: queue.Queue[object] = queue.Queue()
    left, right = socket.socketpair()
    left.setblocking(False)
    log = LimitedLog(get_logger("test"), lambda: 0)
    loop.turns = NoTurns()
    handshake = Handshake(left, HostAddress("10.0.0.1", 1), loop, None, ConnectionLimits(), finished.put, log)

    right.send(b"P")
    loop.call_soon(handshake.start)

    assert isinstance(finished.get(timeout=PATIENCE_S), PlainStream)
    loop.stop()
    left.close()
    right.close()


def test_a_handshake_whose_first_byte_is_missing_waits_for_it(loop: IoLoop) -> None:
    finished: queue.Queue[object] = queue.Queue()
    left, right = socket.socketpair()
    left.setblocking(False)
    log = LimitedLog(get_logger("test"), lambda: 0)
    handshake = Handshake(left, HostAddress("10.0.0.1", 1), loop, None, ConnectionLimits(), finished.put, log)

    loop.call_soon(handshake.start)
    loop.call_soon(lambda: handshake.on_ready(READ))
    loop.call_soon(lambda: right.send(b"\0"))

    assert isinstance(finished.get(timeout=PATIENCE_S), PlainStream)
    loop.stop()
    left.close()
    right.close()


def test_a_handshake_that_is_done_is_freed_without_the_garbage_collector(loop: IoLoop) -> None:
    done = threading.Event()
    left, right = socket.socketpair()
    left.setblocking(False)
    log = LimitedLog(get_logger("test"), lambda: 0)

    def start() -> weakref.ref[Handshake]:
        def on_done(stream: object) -> None:
            handshakes.discard(handshake)
            done.set()

        handshake = Handshake(left, HostAddress("10.0.0.1", 1), loop, None, ConnectionLimits(), on_done, log)
        handshakes = {handshake}
        loop.call_soon(handshake.start)
        return weakref.ref(handshake)

    gc.disable()
    try:
        freed = start()
        right.send(b"\0")
        assert done.wait(PATIENCE_S)
        loop.call_soon(done.set)  # the loop refers to its last callback

        assert eventually(lambda: freed() is None, "the handshake is freed")
    finally:
        gc.enable()
    left.close()
    right.close()

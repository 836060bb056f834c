"""Prefetching: one pull for each queue, limits, turns, seeks, and failures."""

from __future__ import annotations

from collections.abc import Callable

from structlog.testing import capture_logs

from mqtemplate.brokers.remote.consuming.pulls import Pulled, PullFailed, PullLoop, PullOutcome
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.message import HostAddress, MessageExt, MessageQueue

A, B = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1)
NONE: frozenset[MessageQueue] = frozenset()
HOST = HostAddress("127.0.0.1", 10911)


def message(queue: MessageQueue, queue_offset: int, body: bytes = b"x") -> MessageExt:
    return MessageExt(
        topic=queue.topic, body=body, broker_name=queue.broker_name, queue_id=queue.queue_id, queue_offset=queue_offset,
        physical_offset=0, store_size=len(body), sys_flag=0, body_crc=0, born_timestamp=0, born_host=HOST,
        store_timestamp=0, store_host=HOST, reconsume_times=0, prepared_transaction_offset=0,
    )  # fmt: skip


class Wire:
    """Records the pulls, for the test to answer."""

    def __init__(self) -> None:
        self.pulls: list[tuple[MessageQueue, int, int, bool, Callable[[PullOutcome], None]]] = []
        self.fails = False

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        broker_id: int,
        may_wait: bool,
        done: Callable[[PullOutcome], None],
        /,
    ) -> None:
        if self.fails:
            raise RemoteConnectError("refused")
        self.pulls.append((queue, queue_offset, broker_id, may_wait, done))

    def pulled(self) -> list[tuple[int, int]]:
        """Queue id and offset of the unanswered pulls."""
        return [(queue.queue_id, queue_offset) for queue, queue_offset, *_ in self.pulls]

    def answer(self, outcome: PullOutcome) -> None:
        """Answer the oldest pull."""
        self.pulls.pop(0)[-1](outcome)

    def deliver(self, count: int, body: bytes = b"x") -> None:
        queue, at, *_ = self.pulls[0]
        self.answer(Pulled([message(queue, at + number, body) for number in range(count)], at + count))


def loop_over(
    wire: Wire, clock: VirtualClock | None = None, messages: int = 100, size: int = 1_000
) -> tuple[PullLoop, list[str]]:
    """Return a loop, and the list of its events."""
    events: list[str] = []
    loop = PullLoop(
        wire.pull,
        clock or VirtualClock(),
        messages,
        size,
        on_arrival=lambda: events.append("arrival"),
        on_retry=lambda: events.append("retry"),
    )
    return loop, events


def offsets(messages: list[MessageExt]) -> list[int]:
    return [each.queue_offset for each in messages]


def test_a_queue_is_pulled_from_its_position_on() -> None:
    wire = Wire()
    loop, events = loop_over(wire)

    loop.add(A, 5)
    wire.deliver(2)

    assert (events, wire.pulled()) == (["arrival"], [(0, 7)])
    assert offsets(loop.take(10, NONE)) == [5, 6]
    assert loop.position(A) == 7


def test_a_queue_has_one_pull_at_a_time() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    for _ in range(3):
        loop.take(10, NONE)

    assert wire.pulled() == [(0, 0)]


def test_only_the_first_pull_of_a_queue_does_not_wait_at_the_broker() -> None:
    """A poll right after a rebalance has the messages that are there, and a broker holds all later pulls."""
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)
    assert loop.is_settling(NONE)
    assert not loop.is_settling(frozenset({A}))

    first = wire.pulls[0][3]
    wire.answer(Pulled([], 0))

    assert (first, wire.pulls[0][3]) == (False, True)
    assert not loop.is_settling(NONE)
    assert events == ["arrival"]


def test_a_queue_settles_when_it_holds_what_this_client_has_sent() -> None:
    """A broker acknowledges a message before it is in its queue."""
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)

    wire.answer(Pulled([], 0, lags=True))
    assert loop.is_settling(NONE)
    assert (wire.pulls[0][3], events) == (True, []), "the broker holds the next pull until a message arrives"
    wire.deliver(1)

    assert not loop.is_settling(NONE)
    assert events == ["arrival"]


def test_a_settled_queue_settles_again_after_a_seek() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.answer(Pulled([], 0))

    wire.answer(Pulled([], 0, lags=True))
    assert not loop.is_settling(NONE)
    loop.seek(A, 5)

    assert loop.is_settling(NONE)


def test_a_full_queue_is_pulled_again_when_messages_were_taken() -> None:
    wire = Wire()
    loop, _ = loop_over(wire, messages=3)
    loop.add(A, 0)
    wire.deliver(2)
    wire.deliver(2)
    assert wire.pulled() == []

    loop.take(2, NONE)

    assert wire.pulled() == [(0, 4)]


def test_a_queue_is_also_full_by_its_bytes() -> None:
    wire = Wire()
    loop, _ = loop_over(wire, size=10)
    loop.add(A, 0)

    wire.deliver(2, b"12345")
    assert wire.pulled() == []
    loop.take(1, NONE)

    assert wire.pulled() == [(0, 2)]


def test_queues_take_turns_at_being_the_first() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    loop.add(B, 0)
    wire.deliver(4)
    wire.deliver(4)

    taken = [loop.take(2, NONE)[0].queue_id for _ in range(4)]

    assert taken == [0, 1, 0, 1]


def test_an_excluded_queue_keeps_its_messages() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.deliver(2)

    assert loop.take(10, frozenset({A})) == []
    assert offsets(loop.take(10, NONE)) == [0, 1]


def test_excluded_messages_move_the_position() -> None:
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)
    wire.deliver(1)
    loop.take(1, NONE)
    events.clear()

    wire.answer(Pulled([], 9))

    assert (loop.position(A), events, wire.pulled()) == (9, [], [(0, 9)])


def test_an_outcome_from_before_a_seek_is_ignored() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    loop.seek(A, 50)
    wire.deliver(3)

    assert loop.take(10, NONE) == []
    assert wire.pulled() == [(0, 50)]
    assert loop.position(A) == 50


def test_a_seek_to_the_position_keeps_the_prefetched_messages() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.deliver(3)

    loop.seek(A, 0)

    assert offsets(loop.take(10, NONE)) == [0, 1, 2]


def test_a_removed_queue_has_no_messages_and_no_pulls() -> None:
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)

    loop.remove(A)
    wire.deliver(3)

    assert (loop.take(10, NONE), loop.position(A), events) == ([], None, [])
    assert wire.pulled() == []


def test_a_failed_pull_is_repeated_when_it_is_due() -> None:
    clock, wire = VirtualClock(), Wire()
    loop, events = loop_over(wire, clock)
    loop.add(A, 3)
    wire.answer(PullFailed(BrokerError("busy"), 20))
    assert (wire.pulled(), events) == ([], ["retry", "arrival"])
    loop.take(10, NONE)
    assert wire.pulled() == []

    assert loop.retry() == clock.now_ms() + 20
    clock.move_ms(20)
    assert loop.retry() is None

    assert wire.pulled() == [(0, 3)]


def test_a_failed_connection_is_a_failed_pull() -> None:
    clock, wire = VirtualClock(), Wire()
    wire.fails = True
    loop, _ = loop_over(wire, clock)
    loop.add(A, 3)
    wire.fails = False

    clock.move_ms(1_000)
    loop.retry()

    assert wire.pulled() == [(0, 3)]


def test_pulls_continue_at_the_offset_of_the_outcome() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 3)

    wire.answer(Pulled([], 100))

    assert wire.pulled() == [(0, 100)]


def test_pulls_continue_at_the_broker_of_the_outcome() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    wire.answer(Pulled([], 0, broker_id=1))

    assert wire.pulls[0][2] == 1


def test_a_member_that_a_restarted_broker_does_not_know_is_logged_only_if_the_heartbeat_does_not_help() -> None:
    clock, wire = VirtualClock(), Wire()
    with capture_logs() as logs:
        pulls, _events = loop_over(wire, clock)
        pulls.add(A, 0)
        for _ in range(2):
            wire.answer(PullFailed(BrokerError("unknown member"), 20, needs_heartbeat=True))
            clock.move_ms(20)
            pulls.retry()

    assert [(log["event"], log["log_level"]) for log in logs] == [
        ("remote.member_unknown", "debug"),
        ("remote.pull_failed", "warning"),
    ]

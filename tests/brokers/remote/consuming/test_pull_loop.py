"""Fetching ahead: one pull a queue, bounded room, fair turns, and nothing of a queue that was read anew."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.brokers.remote.consuming.pull_loop import Outcome, Pulled, PullFailed, PullLoop
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import RemoteConnectError
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
    """Keeps the pulls that are out, for the test to answer."""

    def __init__(self) -> None:
        self.out: list[tuple[MessageQueue, int, int, bool, Callable[[Outcome], None]]] = []
        self.fails = False

    def pull(
        self, queue: MessageQueue, queue_offset: int, broker_id: int, may_wait: bool, done: Callable[[Outcome], None], /
    ) -> None:
        if self.fails:
            raise RemoteConnectError("no way")
        self.out.append((queue, queue_offset, broker_id, may_wait, done))

    def asked(self) -> list[tuple[int, int]]:
        """Queue id and offset of the pulls that are out."""
        return [(queue.queue_id, queue_offset) for queue, queue_offset, *_ in self.out]

    def answer(self, outcome: Outcome) -> None:
        """Answer the oldest."""
        self.out.pop(0)[-1](outcome)

    def bring(self, count: int, body: bytes = b"x") -> None:
        queue, at, *_ = self.out[0]
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


def test_a_queue_is_read_from_its_position_and_then_on() -> None:
    wire = Wire()
    loop, events = loop_over(wire)

    loop.add(A, 5)
    wire.bring(2)

    assert (events, wire.asked()) == (["arrival"], [(0, 7)])
    assert offsets(loop.take(10, NONE)) == [5, 6]
    assert loop.position(A) == 7


def test_one_pull_is_out_for_a_queue_at_most() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    for _ in range(3):
        loop.take(10, NONE)

    assert wire.asked() == [(0, 0)]


def test_only_the_first_pull_of_a_queue_does_not_wait() -> None:
    """So that it is known soon what is there; after that nobody needs to ask twice."""
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)
    assert loop.is_settling(NONE)
    assert not loop.is_settling(frozenset({A}))

    first = wire.out[0][3]
    wire.answer(Pulled([], 0))

    assert (first, wire.out[0][3]) == (False, True)
    assert not loop.is_settling(NONE)
    assert events == ["arrival"]


def test_a_queue_settles_when_it_holds_what_this_client_has_sent() -> None:
    """A broker acknowledges a message before it is in its queue."""
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)

    wire.answer(Pulled([], 0, lags=True))
    assert loop.is_settling(NONE)
    assert (wire.out[0][3], events) == (True, []), "the broker holds the next pull until the message arrives"
    wire.bring(1)

    assert not loop.is_settling(NONE)
    assert events == ["arrival"]


def test_a_queue_that_settled_stays_so_until_a_seek() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.answer(Pulled([], 0))

    wire.answer(Pulled([], 0, lags=True))
    assert not loop.is_settling(NONE)
    loop.seek(A, 5)

    assert loop.is_settling(NONE)


def test_a_full_queue_asks_for_no_more_until_there_is_room() -> None:
    wire = Wire()
    loop, _ = loop_over(wire, messages=3)
    loop.add(A, 0)
    wire.bring(2)
    wire.bring(2)
    assert wire.asked() == []

    loop.take(2, NONE)

    assert wire.asked() == [(0, 4)]


def test_a_queue_is_full_by_its_bytes_too() -> None:
    wire = Wire()
    loop, _ = loop_over(wire, size=10)
    loop.add(A, 0)

    wire.bring(2, b"12345")
    assert wire.asked() == []
    loop.take(1, NONE)

    assert wire.asked() == [(0, 2)]


def test_queues_take_turns_at_being_first() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    loop.add(B, 0)
    wire.bring(4)
    wire.bring(4)

    taken = [loop.take(2, NONE)[0].queue_id for _ in range(4)]

    assert taken == [0, 1, 0, 1]


def test_a_queue_that_is_left_alone_keeps_its_messages() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.bring(2)

    assert loop.take(10, frozenset({A})) == []
    assert offsets(loop.take(10, NONE)) == [0, 1]


def test_what_the_selector_left_out_moves_the_position() -> None:
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)
    wire.bring(1)
    loop.take(1, NONE)
    events.clear()

    wire.answer(Pulled([], 9))

    assert (loop.position(A), events, wire.asked()) == (9, [], [(0, 9)])


def test_after_a_seek_an_older_answer_is_nothing() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    loop.seek(A, 50)
    wire.bring(3)

    assert loop.take(10, NONE) == []
    assert wire.asked() == [(0, 50)]
    assert loop.position(A) == 50


def test_a_seek_to_where_it_stands_keeps_what_was_fetched() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)
    wire.bring(3)

    loop.seek(A, 0)

    assert offsets(loop.take(10, NONE)) == [0, 1, 2]


def test_a_queue_that_was_dropped_gives_nothing_and_asks_for_nothing() -> None:
    wire = Wire()
    loop, events = loop_over(wire)
    loop.add(A, 0)

    loop.remove(A)
    wire.bring(3)

    assert (loop.take(10, NONE), loop.position(A), events) == ([], None, [])
    assert wire.asked() == []


def test_a_pull_that_failed_is_tried_again_in_its_time() -> None:
    clock, wire = VirtualClock(), Wire()
    loop, events = loop_over(wire, clock)
    loop.add(A, 3)
    wire.answer(PullFailed("busy", 20))
    assert (wire.asked(), events) == ([], ["retry", "arrival"])
    loop.take(10, NONE)
    assert wire.asked() == []

    assert loop.retry() == clock.now_ms() + 20
    clock.move_ms(20)
    assert loop.retry() is None

    assert wire.asked() == [(0, 3)]


def test_a_connection_that_cannot_be_made_is_a_pull_that_failed() -> None:
    clock, wire = VirtualClock(), Wire()
    wire.fails = True
    loop, _ = loop_over(wire, clock)
    loop.add(A, 3)
    wire.fails = False

    clock.move_ms(1_000)
    loop.retry()

    assert wire.asked() == [(0, 3)]


def test_an_offset_that_moved_is_followed() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 3)

    wire.answer(Pulled([], 100))

    assert wire.asked() == [(0, 100)]


def test_the_broker_says_whom_to_ask_next() -> None:
    wire = Wire()
    loop, _ = loop_over(wire)
    loop.add(A, 0)

    wire.answer(Pulled([], 0, broker_id=1))

    assert wire.out[0][2] == 1

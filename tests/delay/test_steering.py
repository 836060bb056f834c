"""Cancelling and rescheduling: what is answered is true, for levels and timers, over kills and file ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mqtemplate.delay import TimerLimits
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import decode_properties
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.waiting_room import WaitingRoom

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

BY_LEVEL = {"DELAY": 5}  # a minute
BY_TIMER = {"TIMER_DELAY_MS": 60_000}
FAR = {"TIMER_DELAY_MS": 3 * HOUR_MS}  # beyond the small wheel's window: parked on the way
BOTH_KINDS = pytest.mark.parametrize("delay", [BY_LEVEL, BY_TIMER, FAR], ids=["level", "timer", "parked"])


@pytest.fixture
def room(tmp_path: Path) -> WaitingRoom:
    return WaitingRoom(tmp_path / "store")


@BOTH_KINDS
def test_a_cancelled_message_is_never_delivered(room: WaitingRoom, delay: dict[str, int]) -> None:
    handle = room.send_for(b"taken-back", **delay)
    room.send_for(b"kept", **delay)
    room.advance(1_500)

    result = room.steering.cancel(handle)
    room.advance(4 * HOUR_MS)

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)
    assert room.bodies() == [b"kept"]


@BOTH_KINDS
def test_the_answer_to_a_second_cancel_is_still_cancelled(room: WaitingRoom, delay: dict[str, int]) -> None:
    """It is the truth about the message, not about this call; the count tells that."""
    handle = room.send_for(b"taken-back", KEYS="4466", **delay)
    room.steering.cancel(handle)

    again, by_key = room.steering.cancel(handle), room.steering.cancel(None, "4466")
    room.advance(4 * HOUR_MS)
    later = room.steering.cancel(handle)

    assert {again.status, by_key.status, later.status} == {ScheduleChangeStatus.CANCELLED}
    assert (again.count, by_key.count, later.count) == (0, 0, 0)


@BOTH_KINDS
def test_what_was_delivered_cannot_be_cancelled_and_says_so(room: WaitingRoom, delay: dict[str, int]) -> None:
    handle = room.send_for(b"out", **delay)
    room.advance(4 * HOUR_MS)

    assert room.steering.cancel(handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
    assert (
        room.steering.reschedule(handle, room.clock.now_ms() + 1_000).status is ScheduleChangeStatus.ALREADY_DELIVERED
    )
    room.advance(4 * HOUR_MS)
    assert room.bodies() == [b"out"]


def test_what_nobody_sent_is_unknown(room: WaitingRoom) -> None:
    handle = WaitingRoom().send_for(b"elsewhere", **BY_TIMER)

    assert room.steering.cancel(handle).status is ScheduleChangeStatus.UNKNOWN
    assert room.steering.cancel(None, "4466").status is ScheduleChangeStatus.UNKNOWN
    assert room.steering.reschedule(None, room.clock.now_ms(), "4466").status is ScheduleChangeStatus.UNKNOWN


def test_a_message_that_never_waited_counts_as_delivered(room: WaitingRoom) -> None:
    room.send(b"at-once", UNIQ_KEY="at-once", KEYS="4466")

    assert room.steering.cancel(None, "4466", "orders").status is ScheduleChangeStatus.ALREADY_DELIVERED


def test_a_key_takes_back_all_that_waits_under_it(room: WaitingRoom) -> None:
    room.send_for(b"a", KEYS="4466 x", **BY_LEVEL)
    room.send_for(b"b", KEYS="4466", **BY_TIMER)
    room.send_for(b"other-topic", "invoices", KEYS="4466", **BY_TIMER)
    room.send_for(b"other-key", KEYS="44667", **BY_TIMER)

    result = room.steering.cancel(None, "4466", "orders")
    room.advance(HOUR_MS)

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 2)
    assert room.bodies() == [b"other-key"]
    assert room.bodies("invoices") == [b"other-topic"]


def test_a_retry_is_no_waiting_message_unless_its_topic_is_named(room: WaitingRoom) -> None:
    """Its message was delivered, so "cancelled" would be no truth about it."""
    room.send_for(b"again", "%RETRY%billing", KEYS="4466", **BY_LEVEL)

    assert room.steering.cancel(None, "4466").count == 0
    assert room.steering.cancel(None, "4466", "%RETRY%billing").count == 1


def test_a_handle_of_several_takes_back_each(room: WaitingRoom) -> None:
    handles = [room.send_for(b"%d" % number, **BY_TIMER) for number in range(3)]

    result = room.steering.cancel(",".join(handles))

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 3)


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [0, 5, 500, 30_000, 61_000, 2 * HOUR_MS, 30 * DAY_MS])
def test_a_rescheduled_message_comes_once_at_its_new_time(
    room: WaitingRoom, delay: dict[str, int], new_delay_ms: int
) -> None:
    handle = room.send_for(b"moved", TAGS="paid", KEYS="4466", **delay)
    room.advance(1_500)
    new_ms = room.clock.now_ms() + new_delay_ms

    result = room.steering.reschedule(handle, new_ms)
    room.advance(new_delay_ms + 4 * HOUR_MS)

    [arrived] = room.arrived()
    assert (result.status, result.count) == (ScheduleChangeStatus.RESCHEDULED, 1)
    assert arrived.at_ms == new_ms
    assert arrived.properties["TIMER_DELIVER_MS"] == str(new_ms)
    assert arrived.properties["UNIQ_KEY"] == "moved"
    assert arrived.properties["TAGS"] == "paid"


@BOTH_KINDS
def test_the_first_handle_goes_on_naming_a_message_that_was_moved(room: WaitingRoom, delay: dict[str, int]) -> None:
    handle = room.send_for(b"moved", **delay)
    moved = room.steering.reschedule(handle, room.clock.now_ms() + HOUR_MS)
    room.steering.reschedule(handle, room.clock.now_ms() + 2 * HOUR_MS)

    result = room.steering.cancel(handle)
    room.advance(4 * HOUR_MS)

    assert result.status is ScheduleChangeStatus.CANCELLED
    assert room.steering.cancel(*moved.handles).status is ScheduleChangeStatus.CANCELLED
    assert room.bodies() == []


def test_a_message_keeps_its_handle_over_its_rolls(room: WaitingRoom) -> None:
    handle = room.send_for(b"far", TIMER_DELAY_MS=10 * HOUR_MS)
    room.advance(5 * HOUR_MS)

    result = room.steering.cancel(handle)
    room.advance(10 * HOUR_MS)

    assert result.status is ScheduleChangeStatus.CANCELLED
    assert room.bodies() == []


def test_a_time_that_cannot_be_kept_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    room = WaitingRoom(tmp_path / "store", limits=TimerLimits(max_delay_ms=DAY_MS))
    handle = room.send_for(b"stays", **BY_TIMER)

    with pytest.raises(DelayError, match=r"allowed are 86400000 ms \(1 days\)"):
        room.steering.reschedule(handle, room.clock.now_ms() + DAY_MS + 1)
    room.advance(60_000)

    assert room.bodies() == [b"stays"]


def test_a_wish_names_a_handle_or_a_key(room: WaitingRoom) -> None:
    with pytest.raises(MessageError, match="name what waits by its handle or by key"):
        room.steering.cancel(None)
    with pytest.raises(MessageError, match="by one of them"):
        room.steering.cancel("handle", "key")
    with pytest.raises(MessageError, match="key must be one word, got 'a b'"):
        room.steering.cancel(None, "a b")


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [None, 0, 5_000, 2 * HOUR_MS])
@pytest.mark.parametrize("end", ["close", "crash", "checkpoint and crash"])
def test_a_wish_outlives_the_process(tmp_path: Path, delay: dict[str, int], new_delay_ms: int | None, end: str) -> None:
    room = WaitingRoom(tmp_path / "store")
    handle = room.send_for(b"steered", **delay)
    room.send_for(b"kept", **delay)
    room.advance(1_500)
    room.store.take_checkpoint()
    if new_delay_ms is None:
        room.steering.cancel(handle)
    else:
        room.steering.reschedule(handle, room.clock.now_ms() + new_delay_ms)
    if end == "checkpoint and crash":
        room.store.take_checkpoint()
    room.close() if end == "close" else room.crash()

    again = WaitingRoom(tmp_path / "store", clock=room.clock)
    again.advance(4 * HOUR_MS)

    expected = [b"kept"] if new_delay_ms is None else [b"kept", b"steered"]
    assert sorted(again.bodies()) == expected
    again.close()


@BOTH_KINDS
def test_a_wish_is_found_again_though_the_files_of_what_waits_are_lost(tmp_path: Path, delay: dict[str, int]) -> None:
    """Wheel, timer log, queues and positions are derived; the marker is in the log."""
    room = WaitingRoom(tmp_path / "store")
    gone = room.send_for(b"gone", **delay)
    moved = room.send_for(b"moved", **delay)
    room.steering.cancel(gone)
    room.steering.reschedule(moved, room.clock.now_ms() + 2 * HOUR_MS)
    room.close()
    for name in ("config/timercheck", "config/delayOffset.json", "config/delayOffset.json.bak", "timerwheel"):
        (tmp_path / "store" / name).unlink(missing_ok=True)
    for path in (tmp_path / "store" / "consumequeue").rglob("0*"):
        if path.is_file():
            path.unlink()

    again = WaitingRoom(tmp_path / "store", clock=room.clock)
    again.advance(4 * HOUR_MS)

    assert again.bodies() == [b"moved"]
    again.close()


def markers_of(room: WaitingRoom) -> list[StoredRecord]:
    records = [message.record for message in room.arrived(TIMER_TOPIC)]
    return [record for record in records if "TIMER_DEL_UNIQKEY" in decode_properties(record.properties_bytes)]


@BOTH_KINDS
def test_a_marker_stands_where_rocketmq_looks_for_it(room: WaitingRoom, delay: dict[str, int]) -> None:
    """So that a folder that RocketMQ opens next keeps the promise. It cannot for levels, which know no recall."""
    handle = room.send_for(b"gone", **delay)

    room.steering.cancel(handle)

    [marker] = markers_of(room)
    assert (
        decode_properties(marker.properties_bytes)["TIMER_DEL_UNIQKEY"]
        == decode_properties(marker.properties_bytes)["UNIQ_KEY"]
        == "gone"
    )
    assert decode_properties(marker.properties_bytes)["TAGS"] == "_RECALL_TAG_"
    assert decode_properties(marker.properties_bytes)["REAL_TOPIC"] == "orders"
    assert marker.body == b"0"


def test_a_marker_beside_the_moved_message_itself_deletes_nothing_by_key(room: WaitingRoom) -> None:
    """Both stand in one slot, and RocketMQ deletes by key in a slot: better twice there than never."""
    handle = room.send_for(b"moved", TIMER_DELIVER_MS=room.clock.now_ms() + 60_100)

    room.steering.reschedule(handle, room.clock.now_ms() + 60_900)
    room.advance(120_000)

    assert [decode_properties(marker.properties_bytes)["TIMER_DEL_UNIQKEY"] for marker in markers_of(room)] == ["-"]
    assert room.bodies() == [b"moved"]


def test_steering_is_counted(room: WaitingRoom) -> None:
    handles = [room.send_for(b"%d" % number, **BY_TIMER) for number in range(3)]
    room.steering.cancel(handles[0])
    room.steering.reschedule(",".join(handles[1:]), room.clock.now_ms() + 90_000)
    room.steering.cancel(handles[0])

    metrics = room.store.metrics.snapshot()

    assert (metrics["delay.cancelled"], metrics["delay.rescheduled"]) == (1, 2)


ROUNDS = 50
A_ROUND = 1_000


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads that change places a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("kind", ["level", "timer"])
def test_a_race_against_delivery_has_one_winner(kind: str) -> None:
    """Twice 50,000 wishes while the service hands the same messages over: never both, never neither."""
    room = WaitingRoom(levels="2s", log_file_size=1 << 22)
    chance = Random(4)
    answers: dict[bytes, ScheduleChangeStatus] = {}
    for number in range(ROUNDS):
        wishes = []
        for place in range(A_ROUND):
            body = b"%d-%d" % (number, place)
            handle = room.send_for(body, **({"DELAY": 1} if kind == "level" else {"TIMER_DELAY_MS": 2_000}))
            wishes.append((body, handle, chance.random() < 0.5))
            room.clock.move_ms(1)
        chance.shuffle(wishes)
        room.advance(1_000)  # the first is due a millisecond later
        answers |= race(room, wishes)

    room.advance(HOUR_MS)
    bodies = room.bodies()

    assert len(bodies) == len(set(bodies)), "delivered twice"
    cancelled = {body for body, status in answers.items() if status is ScheduleChangeStatus.CANCELLED}
    assert cancelled.isdisjoint(bodies), "cancelled and delivered"
    assert cancelled.union(bodies) == answers.keys(), "neither cancelled nor delivered"
    won = sum(status is not ScheduleChangeStatus.ALREADY_DELIVERED for status in answers.values())
    assert 0.02 * len(answers) < won < 0.98 * len(answers), "no race: one side was always first"


def race(room: WaitingRoom, wishes: list[tuple[bytes, str, bool]]) -> dict[bytes, ScheduleChangeStatus]:
    """One thread hands over, a millisecond's worth at a time; this one cancels or moves the same messages."""
    start = threading.Barrier(2)

    def hand_over() -> None:
        start.wait()
        for _ in range(A_ROUND):
            room.clock.move_ms(1)
            room.confirm()

    thread = threading.Thread(target=hand_over)
    thread.start()
    start.wait()
    later_ms = room.clock.now_ms() + 1_800_000
    answers = {}
    for body, handle, cancels in wishes:
        result = room.steering.cancel(handle) if cancels else room.steering.reschedule(handle, later_ms)
        answers[body] = result.status
    thread.join()
    assert ScheduleChangeStatus.UNKNOWN not in answers.values()
    return answers

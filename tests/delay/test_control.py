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
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.delay_engine import DelayEngine

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

BY_LEVEL = {"DELAY": 5}  # a minute
BY_TIMER = {"TIMER_DELAY_MS": 60_000}
FAR = {"TIMER_DELAY_MS": 3 * HOUR_MS}  # beyond the small wheel's window: parked on the way
BOTH_KINDS = pytest.mark.parametrize("delay", [BY_LEVEL, BY_TIMER, FAR], ids=["level", "timer", "parked"])


@pytest.fixture
def engine(tmp_path: Path) -> DelayEngine:
    return DelayEngine(tmp_path / "store")


@BOTH_KINDS
def test_a_cancelled_message_is_never_delivered(engine: DelayEngine, delay: dict[str, int]) -> None:
    handle = engine.send_for(b"taken-back", **delay)
    engine.send_for(b"kept", **delay)
    engine.advance(1_500)

    result = engine.control.cancel(handle)
    engine.advance(4 * HOUR_MS)

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)
    assert engine.bodies() == [b"kept"]


@BOTH_KINDS
def test_the_answer_to_a_second_cancel_is_still_cancelled(engine: DelayEngine, delay: dict[str, int]) -> None:
    """It is the truth about the message, not about this call; the count tells that."""
    handle = engine.send_for(b"taken-back", KEYS="4466", **delay)
    engine.control.cancel(handle)

    again, by_key = engine.control.cancel(handle), engine.control.cancel(None, "4466")
    engine.advance(4 * HOUR_MS)
    later = engine.control.cancel(handle)

    assert {again.status, by_key.status, later.status} == {ScheduleChangeStatus.CANCELLED}
    assert (again.count, by_key.count, later.count) == (0, 0, 0)


@BOTH_KINDS
def test_what_was_delivered_cannot_be_cancelled_and_says_so(engine: DelayEngine, delay: dict[str, int]) -> None:
    handle = engine.send_for(b"out", **delay)
    engine.advance(4 * HOUR_MS)

    assert engine.control.cancel(handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
    assert (
        engine.control.reschedule(handle, engine.clock.now_ms() + 1_000).status
        is ScheduleChangeStatus.ALREADY_DELIVERED
    )
    engine.advance(4 * HOUR_MS)
    assert engine.bodies() == [b"out"]


def test_what_nobody_sent_is_unknown(engine: DelayEngine) -> None:
    handle = DelayEngine().send_for(b"elsewhere", **BY_TIMER)

    assert engine.control.cancel(handle).status is ScheduleChangeStatus.UNKNOWN
    assert engine.control.cancel(None, "4466").status is ScheduleChangeStatus.UNKNOWN
    assert engine.control.reschedule(None, engine.clock.now_ms(), "4466").status is ScheduleChangeStatus.UNKNOWN


def test_a_message_that_never_waited_counts_as_delivered(engine: DelayEngine) -> None:
    engine.send(b"at-once", UNIQ_KEY="at-once", KEYS="4466")

    assert engine.control.cancel(None, "4466", "orders").status is ScheduleChangeStatus.ALREADY_DELIVERED


def test_a_key_takes_back_all_that_waits_under_it(engine: DelayEngine) -> None:
    engine.send_for(b"a", KEYS="4466 x", **BY_LEVEL)
    engine.send_for(b"b", KEYS="4466", **BY_TIMER)
    engine.send_for(b"other-topic", "invoices", KEYS="4466", **BY_TIMER)
    engine.send_for(b"other-key", KEYS="44667", **BY_TIMER)

    result = engine.control.cancel(None, "4466", "orders")
    engine.advance(HOUR_MS)

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 2)
    assert engine.bodies() == [b"other-key"]
    assert engine.bodies("invoices") == [b"other-topic"]


def test_a_retry_is_no_waiting_message_unless_its_topic_is_named(engine: DelayEngine) -> None:
    """Its message was delivered, so "cancelled" would be no truth about it."""
    engine.send_for(b"again", "%RETRY%billing", KEYS="4466", **BY_LEVEL)

    assert engine.control.cancel(None, "4466").count == 0
    assert engine.control.cancel(None, "4466", "%RETRY%billing").count == 1


def test_a_handle_of_several_takes_back_each(engine: DelayEngine) -> None:
    handles = [engine.send_for(b"%d" % number, **BY_TIMER) for number in range(3)]

    result = engine.control.cancel(",".join(handles))

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 3)


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [0, 5, 500, 30_000, 61_000, 2 * HOUR_MS, 30 * DAY_MS])
def test_a_rescheduled_message_comes_once_at_its_new_time(
    engine: DelayEngine, delay: dict[str, int], new_delay_ms: int
) -> None:
    handle = engine.send_for(b"moved", TAGS="paid", KEYS="4466", **delay)
    engine.advance(1_500)
    new_ms = engine.clock.now_ms() + new_delay_ms

    result = engine.control.reschedule(handle, new_ms)
    engine.advance(new_delay_ms + 4 * HOUR_MS)

    [arrived] = engine.arrived()
    assert (result.status, result.count) == (ScheduleChangeStatus.RESCHEDULED, 1)
    assert arrived.at_ms == new_ms
    assert arrived.properties["TIMER_DELIVER_MS"] == str(new_ms)
    assert arrived.properties["UNIQ_KEY"] == "moved"
    assert arrived.properties["TAGS"] == "paid"


@BOTH_KINDS
def test_the_first_handle_goes_on_naming_a_message_that_was_moved(engine: DelayEngine, delay: dict[str, int]) -> None:
    handle = engine.send_for(b"moved", **delay)
    moved = engine.control.reschedule(handle, engine.clock.now_ms() + HOUR_MS)
    engine.control.reschedule(handle, engine.clock.now_ms() + 2 * HOUR_MS)

    result = engine.control.cancel(handle)
    engine.advance(4 * HOUR_MS)

    assert result.status is ScheduleChangeStatus.CANCELLED
    assert engine.control.cancel(*moved.handles).status is ScheduleChangeStatus.CANCELLED
    assert engine.bodies() == []


def test_a_message_keeps_its_handle_over_its_rolls(engine: DelayEngine) -> None:
    handle = engine.send_for(b"far", TIMER_DELAY_MS=10 * HOUR_MS)
    engine.advance(5 * HOUR_MS)

    result = engine.control.cancel(handle)
    engine.advance(10 * HOUR_MS)

    assert result.status is ScheduleChangeStatus.CANCELLED
    assert engine.bodies() == []


def test_a_time_that_cannot_be_kept_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    engine = DelayEngine(tmp_path / "store", limits=TimerLimits(max_delay_ms=DAY_MS))
    handle = engine.send_for(b"stays", **BY_TIMER)

    with pytest.raises(DelayError, match=r"allowed are 86400000 ms \(1 days\)"):
        engine.control.reschedule(handle, engine.clock.now_ms() + DAY_MS + 1)
    engine.advance(60_000)

    assert engine.bodies() == [b"stays"]


def test_a_wish_names_a_handle_or_a_key(engine: DelayEngine) -> None:
    with pytest.raises(MessageError, match="name the pending message by its handle or by key"):
        engine.control.cancel(None)
    with pytest.raises(MessageError, match="by one of them"):
        engine.control.cancel("handle", "key")
    with pytest.raises(MessageError, match="key must be one word, got 'a b'"):
        engine.control.cancel(None, "a b")


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [None, 0, 5_000, 2 * HOUR_MS])
@pytest.mark.parametrize("end", ["close", "crash", "checkpoint and crash"])
def test_a_wish_outlives_the_process(tmp_path: Path, delay: dict[str, int], new_delay_ms: int | None, end: str) -> None:
    engine = DelayEngine(tmp_path / "store")
    handle = engine.send_for(b"steered", **delay)
    engine.send_for(b"kept", **delay)
    engine.advance(1_500)
    engine.store.take_checkpoint()
    if new_delay_ms is None:
        engine.control.cancel(handle)
    else:
        engine.control.reschedule(handle, engine.clock.now_ms() + new_delay_ms)
    if end == "checkpoint and crash":
        engine.store.take_checkpoint()
    engine.close() if end == "close" else engine.crash()

    again = DelayEngine(tmp_path / "store", clock=engine.clock)
    again.advance(4 * HOUR_MS)

    expected = [b"kept"] if new_delay_ms is None else [b"kept", b"steered"]
    assert sorted(again.bodies()) == expected
    again.close()


@BOTH_KINDS
def test_a_wish_is_found_again_though_the_files_of_what_waits_are_lost(tmp_path: Path, delay: dict[str, int]) -> None:
    """Wheel, timer log, queues and positions are derived; the marker is in the log."""
    engine = DelayEngine(tmp_path / "store")
    gone = engine.send_for(b"gone", **delay)
    moved = engine.send_for(b"moved", **delay)
    engine.control.cancel(gone)
    engine.control.reschedule(moved, engine.clock.now_ms() + 2 * HOUR_MS)
    engine.close()
    for name in ("config/timercheck", "config/delayOffset.json", "config/delayOffset.json.bak", "timerwheel"):
        (tmp_path / "store" / name).unlink(missing_ok=True)
    for path in (tmp_path / "store" / "consumequeue").rglob("0*"):
        if path.is_file():
            path.unlink()

    again = DelayEngine(tmp_path / "store", clock=engine.clock)
    again.advance(4 * HOUR_MS)

    assert again.bodies() == [b"moved"]
    again.close()


def markers_of(engine: DelayEngine) -> list[StoredRecord]:
    records = [message.record for message in engine.arrived(TIMER_TOPIC)]
    return [record for record in records if "TIMER_DEL_UNIQKEY" in record.properties]


@BOTH_KINDS
def test_a_marker_stands_where_rocketmq_looks_for_it(engine: DelayEngine, delay: dict[str, int]) -> None:
    """So that a folder that RocketMQ opens next keeps the promise. It cannot for levels, which know no recall."""
    handle = engine.send_for(b"gone", **delay)

    engine.control.cancel(handle)

    [marker] = markers_of(engine)
    assert marker.properties["TIMER_DEL_UNIQKEY"] == marker.properties["UNIQ_KEY"] == "gone"
    assert marker.properties["TAGS"] == "_RECALL_TAG_"
    assert marker.properties["REAL_TOPIC"] == "orders"
    assert marker.body == b"0"


def test_a_marker_beside_the_moved_message_itself_deletes_nothing_by_key(engine: DelayEngine) -> None:
    """Both stand in one slot, and RocketMQ deletes by key in a slot: better twice there than never."""
    handle = engine.send_for(b"moved", TIMER_DELIVER_MS=engine.clock.now_ms() + 60_100)

    engine.control.reschedule(handle, engine.clock.now_ms() + 60_900)
    engine.advance(120_000)

    assert [marker.properties["TIMER_DEL_UNIQKEY"] for marker in markers_of(engine)] == ["-"]
    assert engine.bodies() == [b"moved"]


def test_steering_is_counted(engine: DelayEngine) -> None:
    handles = [engine.send_for(b"%d" % number, **BY_TIMER) for number in range(3)]
    engine.control.cancel(handles[0])
    engine.control.reschedule(",".join(handles[1:]), engine.clock.now_ms() + 90_000)
    engine.control.cancel(handles[0])

    metrics = engine.store.metrics.snapshot()

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
    engine = DelayEngine(levels="2s", log_file_size=1 << 22)
    chance = Random(4)
    answers: dict[bytes, ScheduleChangeStatus] = {}
    for number in range(ROUNDS):
        wishes = []
        for place in range(A_ROUND):
            body = b"%d-%d" % (number, place)
            handle = engine.send_for(body, **({"DELAY": 1} if kind == "level" else {"TIMER_DELAY_MS": 2_000}))
            wishes.append((body, handle, chance.random() < 0.5))
            engine.clock.move_ms(1)
        chance.shuffle(wishes)
        engine.advance(1_000)  # the first is due a millisecond later
        answers |= race(engine, wishes)

    engine.advance(HOUR_MS)
    bodies = engine.bodies()

    assert len(bodies) == len(set(bodies)), "delivered twice"
    cancelled = {body for body, status in answers.items() if status is ScheduleChangeStatus.CANCELLED}
    assert cancelled.isdisjoint(bodies), "cancelled and delivered"
    assert cancelled.union(bodies) == answers.keys(), "neither cancelled nor delivered"
    won = sum(status is not ScheduleChangeStatus.ALREADY_DELIVERED for status in answers.values())
    assert 0.02 * len(answers) < won < 0.98 * len(answers), "no race: one side was always first"


def race(engine: DelayEngine, wishes: list[tuple[bytes, str, bool]]) -> dict[bytes, ScheduleChangeStatus]:
    """One thread hands over, a millisecond's worth at a time; this one cancels or moves the same messages."""
    start = threading.Barrier(2)

    def hand_over() -> None:
        start.wait()
        for _ in range(A_ROUND):
            engine.clock.move_ms(1)
            engine.release_due()

    thread = threading.Thread(target=hand_over)
    thread.start()
    start.wait()
    later_ms = engine.clock.now_ms() + 1_800_000
    answers = {}
    for body, handle, cancels in wishes:
        result = engine.control.cancel(handle) if cancels else engine.control.reschedule(handle, later_ms)
        answers[body] = result.status
    thread.join()
    assert ScheduleChangeStatus.UNKNOWN not in answers.values()
    return answers

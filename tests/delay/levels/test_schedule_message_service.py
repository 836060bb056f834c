"""Delay levels: stored, waited for, handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mqtemplate.delay import DEAD_LETTER_TOPIC, DelayLevels
from mqtemplate.delay.releaser import observe_all
from mqtemplate.errors import StoreFullError
from mqtemplate.metrics import Histogram, HistogramSnapshot
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import encode_properties
from mqtemplate.store import PutResult
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import foreign_level_message

SECOND, MINUTE = 1_000, 60_000


def change_table(engine: DelayEngine, text: str) -> None:
    """At run time: for the front door, and for the service."""
    engine.levels = DelayLevels.parse(text)


# --- storing ----------------------------------------------------------------------------------------


@pytest.mark.feature("B4", "E4", "G5")
def test_a_delayed_message_is_stored_in_the_schedule_topic(engine: DelayEngine) -> None:
    """It goes to the commit log first, under another name, and is not in its own topic before its time."""
    engine.send(b"later", DELAY=3)
    engine.release_due()

    [record] = engine.delayed_records(queue_id=2)
    assert (record.topic, record.queue_id, record.body) == (SCHEDULE_TOPIC, 2, b"later")
    assert engine.bodies() == []


@pytest.mark.feature("B5", "E3")
def test_each_level_that_is_used_has_a_queue(open_engine: OpenEngine) -> None:
    """Each folder has its own; ``SCHEDULE_TOPIC_XXXX/<level - 1>`` appears with the first message."""
    engine = open_engine()
    engine.send(b"", DELAY=3)
    engine.send(b"", DELAY=18)

    assert engine.store_files.list_folders(f"consumequeue/{SCHEDULE_TOPIC}") == ["17", "2"]


@pytest.mark.feature("B6", "E5")
def test_the_queues_tags_code_is_the_delivery_time(engine: DelayEngine) -> None:
    """Store time plus delay, put there when the record is dispatched to its queue."""
    engine.clock.move_ms(77)
    put = engine.send(b"", DELAY=3)

    unit = engine.store.consume_queue(SCHEDULE_TOPIC, 2).unit(0)
    assert unit.tags_code == put.store_timestamp + 10 * SECOND
    assert (unit.physical_offset, unit.size) == (put.physical_offset, put.size)


# --- releasing --------------------------------------------------------------------------------------


@pytest.mark.feature("B7", "E1", "E8", "G12")
def test_a_message_arrives_at_its_millisecond(engine: DelayEngine) -> None:
    """Not visible one millisecond earlier; then read from its own topic like any other message."""
    start = engine.clock.now_ms()
    engine.send(b"ten seconds", DELAY=3)

    engine.advance(10 * SECOND - 1)
    assert engine.bodies() == []

    engine.advance(1)
    assert engine.bodies() == [b"ten seconds"]
    assert engine.arrived()[0].at_ms == start + 10 * SECOND


@pytest.mark.feature("F1", "B8", "B9", "E7", "F21")
def test_the_copy_is_an_ordinary_message_of_its_topic(engine: DelayEngine) -> None:
    """A consumer needs to know nothing: body, flag, born time and host, reconsume times and properties
    are kept; topic, queue and tags code are those of the real topic; it is not delayed again. It tells when it was due.
    """
    start = engine.clock.now_ms()
    properties = {
        "DELAY": "1",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "TAGS": "paid",
        "KEYS": "4466",
        "colour": "red",
    }
    waiting = RecordDraft(
        SCHEDULE_TOPIC, 0, b"body", encode_properties(properties), delay_ms=1_000, flag=5, born_timestamp=start - 9,
        born_host=b"\x0a\x00\x00\x01\x00\x00\x1f\x90", reconsume_times=2, sys_flag=SysFlag.TRANSACTION_COMMIT | 0x2,
    )  # fmt: skip
    source = engine.put(waiting)

    engine.advance(1 * MINUTE)

    [message] = engine.arrived(queue_id=3)
    record = message.record
    assert (record.body, record.flag, record.born_timestamp, record.reconsume_times) == (b"body", 5, start - 9, 2)
    assert record.born_host == waiting.born_host
    assert record.sys_flag == 0x2
    assert message.properties == properties | {"TIMER_DELIVER_MS": str(start + 1_000)}
    assert engine.store.consume_queue("orders", 3).unit(0).tags_code == 3433164
    assert record.prepared_transaction_offset == source.physical_offset + 1


@pytest.mark.parametrize("first", ["REAL_QID", "REAL_TOPIC", "TAGS", "TIMER_DELIVER_MS"])
def test_properties_may_stand_in_any_order(engine: DelayEngine, first: str) -> None:
    """Upstream writes them as a hash map gives them."""
    properties = {"DELAY": "1", "REAL_TOPIC": "orders", "TAGS": "paid", "REAL_QID": "2", "TIMER_DELIVER_MS": "7"}
    ordered = {first: properties[first]} | {name: properties[name] for name in properties if name != first}
    for some in (ordered, dict(reversed(ordered.items())), ordered | {"long": "x" * 500}):
        engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"", encode_properties(some), delay_ms=5))

    engine.advance(5)

    assert [message.properties["TIMER_DELIVER_MS"] for message in engine.arrived(queue_id=2)] == ["7", "7", "7"]
    assert engine.poison_count == 0


def test_a_body_with_an_ipv6_sender_survives(engine: DelayEngine) -> None:
    engine.put(
        RecordDraft(
            SCHEDULE_TOPIC,
            0,
            b"six",
            encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"}),
            delay_ms=5,
            born_host=bytes(15) + b"\x01" + (9876).to_bytes(4, "big"),
        )
    )

    engine.advance(5)

    assert engine.arrived()[0].record.born_host[-4:] == (9876).to_bytes(4, "big")


@pytest.mark.feature("F4")
def test_messages_of_one_level_keep_their_order(engine: DelayEngine) -> None:
    """Equal delays: the first stored is the first due."""
    bodies = [b"%d" % number for number in range(2_500)]
    for body in bodies:
        engine.send(body, DELAY=2)

    engine.advance(5 * SECOND)

    assert engine.bodies() == bodies


@pytest.mark.feature("E6")
def test_levels_are_released_in_order_of_due_time(engine: DelayEngine) -> None:
    """Each level has its own queue; what is due earlier comes first, also when one step finds them all late."""
    engine.send(b"30s", DELAY=4)
    engine.send(b"10s", DELAY=3)
    engine.send(b"1s", DELAY=1)
    engine.clock.move_ms(27 * SECOND)
    engine.send(b"28s", DELAY=1)
    engine.clock.move_ms(60 * SECOND)

    engine.release_due()

    assert engine.bodies() == [b"1s", b"10s", b"28s", b"30s"]


@pytest.mark.feature("E10")
def test_a_first_level_of_90_seconds_waits_that_long(open_engine: OpenEngine) -> None:
    engine = open_engine(levels="90s 5s 10s")
    engine.send(b"first", DELAY=1)
    engine.send(b"second", DELAY=2)

    engine.advance(5 * SECOND)
    assert engine.bodies() == [b"second"]
    engine.advance(85 * SECOND)
    assert engine.bodies() == [b"second", b"first"]


@pytest.mark.feature("B2")
def test_a_nineteenth_level_works(open_engine: OpenEngine) -> None:
    """One day, appended to the 18."""
    engine = open_engine(levels="1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h 1d")
    engine.send(b"tomorrow", DELAY=19)

    engine.advance(86_400 * SECOND - 1)
    assert engine.bodies() == []
    engine.advance(1)
    assert engine.bodies() == [b"tomorrow"]


@pytest.mark.feature("F22")
def test_three_hours_are_two_delays_in_a_chain(engine: DelayEngine) -> None:
    """The article's recipe beyond the two-hour maximum: a hop of two hours, then one. A timer needs no hops."""
    start = engine.clock.now_ms()
    engine.send(b"hop", topic="hops", DELAY=18)
    engine.advance(7_200 * SECOND)
    assert engine.bodies("hops") == [b"hop"]
    engine.send(b"there", DELAY=17)

    engine.advance(3_600 * SECOND)

    assert engine.arrived()[0].at_ms - start == 3 * 3_600 * SECOND


def test_a_delivered_message_can_be_delayed_again(engine: DelayEngine) -> None:
    """As a retry is: with the properties it came with, and a level of its own."""
    engine.send(b"again", DELAY=1)
    engine.advance(1 * SECOND)

    first = engine.arrived()[0]
    engine.send(b"again", **(first.properties | {"DELAY": "3"}))
    engine.advance(10 * SECOND)

    assert [message.at_ms - first.at_ms for message in engine.arrived()] == [0, 10 * SECOND]
    assert engine.arrived()[1].properties["TIMER_DELIVER_MS"] == str(first.at_ms + 10 * SECOND)


@pytest.mark.feature("X11")
def test_a_copy_does_not_carry_the_levels_delay(engine: DelayEngine) -> None:
    """It has a meaning only while the message waits."""
    engine.send(b"", DELAY=1, KEYS="4466")
    [waiting] = engine.delayed_records()

    engine.advance(1 * SECOND)

    assert waiting.properties["__DELAY_MS"] == "1000"
    due = {"TIMER_DELIVER_MS": str(waiting.store_timestamp + 1_000)}
    assert (
        engine.arrived()[0].properties
        == {name: value for name, value in waiting.properties.items() if name != "__DELAY_MS"} | due
    )


# --- waking -----------------------------------------------------------------------------------------


@pytest.mark.feature("F5", "F18", "F19", "G10")
def test_the_step_says_exactly_when_the_next_message_is_due(engine: DelayEngine) -> None:
    """Upstream looks every 100 ms; here one step serves all levels and tells the next due time."""
    start = engine.clock.now_ms()
    assert engine.schedule.step() is None

    engine.send(b"", DELAY=4)
    assert engine.schedule.step() == start + 30 * SECOND
    engine.send(b"", DELAY=1)
    assert engine.schedule.step() == start + 1 * SECOND

    engine.clock.move_ms(1 * SECOND)
    assert engine.schedule.step() == start + 30 * SECOND
    engine.clock.move_ms(29 * SECOND)
    assert engine.schedule.step() is None


def test_a_new_message_wakes_the_service(engine: DelayEngine) -> None:
    rung: list[bool] = []
    engine.schedule.on_wake(lambda: rung.append(True))

    engine.send(b"plain")
    assert not rung
    engine.send(b"delayed", DELAY=1)
    assert rung


def test_a_step_hands_over_a_bounded_number_and_asks_to_be_called_at_once(engine: DelayEngine) -> None:
    for _ in range(1_500):
        engine.send(b"", DELAY=1)
    engine.clock.move_ms(1 * SECOND)

    assert engine.schedule.step() == engine.clock.now_ms()
    assert 0 < len(engine.bodies()) <= 1_000

    engine.release_due()
    assert len(engine.bodies()) == 1_500


@pytest.mark.feature("F8")
def test_starting_twice_is_harmless(engine: DelayEngine) -> None:
    engine.send(b"once", DELAY=1)
    engine.schedule.start()
    engine.schedule.start()

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"once"]


# --- clocks -----------------------------------------------------------------------------------------


@pytest.mark.feature("F15")
def test_after_the_clock_was_set_back_messages_wait_again(engine: DelayEngine) -> None:
    """Upstream would hand it over at once, a minute early; never early goes first."""
    engine.send(b"10s", DELAY=3)
    due = engine.clock.now_ms() + 10 * SECOND
    engine.clock.move_ms(-60 * SECOND)

    engine.advance(69 * SECOND)
    assert engine.bodies() == []
    engine.advance(1 * SECOND)
    assert engine.bodies() == [b"10s"]
    assert engine.arrived()[0].at_ms >= due


@pytest.mark.feature("F15")
def test_a_level_that_was_shortened_does_not_make_waiting_messages_early(open_engine: OpenEngine) -> None:
    """The time promised when the message was sent holds."""
    engine = open_engine(levels="10m")
    engine.send(b"ten minutes", DELAY=1)
    engine.close()

    engine = open_engine(levels="1s")
    engine.advance(10 * MINUTE - 1)
    assert engine.bodies() == []
    engine.advance(1)
    assert engine.bodies() == [b"ten minutes"]


@pytest.mark.feature("X11", "D11")
def test_a_table_may_change_while_messages_wait(engine: DelayEngine) -> None:
    """Each keeps the time it was promised, and none waits for one in front of it that is due later."""
    start = engine.clock.now_ms()
    engine.send(b"10s", DELAY=3)
    change_table(engine, "1s 5s 2s")
    engine.send(b"2s", DELAY=3)
    change_table(engine, "1m")
    engine.send(b"1m", DELAY=1)
    engine.send(b"highest", DELAY=3)

    engine.advance(1 * MINUTE)

    due = [(message.body, message.at_ms - start) for message in engine.arrived()]
    assert due == [(b"2s", 2 * SECOND), (b"10s", 10 * SECOND), (b"1m", 1 * MINUTE), (b"highest", 1 * MINUTE)]


@pytest.mark.feature("D11")
def test_messages_of_one_queue_are_released_in_order_of_due_time(engine: DelayEngine) -> None:
    """Not in that of their places; equal times in the order stored, whatever their levels."""
    for body, level, delay_ms in ((b"d", 0, 90), (b"a", 0, 10), (b"c", 0, 50), (b"b", 1, 10), (b"e", 0, 90)):
        properties = encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"})
        engine.put(RecordDraft(SCHEDULE_TOPIC, level, body, properties, delay_ms=delay_ms))
    engine.clock.move_ms(100)

    engine.release_due()

    assert engine.bodies() == [b"a", b"b", b"c", b"d", b"e"]


def test_after_the_clock_was_set_forward_what_is_due_goes_at_once(engine: DelayEngine) -> None:
    engine.send(b"1h", DELAY=17)
    engine.clock.move_ms(3_600 * SECOND)

    engine.release_due()

    assert engine.bodies() == [b"1h"]


def test_a_level_the_table_has_no_longer_is_served_to_its_end(open_engine: OpenEngine) -> None:
    engine = open_engine(levels="1s 5s 10s")
    engine.send(b"third", DELAY=3)
    engine.close()

    engine = open_engine(levels="1s")
    engine.advance(10 * SECOND)

    assert engine.bodies() == [b"third"]


@pytest.mark.feature("F23")
def test_due_is_when_the_broker_hands_over_and_a_busy_broker_is_late(engine: DelayEngine) -> None:
    """The copy tells when it was due and when it was stored: the difference is the broker's lateness."""
    engine.send(b"", DELAY=1)
    engine.clock.move_ms(1 * SECOND + 250)
    engine.release_due()

    [message] = engine.arrived()

    assert message.at_ms - int(message.properties["TIMER_DELIVER_MS"]) == 250


# --- trouble ----------------------------------------------------------------------------------------


@pytest.mark.feature("F14", "F17")
def test_a_full_disk_delays_but_loses_nothing(engine: DelayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same messages are tried again a second later, and once there is room they are there once."""
    engine.send(b"a", DELAY=1)
    engine.send(b"b", DELAY=1)
    engine.clock.move_ms(1 * SECOND)

    def full(drafts: Sequence[RecordDraft]) -> list[PutResult]:
        raise StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(engine.store, "put_all", full)
        assert engine.schedule.step() == engine.clock.now_ms() + 1 * SECOND

    engine.release_due()
    assert engine.bodies() == [b"a", b"b"]


@pytest.mark.feature("F17")
@pytest.mark.parametrize(
    "properties",
    [
        {"DELAY": "1", "REAL_QID": "0"},
        {"DELAY": "1", "REAL_TOPIC": "orders"},
        {"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "zero"},
        {"DELAY": "1", "REAL_TOPIC": "../etc", "REAL_QID": "0"},
        {"DELAY": "1", "REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"},
    ],
)
def test_a_poisoned_message_goes_to_the_dead_letters_and_holds_nobody_up(
    open_engine: OpenEngine, properties: dict[str, str]
) -> None:
    """Logged, counted, kept for people; once, also over a crash."""
    engine = open_engine()
    engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"poison", encode_properties(properties), delay_ms=1_000))
    engine.send(b"healthy", DELAY=1)
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"healthy"]
    assert engine.bodies(DEAD_LETTER_TOPIC) == [b"poison"]
    assert engine.poison_count == 1

    engine.crash()
    engine = open_engine()
    engine.advance(60 * SECOND)
    assert engine.bodies() == [b"healthy"]
    assert engine.bodies(DEAD_LETTER_TOPIC) == [b"poison"]


@pytest.mark.feature("F16")
def test_a_damaged_record_is_counted_and_passed(engine: DelayEngine) -> None:
    """Its neighbours in the queue are not held up, and nothing of it is delivered."""
    put = engine.send(b"damaged", DELAY=1)
    engine.send(b"healthy", DELAY=1)
    engine.store._commit_log._files.files[0].view[put.physical_offset + 90] ^= 0xFF

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"healthy"]
    assert engine.poison_count == 1


@pytest.mark.feature("D7")
def test_a_message_whose_file_was_deleted_is_reported_and_passed(open_engine: OpenEngine) -> None:
    """Upstream skips it without a trace. Here it is counted; the others are on time."""
    engine = open_engine(log_file_size=4_000)
    gone = [engine.send(b"x" * 1_500, DELAY=3) for _ in range(3)]
    engine.clock.move_ms(1)
    engine.send(b"x" * 1_500, DELAY=3)
    engine.store.delete_before(gone[2].end)
    assert engine.store.consume_queue(SCHEDULE_TOPIC, 2).min_offset == 2

    engine.advance(60 * SECOND)

    assert len(engine.bodies()) == 2
    assert engine.poison_count == 2
    assert engine.store.metrics.snapshot()["delay.poison"] == 2


@pytest.mark.feature("D13")
def test_a_message_with_more_properties_than_can_be_copied_goes_to_the_dead_letters(engine: DelayEngine) -> None:
    """RocketMQ's may fill the bytes that our check takes. Its neighbours in the batch are not held up."""
    engine.put(foreign_level_message(b"long", 1, 1 * SECOND, colour="x" * 32_700, KEYS="4466"))
    engine.send(b"healthy", DELAY=1)

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"healthy"]
    [dead] = engine.arrived(DEAD_LETTER_TOPIC)
    assert dead.properties == {"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0", "KEYS": "4466"}


def test_large_messages_are_handed_over_in_several_appends(open_engine: OpenEngine) -> None:
    """Together they would not fit into one file of the commit log."""
    engine = open_engine(log_file_size=100_000)
    bodies = [bytes([number]) * 20_000 for number in range(12)]
    for body in bodies:
        engine.send(body, DELAY=1)

    engine.advance(1 * SECOND)

    assert engine.bodies() == bodies


# --- metrics ----------------------------------------------------------------------------------------


def test_metrics_agree_with_what_is_in_the_topics(engine: DelayEngine) -> None:
    """Handed over, waiting and late, counted by the message."""
    engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"poison", encode_properties({"DELAY": "1"}), delay_ms=1_000))
    for number in range(1_500):
        engine.send(b"%d" % number, DELAY=1)
    waiting = engine.send(b"waits", DELAY=3)
    engine.clock.move_ms(1 * SECOND + 5)
    engine.release_due()

    metrics = engine.store.metrics.snapshot()
    assert metrics["delay.released"] == len(engine.bodies()) == 1_500
    assert metrics["delay.poison"] == len(engine.bodies(DEAD_LETTER_TOPIC)) == 1
    assert metrics["delay.waiting.level"] == 1
    assert metrics["delay.lag_ms"] == HistogramSnapshot(1_501, 1_501 * 5, {8: 1_501})

    with engine.schedule.lock:
        engine.schedule.remove(engine.store.read(waiting.physical_offset, waiting.size))
    assert engine.store.metrics.snapshot()["delay.waiting.level"] == 0


def test_lags_are_counted_each_in_its_bucket() -> None:
    """In bulk: the same buckets and the same sum as one by one."""
    values = [0, 1, 2, 3, 4, 7, 8, 1_000, 1_003, 1_004, -5, 1 << 40]
    one_by_one, together = Histogram(), Histogram()
    for value in values:
        one_by_one.observe(value)

    observe_all(together, np.array(values))

    assert together.snapshot() == one_by_one.snapshot()

"""Delay levels: stored, pending, released."""

from __future__ import annotations

import numpy as np
import pytest

from mqtemplate.delay.pending_rows import observe_all
from mqtemplate.metrics import HistogramSnapshot, ValueHistogram
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.topics import SCHEDULE_TOPIC, UNDELIVERABLE_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import foreign_level_message

SECOND, MINUTE = 1_000, 60_000


# --- releasing --------------------------------------------------------------------------------------


@pytest.mark.feature("F1", "B8", "B9", "E7", "F21")
def test_the_copy_is_an_ordinary_message_of_its_topic(engine: DelayEngine) -> None:
    """Body, flag, born time and host, reconsume times and properties are kept. Topic, queue and tags code
    belong to the real topic. The due time is added, and the copy is not delayed again."""
    start = engine.clock.now_ms()
    properties = {
        "DELAY": "1",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "TAGS": "paid",
        "KEYS": "4466",
        "colour": "red",
    }
    delayed = RecordDraft(
        SCHEDULE_TOPIC, 0, b"body", encode_properties(properties), delay_ms=1_000, flag=5, born_timestamp=start - 9,
        born_host=b"\x0a\x00\x00\x01\x00\x00\x1f\x90", reconsume_times=2, sys_flag=SysFlag.TRANSACTION_COMMIT | 0x2,
    )  # fmt: skip
    source = engine.put(delayed)

    engine.advance(1 * MINUTE)

    [message] = engine.arrived(queue_id=3)
    record = message.record
    assert (record.body, record.flag, record.born_timestamp, record.reconsume_times) == (b"body", 5, start - 9, 2)
    assert record.born_host == delayed.born_host
    assert record.sys_flag == 0x2
    assert message.properties == properties | {"TIMER_DELIVER_MS": str(start + 1_000)}
    assert engine.store.consume_queue("orders", 3).unit(0).tags_code == 3433164
    assert record.prepared_transaction_offset == source.physical_offset + 1


@pytest.mark.parametrize("first", ["REAL_QID", "REAL_TOPIC", "TAGS", "TIMER_DELIVER_MS"])
def test_properties_may_be_in_any_order(engine: DelayEngine, first: str) -> None:
    """RocketMQ writes them in the order of a hash map."""
    properties = {"DELAY": "1", "REAL_TOPIC": "orders", "TAGS": "paid", "REAL_QID": "2", "TIMER_DELIVER_MS": "7"}
    ordered = {first: properties[first]} | {name: properties[name] for name in properties if name != first}
    for some in (ordered, dict(reversed(ordered.items())), ordered | {"long": "x" * 500}):
        engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"", encode_properties(some), delay_ms=5))

    engine.advance(5)

    assert [message.properties["TIMER_DELIVER_MS"] for message in engine.arrived(queue_id=2)] == ["7", "7", "7"]
    assert engine.poison_count == 0


def test_a_message_with_an_ipv6_born_host_is_released(engine: DelayEngine) -> None:
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
    """Equal delays make the first stored message the first due one."""
    bodies = [b"%d" % number for number in range(2_500)]
    for body in bodies:
        engine.send(body, DELAY=2)

    engine.advance(5 * SECOND)

    assert engine.bodies() == bodies


def test_a_delivered_message_can_be_delayed_again(engine: DelayEngine) -> None:
    """A retry is: it has the properties of the delivered message, and another level."""
    engine.send(b"again", DELAY=1)
    engine.advance(1 * SECOND)

    first = engine.arrived()[0]
    engine.send(b"again", **(first.properties | {"DELAY": "3"}))
    engine.advance(10 * SECOND)

    assert [message.at_ms - first.at_ms for message in engine.arrived()] == [0, 10 * SECOND]
    assert engine.arrived()[1].properties["TIMER_DELIVER_MS"] == str(first.at_ms + 10 * SECOND)


@pytest.mark.feature("X11")
def test_a_copy_does_not_have_the_levels_delay(engine: DelayEngine) -> None:
    """The property has a meaning only while the message is pending."""
    engine.send(b"", DELAY=1, KEYS="4466")
    [delayed] = engine.delayed_records()

    engine.advance(1 * SECOND)

    assert decode_properties(delayed.properties_bytes)["__DELAY_MS"] == "1000"
    due = {"TIMER_DELIVER_MS": str(delayed.store_timestamp + 1_000)}
    assert (
        engine.arrived()[0].properties
        == {name: value for name, value in decode_properties(delayed.properties_bytes).items() if name != "__DELAY_MS"}
        | due
    )


# --- waking -----------------------------------------------------------------------------------------


def test_a_step_releases_a_bounded_number_and_is_due_again_at_once(engine: DelayEngine) -> None:
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


@pytest.mark.feature("D11")
def test_messages_of_one_queue_are_released_in_order_of_due_time(engine: DelayEngine) -> None:
    """Not in the order of their queue offsets. Messages with one due time are released in the order stored."""
    for body, level, delay_ms in ((b"d", 0, 90), (b"a", 0, 10), (b"c", 0, 50), (b"b", 1, 10), (b"e", 0, 90)):
        properties = encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"})
        engine.put(RecordDraft(SCHEDULE_TOPIC, level, body, properties, delay_ms=delay_ms))
    engine.clock.move_ms(100)

    engine.release_due()

    assert engine.bodies() == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.feature("F23")
def test_the_copy_of_a_late_message_shows_the_lateness(engine: DelayEngine) -> None:
    """The copy has the due time and the store time. The difference is the lateness of a busy broker."""
    engine.send(b"", DELAY=1)
    engine.clock.move_ms(1 * SECOND + 250)
    engine.release_due()

    [message] = engine.arrived()

    assert message.at_ms - int(message.properties["TIMER_DELIVER_MS"]) == 250


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.feature("D7")
def test_a_message_whose_file_was_deleted_is_reported_and_skipped(open_engine: OpenEngine) -> None:
    """RocketMQ skips it silently. Here it is counted. The other messages are on time."""
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
    """RocketMQ's properties may use the bytes that our check needs. The other messages of the batch are not blocked."""
    engine.put(foreign_level_message(b"long", 1, 1 * SECOND, colour="x" * 32_700, KEYS="4466"))
    engine.send(b"healthy", DELAY=1)

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"healthy"]
    [dead] = engine.arrived(UNDELIVERABLE_TOPIC)
    assert dead.properties == {"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0", "KEYS": "4466"}


def test_large_messages_are_released_in_several_appends(open_engine: OpenEngine) -> None:
    """All of them together do not fit into one file of the commit log."""
    engine = open_engine(log_file_size=100_000)
    bodies = [bytes([number]) * 20_000 for number in range(12)]
    for body in bodies:
        engine.send(body, DELAY=1)

    engine.advance(1 * SECOND)

    assert engine.bodies() == bodies


# --- metrics ----------------------------------------------------------------------------------------


def test_metrics_agree_with_the_topics(engine: DelayEngine) -> None:
    """Released, pending and late messages are counted."""
    engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"poison", encode_properties({"DELAY": "1"}), delay_ms=1_000))
    for number in range(1_500):
        engine.send(b"%d" % number, DELAY=1)
    pending = engine.send(b"pending", DELAY=3)
    engine.clock.move_ms(1 * SECOND + 5)
    engine.release_due()

    metrics = engine.store.metrics.snapshot()
    assert metrics["delay.released"] == len(engine.bodies()) == 1_500
    assert metrics["delay.poison"] == len(engine.bodies(UNDELIVERABLE_TOPIC)) == 1
    assert metrics["delay.waiting.level"] == 1
    assert metrics["delay.lag_ms"] == HistogramSnapshot(1_501, 1_501 * 5, {8: 1_501})

    with engine.schedule.lock:
        engine.schedule.remove(engine.store.read(pending.physical_offset, pending.size))
    assert engine.store.metrics.snapshot()["delay.waiting.level"] == 0


def test_lags_are_counted_in_their_buckets() -> None:
    """Counting all at once gives the same buckets and the same sum as one by one."""
    values = [0, 1, 2, 3, 4, 7, 8, 1_000, 1_003, 1_004, -5, 1 << 40]
    one_by_one, together = ValueHistogram(), ValueHistogram()
    for value in values:
        one_by_one.observe(value)

    observe_all(together, np.array(values))

    assert together.snapshot() == one_by_one.snapshot()

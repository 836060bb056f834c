"""Delay levels: stored, waited for, handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mqtemplate.delay import DEAD_LETTER_TOPIC, DelayLevels
from mqtemplate.delay.release import observe_all
from mqtemplate.errors import StoreFullError
from mqtemplate.metrics import Histogram, HistogramSnapshot
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store import PutResult
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.conftest import OpenRoom
from tests.delay.foreign_records import foreign_level_message
from tests.delay.waiting_room import WaitingRoom

SECOND, MINUTE = 1_000, 60_000


def change_table(room: WaitingRoom, text: str) -> None:
    """At run time: for the front door, and for the service."""
    room.levels = DelayLevels.parse(text)
    room.schedule.change_levels(room.levels)


# --- storing ----------------------------------------------------------------------------------------


@pytest.mark.feature("B4", "E4", "G5")
def test_a_delayed_message_is_stored_in_the_schedule_topic(room: WaitingRoom) -> None:
    """It goes to the commit log first, under another name, and is not in its own topic before its time."""
    room.send(b"later", DELAY=3)
    room.confirm()

    [record] = room.waiting(queue_id=2)
    assert (record.topic, record.queue_id, record.body) == (SCHEDULE_TOPIC, 2, b"later")
    assert room.bodies() == []


@pytest.mark.feature("B5", "E3")
def test_each_level_that_is_used_has_a_queue(open_room: OpenRoom) -> None:
    """Each folder has its own; ``SCHEDULE_TOPIC_XXXX/<level - 1>`` appears with the first message."""
    room = open_room()
    room.send(b"", DELAY=3)
    room.send(b"", DELAY=18)

    assert room.store_files.list_folders(f"consumequeue/{SCHEDULE_TOPIC}") == ["17", "2"]


@pytest.mark.feature("B6", "E5")
def test_the_queues_tags_code_is_the_delivery_time(room: WaitingRoom) -> None:
    """Store time plus delay, put there when the record is dispatched to its queue."""
    room.clock.move_ms(77)
    put = room.send(b"", DELAY=3)

    unit = room.store.consume_queue(SCHEDULE_TOPIC, 2).unit(0)
    assert unit.tags_code == put.store_timestamp + 10 * SECOND
    assert (unit.physical_offset, unit.size) == (put.physical_offset, put.size)


# --- releasing --------------------------------------------------------------------------------------


@pytest.mark.feature("B7", "E1", "E8", "G12")
def test_a_message_arrives_at_its_millisecond(room: WaitingRoom) -> None:
    """Not visible one millisecond earlier; then read from its own topic like any other message."""
    start = room.clock.now_ms()
    room.send(b"ten seconds", DELAY=3)

    room.advance(10 * SECOND - 1)
    assert room.bodies() == []

    room.advance(1)
    assert room.bodies() == [b"ten seconds"]
    assert room.arrived()[0].at_ms == start + 10 * SECOND


@pytest.mark.feature("F1", "B8", "B9", "E7", "F21")
def test_the_copy_is_an_ordinary_message_of_its_topic(room: WaitingRoom) -> None:
    """A consumer needs to know nothing: body, flag, born time and host, reconsume times and properties
    are kept; topic, queue and tags code are those of the real topic; it is not delayed again. It tells when it was due.
    """
    start = room.clock.now_ms()
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
    source = room.put(waiting)

    room.advance(1 * MINUTE)

    [message] = room.arrived(queue_id=3)
    record = message.record
    assert (record.body, record.flag, record.born_timestamp, record.reconsume_times) == (b"body", 5, start - 9, 2)
    assert record.born_host == waiting.born_host
    assert record.sys_flag == 0x2
    assert message.properties == properties | {"TIMER_DELIVER_MS": str(start + 1_000)}
    assert room.store.consume_queue("orders", 3).unit(0).tags_code == 3433164
    assert record.prepared_transaction_offset == source.physical_offset + 1


@pytest.mark.parametrize("first", ["REAL_QID", "REAL_TOPIC", "TAGS", "TIMER_DELIVER_MS"])
def test_properties_may_stand_in_any_order(room: WaitingRoom, first: str) -> None:
    """Upstream writes them as a hash map gives them."""
    properties = {"DELAY": "1", "REAL_TOPIC": "orders", "TAGS": "paid", "REAL_QID": "2", "TIMER_DELIVER_MS": "7"}
    ordered = {first: properties[first]} | {name: properties[name] for name in properties if name != first}
    for some in (ordered, dict(reversed(ordered.items())), ordered | {"long": "x" * 500}):
        room.put(RecordDraft(SCHEDULE_TOPIC, 0, b"", encode_properties(some), delay_ms=5))

    room.advance(5)

    assert [message.properties["TIMER_DELIVER_MS"] for message in room.arrived(queue_id=2)] == ["7", "7", "7"]
    assert room.schedule.poison_count == 0


def test_a_body_with_an_ipv6_sender_survives(room: WaitingRoom) -> None:
    room.put(
        RecordDraft(
            SCHEDULE_TOPIC,
            0,
            b"six",
            encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"}),
            delay_ms=5,
            born_host=bytes(15) + b"\x01" + (9876).to_bytes(4, "big"),
        )
    )

    room.advance(5)

    assert room.arrived()[0].record.born_host[-4:] == (9876).to_bytes(4, "big")


@pytest.mark.feature("F4")
def test_messages_of_one_level_keep_their_order(room: WaitingRoom) -> None:
    """Equal delays: the first stored is the first due."""
    bodies = [b"%d" % number for number in range(2_500)]
    for body in bodies:
        room.send(body, DELAY=2)

    room.advance(5 * SECOND)

    assert room.bodies() == bodies


@pytest.mark.feature("E6")
def test_levels_are_released_in_order_of_due_time(room: WaitingRoom) -> None:
    """Each level has its own queue; what is due earlier comes first, also when one step finds them all late."""
    room.send(b"30s", DELAY=4)
    room.send(b"10s", DELAY=3)
    room.send(b"1s", DELAY=1)
    room.clock.move_ms(27 * SECOND)
    room.send(b"28s", DELAY=1)
    room.clock.move_ms(60 * SECOND)

    room.confirm()

    assert room.bodies() == [b"1s", b"10s", b"28s", b"30s"]


@pytest.mark.feature("E10")
def test_a_first_level_of_90_seconds_waits_that_long(open_room: OpenRoom) -> None:
    room = open_room(levels="90s 5s 10s")
    room.send(b"first", DELAY=1)
    room.send(b"second", DELAY=2)

    room.advance(5 * SECOND)
    assert room.bodies() == [b"second"]
    room.advance(85 * SECOND)
    assert room.bodies() == [b"second", b"first"]


@pytest.mark.feature("B2")
def test_a_nineteenth_level_works(open_room: OpenRoom) -> None:
    """One day, appended to the 18."""
    room = open_room(levels="1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h 1d")
    room.send(b"tomorrow", DELAY=19)

    room.advance(86_400 * SECOND - 1)
    assert room.bodies() == []
    room.advance(1)
    assert room.bodies() == [b"tomorrow"]


@pytest.mark.feature("F22")
def test_three_hours_are_two_delays_in_a_chain(room: WaitingRoom) -> None:
    """The article's recipe beyond the two-hour maximum: a hop of two hours, then one. A timer needs no hops."""
    start = room.clock.now_ms()
    room.send(b"hop", topic="hops", DELAY=18)
    room.advance(7_200 * SECOND)
    assert room.bodies("hops") == [b"hop"]
    room.send(b"there", DELAY=17)

    room.advance(3_600 * SECOND)

    assert room.arrived()[0].at_ms - start == 3 * 3_600 * SECOND


def test_a_delivered_message_can_be_delayed_again(room: WaitingRoom) -> None:
    """As a retry is: with the properties it came with, and a level of its own."""
    room.send(b"again", DELAY=1)
    room.advance(1 * SECOND)

    first = room.arrived()[0]
    room.send(b"again", **(first.properties | {"DELAY": "3"}))
    room.advance(10 * SECOND)

    assert [message.at_ms - first.at_ms for message in room.arrived()] == [0, 10 * SECOND]
    assert room.arrived()[1].properties["TIMER_DELIVER_MS"] == str(first.at_ms + 10 * SECOND)


@pytest.mark.feature("X11")
def test_a_copy_does_not_carry_the_levels_delay(room: WaitingRoom) -> None:
    """It has a meaning only while the message waits."""
    room.send(b"", DELAY=1, KEYS="4466")
    [waiting] = room.waiting()

    room.advance(1 * SECOND)

    assert decode_properties(waiting.properties_bytes)["__DELAY_MS"] == "1000"
    due = {"TIMER_DELIVER_MS": str(waiting.store_timestamp + 1_000)}
    assert (
        room.arrived()[0].properties
        == {name: value for name, value in decode_properties(waiting.properties_bytes).items() if name != "__DELAY_MS"}
        | due
    )


# --- waking -----------------------------------------------------------------------------------------


@pytest.mark.feature("F5", "F18", "F19", "G10")
def test_the_step_says_exactly_when_the_next_message_is_due(room: WaitingRoom) -> None:
    """Upstream looks every 100 ms; here one step serves all levels and tells the next due time."""
    start = room.clock.now_ms()
    assert room.schedule.step() is None

    room.send(b"", DELAY=4)
    assert room.schedule.step() == start + 30 * SECOND
    room.send(b"", DELAY=1)
    assert room.schedule.step() == start + 1 * SECOND

    room.clock.move_ms(1 * SECOND)
    assert room.schedule.step() == start + 30 * SECOND
    room.clock.move_ms(29 * SECOND)
    assert room.schedule.step() is None


def test_a_new_message_wakes_the_service(room: WaitingRoom) -> None:
    rung: list[bool] = []
    room.schedule.on_wake(lambda: rung.append(True))

    room.send(b"plain")
    assert not rung
    room.send(b"delayed", DELAY=1)
    assert rung


def test_a_step_hands_over_a_bounded_number_and_asks_to_be_called_at_once(room: WaitingRoom) -> None:
    for _ in range(1_500):
        room.send(b"", DELAY=1)
    room.clock.move_ms(1 * SECOND)

    assert room.schedule.step() == room.clock.now_ms()
    assert 0 < len(room.bodies()) <= 1_000

    room.confirm()
    assert len(room.bodies()) == 1_500


@pytest.mark.feature("F8")
def test_starting_twice_is_harmless(room: WaitingRoom) -> None:
    room.send(b"once", DELAY=1)
    room.schedule.start()
    room.schedule.start()

    room.advance(1 * SECOND)

    assert room.bodies() == [b"once"]


# --- clocks -----------------------------------------------------------------------------------------


@pytest.mark.feature("F15")
def test_after_the_clock_was_set_back_messages_wait_again(room: WaitingRoom) -> None:
    """Upstream would hand it over at once, a minute early; never early goes first."""
    room.send(b"10s", DELAY=3)
    due = room.clock.now_ms() + 10 * SECOND
    room.clock.move_ms(-60 * SECOND)

    room.advance(69 * SECOND)
    assert room.bodies() == []
    room.advance(1 * SECOND)
    assert room.bodies() == [b"10s"]
    assert room.arrived()[0].at_ms >= due


@pytest.mark.feature("F15")
def test_a_level_that_was_shortened_does_not_make_waiting_messages_early(open_room: OpenRoom) -> None:
    """The time promised when the message was sent holds."""
    room = open_room(levels="10m")
    room.send(b"ten minutes", DELAY=1)
    room.close()

    room = open_room(levels="1s")
    room.advance(10 * MINUTE - 1)
    assert room.bodies() == []
    room.advance(1)
    assert room.bodies() == [b"ten minutes"]


@pytest.mark.feature("X11", "D11")
def test_a_table_may_change_while_messages_wait(room: WaitingRoom) -> None:
    """Each keeps the time it was promised, and none waits for one in front of it that is due later."""
    start = room.clock.now_ms()
    room.send(b"10s", DELAY=3)
    change_table(room, "1s 5s 2s")
    room.send(b"2s", DELAY=3)
    change_table(room, "1m")
    room.send(b"1m", DELAY=1)
    room.send(b"highest", DELAY=3)

    room.advance(1 * MINUTE)

    due = [(message.body, message.at_ms - start) for message in room.arrived()]
    assert due == [(b"2s", 2 * SECOND), (b"10s", 10 * SECOND), (b"1m", 1 * MINUTE), (b"highest", 1 * MINUTE)]


def test_the_service_tells_the_table_of_now(room: WaitingRoom) -> None:
    change_table(room, "1s 7s")

    assert room.schedule.levels.text == "1s 7s"


@pytest.mark.feature("D11")
def test_messages_of_one_queue_are_released_in_order_of_due_time(room: WaitingRoom) -> None:
    """Not in that of their places; equal times in the order stored, whatever their levels."""
    for body, level, delay_ms in ((b"d", 0, 90), (b"a", 0, 10), (b"c", 0, 50), (b"b", 1, 10), (b"e", 0, 90)):
        properties = encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"})
        room.put(RecordDraft(SCHEDULE_TOPIC, level, body, properties, delay_ms=delay_ms))
    room.clock.move_ms(100)

    room.confirm()

    assert room.bodies() == [b"a", b"b", b"c", b"d", b"e"]


def test_after_the_clock_was_set_forward_what_is_due_goes_at_once(room: WaitingRoom) -> None:
    room.send(b"1h", DELAY=17)
    room.clock.move_ms(3_600 * SECOND)

    room.confirm()

    assert room.bodies() == [b"1h"]


def test_a_level_the_table_has_no_longer_is_served_to_its_end(open_room: OpenRoom) -> None:
    room = open_room(levels="1s 5s 10s")
    room.send(b"third", DELAY=3)
    room.close()

    room = open_room(levels="1s")
    room.advance(10 * SECOND)

    assert room.bodies() == [b"third"]


@pytest.mark.feature("F23")
def test_due_is_when_the_broker_hands_over_and_a_busy_broker_is_late(room: WaitingRoom) -> None:
    """The copy tells when it was due and when it was stored: the difference is the broker's lateness."""
    room.send(b"", DELAY=1)
    room.clock.move_ms(1 * SECOND + 250)
    room.confirm()

    [message] = room.arrived()

    assert message.at_ms - int(message.properties["TIMER_DELIVER_MS"]) == 250


# --- trouble ----------------------------------------------------------------------------------------


@pytest.mark.feature("F14", "F17")
def test_a_full_disk_delays_but_loses_nothing(room: WaitingRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same messages are tried again a second later, and once there is room they are there once."""
    room.send(b"a", DELAY=1)
    room.send(b"b", DELAY=1)
    room.clock.move_ms(1 * SECOND)

    def full(drafts: Sequence[RecordDraft]) -> list[PutResult]:
        raise StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(room.store, "put_all", full)
        assert room.schedule.step() == room.clock.now_ms() + 1 * SECOND

    room.confirm()
    assert room.bodies() == [b"a", b"b"]


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
    open_room: OpenRoom, properties: dict[str, str]
) -> None:
    """Logged, counted, kept for people; once, also over a crash."""
    room = open_room()
    room.put(RecordDraft(SCHEDULE_TOPIC, 0, b"poison", encode_properties(properties), delay_ms=1_000))
    room.send(b"healthy", DELAY=1)
    room.advance(1 * SECOND)

    assert room.bodies() == [b"healthy"]
    assert room.bodies(DEAD_LETTER_TOPIC) == [b"poison"]
    assert room.schedule.poison_count == 1

    room.crash()
    room = open_room()
    room.advance(60 * SECOND)
    assert room.bodies() == [b"healthy"]
    assert room.bodies(DEAD_LETTER_TOPIC) == [b"poison"]


@pytest.mark.feature("F16")
def test_a_damaged_record_is_counted_and_passed(room: WaitingRoom) -> None:
    """Its neighbours in the queue are not held up, and nothing of it is delivered."""
    put = room.send(b"damaged", DELAY=1)
    room.send(b"healthy", DELAY=1)
    room.store._commit_log._files.files[0].view[put.physical_offset + 90] ^= 0xFF

    room.advance(1 * SECOND)

    assert room.bodies() == [b"healthy"]
    assert room.schedule.poison_count == 1


@pytest.mark.feature("D7")
def test_a_message_whose_file_was_deleted_is_reported_and_passed(open_room: OpenRoom) -> None:
    """Upstream skips it without a trace. Here it is counted; the others are on time."""
    room = open_room(log_file_size=4_000)
    gone = [room.send(b"x" * 1_500, DELAY=3) for _ in range(3)]
    room.clock.move_ms(1)
    room.send(b"x" * 1_500, DELAY=3)
    room.store.delete_before(gone[2].end)
    assert room.store.consume_queue(SCHEDULE_TOPIC, 2).min_offset == 2

    room.advance(60 * SECOND)

    assert len(room.bodies()) == 2
    assert room.schedule.poison_count == 2
    assert room.store.metrics.snapshot()["delay.poison"] == 2


@pytest.mark.feature("D13")
def test_a_message_with_more_properties_than_can_be_copied_goes_to_the_dead_letters(room: WaitingRoom) -> None:
    """RocketMQ's may fill the bytes that our check takes. Its neighbours in the batch are not held up."""
    room.put(foreign_level_message(b"long", 1, 1 * SECOND, colour="x" * 32_700, KEYS="4466"))
    room.send(b"healthy", DELAY=1)

    room.advance(1 * SECOND)

    assert room.bodies() == [b"healthy"]
    [dead] = room.arrived(DEAD_LETTER_TOPIC)
    assert dead.properties == {"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0", "KEYS": "4466"}


def test_large_messages_are_handed_over_in_several_appends(open_room: OpenRoom) -> None:
    """Together they would not fit into one file of the commit log."""
    room = open_room(log_file_size=100_000)
    bodies = [bytes([number]) * 20_000 for number in range(12)]
    for body in bodies:
        room.send(body, DELAY=1)

    room.advance(1 * SECOND)

    assert room.bodies() == bodies


# --- metrics ----------------------------------------------------------------------------------------


def test_metrics_agree_with_what_is_in_the_topics(room: WaitingRoom) -> None:
    """Handed over, waiting and late, counted by the message."""
    room.put(RecordDraft(SCHEDULE_TOPIC, 0, b"poison", encode_properties({"DELAY": "1"}), delay_ms=1_000))
    for number in range(1_500):
        room.send(b"%d" % number, DELAY=1)
    waiting = room.send(b"waits", DELAY=3)
    room.clock.move_ms(1 * SECOND + 5)
    room.confirm()

    metrics = room.store.metrics.snapshot()
    assert metrics["delay.released"] == len(room.bodies()) == 1_500
    assert metrics["delay.poison"] == len(room.bodies(DEAD_LETTER_TOPIC)) == 1
    assert metrics["delay.waiting.level"] == 1
    assert metrics["delay.lag_ms"] == HistogramSnapshot(1_501, 1_501 * 5, {8: 1_501})

    with room.schedule.lock:
        room.schedule.withdraw(room.store.read(waiting.physical_offset, waiting.size))
    assert room.store.metrics.snapshot()["delay.waiting.level"] == 0


def test_lags_are_counted_each_in_its_bucket() -> None:
    """In bulk: the same buckets and the same sum as one by one."""
    values = [0, 1, 2, 3, 4, 7, 8, 1_000, 1_003, 1_004, -5, 1 << 40]
    one_by_one, together = Histogram(), Histogram()
    for value in values:
        one_by_one.observe(value)

    observe_all(together, np.array(values))

    assert together.snapshot() == one_by_one.snapshot()

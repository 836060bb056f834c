"""Timers: stored, put on the wheel, released."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.backlog import parking_slots
from mqtemplate.delay.timers.files import TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER, TIMER_WHEEL_FILE
from mqtemplate.delay.timers.intake import TimerTopicReader
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.services import ServiceThread
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine, is_rolled

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
MULTIPLES = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 600}


# --- storing ----------------------------------------------------------------------------------------


@pytest.mark.feature("A12", "G5")
def test_a_timer_is_stored_in_the_timer_topic(engine: DelayEngine) -> None:
    """One queue has all timers. The real topic has nothing yet."""
    engine.send(b"delayed", TIMER_DELAY_MS=1_500)
    engine.release_due()

    [record] = engine.timer_records()
    assert (record.topic, record.queue_id) == (TIMER_TOPIC, 0)
    assert engine.bodies() == []


def test_the_files_are_created_with_the_first_timer(open_engine: OpenEngine) -> None:
    """A store directory with levels only has no wheel."""
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.advance(1 * SECOND)
    assert not any(
        engine.store_files.exists(name) for name in (TIMER_WHEEL_FILE, TIMER_LOG_FOLDER, TIMER_CHECKPOINT_FILE)
    )

    engine.send(b"", TIMER_DELAY_MS=1)
    engine.release_due()
    assert all(engine.store_files.exists(name) for name in (TIMER_WHEEL_FILE, TIMER_LOG_FOLDER, TIMER_CHECKPOINT_FILE))


# --- releasing --------------------------------------------------------------------------------------


@pytest.mark.feature("D2", "A2", "A14", "A15")
@pytest.mark.parametrize("delay_ms", [1, 7, 999, 1_000, 1_001, 59_999, 3_600_000, 10_000_001])
def test_a_timer_arrives_at_its_millisecond(engine: DelayEngine, delay_ms: int) -> None:
    """It is not a millisecond early or late."""
    start = engine.clock.now_ms()
    engine.send(b"exact", TIMER_DELAY_MS=delay_ms)

    engine.advance(delay_ms - 1)
    assert engine.bodies() == []
    engine.advance(1)
    assert [message.at_ms - start for message in engine.arrived()] == [delay_ms]


@pytest.mark.feature("A1", "A17")
@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "__STARTDELIVERTIME"])
def test_an_absolute_time_arrives_at_that_time(engine: DelayEngine, name: str) -> None:
    due = engine.clock.now_ms() + 10_000
    engine.send(b"absolute", **{name: due})

    engine.advance(20_000)

    assert engine.arrived()[0].at_ms == due


@pytest.mark.feature("A17", "A19")
def test_the_three_delay_properties_lead_to_one_time(engine: DelayEngine) -> None:
    start = engine.clock.now_ms()
    engine.send(b"Hello0", TIMER_DELAY_SEC=10)
    engine.send(b"Hello1", TIMER_DELAY_MS=10_000)
    engine.send(b"Hello2", TIMER_DELIVER_MS=start + 10_000)

    engine.advance(10_000)

    assert engine.bodies() == [b"Hello0", b"Hello1", b"Hello2"]
    assert {message.at_ms - start for message in engine.arrived()} == {10_000}


@pytest.mark.feature("A16")
def test_the_copy_is_an_ordinary_message_of_its_topic(engine: DelayEngine) -> None:
    """Properties are kept. The times on the wheel are added."""
    start = engine.clock.now_ms()
    put = engine.send(b"body", queue_id=2, TIMER_DELAY_MS=1_234, TAGS="paid", KEYS="4466")
    engine.advance(1_234)

    [message] = engine.arrived(queue_id=2)
    assert message.properties == {
        "TIMER_DELAY_MS": "1234",
        "TAGS": "paid",
        "KEYS": "4466",
        "TIMER_DELIVER_MS": str(start + 1_234),
        "TIMER_OUT_MS": str(start + 1_000),
        "REAL_TOPIC": "orders",
        "REAL_QID": "2",
        "TIMER_ENQUEUE_MS": str(start),
        "TIMER_DEQUEUE_MS": str(start + 1_234),
    }
    assert engine.store.consume_queue("orders", 2).unit(0).tags_code == 3433164
    assert message.record.prepared_transaction_offset == put.physical_offset + 1


@pytest.mark.feature("D3")
def test_one_slot_is_released_in_order_of_due_time(engine: DelayEngine) -> None:
    """RocketMQ releases a second at once. Here each message has its own millisecond."""
    start = engine.clock.now_ms()
    for delay_ms in (1_900, 1_100, 1_500, 1_100):
        engine.send(b"%d" % delay_ms, TIMER_DELAY_MS=delay_ms)

    engine.advance(5_000)

    assert [(message.body, message.at_ms - start) for message in engine.arrived()] == [
        (b"1100", 1_100),
        (b"1100", 1_100),
        (b"1500", 1_500),
        (b"1900", 1_900),
    ]


def test_messages_that_arrive_in_their_open_slot_are_released_in_order(engine: DelayEngine) -> None:
    start = engine.clock.now_ms()
    engine.send(b"900", TIMER_DELAY_MS=900)
    engine.send(b"300", TIMER_DELAY_MS=300)
    engine.advance(100)
    engine.send(b"200", TIMER_DELAY_MS=100)
    engine.send(b"600", TIMER_DELAY_MS=500)

    engine.advance(2_000)

    assert [(message.body, message.at_ms - start) for message in engine.arrived()] == [
        (b"200", 200),
        (b"300", 300),
        (b"600", 600),
        (b"900", 900),
    ]


@pytest.mark.feature("A3", "A16")
def test_a_delay_of_forty_days_is_exact_to_the_millisecond(open_engine: OpenEngine) -> None:
    """On a wheel of RocketMQ's size it is parked every one or two days."""
    engine = open_engine(timers={})
    start = engine.clock.now_ms()
    engine.send(b"forty days", TIMER_DELAY_MS=40 * DAY)

    engine.advance(40 * DAY)

    [message] = engine.arrived()
    assert message.at_ms == start + 40 * DAY
    assert int(message.properties["TIMER_ROLL_TIMES"]) >= 20


def test_a_slot_across_many_files_is_read_completely(engine: DelayEngine) -> None:
    """A file has a hundred units. Close units are scanned, for scattered ones the chain is followed."""
    for number in range(450):
        engine.send(b"dense", TIMER_DELAY_MS=5_000 + number % 500)
    for number in range(450):
        engine.send(b"sparse" if number % 50 == 0 else b"other", TIMER_DELAY_MS=60_000 if number % 50 == 0 else 90_000)

    engine.advance(60_000)

    assert engine.bodies().count(b"dense") == 450
    assert engine.bodies().count(b"sparse") == 9
    engine.advance(30_000)
    assert len(engine.bodies()) == 900


# --- rolling ----------------------------------------------------------------------------------------


@pytest.mark.feature("D26", "A16")
def test_a_message_beyond_the_window_is_parked_and_rolled(open_engine: OpenEngine) -> None:
    """It is appended to the timer topic again. So retention can delete the files of the old record."""
    engine = open_engine(timers=MULTIPLES)
    start = engine.clock.now_ms()
    engine.send(b"25 s", TIMER_DELAY_MS=25_300)

    engine.advance(25_299)
    assert engine.bodies() == []
    assert len(engine.timer_records()) >= 3
    engine.advance(1)
    [message] = engine.arrived()
    assert message.at_ms == start + 25_300
    assert int(message.properties["TIMER_ROLL_TIMES"]) == len(engine.timer_records()) - 1


@pytest.mark.feature("D5")
def test_parked_messages_spread_over_half_the_window() -> None:
    """Messages of one far time are not rolled in one slot. RocketMQ parks them in two slots."""
    offsets = np.arange(1_000) * 317

    parked = parking_slots(offsets, 0, TimerSettings())

    assert ((parked >= DAY) & (parked < 2 * DAY)).all()
    assert len(np.unique(parked)) > 900


def test_a_message_within_the_window_is_not_parked(open_engine: OpenEngine) -> None:
    engine = open_engine(timers=MULTIPLES)
    engine.send(b"the last slot of the window", TIMER_DELAY_MS=10_000)
    engine.send(b"the first slot after it", TIMER_DELAY_MS=10_001)

    engine.advance(20_000)

    assert len(engine.bodies()) == 2
    assert [is_rolled(message.record) for message in engine.arrived()] == [False, True]


def test_a_parked_message_survives_kills(open_engine: OpenEngine) -> None:
    engine = open_engine(timers=MULTIPLES)
    engine.send(b"a minute", TIMER_DELAY_MS=60_000)
    for _ in range(12):
        engine.advance(5_000)
        engine.crash()
        engine = open_engine(timers=MULTIPLES)

    engine.advance(1)

    assert engine.bodies() == [b"a minute"]


# --- waking -----------------------------------------------------------------------------------------


@pytest.mark.feature("A14")
def test_the_step_returns_when_to_call_it_again(engine: DelayEngine) -> None:
    """RocketMQ polls every 100 ms. Here the step is due shortly before the slot starts, then at the millisecond."""
    start = engine.clock.now_ms()
    assert engine.timer.step() is None

    engine.send(b"", TIMER_DELAY_MS=5_300)
    assert engine.timer.step() == start + 4_900
    engine.clock.set_ms(start + 4_900)
    assert engine.timer.step() == start + 5_300
    engine.clock.set_ms(start + 5_300)
    assert engine.timer.step() == start + 6_000, "to close the slot"
    engine.clock.set_ms(start + 6_000)
    assert engine.timer.step() is None


def test_a_new_timer_wakes_the_service(engine: DelayEngine) -> None:
    calls: list[bool] = []
    engine.timer.on_wake(lambda: calls.append(True))

    engine.send(b"", DELAY=1)
    assert not calls
    engine.send(b"", TIMER_DELAY_MS=1)
    assert calls


def test_a_message_that_is_due_before_it_is_on_the_wheel_is_released_at_once(engine: DelayEngine) -> None:
    engine.send(b"short", TIMER_DELAY_MS=1)
    engine.clock.move_ms(5_000)

    engine.release_due()

    assert engine.bodies() == [b"short"]


# --- clocks and outages -----------------------------------------------------------------------------


def test_after_the_clock_was_set_back_no_message_is_early(engine: DelayEngine) -> None:
    start = engine.clock.now_ms()
    engine.send(b"ten seconds", TIMER_DELAY_MS=10_000)
    engine.advance(9_950)
    engine.clock.set_ms(start - HOUR)

    engine.advance(HOUR + 9_999)
    assert engine.bodies() == []
    engine.advance(1)
    assert engine.bodies() == [b"ten seconds"]


@pytest.mark.parametrize("restart", [False, True])
def test_new_timers_work_after_the_clock_was_set_back(open_engine: OpenEngine, restart: bool) -> None:
    """Their slots were closed before the clock was set back. It works across a restart, too."""
    engine = open_engine()
    engine.send(b"first", TIMER_DELAY_MS=5_000)
    engine.advance(HOUR)
    engine.clock.move_ms(-HOUR)
    start = engine.clock.now_ms()
    engine.send(b"second", TIMER_DELAY_MS=7_000)
    engine.release_due()
    if restart:
        engine.store.take_checkpoint()
        engine.crash()
        engine = open_engine()

    engine.advance(6_999)
    assert engine.bodies() == [b"first"]
    engine.advance(1)
    assert engine.bodies() == [b"first", b"second"]
    assert engine.clock.now_ms() == start + 7_000


def test_after_the_clock_was_set_forward_due_messages_are_released_in_order(engine: DelayEngine) -> None:
    for delay_s in (300, 100, 200):
        engine.send(b"%d" % delay_s, TIMER_DELAY_SEC=delay_s)
    engine.release_due()
    engine.clock.move_ms(HOUR)

    engine.release_due()

    assert engine.bodies() == [b"100", b"200", b"300"]


@pytest.mark.feature("D18")
def test_an_outage_longer_than_the_wheel_loses_no_message(open_engine: OpenEngine) -> None:
    """RocketMQ drops messages that were due more than seven days ago."""
    engine = open_engine(timers=MULTIPLES)
    for delay_s in (3, 8, 40):
        engine.send(b"%d" % delay_s, TIMER_DELAY_SEC=delay_s)
    engine.release_due()
    engine.close()

    engine = open_engine(timers=MULTIPLES)
    engine.clock.move_ms(100 * DAY)
    engine.send(b"new", TIMER_DELAY_SEC=5)
    engine.advance(5_000)

    assert engine.bodies() == [b"3", b"8", b"40", b"new"]


def test_a_slot_with_pending_messages_is_never_overwritten(open_engine: OpenEngine) -> None:
    """An overdue slot and the end of the window may share a place on the ring. The overdue one is released first."""
    engine = open_engine(timers=MULTIPLES)
    engine.send(b"overdue", TIMER_DELAY_MS=2_500)
    engine.release_due()
    lap_ms = 2 * 70 * SECOND
    engine.clock.move_ms(lap_ms - 3 * SECOND)
    engine.send(b"same slot", TIMER_DELAY_MS=5_400)

    engine.advance(10_000)

    assert engine.bodies() == [b"overdue", b"same slot"]


# --- RocketMQ's delete markers ---------------------------------------------------------------------


@pytest.mark.feature("D20")
@pytest.mark.parametrize("key", ["id-1", "orders+id-1"])
def test_a_delete_marker_deletes_its_message(engine: DelayEngine, key: str) -> None:
    """Both forms of the key are accepted. The marker itself is never delivered."""
    due = engine.clock.now_ms() + 10_500
    engine.send(b"deleted", UNIQ_KEY="id-1", TIMER_DELIVER_MS=due)
    engine.send(b"kept", UNIQ_KEY="id-2", TIMER_DELIVER_MS=due)
    engine.send(b"0", UNIQ_KEY="id-1", TIMER_DELIVER_MS=due - 499, TIMER_DEL_UNIQKEY=key)

    engine.advance(60_000)

    assert engine.bodies() == [b"kept"]


def test_a_delete_marker_works_while_its_slot_is_open(engine: DelayEngine) -> None:
    due = engine.clock.now_ms() + 900
    engine.send(b"deleted", UNIQ_KEY="id-1", TIMER_DELIVER_MS=due)
    engine.advance(500)
    engine.send(b"0", UNIQ_KEY="id-1", TIMER_DELIVER_MS=due, TIMER_DEL_UNIQKEY="id-1")

    engine.advance(60_000)

    assert engine.bodies() == []


# --- RocketMQ's messages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"TIMER_OUT_MS": "5000"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "5300"}, 5_300),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "9999"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_MS": "4200"}, 5_200),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "5"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "4", "TIMER_DELAY_MS": "1"}, 5_001),
        ({"TIMER_DELIVER_MS": "5300"}, 5_300),
        ({"TIMER_OUT_MS": "soon"}, None),
        ({}, None),
    ],
)
def test_a_due_time_is_read_from_the_properties_that_a_broker_wrote(
    engine: DelayEngine, properties: dict[str, str], expected: int | None
) -> None:
    """RocketMQ stores the slot only. The producer's delay gives the millisecond within the slot."""
    engine.clock.set_ms(1_000)
    put = engine.store.put(RecordDraft(TIMER_TOPIC, 0, b"", encode_properties(properties)))

    assert (
        TimerTopicReader(engine.store, 1_000).deliver_time(engine.store.read(put.physical_offset, put.size)) == expected
    )


def test_messages_with_units_of_rocketmq_are_released(engine: DelayEngine) -> None:
    """The last field of its units is 0: the due time is read from the record."""
    start = engine.clock.now_ms()
    engine.send(b"from RocketMQ", TIMER_DELAY_MS=5_300)
    engine.release_due()
    assert engine.timer._files is not None
    found = engine.timer._files.log._files.find(0)
    assert found is not None
    found[0].view[44:52] = bytes(8)

    engine.advance(10_000)

    assert [message.at_ms - start for message in engine.arrived()] == [5_300]


# --- threads ----------------------------------------------------------------------------------------


def test_in_a_thread_on_the_system_clock_no_message_is_early() -> None:
    """`ServiceThread` runs the services: it sleeps until the time of the next step, and new messages wake it."""
    engine = DelayEngine(clock=SystemClock())
    errors: list[Exception] = []
    thread = ServiceThread(
        "delay", [engine.schedule, engine.timer], engine.clock, lambda service, error: errors.append(error)
    )
    all_arrived = threading.Event()
    queue = engine.store.consume_queue("orders", 0)
    engine.store.watch("orders", lambda: all_arrived.set() if queue.max_offset == 21 else None)
    thread.start()
    try:
        for number in range(20):
            engine.send(b"", TIMER_DELAY_MS=1 + 7 * number % 90)
        engine.send(b"", TIMER_DELAY_MS=120)

        assert all_arrived.wait(30)
    finally:
        thread.stop()

    late_ms = [message.at_ms - int(message.properties["TIMER_DELIVER_MS"]) for message in engine.arrived()]
    assert min(late_ms) >= 0
    assert errors == []
    engine.close()

"""Timers: stored, put on the wheel, released."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.backlog import parking_slots
from mqtemplate.delay.timers.intake import TimerTopicReader
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.services import ServiceThread
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.kit import TimedClock
from tests.waiting import PATIENCE_S

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
MULTIPLES = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 600}


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


def test_timers_that_arrive_one_by_one_are_put_on_the_wheel_together(open_engine: OpenEngine) -> None:
    """Each send wakes the service, which holds the lock of sends and cancels meanwhile. Many do not have to wait."""
    engine = open_engine(clock=TimedClock())

    def unread() -> int:
        return engine.store.consume_queue(TIMER_TOPIC, 0).max_offset - engine.timer._cursor

    def send_and_step(count: int = 1) -> int:
        for _ in range(count):
            engine.send(b"x", TIMER_DELAY_MS=MINUTE)
        engine.timer.step()
        return unread()

    assert [send_and_step() for _ in range(4)] == [0, 1, 2, 3]
    assert engine.timer.step() == engine.clock.now_ms() + 2
    engine.clock.move_ms(2)
    engine.timer.step()
    assert unread() == 0
    assert send_and_step(128) == 0

    engine.send(b"soon", TIMER_DELAY_MS=1)
    engine.timer.step()
    engine.clock.move_ms(2)
    engine.timer.step()
    assert engine.bodies() == [b"soon"]


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


@pytest.mark.feature("D5")
def test_parked_messages_spread_over_half_the_window() -> None:
    """Messages of one far time are not rolled in one slot. RocketMQ parks them in two slots."""
    offsets = np.arange(1_000) * 317

    parked = parking_slots(offsets, 0, TimerSettings())

    assert ((parked >= DAY) & (parked < 2 * DAY)).all()
    assert len(np.unique(parked)) > 900


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
        "delay", [engine.schedule, engine.timer], engine.clock, lambda service, error, repeated: errors.append(error)
    )
    all_arrived = threading.Event()
    queue = engine.store.consume_queue("orders", 0)
    engine.store.watch("orders", lambda: all_arrived.set() if queue.max_offset == 21 else None)
    thread.start()
    try:
        for number in range(20):
            engine.send(b"", TIMER_DELAY_MS=1 + 7 * number % 90)
        engine.send(b"", TIMER_DELAY_MS=120)

        assert all_arrived.wait(PATIENCE_S)
    finally:
        thread.stop()

    late_ms = [message.at_ms - int(message.properties["TIMER_DELIVER_MS"]) for message in engine.arrived()]
    assert min(late_ms) >= 0
    assert errors == []
    engine.close()

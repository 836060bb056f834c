"""Timers with full disks, poison messages, damage, stops, and deleted files."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mqtemplate.delay.divert import TimerLimits
from mqtemplate.errors import StoreError
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine, full_disk

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
MULTIPLES = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 600}


# --- faults -----------------------------------------------------------------------------------------


def test_another_precision_is_as_exact(open_engine: OpenEngine) -> None:
    engine = open_engine(limits=TimerLimits(precision_ms=100))
    start = engine.clock.now_ms()
    for delay_ms in (1, 99, 100, 101, 250):
        engine.send(b"%d" % delay_ms, TIMER_DELAY_MS=delay_ms)

    engine.advance(1_000)

    assert [message.at_ms - start for message in engine.arrived()] == [1, 99, 100, 101, 250]


@pytest.mark.feature("D19")
def test_the_progress_does_not_pass_an_unreleased_message(engine: DelayEngine) -> None:
    """RocketMQ gives up and continues with the next slot. Here the slot stays open, also on disk."""
    start_ms = engine.clock.now_ms()
    engine.send(b"blocked", TIMER_DELAY_MS=1_500)
    engine.release_due()

    with full_disk(engine):
        engine.clock.move_ms(1 * HOUR)
        engine.timer.step()
        engine.store.take_checkpoint()

    assert engine.timer._files is not None
    assert engine.timer._files.checkpoint.last_read_time_ms <= start_ms + 1_000


@pytest.mark.feature("D30")
def test_a_stop_at_any_time_neither_loses_nor_repeats_messages(open_engine: OpenEngine) -> None:
    """There is no queue between threads. A message that a step did not release is still pending."""
    engine = open_engine()
    delays_ms = [100 + 137 * number for number in range(40)]
    for delay_ms in delays_ms:
        engine.send(b"%d" % delay_ms, TIMER_DELAY_MS=delay_ms)
    for _ in range(30):
        engine.advance(193)
        engine.close()
        engine = open_engine()

    engine.advance(10_000)

    assert engine.bodies() == [b"%d" % delay_ms for delay_ms in delays_ms]


@pytest.mark.feature("D4")
def test_any_number_of_messages_may_be_due_in_one_second(engine: DelayEngine) -> None:
    """RocketMQ's flow control refuses most messages just above its limit. There is no limit here."""
    due_ms = engine.clock.now_ms() + 5_400
    for _ in range(3_000):
        engine.send(b"", TIMER_DELIVER_MS=due_ms)

    engine.advance(5_400)

    assert {message.at_ms for message in engine.arrived()} == {due_ms}
    assert len(engine.bodies()) == 3_000


def test_a_delay_of_years_is_exact_to_the_millisecond(open_engine: OpenEngine) -> None:
    """A unit has four bytes for the delay: a message is never parked beyond the window."""
    timers = {"slots_total": 40_000, "roll_window_slots": 30_000}
    engine = open_engine(timers=timers, limits=TimerLimits(precision_ms=10_000, max_delay_ms=5 * 365 * DAY))
    start_ms = engine.clock.now_ms()
    engine.send(b"three years", TIMER_DELAY_MS=3 * 365 * DAY + 7)

    engine.advance(3 * 365 * DAY + 7)

    [message] = engine.arrived()
    assert message.at_ms == start_ms + 3 * 365 * DAY + 7
    assert int(message.properties["TIMER_ROLL_TIMES"]) == len(engine.timer_records()) - 1


def test_new_timers_work_after_the_clock_was_set_back_by_months(open_engine: OpenEngine) -> None:
    """They are linked to a slot that is months ahead. The delay to it does not fit into four bytes."""
    engine = open_engine()
    engine.send(b"first", TIMER_DELAY_MS=5_000)
    engine.advance(100 * DAY)
    engine.clock.move_ms(-90 * DAY)
    engine.send(b"second", TIMER_DELAY_MS=7_000)
    engine.release_due()
    engine.store.take_checkpoint()
    engine.crash()
    engine = open_engine()

    engine.advance(7_000)

    assert engine.bodies() == [b"first", b"second"]


# --- deleted files ---------------------------------------------------------------------------------


def test_timer_log_files_are_deleted_with_the_commit_log(open_engine: OpenEngine) -> None:
    """Files without pending messages are deleted once their records are. The last file stays."""
    engine = open_engine()
    for number in range(350):
        engine.send(b"", TIMER_DELAY_MS=1_000 + number)
    far = engine.send(b"far", TIMER_DELAY_MS=30 * MINUTE)
    engine.advance(10 * SECOND)

    assert engine.timer.delete_before(0) == 0
    assert engine.timer.delete_before(far.physical_offset) == 3
    assert engine.timer.delete_before(engine.store.end_offset) == 0
    engine.store.take_checkpoint()
    engine.crash()
    engine = open_engine()
    engine.advance(30 * MINUTE)
    assert engine.bodies().count(b"far") == 1
    assert len(engine.bodies()) == 351


def test_a_timer_log_file_with_a_pending_message_stays(engine: DelayEngine) -> None:
    engine.send(b"pending", TIMER_DELAY_MS=30 * MINUTE)
    for number in range(250):
        engine.send(b"", TIMER_DELAY_MS=1_000 + number)
    engine.advance(10 * SECOND)

    assert engine.timer.delete_before(engine.store.end_offset) == 0
    engine.advance(30 * MINUTE)
    assert engine.timer.delete_before(engine.store.end_offset) == 2


def test_a_flush_that_fails_during_a_checkpoint_leaves_no_slot_out_of_the_next_one(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the wheel lacked them. A start here rebuilds the wheel; RocketMQ would not deliver the messages."""
    engine = open_engine()
    engine.send(b"one", TIMER_DELAY_MS=MINUTE)
    engine.release_due()
    with monkeypatch.context() as patch:
        patch.setattr(engine.store.group_commit, "wait", failing_flush)
        with pytest.raises(StoreError):
            engine.timer.persist()
    engine.timer.persist()
    engine.crash()

    with capture_logs() as logs:
        engine = open_engine()

    assert [entry["event"] for entry in logs if entry["event"] == "wheel.rebuilt"] == []
    engine.advance(MINUTE)
    assert engine.bodies() == [b"one"]


def failing_flush(end: int, timeout_ms: int) -> bool:
    raise StoreError("cannot flush the commit log")

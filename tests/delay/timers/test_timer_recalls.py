"""A message that RocketMQ recalled is not pending: its delete marker deletes it when it is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.delay.timers.files import TIMER_LOG_FOLDER
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine

HOUR_MS = 3_600_000
DUE_MS = 30 * 60_000


def recall(engine: DelayEngine, key: str, due_ms: int, topic: str = "orders") -> None:
    """Send a delete marker as RocketMQ does: a timer whose property names the message to delete."""
    own = key.removeprefix(f"{topic}+")
    engine.send(b"0", topic, UNIQ_KEY=own, BORN_TIMESTAMP=1, TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key)


def pending(engine: DelayEngine) -> list[str]:
    """Return the message ids of a query. Assert that all counts agree with it."""
    listed = [message.msg_id for message in engine.view.page(PendingQuery(), 100, None).messages]
    assert engine.view.count(PendingQuery(), 1_000).total == len(listed)
    assert engine.timer.count_pending() == len(listed)
    assert engine.store.metrics.snapshot()["delay.waiting.timer"] == len(listed)
    return listed


@pytest.mark.parametrize("key", ["recalled", "orders+recalled"])
@pytest.mark.parametrize("is_counted_before", [False, True])
def test_a_recalled_message_is_not_listed(engine: DelayEngine, key: str, is_counted_before: bool) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"in another slot", TIMER_DELIVER_MS=due_ms + 5_000)
    if is_counted_before:
        assert pending(engine) == ["recalled", "kept", "in another slot"]

    recall(engine, key, due_ms)

    assert pending(engine) == ["kept", "in another slot"]


def test_a_marker_recalls_a_message_that_arrives_later(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    recall(engine, "recalled", due_ms)
    assert pending(engine) == []

    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)

    assert pending(engine) == ["kept"]


def test_a_body_that_contains_the_key_is_not_recalled(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send(b"\x02UNIQ_KEY\x01recalled\x02", UNIQ_KEY="kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)

    assert pending(engine) == ["kept"]


def test_a_marker_in_another_slot_recalls_nothing(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "kept", due_ms + 1_000)

    assert pending(engine) == ["kept"]
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"kept"]


@pytest.mark.parametrize("kill", [False, True])
def test_a_restart_finds_the_markers_again(open_engine: OpenEngine, kill: bool) -> None:
    engine = open_engine()
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)
    engine.release_due()
    engine.store.take_checkpoint()
    engine.crash() if kill else engine.close()

    engine = open_engine()

    assert pending(engine) == ["kept"]


def test_the_count_is_correct_before_during_and_after_the_slot(engine: DelayEngine) -> None:
    """The message is deleted at its due time. It is subtracted from the count once."""
    due_ms = (engine.clock.now_ms() + DUE_MS) // 1_000 * 1_000 + 500
    for name, at_ms in (("first", 100), ("recalled", 400), ("last", 450)):
        engine.send_for(name.encode(), TIMER_DELIVER_MS=due_ms - 500 + at_ms)
    recall(engine, "recalled", due_ms)
    slot_ms = due_ms - 500

    found = []
    for at_ms in (-60_000, -50, 50, 200, 420, 500, 5_000):
        engine.advance(slot_ms + at_ms - engine.clock.now_ms())
        found.append(pending(engine))

    assert found == [["first", "last"]] * 3 + [["last"]] * 2 + [[]] * 2
    assert engine.bodies() == [b"first", b"last"]


def test_a_marker_that_arrives_in_its_open_slot_recalls_what_is_left_of_it(engine: DelayEngine) -> None:
    due_ms = (engine.clock.now_ms() + 5_000) // 1_000 * 1_000
    for name, at_ms in (("gone", 100), ("recalled", 800)):
        engine.send_for(name.encode(), TIMER_DELIVER_MS=due_ms + at_ms)
    engine.advance(due_ms + 300 - engine.clock.now_ms())

    recall(engine, "gone", due_ms + 900)
    recall(engine, "recalled", due_ms + 900)

    assert pending(engine) == []
    engine.advance(5_000)
    assert engine.bodies() == [b"gone"]
    assert pending(engine) == []


@pytest.mark.parametrize("marker_at_ms", [0, 30 * 60_000, 150 * 60_000], ids=["at once", "later", "in its slot"])
@pytest.mark.parametrize("restarts", [False, True])
def test_parked_messages_are_recalled_wherever_their_marker_is(
    open_engine: OpenEngine, marker_at_ms: int, restarts: bool
) -> None:
    """Both reach the same final slot. They are rolled several times before."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 3 * HOUR_MS
    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    before = pending(engine)
    engine.advance(marker_at_ms)
    recall(engine, "recalled", due_ms)
    if restarts:
        engine.release_due()
        engine.crash()
        engine = open_engine()

    found = []
    while engine.clock.now_ms() < due_ms - 60_000:
        found.append(pending(engine))
        engine.advance(9 * 60_000)

    assert before == ["recalled", "kept"]
    assert found
    assert all(ids == ["kept"] for ids in found)
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"kept"]
    assert pending(engine) == []


def test_units_of_rocketmq_are_recalled_by_the_due_time_of_their_records(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The units do not have it, and the slot of a parked unit is not its final slot."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 3 * HOUR_MS
    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)
    engine.release_due()
    engine.close()
    for path in (tmp_path / TIMER_LOG_FOLDER).iterdir():
        data = bytearray(path.read_bytes())
        for at in range(44, 3 * 52, 52):
            data[at : at + 8] = bytes(8)
        path.write_bytes(data)

    engine = open_engine()

    assert pending(engine) == ["kept"]


def test_a_recalled_message_is_reported_as_cancelled(engine: DelayEngine) -> None:
    """A reschedule does not make it pending again."""
    due_ms = engine.clock.now_ms() + DUE_MS
    handle = engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    kept = engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)
    engine.release_due()

    again = engine.control.cancel(handle)
    moved = engine.control.reschedule(handle, due_ms + 60_000)
    other = engine.control.cancel(kept)

    assert (again.status, again.count) == (ScheduleChangeStatus.CANCELLED, 0)
    assert (moved.status, moved.count) == (ScheduleChangeStatus.CANCELLED, 0)
    assert (other.status, other.count) == (ScheduleChangeStatus.CANCELLED, 1)
    assert pending(engine) == []
    engine.advance(HOUR_MS)
    assert engine.bodies() == []


def test_retention_copies_a_recalled_message_and_its_marker(engine: DelayEngine) -> None:
    """Both are copied forward, and meet again. The count stays correct after another cancel."""
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"recalled", TIMER_DELIVER_MS=due_ms)
    kept = engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"cancelled", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)
    before = pending(engine)

    assert engine.control.copy_forward(0, engine.store.end_offset)

    assert before == ["kept", "cancelled"]
    assert pending(engine) == ["kept", "cancelled"]
    assert engine.control.cancel(kept).count == 1
    assert pending(engine) == ["cancelled"]
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"cancelled"]

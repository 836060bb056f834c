"""What RocketMQ took back does not wait: its marker meets the message in its slot, and drops it when it is due."""

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
    """As RocketMQ does: a message like any other, whose property names the one to drop."""
    own = key.removeprefix(f"{topic}+")
    engine.send(b"0", topic, UNIQ_KEY=own, BORN_TIMESTAMP=1, TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key)


def waiting(engine: DelayEngine) -> list[str]:
    """The ids that are listed; the counts tell the same."""
    listed = [message.msg_id for message in engine.view.page(PendingQuery(), 100, None).messages]
    assert engine.view.count(PendingQuery(), 1_000).total == len(listed)
    assert engine.timer.count_pending() == len(listed)
    assert engine.store.metrics.snapshot()["delay.waiting.timer"] == len(listed)
    return listed


@pytest.mark.parametrize("key", ["taken-back", "orders+taken-back"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_recalled_message_is_not_listed(engine: DelayEngine, key: str, asked_before: bool) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"in another slot", TIMER_DELIVER_MS=due_ms + 5_000)
    if asked_before:
        assert waiting(engine) == ["taken-back", "kept", "in another slot"]

    recall(engine, key, due_ms)

    assert waiting(engine) == ["kept", "in another slot"]


def test_a_marker_that_was_there_first_takes_what_comes_later(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    recall(engine, "taken-back", due_ms)
    assert waiting(engine) == []

    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)

    assert waiting(engine) == ["kept"]


def test_a_body_that_looks_like_the_key_is_not_taken_for_it(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send(b"\x02UNIQ_KEY\x01taken-back\x02", UNIQ_KEY="kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "taken-back", due_ms)

    assert waiting(engine) == ["kept"]


def test_a_marker_in_another_slot_takes_nothing(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "kept", due_ms + 1_000)

    assert waiting(engine) == ["kept"]
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"kept"]


@pytest.mark.parametrize("kill", [False, True])
def test_a_restart_finds_the_markers_again(open_engine: OpenEngine, kill: bool) -> None:
    engine = open_engine()
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "taken-back", due_ms)
    engine.release_due()
    engine.store.take_checkpoint()
    engine.crash() if kill else engine.close()

    engine = open_engine()

    assert waiting(engine) == ["kept"]


def test_it_is_told_right_before_during_and_after_its_slot(engine: DelayEngine) -> None:
    """In the slot the message is dropped at its time; the count goes with it, and not twice."""
    due_ms = (engine.clock.now_ms() + DUE_MS) // 1_000 * 1_000 + 500
    for name, at_ms in (("first", 100), ("taken-back", 400), ("last", 450)):
        engine.send_for(name.encode(), TIMER_DELIVER_MS=due_ms - 500 + at_ms)
    recall(engine, "taken-back", due_ms)
    begin_ms = due_ms - 500

    found = []
    for at_ms in (-60_000, -50, 50, 200, 420, 500, 5_000):
        engine.advance(begin_ms + at_ms - engine.clock.now_ms())
        found.append(waiting(engine))

    assert found == [["first", "last"]] * 3 + [["last"]] * 2 + [[]] * 2
    assert engine.bodies() == [b"first", b"last"]


def test_a_marker_that_comes_while_the_slot_is_open_takes_what_is_left_of_it(engine: DelayEngine) -> None:
    due_ms = (engine.clock.now_ms() + 5_000) // 1_000 * 1_000
    for name, at_ms in (("gone", 100), ("taken-back", 800)):
        engine.send_for(name.encode(), TIMER_DELIVER_MS=due_ms + at_ms)
    engine.advance(due_ms + 300 - engine.clock.now_ms())

    recall(engine, "gone", due_ms + 900)
    recall(engine, "taken-back", due_ms + 900)

    assert waiting(engine) == []
    engine.advance(5_000)
    assert engine.bodies() == [b"gone"]
    assert waiting(engine) == []


@pytest.mark.parametrize("marker_at_ms", [0, 30 * 60_000, 150 * 60_000], ids=["at once", "later", "in its slot"])
@pytest.mark.parametrize("restarts", [False, True])
def test_parked_ones_do_not_wait_wherever_their_marker_is(
    open_engine: OpenEngine, marker_at_ms: int, restarts: bool
) -> None:
    """Both will come to the same slot. They are set on again several times on the way, which tells nothing new."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 3 * HOUR_MS
    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    before = waiting(engine)
    engine.advance(marker_at_ms)
    recall(engine, "taken-back", due_ms)
    if restarts:
        engine.release_due()
        engine.crash()
        engine = open_engine()

    found = []
    while engine.clock.now_ms() < due_ms - 60_000:
        found.append(waiting(engine))
        engine.advance(9 * 60_000)

    assert before == ["taken-back", "kept"]
    assert found
    assert all(ids == ["kept"] for ids in found)
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"kept"]
    assert waiting(engine) == []


def test_units_of_rocketmqs_making_are_asked_for_their_time(open_engine: OpenEngine, tmp_path: Path) -> None:
    """They do not tell it; a parked one's slot is not the one that its marker means."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 3 * HOUR_MS
    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "taken-back", due_ms)
    engine.release_due()
    engine.close()
    for path in (tmp_path / TIMER_LOG_FOLDER).iterdir():
        data = bytearray(path.read_bytes())
        for at in range(44, 3 * 52, 52):
            data[at : at + 8] = bytes(8)
        path.write_bytes(data)

    engine = open_engine()

    assert waiting(engine) == ["kept"]


def test_a_recalled_message_cannot_be_cancelled_once_more(engine: DelayEngine) -> None:
    """It is cancelled, which is the answer; a reschedule does not bring it back."""
    due_ms = engine.clock.now_ms() + DUE_MS
    handle = engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    kept = engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "taken-back", due_ms)
    engine.release_due()

    again = engine.control.cancel(handle)
    moved = engine.control.reschedule(handle, due_ms + 60_000)
    other = engine.control.cancel(kept)

    assert (again.status, again.count) == (ScheduleChangeStatus.CANCELLED, 0)
    assert (moved.status, moved.count) == (ScheduleChangeStatus.CANCELLED, 0)
    assert (other.status, other.count) == (ScheduleChangeStatus.CANCELLED, 1)
    assert waiting(engine) == []
    engine.advance(HOUR_MS)
    assert engine.bodies() == []


def test_what_we_take_back_beside_a_recalled_one_is_counted_once(engine: DelayEngine) -> None:
    """Retention copies both forward, the marker and what it names; they meet again."""
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send_for(b"taken-back", TIMER_DELIVER_MS=due_ms)
    kept = engine.send_for(b"kept", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"cancelled", TIMER_DELIVER_MS=due_ms)
    recall(engine, "taken-back", due_ms)
    before = waiting(engine)

    assert engine.control.copy_forward(0, engine.store.end_offset)

    assert before == ["kept", "cancelled"]
    assert waiting(engine) == ["kept", "cancelled"]
    assert engine.control.cancel(kept).count == 1
    assert waiting(engine) == ["cancelled"]
    engine.advance(HOUR_MS)
    assert engine.bodies() == [b"cancelled"]

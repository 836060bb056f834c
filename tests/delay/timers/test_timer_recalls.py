"""A message that RocketMQ recalled is not pending: its delete marker deletes it when it is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.pending import PendingQuery
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import clear_tails

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


def test_a_body_that_contains_the_key_is_not_recalled(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + DUE_MS
    engine.send(b"\x02UNIQ_KEY\x01recalled\x02", UNIQ_KEY="kept", TIMER_DELIVER_MS=due_ms)
    recall(engine, "recalled", due_ms)

    assert pending(engine) == ["kept"]


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
    clear_tails(tmp_path)

    engine = open_engine()

    assert pending(engine) == ["kept"]

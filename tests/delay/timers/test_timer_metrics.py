"""Counts of timers: metrics, ``timermetrics``, and the list of pending messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.delay.timers.timer_message_store import TIMER_METRICS_FILE
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import is_rolled

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
MULTIPLES = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 600}


def test_the_metrics_agree_with_the_store(open_engine: OpenEngine) -> None:
    """Pending, released and rolled messages: the running counts equal the numbers in the store."""
    engine = open_engine()
    for delay_s in (1, 2, 3, 4_000, 5_000):
        engine.send(b"%d" % delay_s, UNIQ_KEY=f"id-{delay_s}", TIMER_DELAY_SEC=delay_s)
    handle = engine.send_for(b"deleted", TIMER_DELAY_SEC=90)
    metrics = engine.store.metrics

    assert metrics.snapshot()["delay.waiting.timer"] == 6
    engine.control.cancel(handle)
    assert metrics.snapshot()["delay.waiting.timer"] == 5
    engine.advance(2 * SECOND)
    engine.clock.move_ms(1_300)
    engine.release_due()
    assert metrics.snapshot()["delay.waiting.timer"] == 2
    engine.advance(3_800 * SECOND)

    snapshot = metrics.snapshot()
    listed = sum(len(piece.rows) for piece in engine.timer.pending(0, 1 << 60))
    assert snapshot["delay.waiting.timer"] == listed == 2
    assert snapshot["delay.released"] == len(engine.bodies()) == 3
    assert snapshot["delay.rolled"] == len([record for record in engine.timer_records() if is_rolled(record)]) == 2
    assert metrics.histogram("delay.lag_ms").snapshot().total == 300
    engine.crash()
    engine = open_engine()
    assert engine.store.metrics.snapshot()["delay.waiting.timer"] == 2


def test_timermetrics_has_the_number_of_pending_timers_by_topic(open_engine: OpenEngine, tmp_path: Path) -> None:
    """One line of JSON as in RocketMQ, written twice a minute at most, and read at the next start."""
    engine = open_engine()
    for delay_s in (1, 2, 90, 5_000):
        engine.send(b"", TIMER_DELAY_SEC=delay_s)
    engine.send(b"", topic="bills", TIMER_DELAY_SEC=90)
    engine.advance(1_500)
    now_ms = engine.clock.now_ms()
    engine.store.take_checkpoint()
    engine.close()

    table = json.loads((tmp_path / TIMER_METRICS_FILE).read_text())
    assert {topic: pair["count"] for topic, pair in table["timingCount"].items()} == {"orders": 3, "bills": 1}
    assert table["dataVersion"] == {"counter": 1, "stateVersion": 0, "timestamp": now_ms}
    engine = open_engine()
    engine.advance(3_700 * SECOND)
    engine.store.take_checkpoint()
    table = json.loads((tmp_path / TIMER_METRICS_FILE).read_text())
    assert {topic: pair["count"] for topic, pair in table["timingCount"].items()} == {"orders": 1, "bills": 0}


def test_timermetrics_counts_every_topic_of_a_batch_with_thousands(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A batch may name more topics than any cache holds, and two topics may share a Java hash (``Aa`` and ``BB``)."""
    topics = ["Aa", "BB", *(f"topic-{number}" for number in range(4_200))]
    engine = open_engine()
    for topic in topics:
        engine.send(b"", topic=topic, TIMER_DELAY_SEC=90)
    engine.release_due()
    engine.store.take_checkpoint()
    engine.close()

    table = json.loads((tmp_path / TIMER_METRICS_FILE).read_text())

    assert {topic: pair["count"] for topic, pair in table["timingCount"].items()} == dict.fromkeys(topics, 1)
    open_engine()


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"timingCount":{"orders":7}}', b'{"timingCount":[]}'])
def test_unreadable_timermetrics_are_ignored(open_engine: OpenEngine, tmp_path: Path, text: bytes) -> None:
    engine = open_engine()
    engine.send(b"pending", TIMER_DELAY_SEC=5)
    engine.release_due()
    engine.close()
    (tmp_path / TIMER_METRICS_FILE).write_bytes(text)

    engine = open_engine()
    engine.advance(5_000)

    assert engine.bodies() == [b"pending"]

"""The metrics of the embedded broker, compared with the contents of the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.metrics import HistogramSnapshot, ValueHistogram
from mqtemplate.pending import PendingQuery
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

SETTINGS = EmbeddedSettings(mapped_file_size_commit_log=1 << 20, timer_roll_window_slot=60)
HOUR_MS = 3_600_000
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, SETTINGS, VirtualClock()) as broker:
        yield broker


def number(broker: EmbeddedBroker, name: str) -> int:
    value = broker.metrics.snapshot()[name]
    assert isinstance(value, int)
    return value


def times(broker: EmbeddedBroker, name: str) -> HistogramSnapshot:
    value = broker.metrics.snapshot()[name]
    assert isinstance(value, HistogramSnapshot)
    return value


def send(broker: EmbeddedBroker, chance: Random) -> str | None:
    """Send a message with a level, with a timer or without a delay, and return its handle."""
    properties = chance.choice(
        [{}, {"DELAY": str(chance.randrange(1, 6))}, {"TIMER_DELAY_MS": str(chance.randrange(1, 300_000))}]
    )
    return broker.sends.send(Message("orders", b"x", properties)).handle


@pytest.mark.parametrize("seed", range(5))
def test_the_counters_agree_with_the_store(broker: EmbeddedBroker, seed: int) -> None:
    """The queues show the same numbers of pending, released, rolled, cancelled and appended messages."""
    chance, harness = Random(seed), Harness(broker)
    not_delayed = pending = 0
    for moved_to_now in range(1, 7):
        handles = [send(broker, chance) for _ in range(30)]
        delayed = [handle for handle in handles if handle is not None]
        not_delayed, pending = not_delayed + len(handles) - len(delayed), pending + len(delayed)
        broker.delayed.cancel(delayed[0])
        broker.delayed.reschedule(delayed[1], broker.clock.now_ms())
        broker.delayed.reschedule(delayed[2], broker.clock.now_ms() + HOUR_MS)
        harness.advance(f"{chance.randrange(90_000)}ms")

        left = broker.delayed.count_pending(PendingQuery()).total
        stored = sum(
            broker.store.consume_queue(topic, queue_id).max_offset
            for topic in ("orders", SCHEDULE_TOPIC, TIMER_TOPIC)
            for queue_id in broker.store.queue_ids(topic)
        )
        released = number(broker, "delay.released")
        assert number(broker, "delay.waiting.level") + number(broker, "delay.waiting.timer") == left
        assert released + number(broker, "delay.cancelled") + moved_to_now + left == pending
        assert len(messages_in(broker, "orders")) == not_delayed + moved_to_now + released
        assert number(broker, "store.appended") == stored
        assert times(broker, "delay.lag_ms").count == released
    assert number(broker, "delay.rescheduled") == 2 * number(broker, "delay.cancelled") == 12
    assert number(broker, "delay.rolled") > 0
    assert number(broker, "delay.poison") == 0


@pytest.mark.feature("X9")
def test_the_lag_is_the_time_from_the_deliver_time_to_the_delivery(tmp_path: Path) -> None:
    """It is zero without an outage, and the length of the outage after one."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, SETTINGS, clock) as broker:
        broker.sends.send(Message("orders", b"x", {"DELAY": "1"}))
        Harness(broker).advance("1s")
        on_time = times(broker, "delay.lag_ms")
        broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_MS": "1000"}))
    clock.move_ms(61_000)

    with EmbeddedBroker(tmp_path, SETTINGS, clock) as broker:
        Harness(broker).run_until_idle()
        late = times(broker, "delay.lag_ms")

    assert (on_time.count, on_time.total) == (1, 0)
    assert (late.count, late.total) == (1, 60_000)


def test_appends_and_flushes_are_timed(broker: EmbeddedBroker) -> None:
    broker.sends.send(Message("orders", b"x"))
    broker.sends.send_batch([Message("orders", b"x") for _ in range(10)])

    assert times(broker, "store.append_ns").count == 2
    assert number(broker, "store.appended") == 11
    assert times(broker, "store.flush_ns").count >= 2
    assert times(broker, "store.flush_ns").quantile(0.5) > 0


def test_a_histogram_counts_in_buckets_of_doubling_size() -> None:
    histogram = ValueHistogram()
    for value in (0, 1, 2, 3, 4, 1_000, -5):
        histogram.observe(value)
    histogram.observe(7, count=2)

    snapshot = histogram.snapshot()

    assert snapshot.buckets == {1: 2, 2: 1, 4: 2, 8: 3, 1_024: 1}
    assert (snapshot.count, snapshot.total) == (9, 1_024)
    assert (snapshot.quantile(0.5), snapshot.quantile(1.0)) == (4, 1_024)
    assert ValueHistogram().snapshot().quantile(0.99) == 0


def test_the_documentation_lists_all_metrics(broker: EmbeddedBroker) -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [sample.name for sample in broker.metrics.samples() if f"| `{sample.name}` |" not in page] == []

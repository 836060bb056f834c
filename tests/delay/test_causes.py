"""Causes of late releases: broker stopped, backlog, rate limit."""

from __future__ import annotations

import numpy as np
import pytest

from mqtemplate.delay.pending_rows import LatenessCauses
from mqtemplate.metrics import HistogramSnapshot, Metrics


@pytest.fixture
def causes() -> LatenessCauses:
    causes = LatenessCauses(Metrics())
    causes.broker_started(1_000, 5_000)
    return causes


@pytest.mark.parametrize(
    ("due_ms", "released_ms", "parts"),
    [
        (6_000, 6_000, (0, 0, 0)),  # on time
        (2_000, 5_000, (3_000, 0, 0)),  # due while the broker was stopped
        (2_000, 5_700, (3_000, 700, 0)),  # and others were released first
        (500, 5_700, (4_000, 1_200, 0)),  # due while the process before ran, and had a backlog
        (6_000, 6_400, (0, 400, 0)),
    ],
)
def test_the_time_in_which_the_broker_was_stopped_counts_apart(
    causes: LatenessCauses, due_ms: int, released_ms: int, parts: tuple[int, int, int]
) -> None:
    assert causes.split("orders", due_ms, released_ms) == parts


def test_a_held_topic_is_late_by_its_rate_and_others_by_the_backlog(causes: LatenessCauses) -> None:
    causes.topic_held("orders", 6_000, 9_000)

    assert causes.split("orders", 6_500, 8_000) == (0, 0, 1_500)
    assert causes.split("orders", 8_500, 9_600) == (0, 600, 500)
    assert causes.split("others", 6_500, 8_000) == (0, 1_500, 0)


def test_a_time_counts_once(causes: LatenessCauses) -> None:
    """Messages that were due during the outage are held from the start on."""
    causes.topic_held("orders", 2_000, 9_000)

    assert causes.split("orders", 2_000, 8_000) == (3_000, 0, 3_000)


def test_spans_of_a_topic_that_adjoin_are_one(causes: LatenessCauses) -> None:
    for start_ms in range(10_000, 1_010_000, 500):
        causes.topic_held("orders", start_ms, start_ms + 400)

    assert causes.split("orders", 10_000, 1_000_000) == (0, 0, 990_000)


def test_releases_are_counted_by_cause() -> None:
    metrics = Metrics()
    causes = LatenessCauses(metrics)
    causes.broker_started(1_000, 5_000)

    causes.observe(np.array([2_000, 6_000, 6_000, 7_000]), np.array([2_000, 6_000, 6_900, 7_000]), 7_000)

    found = {name: value for name, value in metrics.snapshot().items() if name.startswith("delay.lateness_ms")}
    totals = {name: value.total for name, value in found.items() if isinstance(value, HistogramSnapshot)}
    assert totals == {
        "delay.lateness_ms{cause=broker_stopped}": 3_000,
        "delay.lateness_ms{cause=rate_limit}": 900,
        "delay.lateness_ms{cause=backlog}": 2_000 + 1_000 + 100,
    }

"""Metrics: series by labels, their bound, and values that are read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mqtemplate.metrics import OTHER, MetricKind, Metrics, MetricSample


def test_a_series_is_created_once_for_its_labels() -> None:
    metrics = Metrics()
    metrics.counter("sent", topic="a", tag="x").add()
    metrics.counter("sent", tag="x", topic="a").add()
    metrics.counter("sent", topic="b", tag="x").add(5)

    assert metrics.snapshot() == {"sent{tag=x,topic=a}": 2, "sent{tag=x,topic=b}": 5}


@pytest.mark.feature("14.3")
def test_the_number_of_series_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """What is beyond the limit is counted in one series, and that is logged once."""
    metrics = Metrics(max_series=10)
    for number in range(50):
        metrics.counter("sent", topic=f"t{number}").add()
        metrics.histogram("took", topic=f"t{number}").observe(1)

    sent = [sample for sample in metrics.samples() if sample.name == "sent"]
    assert len(sent) == 10
    assert [sample.value for sample in sent if sample.labels == {"topic": OTHER}] == [41]
    assert sum(sample.value for sample in sent if isinstance(sample.value, int)) == 50
    assert caplog.text.count("metrics.limited") == 2
    assert "metric=sent series=10 counted_as=_other advice='use fewer topics and groups, or raise " in caplog.text


@pytest.mark.feature("14.3")
def test_values_that_are_read_are_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(max_series=10)
    metrics.add_collector(lambda: [MetricSample("lag", MetricKind.GAUGE, 1, {"queue": str(n)}) for n in range(50)])

    lags = metrics.samples()
    metrics.samples()

    assert len(lags) == 10
    assert caplog.text.count("metrics.limited") == 1
    assert "metric=lag series=10 counted_as=_other advice='use fewer topics and groups, or raise " in caplog.text
    assert {str(sample.labels["queue"]): sample.value for sample in lags}[OTHER] == 41


def test_a_collector_that_fails_leaves_the_other_values(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterable[MetricSample]:
        raise OSError("no answer")

    metrics = Metrics()
    metrics.counter("sent").add()
    metrics.add_collector(fails)

    assert metrics.snapshot() == {"sent": 1}
    assert "OSError: no answer" in caplog.text

"""Metrics as Prometheus and OpenTelemetry show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mqtemplate import message_listener
from mqtemplate.metrics import HistogramSnapshot, MetricKind, Metrics
from mqtemplate.observability import INSTRUMENTS, PrometheusCollector, export_metrics, prometheus_text
from mqtemplate.observability.catalogue import cumulated

from .conftest import Observe

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the value of each series in Prometheus' text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


SENT = (
    ("messaging_destination_name", "orders"),
    ("messaging_operation_name", "send"),
    ("messaging_system", "rocketmq"),
)


@pytest.mark.feature("14.3")
def test_prometheus_reads_all_values(observe: Observe) -> None:
    observed = observe(bill)
    for _ in range(3):
        observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("1m")

    found = values(prometheus_text(observed.observability.metrics))

    assert found["messaging_client_sent_messages_total", SENT] == 3
    assert found["messaging_client_operation_duration_seconds_count", SENT] == 3
    assert found["mqtemplate_delay_released_total", ()] == 3
    assert found["mqtemplate_delay_pending", (("mqtemplate_horizon", "1m"),)] == 0
    names = {name for name, _ in found}
    assert {"messaging_process_duration_seconds_bucket", "messaging_client_consumed_messages_total"} <= names
    assert {"mqtemplate_lateness_delivery_seconds_sum", "mqtemplate_group_lag"} <= names


def test_a_collector_can_be_registered_in_a_registry_of_the_program(observe: Observe) -> None:
    observed = observe()
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(observed.observability.metrics))
    observed.app.template.sync_send("orders", "x")

    sent = registry.get_sample_value("messaging_client_sent_messages_total", dict(SENT))

    assert sent == 1


def test_buckets_are_cumulated_and_fixed() -> None:
    """A bucket of whole numbers below a bound has the values up to the bound minus 1."""
    lag = next(each for each in INSTRUMENTS if each.source == "delay.lag_ms")
    metrics = Metrics()
    histogram = metrics.histogram("delay.lag_ms")
    for value in (0, 1, 3, 4, 100_000):
        histogram.observe(value)

    buckets = dict(cumulated(histogram.snapshot(), lag))

    assert [buckets[bound] for bound in ("0", "0.003", "0.015", "65.535", "262.143", "+Inf")] == [1, 3, 4, 4, 5, 5]
    assert len(cumulated(HistogramSnapshot(0, 0, {}), lag)) == len(buckets)


@pytest.mark.feature("14.3")
def test_opentelemetry_reads_the_same_values(observe: Observe) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    observed = observe(bill)
    export_metrics(observed.observability.metrics, meter)
    for _ in range(3):
        observed.app.template.sync_send("orders", "x")
    observed.harness.advance("1s")

    data = reader.get_metrics_data()

    assert data is not None
    found = {
        (metric.name, frozenset((point.attributes or {}).items())): getattr(point, "value", None)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    sent = {"messaging.system": "rocketmq", "messaging.operation.name": "send", "messaging.destination.name": "orders"}
    assert found["messaging.client.sent.messages", frozenset(sent.items())] == 3
    assert found["messaging.client.operation.duration.count", frozenset(sent.items())] == 3
    buckets = {dict(key)["le"] for name, key in found if name == "messaging.client.operation.duration.bucket"}
    assert "+Inf" in buckets
    assert found["mqtemplate.store.appended", frozenset()] == 3


def test_each_metric_of_the_library_has_an_exported_name(observe: Observe) -> None:
    """A new metric is added to the catalogue, or nothing is known about its unit."""
    observed = observe(bill, management__metrics__pending_interval_ms=0)
    observed.app.template.sync_send("orders", "x", delay_level=1)
    observed.harness.advance("5s")
    known = {each.source for each in INSTRUMENTS}

    assert {sample.name for sample in observed.observability.metrics.samples()} - known == set()


def test_exported_names_are_unique_and_kinds_match() -> None:
    names = [each.name for each in INSTRUMENTS]

    assert len(names) == len(set(names))
    assert all(each.unit == "s" for each in INSTRUMENTS if each.kind is MetricKind.HISTOGRAM)


def test_the_documentation_lists_all_exported_metrics() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [each.name for each in INSTRUMENTS if f"| `{each.source}` | `{each.name}` |" not in page] == []

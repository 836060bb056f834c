"""Metrics for Prometheus: a collector that reads the values when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mqtemplate.metrics import HistogramSnapshot, MetricKind, Metrics
from mqtemplate.observability.catalogue import Instrument, Point, cumulated, points

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusCollector(Collector):
    """Collector of all metrics, for a registry of ``prometheus-client``.

    ::

        from prometheus_client import REGISTRY

        REGISTRY.register(PrometheusCollector(observability.metrics))

    Nothing is counted twice: the values come from `Metrics`, read at each scrape.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are known when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric."""
        families: dict[str, list[Point]] = {}
        for point in points(self._metrics.samples()):
            families.setdefault(point.instrument.prometheus_name, []).append(point)
        for name, found in families.items():
            yield _family(name, found)


def prometheus_text(metrics: Metrics) -> bytes:
    """Return all metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(metrics))
    return generate_latest(registry)


def _family(name: str, found: list[Point]) -> Metric:
    instrument = found[0].instrument
    attributes = sorted({attribute for point in found for attribute in point.attributes})
    labels = [attribute.replace(".", "_") for attribute in attributes]
    family = _empty_family(name, instrument, labels)
    for point in found:
        values = [point.attributes.get(attribute, "") for attribute in attributes]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(point.value, HistogramSnapshot), "all values of a histogram are snapshots"
            family.add_metric(values, cumulated(point.value, instrument), point.value.total * instrument.factor)
        else:
            family.add_metric(values, point.value)  # type: ignore[attr-defined]  # both other kinds have it
    return family


def _empty_family(name: str, instrument: Instrument, labels: list[str]) -> Metric:
    if instrument.kind is MetricKind.HISTOGRAM:
        return HistogramMetricFamily(name, instrument.description, labels=labels)
    if instrument.kind is MetricKind.COUNTER:
        return CounterMetricFamily(name, instrument.description, labels=labels)
    return GaugeMetricFamily(name, instrument.description, labels=labels)

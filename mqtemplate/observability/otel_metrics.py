"""Metrics for OpenTelemetry: observable instruments that read the values when the program's SDK collects.

The API has no histogram that is read. So a histogram is three observable counters, as Prometheus has them:
``<name>.count``, ``<name>.sum``, and ``<name>.bucket`` with the attribute ``le``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from opentelemetry import metrics as otel
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from mqtemplate.metrics import HistogramSnapshot, MetricKind, Metrics
from mqtemplate.observability.catalogue import INSTRUMENTS, Instrument, Point, cumulated, points

_SAME_COLLECTION_S = 1.0
_Read = Callable[[CallbackOptions], Iterable[Observation]]
_Observe = Callable[[HistogramSnapshot], Iterable[tuple[float, dict[str, str]]]]
"""Function that returns the values of a histogram, each with further attributes."""


def export_metrics(metrics: Metrics, meter: Meter | None = None) -> None:
    """Register an observable instrument for each metric of `INSTRUMENTS`.

    Args:
        meter: Creates the instruments; by default from the program's meter provider.
    """
    meter = otel.get_meter("mqtemplate") if meter is None else meter
    reader = _CollectedPoints(metrics)
    for instrument in INSTRUMENTS:
        _register(meter, instrument, reader)


class _CollectedPoints:
    """Reads all values once for a collection: its callbacks are called one after the other, one for each instrument."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._points: dict[str, list[Point]] = {}
        self._read_at = -_SAME_COLLECTION_S

    def points_of(self, instrument: Instrument) -> list[Point]:
        """Return the values of an instrument."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= _SAME_COLLECTION_S or instrument is INSTRUMENTS[0]:
                self._points = {}
                for point in points(self._metrics.samples()):
                    self._points.setdefault(point.instrument.name, []).append(point)
                self._read_at = now
            return self._points.get(instrument.name, [])


def _register(meter: Meter, instrument: Instrument, reader: _CollectedPoints) -> None:
    name, unit, text = instrument.name, instrument.unit, instrument.description

    def reading(observe: _Observe) -> _Read:
        return lambda _: _observations(reader, instrument, observe)

    if instrument.kind is MetricKind.GAUGE:
        meter.create_observable_gauge(name, [reading(lambda _: ())], unit, text)
    elif instrument.kind is MetricKind.COUNTER:
        meter.create_observable_counter(name, [reading(lambda _: ())], unit, text)
    else:
        parts: dict[str, tuple[str, _Observe]] = {
            "count": ("{value}", lambda snapshot: [(snapshot.count, {})]),
            "sum": (unit, lambda snapshot: [(snapshot.total * instrument.factor, {})]),
            "bucket": (
                "{value}",
                lambda snapshot: [(count, {"le": label}) for label, count in cumulated(snapshot, instrument)],
            ),
        }
        for part, (part_unit, observe) in parts.items():
            meter.create_observable_counter(f"{name}.{part}", [reading(observe)], part_unit, f"{text} ({part})")


def _observations(reader: _CollectedPoints, instrument: Instrument, observe: _Observe) -> Iterator[Observation]:
    for point in reader.points_of(instrument):
        if isinstance(point.value, HistogramSnapshot):
            for value, more in observe(point.value):
                yield Observation(value, {**point.attributes, **more})
        else:
            yield Observation(point.value, dict(point.attributes))

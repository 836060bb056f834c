"""Counters, histograms and gauges of a broker and of an application, by name and labels. An exporter reads `samples`.

A part of the library creates its counters once and holds them: counting is one addition. Everything else happens when
the values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from mqtemplate.event_log import get_logger
from mqtemplate.user_code import error_text, is_interrupt

__all__ = [
    "OTHER",
    "Counter",
    "HistogramSnapshot",
    "MetricKind",
    "MetricSample",
    "Metrics",
    "ValueHistogram",
    "warn_limited",
]

_log = get_logger("mqtemplate.metrics")

OTHER = "_other"
"""Value of each label of the series that counts what is beyond the limit of series."""

_MAX_SERIES_ADVICE = "use fewer topics and groups, or raise mqtemplate.management.metrics.max-series"

_T = TypeVar("_T")
_Labels: TypeAlias = tuple[tuple[str, str], ...]


class Counter:
    """A number that only grows. It has no lock: the caller holds the one of the object that it counts."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, count: int = 1) -> None:
        """Increase the counter."""
        self.value += count


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The observed values, grouped by size.

    Attributes:
        count: Number of values.
        total: Sum of the values.
        buckets: Upper bound (a power of two, excluded) -> number of values from half of it up to it. Empty buckets are
            left out.
    """

    count: int
    total: int
    buckets: dict[int, int]

    def quantile(self, share: float) -> int:
        """Return the upper bound of the bucket with the value at *share* (0 to 1) of all values; 0 without values."""
        seen = 0
        for bound, count in self.buckets.items():
            seen += count
            if seen >= share * self.count:
                return bound
        return 0


class ValueHistogram:
    """Integers, counted in buckets of doubling size: 0, 1, 2..3, 4..7, …"""

    __slots__ = ("_counts", "_total")

    _BUCKETS = 64

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS
        self._total = 0

    def observe(self, value: int, count: int = 1) -> None:
        """Count *value*, *count* times. Negative values count as 0."""
        if value <= 0:
            self._counts[0] += count
            return
        bits = value.bit_length()
        self._counts[bits if bits < self._BUCKETS else -1] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        """Return the values up to now."""
        counts = list(self._counts)
        return HistogramSnapshot(sum(counts), self._total, {1 << bits: n for bits, n in enumerate(counts) if n})


class MetricKind(Enum):
    """Kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSample:
    """The value of one series of a metric.

    Attributes:
        name: Name of the metric, such as ``delay.lag_ms``. The suffix is the unit.
        labels: Names and values that distinguish the series of one metric.
    """

    name: str
    kind: MetricKind
    value: int | float | HistogramSnapshot
    labels: Mapping[str, str]


class _Family(Generic[_T]):
    """The series of the metrics of one kind."""

    def __init__(self, create: Callable[[], _T], limit: int) -> None:
        self._create = create
        self._limit = limit
        self._series: dict[str, dict[_Labels, _T]] = {}

    def get(self, name: str, labels: dict[str, str]) -> _T:
        series = self._series.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        found = series.get(key)
        if found is not None:
            return found
        # The last place is for the series of all others.
        if len(series) >= self._limit - 1 and labels:
            if (others := _others(key)) not in series:
                warn_limited(name, self._limit)
            key = others
        return series.setdefault(key, self._create())

    def items(self) -> Iterator[tuple[str, dict[str, str], _T]]:
        for name, series in list(self._series.items()):
            for labels, value in list(series.items()):
                yield name, dict(labels), value


class Metrics:
    """The metrics of one broker or application by name: ``store.appended``, ``delay.lag_ms``.

    The number of series of a metric is bounded: those beyond the limit are counted together, with `OTHER` as the value
    of each label.

    Args:
        max_series: Most series (sets of labels) of one metric.
    """

    def __init__(self, max_series: int = 1_000) -> None:
        self._max_series = max_series
        self._counters: _Family[Counter] = _Family(Counter, max_series)
        self._histograms: _Family[ValueHistogram] = _Family(ValueHistogram, max_series)
        self._gauges: dict[tuple[str, _Labels], Callable[[], float]] = {}
        self._collectors: list[Callable[[], Iterable[MetricSample]]] = []
        self._limited: set[str] = set()

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter of this name and these labels; create it at the first call. Hold it: this looks it up."""
        return self._counters.get(name, labels)

    def histogram(self, name: str, **labels: str) -> ValueHistogram:
        """Return the histogram of this name and these labels; create it at the first call."""
        return self._histograms.get(name, labels)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Register *read*, which returns the current value of a gauge."""
        self._gauges[name, tuple(sorted(labels.items()))] = read

    def add_collector(self, read: Callable[[], Iterable[MetricSample]]) -> None:
        """Register *read*, which returns values whose labels are known only when they are read, such as lags."""
        self._collectors.append(read)

    def samples(self) -> list[MetricSample]:
        """Return the value of each series, sorted by name and labels.

        A gauge or collector that raises is left out, and logged: the other values are read all the same.
        """
        found = [
            MetricSample(name, MetricKind.COUNTER, each.value, labels) for name, labels, each in self._counters.items()
        ]
        for name, labels, each in self._histograms.items():
            found.append(MetricSample(name, MetricKind.HISTOGRAM, each.snapshot(), labels))
        gauges = [partial(_read_gauge, name, labels, read) for (name, labels), read in list(self._gauges.items())]
        collectors: list[Callable[[], Iterable[MetricSample]]] = [*gauges, *self._collectors]
        for collect in collectors:
            try:
                found += self._bounded(collect())
            except BaseException as exc:
                if is_interrupt(exc):
                    raise
                _log.warning("metrics.collect_failed", reason=error_text(exc))
        return sorted(found, key=lambda sample: (sample.name, sorted(sample.labels.items())))

    def _bounded(self, samples: Iterable[MetricSample]) -> list[MetricSample]:
        """Return the first series of each name, and one with the sum of the others; log each such name once."""
        kept, others, folded = _limited(samples, self._max_series)
        for name in folded - self._limited:
            self._limited.add(name)
            warn_limited(name, self._max_series)
        return [*kept, *others]

    def snapshot(self) -> dict[str, int | float | HistogramSnapshot]:
        """Return the value of each metric, sorted by name; a metric with labels as ``name{label=value}``."""
        return {_title(sample): sample.value for sample in self.samples()}


def _read_gauge(name: str, labels: _Labels, read: Callable[[], float]) -> list[MetricSample]:
    return [MetricSample(name, MetricKind.GAUGE, read(), dict(labels))]


def _others(labels: Iterable[tuple[str, str]]) -> _Labels:
    return tuple((name, OTHER) for name, _ in labels)


def warn_limited(metric: str, limit: int, advice: str = _MAX_SERIES_ADVICE) -> None:
    """Log that further series of a metric are counted together. The caller does so once for each metric."""
    _log.warning("metrics.limited", metric=metric, series=limit, counted_as=OTHER, advice=advice)


def _limited(samples: Iterable[MetricSample], limit: int) -> tuple[list[MetricSample], list[MetricSample], set[str]]:
    """Return the first *limit* - 1 series of each name, one with the sum of the others, and the names of these.

    A name is left out if the collector has such a series itself, and no other one is beyond the limit.
    """
    kept: list[MetricSample] = []
    folded: set[str] = set()
    counts: dict[str, int] = {}
    rest: dict[tuple[str, _Labels], MetricSample] = {}
    for sample in samples:
        counts[sample.name] = counts.get(sample.name, 0) + 1
        if counts[sample.name] < limit or isinstance(sample.value, HistogramSnapshot):
            kept.append(sample)
            continue
        if OTHER not in sample.labels.values():
            folded.add(sample.name)
        key = (sample.name, _others(sorted(sample.labels.items())))
        sum_ = rest[key].value if key in rest else 0
        assert not isinstance(sum_, HistogramSnapshot), "histograms are kept"
        rest[key] = MetricSample(sample.name, sample.kind, sum_ + sample.value, dict(key[1]))
    return kept, list(rest.values()), folded


def _title(sample: MetricSample) -> str:
    if not sample.labels:
        return sample.name
    pairs = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{pairs}}}"

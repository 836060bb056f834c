"""Counters, histograms and gauges of a broker, by name. An exporter reads `Metrics.snapshot`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Counter", "Histogram", "HistogramSnapshot", "Metrics"]


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


class Histogram:
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


class Metrics:
    """The metrics of one broker by name: ``store.appended``, ``delay.lag_ms``. The suffix of a name is its unit."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gauges: dict[str, Callable[[], int]] = {}

    def counter(self, name: str) -> Counter:
        """Return the counter of this name; create it at the first call."""
        return self._counters.setdefault(name, Counter())

    def histogram(self, name: str) -> Histogram:
        """Return the histogram of this name; create it at the first call."""
        return self._histograms.setdefault(name, Histogram())

    def gauge(self, name: str, read: Callable[[], int]) -> None:
        """Register *read*, which returns the current value of a gauge."""
        self._gauges[name] = read

    def snapshot(self) -> dict[str, int | HistogramSnapshot]:
        """Return the value of each metric, sorted by name."""
        values: dict[str, int | HistogramSnapshot] = {name: counter.value for name, counter in self._counters.items()}
        values |= {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        values |= {name: read() for name, read in self._gauges.items()}
        return dict(sorted(values.items()))

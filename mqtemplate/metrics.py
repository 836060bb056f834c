"""Counts and times of the engine, as plain numbers with names; whoever exports them reads `Metrics.snapshot`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Counter", "Histogram", "HistogramSnapshot", "Metrics"]


class Counter:
    """A number that only grows. Whoever adds to it holds the lock of what it counts."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, count: int = 1) -> None:
        self.value += count


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Values by size.

    Attributes:
        count: How many values.
        total: Their sum.
        buckets: Upper bound (a power of two, excluded) -> how many values below it and not below half of it;
            those without values are left out.
    """

    count: int
    total: int
    buckets: dict[int, int]

    def quantile(self, share: float) -> int:
        """The upper bound of the bucket that the value at *share* (0 to 1) of all lies in; 0 without values."""
        seen = 0
        for bound, count in self.buckets.items():
            seen += count
            if seen >= share * self.count:
                return bound
        return 0


class Histogram:
    """Whole numbers counted in buckets that double: 0, 1, 2..3, 4..7, …"""

    __slots__ = ("_counts", "_total")

    _BUCKETS = 64

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS
        self._total = 0

    def observe(self, value: int, count: int = 1) -> None:
        """Count *value*, *count* times; negative ones as 0."""
        if value <= 0:
            self._counts[0] += count
            return
        bits = value.bit_length()
        self._counts[bits if bits < self._BUCKETS else -1] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        counts = list(self._counts)
        return HistogramSnapshot(sum(counts), self._total, {1 << bits: n for bits, n in enumerate(counts) if n})


class Metrics:
    """The metrics of one broker, by name: ``store.appended``, ``delay.lag_ms``. A name's last part tells the unit."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gauges: dict[str, Callable[[], int]] = {}

    def counter(self, name: str) -> Counter:
        """The counter of this name, made at the first call."""
        return self._counters.setdefault(name, Counter())

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name, made at the first call."""
        return self._histograms.setdefault(name, Histogram())

    def gauge(self, name: str, read: Callable[[], int]) -> None:
        """Show what *read* gives whenever somebody looks."""
        self._gauges[name] = read

    def snapshot(self) -> dict[str, int | HistogramSnapshot]:
        """Everything by name, sorted."""
        values: dict[str, int | HistogramSnapshot] = {name: counter.value for name, counter in self._counters.items()}
        values |= {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        values |= {name: read() for name, read in self._gauges.items()}
        return dict(sorted(values.items()))

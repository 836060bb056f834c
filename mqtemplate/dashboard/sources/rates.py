"""Rates of a broker, from the offsets that the dashboard reads from time to time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

_MAX_SAMPLES = 120
_LEAST_MS = 1_000
_WINDOW_MS = 60_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums of offsets at a time.

    Attributes:
        stored: Topic -> sum of the maximum offsets of its queues.
        consumed: Group -> sum of its committed offsets.
    """

    time_ms: int
    stored: Mapping[str, int] = field(default_factory=dict)
    consumed: Mapping[str, int] = field(default_factory=dict)


class Rates:
    """The last samples. Rates are those of about the last minute."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)
        self._lock = threading.Lock()

    def add(self, sample: Sample) -> None:
        """Add a sample, unless the last one is younger than a second."""
        with self._lock:
            if not self._samples or sample.time_ms >= self._samples[-1].time_ms + _LEAST_MS:
                self._samples.append(sample)

    def stored(self) -> dict[str, float]:
        """Return messages per second by topic; empty before the second sample."""
        return self._rates(lambda sample: sample.stored)

    def consumed(self) -> dict[str, float]:
        """Return messages per second by group; empty before the second sample."""
        return self._rates(lambda sample: sample.consumed)

    def history(self) -> list[tuple[int, float]]:
        """Return times and messages stored per second, the oldest first: the sums of all topics."""
        with self._lock:
            samples = list(self._samples)
        found = []
        for before, after in pairwise(samples):
            grown = sum(max(0, count - before.stored.get(name, 0)) for name, count in after.stored.items())
            found.append((after.time_ms, grown * 1_000 / (after.time_ms - before.time_ms)))
        return found

    def _rates(self, values: Callable[[Sample], Mapping[str, int]]) -> dict[str, float]:
        with self._lock:
            samples = list(self._samples)
        if len(samples) < 2:
            return {}
        last = samples[-1]
        first = next(each for each in samples if each.time_ms >= last.time_ms - _WINDOW_MS)
        if first is last:
            first = samples[-2]
        seconds, before = (last.time_ms - first.time_ms) / 1_000, values(first)
        return {name: max(0, count - before.get(name, 0)) / seconds for name, count in values(last).items()}

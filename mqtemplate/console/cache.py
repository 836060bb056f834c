"""Values that take long to read, and rates of a broker from the offsets that the dashboard reads from time to time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

from mqtemplate.engine.figures import BrokerFigures
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.progress import LagTrend

T = TypeVar("T")

_MAX_KEYS = 64
_LEAST_AGE_S = 2.0
_COST_FACTOR = 20
"""A value is used at least this many times as long as it took to read."""
_PAUSE_S = 0.3
"""Time before an old value is read again: the page that shows the old one is sent first, which takes processor time."""


@dataclass(frozen=True, slots=True)
class Cached(Generic[T]):
    """A value, and its age in seconds."""

    value: T
    age_s: float


class _CacheEntry:
    def __init__(self) -> None:
        self.is_read = threading.Event()
        self.is_reading = False
        self.value: Any = None
        self.error: MQTemplateError | None = None
        self.at_s = 0.0
        self.expires_s = 0.0


class BackgroundCache:
    """Values by key. A value that is too old is returned all the same, while a thread reads it again.

    So only the first reader of a key waits, and no longer than it wants to.

    Args:
        in_background: False: values are read by the caller, each time. For a virtual clock.
    """

    def __init__(self, *, in_background: bool = True) -> None:
        self._in_background = in_background
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], T], wait_s: float | None) -> Cached[T] | None:
        """Return the value of a key; None if it was never read and reading takes longer than *wait_s*.

        Args:
            wait_s: None: do not start to read a value that was never read.

        Raises:
            MQTemplateError: The last read raised it.
        """
        if not self._in_background:
            return Cached(read(), 0.0)
        if wait_s is None and key not in self._entries:
            return None
        entry = self._entry(key, read)
        if not entry.is_read.wait(wait_s or 0.0):
            return None
        if entry.error is not None:
            raise entry.error
        return Cached(entry.value, time.monotonic() - entry.at_s)

    def clear(self) -> None:
        """Forget all values: after a change."""
        with self._lock:
            self._entries.clear()

    def _entry(self, key: Hashable, read: Callable[[], object]) -> _CacheEntry:
        with self._lock:
            entry = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            if len(self._entries) > _MAX_KEYS:
                self._entries.popitem(last=False)
            must_read = not entry.is_reading and time.monotonic() >= entry.expires_s
            entry.is_reading = entry.is_reading or must_read
        if must_read:
            thread = threading.Timer(_PAUSE_S if entry.is_read.is_set() else 0.0, self._read, (entry, read))
            thread.name, thread.daemon = "mqtemplate-dashboard", True
            thread.start()
        return entry

    def _read(self, entry: _CacheEntry, read: Callable[[], object]) -> None:
        start_s = time.monotonic()
        try:
            entry.value, entry.error = read(), None
        except MQTemplateError as exc:
            entry.error = exc
        except Exception as exc:
            entry.error = MQTemplateError(f"{type(exc).__name__}: {exc}")
        entry.at_s = time.monotonic()
        entry.expires_s = entry.at_s + max(_LEAST_AGE_S, _COST_FACTOR * (entry.at_s - start_s))
        entry.is_reading = False
        entry.is_read.set()


_MAX_SAMPLES = 120
_LEAST_MS = 1_000
_WINDOW_MS = 60_000


@dataclass(frozen=True, slots=True)
class OffsetSample:
    """Offsets at a time.

    Attributes:
        stored: Topic -> sum of the maximum offsets of its queues.
        consumed: Group -> its committed offsets by queue. The first one is where the group starts, often at the end of
            a long queue, so it is not a number of consumed messages.
        lags: Group -> number of messages that it has not consumed.
    """

    time_ms: int
    stored: Mapping[str, int] = field(default_factory=dict)
    consumed: Mapping[str, Mapping[MessageQueue, int]] = field(default_factory=dict)
    lags: Mapping[str, int] = field(default_factory=dict)


class Rates:
    """The last samples. Rates are for about the last minute."""

    def __init__(self) -> None:
        self._samples: deque[_Totals] = deque(maxlen=_MAX_SAMPLES)
        self._offsets: Mapping[str, Mapping[MessageQueue, int]] = {}
        self._lock = threading.Lock()

    def add(self, sample: OffsetSample) -> None:
        """Add a sample, unless the last one is younger than a second."""
        with self._lock:
            last = self._samples[-1] if self._samples else None
            if last is not None and sample.time_ms < last.time_ms + _LEAST_MS:
                return
            before, totals = self._offsets, {} if last is None else last.consumed
            consumed = {
                name: totals.get(name, 0) + _growth(before.get(name, {}), offsets)
                for name, offsets in sample.consumed.items()
            }
            self._samples.append(_Totals(sample.time_ms, sample.stored, consumed, sample.lags))
            self._offsets = sample.consumed

    def stored(self) -> dict[str, float]:
        """Return messages per second by topic; empty before the second sample."""
        return self._rates(lambda sample: sample.stored)

    def consumed(self) -> dict[str, float]:
        """Return messages per second by group; empty before the second sample."""
        return self._rates(lambda sample: sample.consumed)

    def history(self) -> list[BrokerFigures]:
        """Return the figures of the samples, the oldest first. Pending messages are not among them."""
        with self._lock:
            samples = list(self._samples)
        return [
            BrokerFigures(
                time_ms=after.time_ms,
                stored=_rate(before, after, lambda sample: sample.stored),
                consumed=_rate(before, after, lambda sample: sample.consumed),
                lag=sum(after.lags.values()),
                lags=after.lags,
            )
            for before, after in pairwise(samples)
        ]

    def lag_trends(self) -> dict[str, LagTrend]:
        """Return the trend of the lag of each group; empty before the second sample."""
        ends = self._ends()
        if ends is None:
            return {}
        first, last = ends
        elapsed_ms = last.time_ms - first.time_ms
        return {
            name: LagTrend(first.lags[name], lag, elapsed_ms) for name, lag in last.lags.items() if name in first.lags
        }

    def _ends(self) -> tuple[_Totals, _Totals] | None:
        """Return the first sample of the last minute, and the last one; None before the second sample."""
        with self._lock:
            samples = list(self._samples)
        if len(samples) < 2:
            return None
        last = samples[-1]
        first = next(each for each in samples if each.time_ms >= last.time_ms - _WINDOW_MS)
        return samples[-2] if first is last else first, last

    def _rates(self, values: Callable[[_Totals], Mapping[str, int]]) -> dict[str, float]:
        ends = self._ends()
        if ends is None:
            return {}
        first, last = ends
        seconds, before = (last.time_ms - first.time_ms) / 1_000, values(first)
        return {name: max(0, count - before.get(name, 0)) / seconds for name, count in values(last).items()}


@dataclass(frozen=True, slots=True)
class _Totals:
    """A sample as it is kept: numbers of stored messages by topic, and of consumed ones by group since the first."""

    time_ms: int
    stored: Mapping[str, int]
    consumed: Mapping[str, int]
    lags: Mapping[str, int]


def _rate(before: _Totals, after: _Totals, values: Callable[[_Totals], Mapping[str, int]]) -> float:
    earlier = values(before)
    grown = sum(max(0, count - earlier.get(name, 0)) for name, count in values(after).items())
    return grown * 1_000 / (after.time_ms - before.time_ms)


def _growth(before: Mapping[MessageQueue, int], offsets: Mapping[MessageQueue, int]) -> int:
    return sum(max(0, offset - before[queue]) for queue, offset in offsets.items() if queue in before)

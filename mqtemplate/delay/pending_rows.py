"""Types that the delay services share: pending and due messages, sets of their offsets, causes of late releases."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

import numpy as np

from mqtemplate.metrics import Metrics, ValueHistogram

PENDING_DTYPE = np.dtype([("due_ms", "i8"), ("physical_offset", "i8"), ("size", "i4"), ("topic_hash", "i4")])
"""One pending message. ``topic_hash`` is the Java hash of its real topic, or 0 where only the record has the topic."""

NO_ROWS = np.empty(0, PENDING_DTYPE)
NEVER_MS = 1 << 62
"""A time later than any other: the due time of a queue without pending messages."""


class PendingPiece(NamedTuple):
    """A part of the pending messages.

    Attributes:
        floor_ms: No row of this piece or of a later piece is due before this time.
        rows: Array of `PENDING_DTYPE`, in any order.
    """

    floor_ms: int
    rows: np.ndarray


class PendingEntry(NamedTuple):
    """The times of one pending message.

    Attributes:
        slot_ms: Timer slot in which RocketMQ looks for a delete marker of the message.
    """

    due_ms: int
    slot_ms: int


class DueRecord(NamedTuple):
    """One delayed record that is due.

    Attributes:
        enqueue_ms: Time at which a timer was put on the wheel; -1 for a level.
        rolls: The record is parked; its copy goes back to the timer topic.
        is_poison: The record has no readable deliver time.
    """

    due_ms: int
    physical_offset: int
    size: int
    enqueue_ms: int = -1
    rolls: bool = False
    is_poison: bool = False


class OffsetSet:
    """A set of 64-bit integers that takes eight bytes for each.

    A replay of the commit log adds physical offsets one at a time. Afterwards thousands are looked up in one call.
    """

    def __init__(self) -> None:
        self._added: array[int] = array("q")
        self._sorted = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.values())

    def add(self, value: int) -> None:
        """Add one number. Adding it again has no effect."""
        self._added.append(value)

    def values(self) -> np.ndarray:
        """Return all numbers, ascending."""
        if self._added:
            self._sorted = np.union1d(self._sorted, np.frombuffer(self._added, np.int64))
            self._added = array("q")
        return self._sorted

    def contains(self, wanted: np.ndarray) -> np.ndarray:
        """Return for each of *wanted* whether it is in the set."""
        return contains(self.values(), wanted)


def contains(sorted_values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each of *wanted* whether it is one of *sorted_values*."""
    if not len(sorted_values):
        return np.zeros(len(wanted), np.bool_)
    indexes = np.searchsorted(sorted_values, wanted)
    indexes[indexes == len(sorted_values)] = 0
    return np.asarray(sorted_values[indexes] == wanted)


# --- causes of late releases -----------------------------------------------------------------------


_MAX_SPANS = 256
_ON_TIME_MS = 20
_GAP_MS = 1_000
"""Spans with a shorter pause are one: a topic at its rate is held again and again."""


class LatenessCauses:
    """The times at which a broker was stopped or held a topic, for explanations of late releases.

    It stores a few spans of time and nothing for each message.

    Args:
        metrics: Gets ``delay.lateness_ms`` by cause.

    Attributes:
        stopped: Time of the last sign of life of the process before, and the start of this one (epoch ms); equal for a
            new store directory.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.stopped = (0, 0)
        self._held: dict[str, deque[tuple[int, int]]] = {}
        self._by_cause = {
            cause: metrics.histogram("delay.lateness_ms", cause=cause)
            for cause in ("broker_stopped", "backlog", "rate_limit")
        }

    def broker_started(self, alive_ms: int | None, now_ms: int) -> None:
        """Note the start of the broker, and the newest time at which the one before is known to have run."""
        self.stopped = (now_ms if alive_ms is None else min(alive_ms, now_ms), now_ms)

    def topic_held(self, topic: str, from_ms: int, to_ms: int) -> None:
        """Note that messages of *topic* were due at *from_ms*, and may be released at *to_ms* by its shape."""
        spans = self._held.setdefault(topic, deque(maxlen=_MAX_SPANS))
        if spans and from_ms <= spans[-1][1] + _GAP_MS:
            start_ms, end_ms = spans.pop()
            from_ms, to_ms = min(start_ms, from_ms), max(end_ms, to_ms)
        spans.append((from_ms, to_ms))

    def split(self, topic: str, due_ms: int, released_ms: int) -> tuple[int, int, int]:
        """Return the parts of the time from *due_ms* to *released_ms*: broker stopped, backlog, rate limit."""
        late_ms = max(0, released_ms - due_ms)
        stopped_ms = _overlap(self.stopped, due_ms, released_ms)
        # A topic is not held while the broker is stopped: that time counts once.
        from_ms = max(due_ms, self.stopped[1]) if stopped_ms else due_ms
        held = self._held.get(topic, ())
        limited_ms = min(sum(_overlap(span, from_ms, released_ms) for span in held), late_ms - stopped_ms)
        return stopped_ms, late_ms - stopped_ms - limited_ms, limited_ms

    def observe(self, due_ms: np.ndarray, eligible_ms: np.ndarray, now_ms: int) -> None:
        """Count the causes of late releases at *now_ms*; a batch that is on time has no causes.

        Args:
            due_ms: Due times; ascending if they are *eligible_ms*, too.
            eligible_ms: Time at which the shape of its topic let each message go; its due time without a shape.
        """
        # The first due time is the earliest without shapes. Most releases are on time, and cost this one comparison.
        if not len(due_ms) or (eligible_ms is due_ms and now_ms - int(due_ms[0]) <= _ON_TIME_MS):
            return
        lags_ms = np.maximum(now_ms - due_ms, 0)
        start_ms, end_ms = self.stopped
        stopped_ms = np.maximum(np.minimum(end_ms, now_ms) - np.maximum(due_ms, start_ms), 0)
        held_ms = eligible_ms - np.maximum(due_ms, np.where(stopped_ms > 0, end_ms, due_ms))
        limited_ms = np.clip(held_ms, 0, lags_ms - stopped_ms)
        parts = {
            "broker_stopped": stopped_ms,
            "rate_limit": limited_ms,
            "backlog": lags_ms - stopped_ms - limited_ms,
        }
        for cause, part_ms in parts.items():
            late = part_ms[part_ms > 0]
            if len(late):
                observe_all(self._by_cause[cause], late)


def _overlap(span: tuple[int, int], from_ms: int, to_ms: int) -> int:
    return max(0, min(span[1], to_ms) - max(span[0], from_ms))


def observe_all(histogram: ValueHistogram, values: np.ndarray) -> None:
    """Call `ValueHistogram.observe` for all of *values* at the cost of two calls for each bucket."""
    values = np.maximum(values, 0)
    bits = np.frexp(values.astype(np.float64))[1]  # the exponent equals int.bit_length, which chooses the bucket
    for size in np.unique(bits).tolist():
        same = values[bits == size]
        # Two values near the mean give the same bucket and exactly the same sum.
        mean, rest = divmod(int(same.sum()), len(same))
        histogram.observe(mean, len(same) - rest)
        histogram.observe(mean + 1, rest)

"""Causes of late releases: the broker was stopped, it had a backlog, or the shape of a topic held messages."""

from __future__ import annotations

from collections import deque

import numpy as np

from mqtemplate.metrics import Metrics, ValueHistogram

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

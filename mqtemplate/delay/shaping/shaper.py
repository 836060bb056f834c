"""Release times of the timers of topics with a shape."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import numpy as np

from mqtemplate.delay.causes import ReleaseCauses
from mqtemplate.delay.shaping.held import HeldTimers
from mqtemplate.delay.shaping.shape import HEAD_START_MS, TopicShape
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import java_string_hash

_log = get_logger("mqtemplate.delay")

MAX_HELD = 1_000_000
"""Held timers from which on no further overdue slot is read: memory stays bounded, and other topics are late."""

_MILLISECOND = timedelta(milliseconds=1)
_GRID_MS = 10
"""Held messages are released each 10 ms. Five messages each millisecond would cost a flush each."""
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 divided by the golden ratio: multiples are spread evenly


class _Limit:
    """The shape of one topic, and the time of its next release.

    Attributes:
        next_ms: The earliest time of the next message, with fractions of a millisecond.
    """

    __slots__ = ("next_ms", "shape", "topic")

    def __init__(self, topic: str, shape: TopicShape) -> None:
        self.topic = topic
        self.shape = shape
        self.next_ms = 0.0

    def release_times(self, due_ms: np.ndarray, physical_offsets: np.ndarray, now_ms: int) -> np.ndarray:
        """Return the release times of timers, in the order of which they use up the rate.

        Jitter and spread depend on the physical offset only. So a restart computes the same times again.
        """
        shape, release_ms = self.shape, due_ms.astype(np.float64)
        if shape.jitter:
            release_ms = release_ms + _shares(physical_offsets) * (shape.jitter / _MILLISECOND)
        if shape.spread:
            release_ms = release_ms + _evenly(physical_offsets) * (shape.spread / _MILLISECOND)
        whole_ms = np.ceil(release_ms).astype(np.int64)
        return whole_ms if shape.max_rate is None else self._limited(whole_ms, 1_000 / shape.max_rate, now_ms)

    def _limited(self, release_ms: np.ndarray, step_ms: float, now_ms: int) -> np.ndarray:
        """Return times at least *step_ms* apart, none earlier than it was, or than the messages before it."""
        order = np.argsort(release_ms, kind="stable")
        # What is overdue is released from now on: the rate holds after an outage, too.
        earliest = np.maximum(release_ms[order], now_ms)
        steps = np.arange(len(order)) * step_ms
        start_ms = np.maximum(earliest - steps, self.next_ms)
        times = np.maximum.accumulate(start_ms) + steps
        self.next_ms = float(times[-1]) + step_ms
        is_held = times > earliest
        grid = np.where(is_held, np.ceil(times / _GRID_MS) * _GRID_MS, earliest)
        limited = np.empty(len(order), np.int64)
        limited[order] = grid.astype(np.int64)
        return limited


class Shaper:
    """Moves the timers of topics with a shape from the near term to the held ones.

    Topics are known by the hash that a timer unit has. Two topics with one Java hash would share a shape: with n shaped
    topics the chance for another topic is n in four billion.

    Args:
        shapes: Topic -> shape.
        causes: Notes when topics are held.

    Attributes:
        held: The held timers.
    """

    def __init__(self, shapes: Mapping[str, TopicShape], causes: ReleaseCauses) -> None:
        self._limits = {java_string_hash(topic): _Limit(topic, shape) for topic, shape in shapes.items()}
        self._hashes = np.array(sorted(self._limits), np.int64)
        self._causes = causes
        self._is_reported = False
        self.held = HeldTimers()

    def keep_unshaped(self, rows: np.ndarray, topic_hashes: np.ndarray, now_ms: int) -> np.ndarray:
        """Hold the timers of topics with a shape, and return the others.

        Args:
            rows: Array of `NEAR_DTYPE`.
            topic_hashes: Hash of the real topic of each.
        """
        if not len(self._hashes) or not len(rows):
            return rows
        is_shaped = np.isin(topic_hashes, self._hashes) & ~rows["rolls"] & ~rows["is_poison"]
        if not is_shaped.any():
            return rows
        for topic_hash in np.unique(topic_hashes[is_shaped]).tolist():
            self._hold(self._limits[topic_hash], rows[is_shaped & (topic_hashes == topic_hash)], now_ms)
        return np.asarray(rows[~is_shaped])

    def _hold(self, limit: _Limit, rows: np.ndarray, now_ms: int) -> None:
        release_ms = limit.release_times(rows["due_ms"], rows["physical_offset"], now_ms)
        is_late = release_ms > np.maximum(rows["due_ms"], now_ms)
        if is_late.any():
            first_ms = int(rows["due_ms"][is_late].min())
            self._causes.topic_held(limit.topic, first_ms, int(release_ms[is_late].max()))
        self.held.add(rows, release_ms, limit.shape.priority * HEAD_START_MS)

    def clock_moved(self, moved_ms: int) -> None:
        """Keep the rates when the clock was set by *moved_ms*: back, else the next release would be in years."""
        if moved_ms < 0:
            for limit in self._limits.values():
                limit.next_ms += moved_ms
            self.held.set_back(moved_ms)

    def is_full(self) -> bool:
        """Return True if no further overdue slot may be read. It is logged once."""
        is_full = len(self.held) >= MAX_HELD
        if is_full and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "shaping.overloaded",
                held=len(self.held),
                allowed=MAX_HELD,
                reason="more is due than the shapes of the topics let go, so messages of other topics are late too; "
                "raise max-rate in mqtemplate.broker.topic-shapes",
            )
        elif len(self.held) < MAX_HELD // 2:
            self._is_reported = False
        return is_full


def _shares(physical_offsets: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1 for each offset, as if by chance (splitmix64)."""
    mixed = physical_offsets.astype(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _evenly(physical_offsets: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1 for each offset; those of adjacent records are evenly apart."""
    return (physical_offsets.astype(np.uint64) * _GOLDEN >> np.uint64(11)).astype(np.float64) / float(1 << 53)

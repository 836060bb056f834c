"""Types for pending and due messages that the delay services and their readers exchange, and sets of their offsets."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

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

"""A set of numbers that is filled one by one and searched by numpy."""

from __future__ import annotations

from array import array

import numpy as np


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

"""The consume queues whose files are mapped: a bounded number, so that topics do not take all descriptors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

_SECOND_CHANCES = 16


class MappedQueue(Protocol):
    """A consume queue."""

    max_offset: int

    def release(self) -> None:
        """Unmap the files until the next message is written."""


class MappedQueues:
    """Releases the files of the queue that was mapped first, except those that got messages since then.

    Not thread-safe: the writer of the queues calls it, under the lock of the store.

    Args:
        max_mapped: Largest number of queues with mapped files. Each takes two descriptors.
    """

    def __init__(self, max_mapped: int) -> None:
        self._max_mapped = max_mapped
        self._queues: OrderedDict[MappedQueue, int] = OrderedDict()  # queue -> its max_offset when it was noted

    def __len__(self) -> int:
        """Return the number of queues with mapped files."""
        return len(self._queues)

    def note(self, queue: MappedQueue) -> None:
        """Note that the files of *queue* were mapped, and release those of another one if there are too many."""
        self._queues.pop(queue, None)
        while len(self._queues) >= self._max_mapped:
            self._release_one()
        self._queues[queue] = queue.max_offset

    def _release_one(self) -> None:
        for _ in range(_SECOND_CHANCES):
            queue, noted = self._queues.popitem(last=False)
            if queue.max_offset == noted:
                break
            self._queues[queue] = queue.max_offset  # it is in use
        else:
            queue, _ = self._queues.popitem(last=False)
        queue.release()

"""What the two delay services have in common for whoever looks at what waits, or takes something out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from mqtemplate.record.codec import StoredRecord

WAITING_DTYPE = np.dtype([("due_ms", "i8"), ("physical_offset", "i8"), ("size", "i4"), ("topic_hash", "i4")])
"""One message that waits. ``topic_hash`` is the Java hash of its real topic, or 0 where only its record tells."""


class WaitingPiece(NamedTuple):
    """Some messages that wait.

    Attributes:
        floor_ms: No row of this piece or of a later one is due before it.
        rows: An array of `WAITING_DTYPE`, in any order.
    """

    floor_ms: int
    rows: np.ndarray


class DelayStore(Protocol):
    """A service that keeps messages until they are due.

    Attributes:
        source_topic: The system topic its messages wait in.
        lock: Held by whoever takes a message out: the release, and whoever steers. Reentrant. What it guards is that
            a record which takes a waiting one's place is appended, and the waiting one withdrawn, together.
    """

    source_topic: str
    lock: threading.RLock

    def catch_up(self) -> None:
        """With the lock: take in every message that is in the source topic by now."""

    def is_waiting(self, record: StoredRecord) -> bool:
        """With the lock, after `catch_up`: whether a record of the source topic is still to be handed over."""

    def due_ms(self, record: StoredRecord) -> int:
        """When a waiting record is due."""

    def slot_of(self, record: StoredRecord) -> int:
        """With the lock: the slot that RocketMQ has to find a delete marker for this record in."""

    def withdraw(self, record: StoredRecord) -> None:
        """With the lock, once the record that takes its place is in the log: never hand *record* over.

        It lasts: written to the service's files at the next checkpoint, and until then found again by `replay`.
        """

    def mark_cancelled(self, record: StoredRecord) -> None:
        """With the lock, once nothing is lost if the mark outlives what took the place of *record*: write into the
        files that it is withdrawn, where RocketMQ would find out by nothing else."""

    def waiting(self, after_ms: int, before_ms: int) -> Iterator[WaitingPiece]:
        """What waits now and is due in ``after_ms <= due < before_ms``, floors ascending.

        It takes the lock for each piece, not over all of them: a message that is handed over meanwhile may be shown
        or not. Memory is that of one piece.
        """

    def waiting_between(self, physical_begin: int, physical_end: int) -> np.ndarray:
        """What waits now with its record in this part of the commit log, as `WAITING_DTYPE`."""

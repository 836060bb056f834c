"""Types for pending messages that both delay services and their readers exchange."""

from __future__ import annotations

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

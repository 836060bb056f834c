"""Bytes of records that are due, as the rows of one array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqtemplate.store import MessageStore


def read_rows(store: MessageStore, physical_offsets: NDArray[np.int64], size: int) -> NDArray[np.uint8] | None:
    """What the log holds at these places, *size* bytes each, unchecked; None where one of them is not there.

    Neighbours in the log are read at once.
    """
    begins = np.flatnonzero(np.diff(physical_offsets, prepend=physical_offsets[0]) != size)
    counts = np.diff(begins, append=len(physical_offsets))
    pieces = [
        store.read_bytes(physical_offset, count * size)
        for physical_offset, count in zip(physical_offsets[begins].tolist(), counts.tolist(), strict=True)
    ]
    if any(len(piece) != count * size for piece, count in zip(pieces, counts.tolist(), strict=True)):
        return None
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, size)

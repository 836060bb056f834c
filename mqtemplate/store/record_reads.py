"""Reading of many records of one size: those that are near each other in the log are read at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mqtemplate.store.message_store import MessageStore

_NEAR_BYTES = 4_096
"""Records with less than this between them are read at once: to copy the bytes takes less time than to read again."""


def read_records(store: MessageStore, physical_offsets: Sequence[int], size: int) -> bytes | None:
    """Return *size* bytes at each physical offset, unchecked and joined; None if the log does not have them all."""
    between = np.diff(physical_offsets) - size
    first, gaps = 0, np.flatnonzero((between < 0) | (between >= _NEAR_BYTES))
    parts: list[bytes] = []
    for end in (*(gaps + 1).tolist(), len(physical_offsets)):
        group = physical_offsets[first:end]
        start, length = group[0], group[-1] + size - group[0]
        data = store.read_bytes(start, length)
        if len(data) != length:
            return None
        if length == size * len(group):
            parts.append(data)
        else:
            parts += [data[at - start : at - start + size] for at in group]
        first = end
    return parts[0] if len(parts) == 1 else b"".join(parts)

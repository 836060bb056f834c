"""Records of one size, read together as rows of an array: with arrays each costs a third of what it costs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mqtemplate.record import layout
from mqtemplate.record.codec import read_without_check
from mqtemplate.record.columns import Rows, count_equal, count_verified
from mqtemplate.record.layout import BODY_AT, CHECK_SIZE, HEADER, MAGIC_V1, read_size_and_magic


def rows_without_check(
    data: bytes, topic: str, queue_id: int, queue_offset: int, physical_offsets: Sequence[int]
) -> tuple[memoryview, int]:
    """Return what `read_without_check` returns for each record in *data*, up to the first that has another shape.

    The records are joined: a response contains them so. The second value is their number.

    Args:
        data: As many records as there are physical offsets, all of one size, one after the other.
        queue_offset: That of the first record.
    """
    count = len(physical_offsets)
    size = len(data) // count
    first = read_without_check(data[:size], topic, queue_id, queue_offset, physical_offsets[0])
    if first is None or read_size_and_magic(data) != (size, MAGIC_V1):
        return memoryview(b""), 0
    rows, numbers = np.frombuffer(data, np.uint8).reshape(count, size), np.empty((count, 2), ">i8")
    numbers[:, 0], numbers[:, 1] = queue_offset + np.arange(count), physical_offsets
    body_end, check_at = BODY_AT + HEADER.unpack_from(data)[14], size - CHECK_SIZE
    length_at = body_end + 1 + data[body_end]
    shapes = _shapes(rows, slice(body_end, length_at + 2))
    good = min(
        count_equal(shapes, shapes[:1]),
        count_equal(rows[:, layout.QUEUE_OFFSET_AT : layout.SYS_FLAG_AT], numbers.view(np.uint8)),
        count_verified(rows, body_end, numbers[:, 1]),
    )
    plain = rows[:good, :check_at].copy()
    for columns in (slice(4), slice(length_at, length_at + 2)):  # both lengths are smaller without the check
        plain[:, columns] = np.frombuffer(first[columns], np.uint8)
    return plain.reshape(-1).data, good


def _shapes(rows: Rows, names: slice) -> Rows:
    """Return the columns that are equal in records of one shape.

    Size and magic, queue ID, flags and body length, then *names*: the topic, and the lengths of topic and properties.
    """
    columns = (
        slice(layout.BODY_CRC_AT),
        slice(layout.QUEUE_ID_AT, layout.FLAG_AT),
        slice(layout.SYS_FLAG_AT, layout.BORN_TIMESTAMP_AT),
        slice(layout.BODY_LENGTH_AT, BODY_AT),
        names,
    )
    return np.concatenate([rows[:, each] for each in columns], axis=1)

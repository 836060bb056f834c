"""Records of one size, read together as rows of an array: with arrays each costs a third of what it costs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows, count_leading, to_bytes
from mqtemplate.record.codec import read_without_check
from mqtemplate.record.layout import BODY_AT, CHECK_SIZE, HEADER, MAGIC_V1, read_size_and_magic
from mqtemplate.record.row_checks import checks, crcs


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
    body_crcs = to_bytes(crcs(rows[:, BODY_AT:body_end]) & 0x7FFF_FFFF, ">u4")
    around = np.concatenate((rows[:, :BODY_AT], rows[:, body_end:check_at]), axis=1)
    good = min(
        _count_equal(shapes, shapes[:1]),
        _count_equal(rows[:, layout.QUEUE_OFFSET_AT : layout.SYS_FLAG_AT], numbers.view(np.uint8)),
        _count_equal(rows[:, layout.BODY_CRC_AT : layout.QUEUE_ID_AT], body_crcs),
        _count_equal(rows[:, check_at:], checks(crcs(around), numbers[:, 1])),
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


def _count_equal(rows: Rows, expected: Rows) -> int:
    """Return the number of leading rows that are as expected: each as its own row, or all as the only one."""
    if rows.tobytes() == expected.tobytes() * (len(rows) // len(expected)):  # mostly; that takes the least time
        return len(rows)
    return count_leading((rows == expected).all(axis=1))

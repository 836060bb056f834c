"""Copies as rows of one array: the same bytes as from `RecordDraft`, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqtemplate.hashes import tags_code
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import RecordDraft, pack_host, parse_record
from mqtemplate.record.properties import find_property
from mqtemplate.record.record_arrays import AlikeCopies, RecordShape

V4, V6 = pack_host(HostAddress("10.0.0.1", 10911)), pack_host(HostAddress("::1", 10911))
PROPERTIES = b"UNIQ_KEY\x01%04d\x02TAGS\x01%c\x02REAL_TOPIC\x01orders\x02REAL_QID\x01%d\x02"
START = 1_000
TIME_MS = 1_700_000_000_000


def source(number: int, body: bytes = b"body", **fields: object) -> RecordDraft:
    """Return the record of a delayed message."""
    properties = PROPERTIES % (number, b"ab"[number % 2 : number % 2 + 1], number % 10)
    return replace(RecordDraft("DELAYED", 0, body, properties, born_timestamp=number), **fields)  # type: ignore[arg-type]


def stored(drafts: list[RecordDraft], host: bytes = V4) -> tuple[list[bytes], NDArray[np.int64]]:
    """Return the adjacent records, and their physical offsets."""
    records, at = [], START
    for number, draft in enumerate(drafts):
        records.append(draft.encode(number, at, TIME_MS, host))
        at += len(records[-1])
    return records, START + np.cumsum([0, *map(len, records[:-1])])


def rows_of(records: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)


def shape_of(records: list[bytes]) -> RecordShape:
    return RecordShape(parse_record(records[0]), records[0])


def count_matching(drafts: list[RecordDraft]) -> int:
    records, offsets = stored(drafts)
    return shape_of(records).count_matching(rows_of(records), offsets)


@given(
    st.integers(1, 30),
    st.integers(0, 50),
    st.binary(min_size=20, max_size=20),
    st.sampled_from([V4, V6]),
    st.integers(0, 1 << 40),
    st.booleans(),
)
def test_a_run_equals_records_encoded_one_by_one(
    count: int, body_length: int, noise: bytes, host: bytes, physical_offset: int, has_own_stamps: bool
) -> None:
    drafts = [
        source(number, (noise * (3 + number))[number : number + body_length], flag=number - 5, reconsume_times=number)
        for number in range(count)
    ]
    records, offsets = stored(drafts)
    stamps = [b"STAMP\x01%02d\x02" % (number if has_own_stamps else 7) for number in range(count)]
    copies = [
        replace(
            draft,
            topic="orders",
            queue_id=number % 10,
            properties=draft.properties.replace(b"UNIQ_KEY\x01%04d\x02" % number, b"") + stamp,
            prepared_transaction_offset=offset + 1,
        )
        for number, (draft, stamp, offset) in enumerate(zip(drafts, stamps, offsets.tolist(), strict=True))
    ]
    shape = shape_of(records)
    gap = slice(shape.properties_at, shape.properties_at + len(b"UNIQ_KEY\x010000\x02"))
    stamp_rows = rows_of(stamps if has_own_stamps else stamps[:1])
    assert shape.count_matching(rows_of(records), offsets) == count

    run = AlikeCopies(copies[0], shape, rows_of(records), gap, stamp_rows)

    queue_offsets = np.arange(count) * 3 + 1
    expected, at = [], physical_offset
    for copy, queue_offset in zip(copies, queue_offsets.tolist(), strict=True):
        expected.append(copy.encode(queue_offset, at, TIME_MS, host))
        at += len(expected[-1])
    assert run.encode(queue_offsets, physical_offset, TIME_MS, host) == b"".join(expected)
    assert len(run) == count
    assert run.queue_ids.tolist() == [number % 10 for number in range(count)]


def copies_of(drafts: list[RecordDraft], first: RecordDraft) -> AlikeCopies:
    """Return copies with the same properties."""
    records, _ = stored(drafts)
    shape = shape_of(records)
    return AlikeCopies(
        first, shape, rows_of(records), slice(shape.properties_end, shape.properties_end), rows_of([b""])
    )


def test_each_row_has_the_code_of_its_own_tags() -> None:
    drafts = [source(number) for number in range(4)]

    run = copies_of(drafts, replace(drafts[0], tags_code=tags_code("a")))

    assert run.codes.tolist() == [tags_code(find_property(draft.properties, b"TAGS")) for draft in drafts]
    assert len(set(run.codes.tolist())) == 2


def test_a_run_returns_the_rows_of_each_queue() -> None:
    drafts = [source(number) for number in (3, 4, 3, 3)]

    run = copies_of(drafts, drafts[0])

    assert [(queue_id, list(rows)) for _, queue_id, rows in run.queues()] == [(3, [0, 2, 3]), (4, [1])]


def changed(old: bytes, new: bytes) -> RecordDraft:
    """Return a record of the same length, with *new* instead of *old* in its properties."""
    assert len(old) == len(new)
    assert old in source(2).properties
    return source(2, properties=source(2).properties.replace(old, new))


@pytest.mark.parametrize(
    "other",
    [
        source(2, b"bodybody", properties=source(2).properties[4:]),
        source(2, topic="DELAYE2"),
        source(2, sys_flag=1),
        changed(b"orders", b"offers"),
        changed(b"REAL_QID\x012", b"REAL_QID\x01x"),
        changed(b"UNIQ_KEY", b"UNIQ_KEX"),
        changed(b"0002", b"0\x02a\x01"),
        changed(b"0002", b"00\x012"),
    ],
    ids=["lengths", "topic", "flags", "real topic", "queue", "name", "one more property", "irregular property"],
)
def test_a_record_that_differs_in_a_decisive_byte_has_another_shape(other: RecordDraft) -> None:
    assert count_matching([source(0), source(1), source(2), source(3)]) == 4
    assert count_matching([source(0), source(1), other, source(3)]) == 2


@pytest.mark.parametrize(
    "first",
    [
        source(0, born_host=V6),
        source(0, properties=b""),
        source(0, properties=source(0).properties[:-1]),
        source(0, properties=source(0).properties + b"TAGS\x01b\x02"),
        source(0, properties=source(0).properties + b"alone\x02"),
        source(0, properties=source(0).properties.replace(b"REAL_QID", b"REAL_QIX")),
        source(0, topic="w" * 200),
    ],
    ids=["IPv6", "none", "open end", "a name twice", "no value", "no queue", "a long topic"],
)
def test_an_irregular_record_has_no_shape(first: RecordDraft) -> None:
    assert count_matching([first, first]) == 0


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.integers(0, 5))
def test_a_flipped_bit_ends_the_run(share: float, bit: int, row: int) -> None:
    records, offsets = stored([source(number) for number in range(6)])
    shape = shape_of(records)
    rows = rows_of(records).copy()
    rows[row, int(share * rows.shape[1])] ^= 1 << bit

    assert shape.count_matching(rows, offsets) == row


def test_a_record_at_another_offset_ends_the_run() -> None:
    records, offsets = stored([source(number) for number in range(3)])
    offsets[1] += 1

    assert shape_of(records).count_matching(rows_of(records), offsets) == 1

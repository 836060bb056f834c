"""Many records at once are parsed like single ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.record.codec import BadRecordError, RecordDraft, StoredRecord, parse_record
from mqtemplate.record.columns import RecordBatch
from mqtemplate.record.layout import CHECK_SIZE, CHECK_START
from tests.delay.foreign_records import ForeignDraft

HOSTS = [b"\x7f\x00\x00\x01\x00\x00*\x9f", bytes(15) + b"\x01\x00\x00*\x9f"]
STALE_CHECK = b"__CRC@\x0100000000ffffffff\x02"  # of another record, copied by RocketMQ
START = 4_096


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Records of every kind, adjacent as in a log."""
    data = b""
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from([RecordDraft, ForeignDraft]))
        topic = draw(st.sampled_from(["orders", "Bücher", "%RETRY%" + "g" * 130]))
        properties = draw(st.sampled_from([b"", b"TAGS\x01paid\x02", b"TAGS\x01paid", b"TAGS\x01a\x02" + STALE_CHECK]))
        item = kind(
            topic,
            draw(st.integers(0, 3)),
            draw(st.binary(max_size=60)),
            properties,
            sys_flag=draw(st.sampled_from([0, 4, 8, 12])),
            born_host=draw(st.sampled_from(HOSTS)),
            prepared_transaction_offset=draw(st.integers(0, 5)),
        )
        data += item.encode(draw(st.integers(0, 9)), START + len(data), 1_000, draw(st.sampled_from(HOSTS)))
    return data


def one_by_one(data: bytes) -> list[StoredRecord]:
    """Return the records that `parse_record` finds, up to the first invalid one."""
    records: list[StoredRecord] = []
    at = 0
    while at < len(data):
        try:
            record = parse_record(data[at:])
        except BadRecordError:
            break
        if record.physical_offset != START + at:
            break
        records.append(record)
        at += record.total_size
    return records


def check(data: bytes) -> None:
    batch = RecordBatch(data, START)

    expected = one_by_one(data)
    assert [batch.record(row) for row in range(len(batch))] == expected
    assert batch.byte_count == sum(record.total_size for record in expected)
    for row, record in enumerate(expected):
        assert (batch.topics[row], batch.queue_id[row]) == (record.topic, record.queue_id)
        assert (batch.queue_offset[row], batch.physical_offset[row]) == (record.queue_offset, record.physical_offset)
        assert (batch.size[row], batch.sys_flag[row]) == (record.total_size, record.sys_flag)
        assert batch.store_timestamp[row] == record.store_timestamp
        assert batch.prepared_transaction_offset[row] == record.prepared_transaction_offset
        assert batch.properties(row).startswith(record.properties_bytes)
        assert batch.has_check[row] == has_own_check(data, record)


def has_own_check(data: bytes, record: StoredRecord) -> bool:
    end = record.physical_offset - START + record.total_size
    return data[:end].endswith(b"%08x\x02" % record.physical_offset) and data.startswith(CHECK_START, end - CHECK_SIZE)


@given(data=logs())
def test_a_batch_equals_records_parsed_one_by_one(data: bytes) -> None:
    check(data)


@given(data=logs(), where=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_a_batch_ends_before_the_first_damaged_record(data: bytes, where: int, flip: int) -> None:
    damaged = bytearray(data)
    if damaged:
        damaged[where % len(damaged)] ^= flip
    check(bytes(damaged))


@given(data=logs(), length=st.integers(0, 2_000))
def test_a_batch_ends_before_an_incomplete_record(data: bytes, length: int) -> None:
    check(data[:length])


@given(data=st.binary(max_size=400))
def test_any_bytes_form_a_batch_without_an_error(data: bytes) -> None:
    check(data)


def test_properties_of_one_size_are_rows_with_their_checks() -> None:
    data = b""
    for tag in (b"paid", b"late"):
        item = RecordDraft("orders", 0, b"x", b"TAGS\x01" + tag + b"\x02")
        data += item.encode(0, len(data), 1_000 + len(data), HOSTS[0])
    batch = RecordBatch(data, 0)

    rows = batch.properties_rows(np.array([1, 0]), int(batch.properties_size[0]))

    assert [bytes(row[:-CHECK_SIZE]) for row in rows] == [b"TAGS\x01late\x02", b"TAGS\x01paid\x02"]
    assert data.endswith(bytes(rows[0]))


@given(data=logs(), where=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_without_verification_a_damaged_body_counts_and_a_wrong_size_does_not(
    data: bytes, where: int, flip: int
) -> None:
    """A batch without verification has at least the records of a verified one, in the same places."""
    damaged = bytearray(data)
    if damaged:
        damaged[where % len(damaged)] ^= flip
    verified, batch = (RecordBatch(bytes(damaged), START, verify=each) for each in (True, False))

    assert batch.physical_offset.tolist()[: len(verified)] == verified.physical_offset.tolist()
    assert batch.topics[: len(verified)] == verified.topics


def test_every_byte_of_a_check_counts() -> None:
    """A colon follows nine in ASCII: no other character may count as a digit."""
    data = RecordDraft("orders", 0, b"x", b"TAGS\x01paid\x02").encode(0, START, 1_000, HOSTS[0])
    for at in range(len(data) - CHECK_SIZE, len(data)):
        for byte in range(256):
            check(data[:at] + bytes([byte]) + data[at + 1 :])

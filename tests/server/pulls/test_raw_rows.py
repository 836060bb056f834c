"""Records of one size that a pull reads together: the same bytes as one by one, and damage is found in any of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.message import HostAddress
from mqtemplate.record.codec import RecordDraft, pack_host, read_without_check
from mqtemplate.server.pulls.raw_reader import rows_without_check

HOST = pack_host(HostAddress("127.0.0.1", 10911))
COUNT = 5


def block(count: int = COUNT, topic: str = "orders") -> tuple[bytes, list[int]]:
    """Return adjacent records of one shape with different content, from queue offset 7 on, and their offsets."""
    data, offsets = b"", list[int]()
    for number in range(count):
        draft = RecordDraft(topic, 3, b"body %d" % number, b"UNIQ_KEY\x01A%d\x02" % number, flag=number)
        offsets.append(4_096 + len(data))
        data += draft.encode(7 + number, offsets[-1], 10 + number, HOST)
    return data, offsets


DATA, OFFSETS = block()
SIZE = len(DATA) // COUNT
PLAIN = [read_without_check(DATA[at * SIZE : (at + 1) * SIZE], "orders", 3, 7 + at, OFFSETS[at]) for at in range(COUNT)]


def joined(count: int) -> tuple[bytes, int]:
    """Return the first *count* records as rows are returned."""
    return b"".join(record or pytest.fail("no record") for record in PLAIN[:count]), count


def test_rows_are_the_records_one_by_one() -> None:
    assert rows_without_check(DATA, "orders", 3, 7, OFFSETS) == joined(COUNT)


@given(at=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_ends_the_rows_before_its_record(at: int, bit: int) -> None:
    data = bytearray(DATA)
    data[at] ^= 1 << bit

    assert rows_without_check(bytes(data), "orders", 3, 7, OFFSETS) == joined(at // SIZE)


@pytest.mark.parametrize("other", [("paid", 3, 7), ("orders", 2, 7), ("orders", 3, 8)])
def test_records_of_another_place_are_no_rows(other: tuple[str, int, int]) -> None:
    assert rows_without_check(DATA, *other, OFFSETS) == (b"", 0)


def test_a_record_at_another_physical_offset_ends_the_rows() -> None:
    assert rows_without_check(DATA, "orders", 3, 7, [*OFFSETS[:2], 1, *OFFSETS[3:]]) == joined(2)


def test_records_with_a_long_topic_are_read_one_by_one() -> None:
    topic = "%RETRY%" + "g" * 150
    data, offsets = block(topic=topic)

    assert read_without_check(data[: len(data) // COUNT], topic, 3, 7, offsets[0]) is not None
    assert rows_without_check(data, topic, 3, 7, offsets) == (b"", 0)

"""What a power failure took away, and what went bad."""

from __future__ import annotations

import pytest

from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.recovery import is_lost_write

HOST = b"\x7f\x00\x00\x01\x00\x00*\x9f"
RECORD = len(RecordDraft("orders", 0, b"x" * 700, b"").encode(0, 0, 0, HOST))


def records(begin: int) -> MappedFile:
    """A file of records, one behind the other from *begin* on."""
    file = MappedFile(8_192)
    for at in range(begin, 7_000, RECORD):
        file.write_mapped(at, RecordDraft("orders", 0, b"x" * 700, b"").encode(at, at, 1_000, HOST))
    return file


def test_a_record_with_a_sector_of_zeros_was_lost() -> None:
    """The sector takes the begin of the next record with it; the one behind that is whole."""
    file = records(0)
    file.write_mapped(1_536, bytes(512))

    assert is_lost_write(file, RECORD, 3 * RECORD)


def test_a_record_with_a_flipped_bit_was_not() -> None:
    file = records(0)
    file.write_mapped(RECORD + 200, b"y")

    assert not is_lost_write(file, RECORD, 2 * RECORD)


@pytest.mark.parametrize("head", [5, 6, 100, 511])
def test_the_begin_of_a_record_at_a_sectors_end_may_be_all_that_was_lost(head: int) -> None:
    """The sector held the record before, and zeros."""
    begin = 512 - head
    file = records(begin)
    file.write_mapped(begin, bytes(head))

    assert is_lost_write(file, begin, begin + RECORD)


@pytest.mark.parametrize("head", [3, 4])
def test_zeros_that_belong_to_the_size_are_no_loss(head: int) -> None:
    """The first bytes of a size are zero in a good record: what is wrong is something else, here."""
    begin = 512 - head
    file = records(begin)
    lost = file.view[begin : begin + head]
    file.write_mapped(begin, bytes(head))
    assert is_lost_write(file, begin, begin + RECORD) is (head >= 3)

    file.write_mapped(begin, lost)
    file.write_mapped(begin + 300, b"y")
    assert not is_lost_write(file, begin, begin + RECORD)

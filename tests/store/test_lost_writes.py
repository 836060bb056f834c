"""Records that a power failure left incomplete, and records that were damaged."""

from __future__ import annotations

import pytest

from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.flush import is_lost_write

HOST = b"\x7f\x00\x00\x01\x00\x00*\x9f"
RECORD = len(RecordDraft("orders", 0, b"x" * 700, b"").encode(0, 0, 0, HOST))


def records(start: int) -> MappedFile:
    """Return a file with adjacent records from byte *start* on."""
    file = MappedFile(8_192)
    for at in range(start, 7_000, RECORD):
        file.write_mapped(at, RecordDraft("orders", 0, b"x" * 700, b"").encode(at, at, 1_000, HOST))
    return file


def test_a_record_with_a_sector_of_zeros_is_a_lost_write() -> None:
    """The sector contains the start of the next record; the record after that is whole."""
    file = records(0)
    file.write_mapped(1_536, bytes(512))

    assert is_lost_write(file, RECORD, 3 * RECORD)


def test_a_record_with_a_flipped_bit_is_not_a_lost_write() -> None:
    file = records(0)
    file.write_mapped(RECORD + 200, b"y")

    assert not is_lost_write(file, RECORD, 2 * RECORD)


@pytest.mark.parametrize("head", [5, 6, 100, 511])
def test_only_the_start_of_a_record_may_be_lost(head: int) -> None:
    """The old sector has the previous record, and zeros."""
    start = 512 - head
    file = records(start)
    file.write_mapped(start, bytes(head))

    assert is_lost_write(file, start, start + RECORD)


@pytest.mark.parametrize("head", [3, 4])
def test_zeros_of_the_size_are_not_a_lost_write(head: int) -> None:
    """The first bytes of the size are zero in a valid record too. Here another byte is wrong."""
    start = 512 - head
    file = records(start)
    lost = file.view[start : start + head]
    file.write_mapped(start, bytes(head))
    assert is_lost_write(file, start, start + RECORD) is (head >= 3)

    file.write_mapped(start, lost)
    file.write_mapped(start + 300, b"y")
    assert not is_lost_write(file, start, start + RECORD)

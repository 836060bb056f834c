"""The records in the body of a pull."""

from __future__ import annotations

from mqtemplate.record.codec import parse_record
from mqtemplate.record.layout import read_size_and_magic
from mqtemplate.server.pulls.raw_reader import RawPull


def records(pull: RawPull) -> list[bytes]:
    """Return the bytes of each record, as many as the pull counts."""
    found, at = list[bytes](), 0
    while at < len(pull.body):
        size = read_size_and_magic(pull.body, at)[0]
        found.append(pull.body[at : at + size])
        at += size
    assert len(found) == pull.count
    return found


def numbers(pull: RawPull) -> list[int]:
    """Return the numbers that the records have as their bodies."""
    return [int(parse_record(record).body) for record in records(pull)]

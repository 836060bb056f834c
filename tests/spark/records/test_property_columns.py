"""Property columns: properties are parsed as in RocketMQ."""

from __future__ import annotations

import pytest

pa = pytest.importorskip("pyarrow")

from mqtemplate.record.properties import decode_properties  # noqa: E402
from mqtemplate.spark.records.record_batches import PropertyColumns  # noqa: E402


def columns(*encoded: bytes) -> PropertyColumns:
    return PropertyColumns(pa.array(encoded, pa.binary()))


def test_there_may_be_no_messages_and_no_properties() -> None:
    assert columns().value("TAGS").to_pylist() == []
    assert columns().maps().to_pylist() == []
    assert columns(b"", b"").value("TAGS").to_pylist() == [None, None]
    assert columns(b"", b"").maps().to_pylist() == [[], []]


@pytest.mark.parametrize(
    "encoded",
    [
        b"TAGS\x01pay\x02KEYS\x01k\x02",
        b"TAGS\x01pay\x02KEYS\x01k",  # older writers leave the last separator out
        b"TAGS\x01\x02KEYS\x01k\x02",  # no value
        b"\x01value\x02KEYS\x01k\x02",  # no name
        b"TAGS\x02KEYS\x01k\x02",  # no separator
        b"\x02\x02KEYS\x01a\x01b\x02",  # a value with the inner separator
        b"KEYS\x01first\x02KEYS\x01last\x02",
        b"KEYS\x01k\x02__CRC@\x01000000000000abcd\x02x\x01y\x02",  # copied by another broker from one of our records
    ],
)
def test_unusual_properties_are_parsed_as_by_the_record_parser(encoded: bytes) -> None:
    read = columns(b"TAGS\x01before\x02", encoded, b"TAGS\x01after\x02")

    assert [dict(pairs) for pairs in read.maps().to_pylist()][1] == decode_properties(encoded)
    assert read.value("KEYS").to_pylist() == [None, decode_properties(encoded).get("KEYS"), None]
    assert read.value("TAGS").to_pylist() == ["before", decode_properties(encoded).get("TAGS"), "after"]


def test_of_two_equal_names_only_the_later_one_counts() -> None:
    """A Spark map with the same key twice would return the first value."""
    read = columns(b"a\x011\x02b\x012\x02a\x013\x02", b"a\x014\x02")

    assert [sorted(pairs) for pairs in read.maps().to_pylist()] == [[("a", "3"), ("b", "2")], [("a", "4")]]


def test_names_that_differ_only_in_their_middle_are_different() -> None:
    read = columns(b"region-1-code\x01x\x02region-2-code\x01y\x02")

    assert dict(read.maps().to_pylist()[0]) == {"region-1-code": "x", "region-2-code": "y"}


@pytest.mark.parametrize(
    "messages",
    [
        [b"TAGS\x01a\x02KEYS\x01k1\x02", b"TAGS\x01bb\x02KEYS\x01k2\x02"],  # the same names: one message says where
        [b"TAGS\x01a\x02KEYS\x01k1\x02", b"KEYS\x01k2\x02TAGS\x01bb\x02"],  # another order
        [b"TAGS\x01a\x02KEYS\x01k1\x02", b"TAGS\x01bb\x02KEYT\x01k2\x02"],  # another name of equal length
        [b"TAGS\x01a\x02KEYS\x01k1\x02", b"TAGS\x01bb\x02"],
        [b"TAGS\x01a\x02KEYS\x01k1\x02", b"TAGS\x01bb\x02KEYS2\x01k2\x02"],
        [b"TAGS\x01a\x02TAGS\x01k1\x02", b"TAGS\x01bb\x02TAGS\x01k2\x02"],  # equal names in each message
        [b"TAGS\x01a\x02__CRC@\x01000000000000abcd\x02"] * 2,
        [b"TAGS\x02", b"\x01b\x02"],  # alternating separators, but in the wrong order
    ],
)
def test_messages_with_the_same_names_are_parsed_like_any_others(messages: list[bytes]) -> None:
    read = columns(*messages)

    assert [dict(pairs) for pairs in read.maps().to_pylist()] == [decode_properties(each) for each in messages]
    for name in ("TAGS", "KEYS", "KEYT", "other"):
        expected = [decode_properties(each).get(name) for each in messages]
        assert columns(*messages).value(name).to_pylist() == expected


def test_text_that_is_not_utf_8_is_replaced() -> None:
    """Invalid bytes must not reach the JVM. RocketMQ's Java client replaces them in the same way."""
    read = columns(b"TAGS\x01gr\xfc\xdfe\x02")

    assert read.value("TAGS").to_pylist() == ["gr\ufffd\ufffde"]
    assert read.maps().to_pylist() == [[("TAGS", "gr\ufffd\ufffde")]]

"""One message as bytes."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import BadRecordError, RecordDraft, pack_host, parse_record, unpack_host
from mqtemplate.record.layout import MAGIC_V1, MAGIC_V2
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.record.properties import decode_properties, encode_properties, find_property

HEADER = struct.Struct(">iiiiiqqiq8sq8siqi")
CHECK_SIZE = 24
HOST = pack_host(HostAddress("127.0.0.1", 10911))


def record(
    body: bytes = b"hello",
    topic: str = "TopicA",
    properties: bytes = b"TAGS\x01Tag\x02",
    sys_flag: int = 0,
    size_error: int = 0,
) -> bytes:
    """A record made by hand from the layout, not by the code under test."""
    name = topic.encode()
    tail = body + bytes([len(name)]) + name + struct.pack(">h", len(properties)) + properties
    crc = zlib.crc32(body) & 0x7FFFFFFF
    size = 88 + len(tail) + size_error
    return HEADER.pack(size, MAGIC_V1, crc, 3, 7, 11, 4096, sys_flag, 1000, HOST, 2000, HOST, 5, 0, len(body)) + tail


def test_a_record_reads_back_field_by_field() -> None:
    parsed = parse_record(record())

    assert parsed.topic == "TopicA"
    assert parsed.body == b"hello"
    assert decode_properties(parsed.properties_bytes) == {"TAGS": "Tag"}
    assert (parsed.queue_id, parsed.flag, parsed.queue_offset, parsed.physical_offset) == (3, 7, 11, 4096)
    assert (parsed.born_timestamp, parsed.store_timestamp, parsed.reconsume_times) == (1000, 2000, 5)
    assert unpack_host(parsed.store_host) == HostAddress("127.0.0.1", 10911)


def test_upstreams_own_bytes_read_as_a_level_3_message() -> None:
    """A record that Apache RocketMQ 5.5.0 wrote: level 3, so queue 2 of the schedule topic."""
    properties = (
        b"MSG_REGION\x01DefaultRegion\x02UNIQ_KEY\x01FD000001\x02CLUSTER\x01SpecCluster\x02DELAY\x013\x02TAGS\x01TagB\x02"
        b"KEYS\x01kd3\x02WAIT\x01true\x02TRACE_ON\x01true\x02REAL_TOPIC\x01SpecTopic\x02REAL_QID\x013\x02"
    )
    head = bytes.fromhex(
        "daa320a7358e4ced00000002000000000000000000000000000000000000010f00000000000001a1fd727ce4"
        "7f0000010000b7c4000001a1fd727cf97f000001000078bf000000000000000000000000"
    )
    body = b"delay level 3"
    tail = (
        struct.pack(">i", len(body))
        + body
        + b"\x13SCHEDULE_TOPIC_XXXX"
        + struct.pack(">h", len(properties))
        + properties
    )
    data = struct.pack(">i", 4 + len(head) + len(tail)) + head + tail

    parsed = parse_record(data)

    assert zlib.crc32(body) & 0x7FFFFFFF == 0x358E4CED == parsed.body_crc
    assert (parsed.topic, parsed.queue_id, parsed.physical_offset) == ("SCHEDULE_TOPIC_XXXX", 2, 271)
    assert decode_properties(parsed.properties_bytes)["REAL_TOPIC"] == "SpecTopic"
    assert decode_properties(parsed.properties_bytes)["DELAY"] == "3"


def test_a_topic_over_127_characters_takes_the_second_version() -> None:
    draft = RecordDraft("%RETRY%" + "g" * 130, 0, b"x", b"")

    data = draft.encode(0, 4096, 2000, HOST)

    assert parse_record(data).magic == MAGIC_V2
    assert parse_record(data).topic == draft.topic
    assert len(data) == draft.size(HOST)


def test_properties_over_their_limit_are_refused_with_the_limit() -> None:
    with pytest.raises(MessageError, match=r"take 40000 bytes, allowed are 32743; move data into the body"):
        RecordDraft("t", 0, b"x", b"p" * 40_000).encode(0, 0, 0, HOST)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"short", "fewer than a header"),
        (record()[:60] + b"", "fewer than a header"),
        (bytes(120), "magic 0x00000000 is not a record's"),
        (record()[:-1], "exceeds"),
        (record(size_error=-1), "do not add up"),
        (record().replace(b"hello", b"hellO"), "does not match its CRC-32"),
        (record(properties=b"TAGS\x01Ta\0"), "its end is missing"),
    ],
)
def test_what_is_not_a_whole_record_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        parse_record(data)


@given(data=st.binary(max_size=400))
def test_any_bytes_parse_or_raise_our_own_error(data: bytes) -> None:
    try:
        parse_record(data)
    except BadRecordError:
        pass


@given(
    properties=st.dictionaries(
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8),
        max_size=5,
    ).filter(lambda properties: "__CRC@" not in properties)  # this name is the check's
)
def test_properties_read_back_whole_and_one_by_one(properties: dict[str, str]) -> None:
    data = encode_properties(properties)

    assert decode_properties(data) == properties
    for name, value in properties.items():
        assert find_property(data, name.encode()) == value
    assert find_property(data, b"not there") is None


def test_a_missing_last_separator_and_empty_values_are_tolerated() -> None:
    """4.x clients end without 0x02; recall messages carry an empty TRACE_CONTEXT."""
    assert decode_properties(b"TRACE_CONTEXT\x01\x02TAGS\x01a") == {"TAGS": "a"}
    assert find_property(b"TRACE_CONTEXT\x01\x02TAGS\x01a", b"TAGS") == "a"


def test_a_property_is_not_taken_for_one_whose_name_ends_like_it() -> None:
    data = b"MY_TAGS\x01mine\x02NOTE\x01see TAGS\x02TAGS\x01paid\x02"

    assert find_property(data, b"TAGS") == "paid"
    assert find_property(data[: data.index(b"TAGS\x01paid")], b"TAGS") is None
    assert find_property(b"TAGS\x01first\x02MY_TAGS\x01mine\x02", b"TAGS") == "first"


def test_ipv6_hosts_make_the_header_longer() -> None:
    host6 = pack_host(HostAddress("::1", 10911))
    tail = b"hello" + b"\x06TopicA" + struct.pack(">h", 0)
    head = struct.pack(">iiiiiqqiq", 112 + len(tail), MAGIC_V1, zlib.crc32(b"hello") & 0x7FFFFFFF, 0, 0, 0, 0, 0x30, 1)
    data = head + host6 + struct.pack(">q", 2) + host6 + struct.pack(">iqi", 0, 0, 5) + tail

    parsed = parse_record(data)

    assert parsed.body == b"hello"
    assert to_message_ext(parsed, "b").born_host == HostAddress("::1", 10911)


def test_a_compressed_body_is_unpacked_and_its_bit_cleared() -> None:
    packed = zlib.compress(b"long text" * 100)

    message = to_message_ext(parse_record(record(body=packed, sys_flag=0x301)), "b")

    assert (message.body, message.sys_flag) == (b"long text" * 100, 0x300)


@pytest.mark.parametrize("flag", [0x301, 0x701])
def test_a_body_that_cannot_be_unpacked_keeps_its_bit(flag: int) -> None:
    """One such message must not hold up its queue."""
    message = to_message_ext(parse_record(record(body=b"?", sys_flag=flag)), "b")

    assert (message.body, message.sys_flag) == (b"?", flag)


def check(guarded: bytes, physical_offset: int) -> bytes:
    return b"__CRC@\x01%08x%08x\x02" % (zlib.crc32(guarded), physical_offset)


@pytest.fixture
def checked() -> bytes:
    """A record with the check that this store writes behind the properties."""
    plain = record(properties=b"TAGS\x01Tag\x02" + bytes(CHECK_SIZE))[:-CHECK_SIZE]
    return plain + check(plain.replace(b"hello", b""), 4096)


def test_the_check_is_no_property(checked: bytes) -> None:
    assert decode_properties(parse_record(checked).properties_bytes) == {"TAGS": "Tag"}


def test_every_flipped_bit_is_noticed_or_harmless(checked: bytes) -> None:
    """Flip each bit: the record is refused, or it reads exactly as before (the check itself was hit)."""
    whole = parse_record(checked)
    for bit in range(len(checked) * 8):
        damaged = bytearray(checked)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = parse_record(bytes(damaged))
        except BadRecordError:
            continue
        is_own_offset = 28 <= bit // 8 < 36  # whoever reads a record knows where it lies, and compares
        assert bit // 8 >= len(checked) - CHECK_SIZE or is_own_offset
        assert (read.topic, read.body, decode_properties(read.properties_bytes)["TAGS"]) == (
            whole.topic,
            whole.body,
            "Tag",
        )


def test_another_records_check_that_a_broker_copied_along_is_passed_over() -> None:
    """Upstream delivers a waiting message with all its properties, in any order: our old check may stand last."""
    stale = check(b"another record", 77)

    assert decode_properties(parse_record(record(properties=b"TAGS\x01Tag\x02" + stale)).properties_bytes) == {
        "TAGS": "Tag"
    }
    assert decode_properties(parse_record(record(properties=stale + b"TAGS\x01Tag\x02")).properties_bytes) == {
        "TAGS": "Tag"
    }

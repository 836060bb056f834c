"""One record as bytes."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import BadRecordError, RecordDraft, pack_host, parse_record, to_message_ext, unpack_host
from mqtemplate.record.layout import MAGIC_V1, MAGIC_V2, read_size_and_magic
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
    """Return a record built from the layout, not by the code under test."""
    name = topic.encode()
    tail = body + bytes([len(name)]) + name + struct.pack(">h", len(properties)) + properties
    crc = zlib.crc32(body) & 0x7FFFFFFF
    size = 88 + len(tail) + size_error
    return HEADER.pack(size, MAGIC_V1, crc, 3, 7, 11, 4096, sys_flag, 1000, HOST, 2000, HOST, 5, 0, len(body)) + tail


def test_a_record_is_parsed_field_by_field() -> None:
    parsed = parse_record(record())

    assert parsed.topic == "TopicA"
    assert parsed.body == b"hello"
    assert decode_properties(parsed.properties_bytes) == {"TAGS": "Tag"}
    assert (parsed.queue_id, parsed.flag, parsed.queue_offset, parsed.physical_offset) == (3, 7, 11, 4096)
    assert (parsed.born_timestamp, parsed.store_timestamp, parsed.reconsume_times) == (1000, 2000, 5)
    assert unpack_host(parsed.store_host) == HostAddress("127.0.0.1", 10911)


def test_a_record_of_rocketmq_is_parsed_as_a_level_3_message() -> None:
    """RocketMQ 5.5.0 wrote it: level 3, so queue 2 of the schedule topic."""
    properties = (
        b"MSG_REGION\x01DefaultRegion\x02UNIQ_KEY\x01FD000001\x02CLUSTER\x01SpecCluster\x02DELAY\x013\x02TAGS\x01TagB\x02"
        b"KEYS\x01kd3\x02WAIT\x01true\x02TRACE_ON\x01true\x02REAL_TOPIC\x01SpecTopic\x02REAL_QID\x013\x02"
    )
    head = bytes.fromhex(
        "daa320a7358e4ced00000002000000000000000000000000000000000000010f00000000000001a1fd727ce4"
        "7f0000010000b7c4000001a1fd727cf97f000001000078bf000000000000000000000000"
    )
    body = b"delay level 3"
    lengths = struct.pack(">i", len(body)), struct.pack(">h", len(properties))
    tail = b"".join((lengths[0], body, b"\x13SCHEDULE_TOPIC_XXXX", lengths[1], properties))
    data = struct.pack(">i", 4 + len(head) + len(tail)) + head + tail

    parsed = parse_record(data)

    assert zlib.crc32(body) & 0x7FFFFFFF == 0x358E4CED == parsed.body_crc
    assert (parsed.topic, parsed.queue_id, parsed.physical_offset) == ("SCHEDULE_TOPIC_XXXX", 2, 271)
    assert decode_properties(parsed.properties_bytes)["REAL_TOPIC"] == "SpecTopic"
    assert decode_properties(parsed.properties_bytes)["DELAY"] == "3"


def test_a_topic_over_127_characters_uses_version_2() -> None:
    draft = RecordDraft("%RETRY%" + "g" * 130, 0, b"x", b"")

    data = draft.encode(0, 4096, 2000, HOST)

    assert parse_record(data).magic == MAGIC_V2
    assert parse_record(data).topic == draft.topic
    assert len(data) == read_size_and_magic(data, 0)[0]


def test_properties_over_the_limit_are_refused() -> None:
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
def test_an_invalid_record_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        parse_record(data)


@given(data=st.binary(max_size=400))
def test_any_bytes_are_parsed_or_raise_bad_record_error(data: bytes) -> None:
    try:
        parse_record(data)
    except BadRecordError:
        pass


@given(
    properties=st.dictionaries(
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8),
        max_size=5,
    ).filter(lambda properties: "__CRC@" not in properties)  # the name of the check
)
def test_encoded_properties_are_decoded_and_found(properties: dict[str, str]) -> None:
    data = encode_properties(properties)

    assert decode_properties(data) == properties
    for name, value in properties.items():
        assert find_property(data, name.encode()) == value
    assert find_property(data, b"missing") is None


def test_a_missing_last_separator_and_empty_values_are_tolerated() -> None:
    """4.x clients omit the last 0x02. Recall messages have an empty TRACE_CONTEXT."""
    assert decode_properties(b"TRACE_CONTEXT\x01\x02TAGS\x01a") == {"TAGS": "a"}
    assert find_property(b"TRACE_CONTEXT\x01\x02TAGS\x01a", b"TAGS") == "a"


def test_a_property_is_not_confused_with_one_whose_name_ends_alike() -> None:
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


def test_a_compressed_body_is_decompressed_and_its_flag_cleared() -> None:
    packed = zlib.compress(b"long text" * 100)

    message = to_message_ext(parse_record(record(body=packed, sys_flag=0x301)), "b")

    assert (message.body, message.sys_flag) == (b"long text" * 100, 0x300)


@pytest.mark.parametrize("flag", [0x301, 0x701])
def test_a_body_that_cannot_be_decompressed_keeps_its_flag(flag: int) -> None:
    """One such message must not stop the consumption of its queue."""
    message = to_message_ext(parse_record(record(body=b"?", sys_flag=flag)), "b")

    assert (message.body, message.sys_flag) == (b"?", flag)


def check(guarded: bytes, physical_offset: int) -> bytes:
    return b"__CRC@\x01%08x%08x\x02" % (zlib.crc32(guarded), physical_offset)


@pytest.fixture
def checked() -> bytes:
    """A record with a check after its properties."""
    plain = record(properties=b"TAGS\x01Tag\x02" + bytes(CHECK_SIZE))[:-CHECK_SIZE]
    return plain + check(plain.replace(b"hello", b""), 4096)


def test_the_check_is_not_among_the_properties(checked: bytes) -> None:
    assert decode_properties(parse_record(checked).properties_bytes) == {"TAGS": "Tag"}


def test_every_flipped_bit_is_detected_or_harmless(checked: bytes) -> None:
    """Flip each bit: the record is refused, or parsed as before if the bit is in the check itself."""
    whole = parse_record(checked)
    for bit in range(len(checked) * 8):
        damaged = bytearray(checked)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = parse_record(bytes(damaged))
        except BadRecordError:
            continue
        is_own_offset = 28 <= bit // 8 < 36  # the caller knows the offset of a record and compares it
        assert bit // 8 >= len(checked) - CHECK_SIZE or is_own_offset
        assert (read.topic, read.body) == (whole.topic, whole.body)
        assert decode_properties(read.properties_bytes)["TAGS"] == "Tag"


def test_the_copied_check_of_another_record_is_ignored() -> None:
    """RocketMQ copies all properties of a delayed message, in any order: our old check may be the last."""
    stale, tags = check(b"another record", 77), b"TAGS\x01Tag\x02"

    for properties in (tags + stale, stale + tags):
        assert decode_properties(parse_record(record(properties=properties)).properties_bytes) == {"TAGS": "Tag"}

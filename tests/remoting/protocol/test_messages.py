"""Messages in bodies: pulled ones, batches, ids, properties, compression."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import ConversionError, MessageError, RemoteProtocolError, UnsupportedError
from mqtemplate.message import HostAddress, Message, MessageExt, offset_msg_id, offset_msg_ids, parse_offset_msg_id
from mqtemplate.record import compression
from mqtemplate.record.compression import CompressionType, compress_body, compression_type, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol.messages import (
    decode_batch,
    decode_messages,
    decode_properties_text,
    encode_batch,
    encode_properties_text,
)
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.other_side import encode_message

STORED = bytes.fromhex(
    """
    00000093 daa320a7 58932aac 00000001 00000000 0000000000000005 0000000000001234 00000000 0000018bcfe56800
    7f000001 0000d431 0000018bcfe56801 7f000001 00002a9f 00000000 0000000000000000 00000002 6869 02 5431 0034
    554e49515f4b4559 01 3746303030303031303030303030303030303030303030303030303030303030 02 54414753 01 54616741 02
    """
)
"""A stored message, written by hand field by field."""

PLAIN = b"compress me, compress me, compress me; " * 9

_property_texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=9
)
_properties = st.dictionaries(_property_texts.filter(lambda name: name != "__CRC@"), _property_texts, max_size=4)
_times = st.integers(0, (1 << 63) - 1)
_hosts = st.builds(HostAddress, st.sampled_from(["127.0.0.1", "10.0.0.255", "fe80::1"]), st.integers(0, 65_535))
_int4 = st.integers(0, (1 << 31) - 1)


@st.composite
def messages(draw: st.DrawFn) -> MessageExt:
    body, born_host, store_host = draw(st.binary(max_size=50)), draw(_hosts), draw(_hosts)
    flags = draw(st.sampled_from([0, SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_COMMIT]))
    flags |= SysFlag.BORN_HOST_V6 if ":" in born_host.ip else 0
    flags |= SysFlag.STORE_HOST_V6 if ":" in store_host.ip else 0
    message = MessageExt(
        draw(st.text("aZ09_-%|", min_size=1, max_size=200)),
        body,
        draw(_properties),
        draw(_int4),
        broker_name="broker-a",
        queue_id=draw(_int4),
        queue_offset=draw(_times),
        physical_offset=draw(_times),
        store_size=0,
        sys_flag=flags,
        body_crc=zlib.crc32(body) & 0x7FFF_FFFF,
        born_timestamp=draw(_times),
        born_host=born_host,
        store_timestamp=draw(_times),
        store_host=store_host,
        reconsume_times=draw(_int4),
        prepared_transaction_offset=draw(_times),
    )
    message.store_size = len(encode_message(message))
    return message


def stored(body: bytes, sys_flag: int) -> bytes:
    (message,) = decode_messages(STORED, "broker-a")
    message.body, message.sys_flag = body, sys_flag
    return encode_message(message)


# --- records ----------------------------------------------------------------------------------------


def test_a_stored_message_is_read() -> None:
    (message,) = decode_messages(STORED, "broker-a")

    assert (message.topic, message.body, message.queue_id, message.queue_offset) == ("T1", b"hi", 1, 5)
    assert (message.physical_offset, message.store_size, message.body_crc) == (0x1234, 147, 0x58932AAC)
    assert (message.born_timestamp, message.store_timestamp) == (1_700_000_000_000, 1_700_000_000_001)
    assert (message.born_host, message.store_host) == (("127.0.0.1", 54_321), ("127.0.0.1", 10_911))
    assert message.properties == {"UNIQ_KEY": "7F000001000000000000000000000000", "TAGS": "TagA"}
    assert message.broker_name == "broker-a"
    assert message.offset_msg_id == "7F00000100002A9F0000000000001234"


@pytest.mark.parametrize(
    ("name", "ip", "born_ip", "bits"), [("v4", "127.0.0.1", "127.0.0.1", 0), ("v6", "::1", "fe80::1", 0x30)]
)
@pytest.mark.feature("trap 11")
def test_a_message_that_java_encoded_is_read(name: str, ip: str, born_ip: str, bits: int) -> None:
    (message,) = decode_messages(bytes.fromhex(golden("stored")[name]), "broker-a")

    assert (message.store_host, message.reconsume_times) == ((ip, 10_911), 2)
    assert (message.born_host.ip, message.sys_flag & 0x30) == (born_ip, bits)
    assert message.properties == {"color": "é", "TAGS": "TagA"}


@given(sent=st.lists(messages(), max_size=3))
def test_messages_survive_the_body_of_a_pull(sent: list[MessageExt]) -> None:
    body = b"".join(map(encode_message, sent))

    assert decode_messages(body, "broker-a") == sent


@given(data=st.binary(max_size=200))
def test_any_bytes_are_messages_or_raise_our_own_error(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode_messages(data, "broker-a")


@given(at=st.integers(0, len(STORED) - 1), byte=st.integers(0, 255))
def test_one_damaged_byte_is_read_or_raises_our_own_error(at: int, byte: int) -> None:
    data = bytearray(STORED)
    data[at] = byte
    with suppress(RemoteProtocolError):
        decode_messages(bytes(data), "broker-a")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (STORED + STORED[:-1], "message 1 of the body has 147 bytes, 146 bytes are left"),
        (STORED + b"\0", "message 1 of the body has 0 bytes, 1 bytes are left"),
        (b"\x7f" + STORED[1:], "message 0 of the body has 2130706579 bytes, 147 bytes are left"),
        (STORED[:4] + b"\0\0\0\0" + STORED[8:], "message 0 of the body cannot be read: magic 0x00000000"),
        (STORED[:89] + b"!" + STORED[90:], "message 0 of the body cannot be read: its body does not match its CRC-32"),
    ],
)
def test_a_body_of_incomplete_messages_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode_messages(body, "broker-a")


# --- batches ----------------------------------------------------------------------------------------


def test_a_batch_is_written_as_java_writes_it() -> None:
    first = Message("T1", b"A", {"KEYS": "k1", "WAIT": "true", "TAGS": "TagA"}, flag=3)
    second = Message("T1", "Bé".encode(), {"WAIT": "false"})

    assert encode_batch([first, second]).hex() == golden("batch")["two"]


@pytest.mark.feature("trap 18")
def test_a_batch_is_read_and_written() -> None:
    """4.9.8 leaves out the last separator of the properties."""
    newer = bytes.fromhex("00000021 00000000 00000000 00000000 00000001 41 000a 57414954 01 74727565 02")
    older = bytes.fromhex("00000020 00000000 00000000 00000000 00000001 41 0009 57414954 01 74727565")
    message = Message("T", b"A", {"WAIT": "true"})

    assert encode_batch([message]) == newer
    assert decode_batch(newer, "T") == decode_batch(older, "T") == [message]


@given(sent=st.lists(st.builds(Message, st.just("T"), st.binary(max_size=50), _properties, _int4), max_size=4))
def test_a_batch_survives_encoding(sent: list[Message]) -> None:
    assert decode_batch(encode_batch(sent), "T") == sent


@given(data=st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_raise_our_own_error(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode_batch(data, "T")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda body: body[:-1], "the lengths in message 0 of the batch do not add up to 33"),
        (lambda body: body + body[:10], "message 1 of the batch is cut off"),
        (lambda body: body[:16] + b"\xff\xff\xff\xff" + body[20:], "do not add up"),
        (lambda body: body[:21] + b"\xff\xff" + body[23:], "do not add up"),
    ],
)
def test_a_batch_with_wrong_lengths_is_refused(damage: object, text: str) -> None:
    body = encode_batch([Message("T", b"A", {"WAIT": "true"})])

    with pytest.raises(RemoteProtocolError, match=text):
        decode_batch(damage(body), "T")  # type: ignore[operator]


def test_properties_that_are_too_long_are_refused_before_they_are_sent() -> None:
    with pytest.raises(MessageError, match="take 32773 bytes, allowed are 32767; move data into the body"):
        encode_batch([Message("T", b"A", {"KEYS": "k" * 32_767})])


# --- ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ip"), [("v4", "127.0.0.1"), ("v6", "::1")])
@pytest.mark.feature("trap 12", "trap 13", "trap 17")
def test_the_id_of_a_broker_contains_the_position_of_the_message(name: str, ip: str) -> None:
    text = golden("msgid")[name]

    assert len(text) == (32 if name == "v4" else 56)
    assert parse_offset_msg_id(text) == ((ip, 10_911), 0x1234)
    assert offset_msg_id(HostAddress(ip, 10_911), 0x1234) == text


@given(host=_hosts, physical_offset=_times)
def test_every_id_survives_encoding(host: HostAddress, physical_offset: int) -> None:
    assert parse_offset_msg_id(offset_msg_id(host, physical_offset)) == (host, physical_offset)


@pytest.mark.parametrize("host", [HostAddress("10.0.0.1", 10_911), HostAddress("::1", 10_911)])
@pytest.mark.parametrize("offsets", [[0], [0, 0x12AB, (1 << 63) - 1], range(7, 1_000, 250)])
def test_the_ids_of_several_messages_are_those_of_each_joined(host: HostAddress, offsets: Sequence[int]) -> None:
    assert offset_msg_ids(host, offsets) == ",".join([offset_msg_id(host, offset) for offset in offsets])


@pytest.mark.parametrize("text", ["", "0", "7F" * 15, "XY" * 16, " 7" * 16, "7F00000100002A9F0000000000001234," * 2])
def test_another_text_is_refused_as_an_id(text: str) -> None:
    with pytest.raises(MessageError, match="is not an offset message id: those have 32 hex digits, or 56"):
        parse_offset_msg_id(text)


# --- properties -------------------------------------------------------------------------------------


@given(properties=_properties)
def test_properties_survive_encoding(properties: dict[str, str]) -> None:
    assert decode_properties_text(encode_properties_text(properties)) == properties


def test_properties_are_written_as_java_writes_them() -> None:
    assert encode_properties_text({"TAGS": "TagA"}) == "TAGS\x01TagA\x02"


@pytest.mark.parametrize("pair", [("a\x01", "b"), ("a", "b\x02"), ("a", "\x01\x02"), ("\x02", "")])
def test_a_separator_inside_a_property_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(MessageError, match="has the character 0x01 or 0x02 .*; .* put such data into the body"):
        encode_properties_text({"ok": "fine", pair[0]: pair[1]})


def test_an_empty_text_has_no_properties() -> None:
    assert decode_properties_text(None) == decode_properties_text("") == {}


# --- compression ------------------------------------------------------------------------------------


def test_a_body_that_java_compressed_is_decompressed() -> None:
    flag, body = golden("compressed")["ZLIB"].split()

    assert decompress_body(bytes.fromhex(body), int(flag) | 1) == PLAIN
    assert compress_body(PLAIN)[0].hex() == body


@pytest.mark.parametrize(("name", "module"), [("LZ4", "lz4.frame"), ("ZSTD", "zstandard")])
def test_a_body_that_java_compressed_with_an_optional_library_is_decompressed(name: str, module: str) -> None:
    pytest.importorskip(module)
    flag, body = golden("compressed")[name].split()

    assert decompress_body(bytes.fromhex(body), int(flag) | 1) == PLAIN
    assert decompress_body(*compress_body(PLAIN, CompressionType[name])) == PLAIN
    with pytest.raises(ConversionError, match=f"does not decompress as {name}"):
        decompress_body(bytes.fromhex(body)[:-6], int(flag) | 1)


@pytest.mark.parametrize("kind", [CompressionType.LZ4, CompressionType.ZSTD])
def test_the_error_names_a_missing_library(kind: CompressionType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compression._LIBRARIES, kind, ("no_such_library", "no-such-library"))

    for act in (lambda: compress_body(PLAIN, kind), lambda: decompress_body(b"", kind.sys_flag)):
        with pytest.raises(UnsupportedError, match=f"{kind.name} bodies need the package no-such-library: pip install"):
            act()


@pytest.mark.parametrize("body", [b"", b"nothing", zlib.compress(PLAIN)[:-1]])
def test_a_body_that_contradicts_its_flag_is_refused(body: bytes) -> None:
    with pytest.raises(ConversionError, match="the body does not decompress as ZLIB"):
        decompress_body(body, CompressionType.ZLIB.sys_flag)


def test_an_unknown_compression_type_is_refused() -> None:
    with pytest.raises(
        ConversionError, match="compressed with method 7; known are 1 \\(LZ4\\), 2 \\(ZSTD\\), 3 and 0 "
    ):
        compression_type(0x701)


def test_a_pulled_body_is_decompressed_and_its_bit_cleared() -> None:
    body, flag = compress_body(PLAIN)

    (message,) = decode_messages(stored(body, flag | SysFlag.TRANSACTION_COMMIT), "broker-a")

    assert message.body == PLAIN
    assert message.sys_flag == 0x300 | SysFlag.TRANSACTION_COMMIT


@pytest.mark.parametrize("flag", [0x301, 0x701])
def test_a_body_that_does_not_decompress_does_not_block_other_messages(flag: int) -> None:
    """Its message keeps the bit, so that the listener can see it."""
    broken, whole = decode_messages(stored(b"?", flag) + stored(b"fine", 0), "broker-a")

    assert (broken.body, broken.sys_flag, whole.body) == (b"?", flag, b"fine")

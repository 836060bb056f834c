"""Frames: golden bytes, decoding of pieces of any size, and the refusal of other bytes."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import BrokerError, MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    LanguageCode,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    SerializeType,
    decode_command,
    encode_command,
    encode_head,
    json_header,
)
from mqtemplate.remoting.protocol.codes import Version
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.strategies import commands, json_values

OUR_CODES = range(500_001, 500_100)
ROUTE_JSON = bytes.fromhex("000000800000007c") + (
    b'{"code":105,"extFields":{"topic":"T1"},"flag":0,"language":"JAVA",'
    b'"opaque":7,"serializeTypeCurrentRPC":"JSON","version":513}'
)
ROUTE_BINARY = bytes.fromhex(
    "00000026 01000022 0069 00 0201 00000007 00000000 00000000 0000000d 0005 746f706963 00000002 5431"
)


def route_request(serialize_type: SerializeType) -> RemotingCommand:
    command = RemotingCommand.request(105, GetRouteInfoRequestHeader(topic="T1"), opaque=7)
    command.language, command.version, command.serialize_type = LanguageCode.JAVA, Version.V5_5_0, serialize_type
    return command


def sliced(frames: bytes, cuts: list[int]) -> list[RemotingCommand]:
    """Return the commands that a decoder reads from *frames* in pieces of these sizes, which repeat."""
    decoder, commands, at, turn = FrameDecoder(), [], 0, 0
    while at < len(frames):
        size = cuts[turn % len(cuts)]
        decoder.feed(frames[at : at + size])
        at, turn = at + size, turn + 1
        while (command := decoder.next_command()) is not None:
            commands.append(command)
    return commands


def head(length: int, serialize_type: int, header_length: int) -> bytes:
    return struct.pack(">iI", length, serialize_type << 24 | header_length)


def json_frame(header: object) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return head(4 + len(data), 0, len(data)) + data


# --- golden bytes -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("json_library")
def test_a_request_is_written_as_java_writes_it_in_json() -> None:
    """Byte by byte."""
    assert (
        encode_command(route_request(SerializeType.JSON)) == ROUTE_JSON == bytes.fromhex(golden("frame")["route-JSON"])
    )


def test_a_request_is_written_as_java_writes_it_in_binary() -> None:
    """Byte by byte."""
    binary = encode_command(route_request(SerializeType.ROCKETMQ))

    assert binary == ROUTE_BINARY == bytes.fromhex(golden("frame")["route-ROCKETMQ"])


@pytest.mark.usefixtures("json_library")
@pytest.mark.parametrize("name", golden("frame"))
def test_every_frame_that_java_wrote_is_read_and_written_again(name: str) -> None:
    frame = bytes.fromhex(golden("frame")[name])

    command = decode_command(frame)

    assert (command.opaque, command.version, command.language) == (7, Version.V5_5_0, LanguageCode.JAVA)
    assert command.serialize_type is SerializeType[name.rpartition("-")[2]]
    if command.ext_fields or command.serialize_type is SerializeType.ROCKETMQ:
        assert encode_command(command) == frame
    else:  # our JSON always has extFields
        assert decode_command(encode_command(command)) == command


def test_both_encodings_of_a_java_command_are_read_alike() -> None:
    for name in ("send", "send-answer", "error", "no-header", "search", "route"):
        as_json = decode_command(bytes.fromhex(golden("frame")[f"{name}-JSON"]))
        as_binary = decode_command(bytes.fromhex(golden("frame")[f"{name}-ROCKETMQ"]))

        as_binary.serialize_type = SerializeType.JSON
        assert as_json == as_binary


def test_the_fields_of_javas_frames_are_read() -> None:
    send = decode_command(bytes.fromhex(golden("frame")["send-JSON"]))
    error = decode_command(bytes.fromhex(golden("frame")["error-ROCKETMQ"]))
    one_way = decode_command(bytes.fromhex(golden("frame")["no-header-JSON"]))

    assert (send.code, send.body, send.ext_fields["b"], send.is_response) == (310, b"hello", "T1", False)
    assert send.ext_fields["i"] == "TAGS\x01TagA\x02KEYS\x01k é\x02"
    assert error.is_response
    assert error.remark == 'No topic route info in name server for the topic: é\n"quoted"'
    assert one_way.is_one_way
    assert one_way.ext_fields == {}


# --- properties -------------------------------------------------------------------------------------


@given(command=commands())
def test_a_command_survives_encoding(command: RemotingCommand) -> None:
    assert decode_command(encode_command(command)) == command


@given(command=commands())
def test_both_json_libraries_read_a_header_alike(command: RemotingCommand) -> None:
    orjson = pytest.importorskip("orjson")
    header = json_header.encode_json_header(command)

    assert orjson.loads(header) == json_header._load_plainly(header)


@given(sent=st.lists(commands(), max_size=4), cuts=st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_frames_survive_any_slicing(sent: list[RemotingCommand], cuts: list[int]) -> None:
    assert sliced(b"".join(map(encode_command, sent)), cuts) == sent


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_any_bytes_decode_or_raise_our_own_error(data: bytes, cuts: list[int]) -> None:
    with suppress(RemoteProtocolError):
        sliced(data, cuts)


@given(serialize_type=st.integers(0, 1), header=st.binary(max_size=100), body=st.binary(max_size=20))
def test_any_header_in_a_whole_frame_decodes_or_raises_our_own_error(
    serialize_type: int, header: bytes, body: bytes
) -> None:
    frame = head(4 + len(header) + len(body), serialize_type, len(header)) + header + body
    try:
        command = decode_command(frame)
    except RemoteProtocolError:
        return
    assert command.body == body


@given(command=commands(), data=st.data())
def test_one_damaged_byte_decodes_or_raises_our_own_error(command: RemotingCommand, data: st.DataObject) -> None:
    frame = bytearray(encode_command(command))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        sliced(bytes(frame), [len(frame)])


@given(
    value=json_values(max_leaves=5),
    name=st.sampled_from(["code", "opaque", "flag", "version", "language", "remark", "extFields"]),
)
def test_any_type_in_any_field_decodes_or_raises_our_own_error(value: object, name: str) -> None:
    frame = json_frame({"code": 34, "opaque": 1, "flag": 0, name: value})
    try:
        command = decode_command(frame)
    except RemoteProtocolError:
        return
    assert decode_command(encode_command(command)) == command


# --- the decoder ------------------------------------------------------------------------------------


def test_a_decoder_waits_for_the_last_byte() -> None:
    decoder = FrameDecoder()
    for byte in ROUTE_JSON[:-1]:
        decoder.feed(bytes([byte]))
        assert decoder.next_command() is None
    assert decoder.buffered == len(ROUTE_JSON) - 1

    decoder.feed(ROUTE_JSON[-1:])

    assert decoder.next_command() == decode_command(ROUTE_JSON)
    assert decoder.buffered == 0


def test_the_largest_frame_is_accepted_and_one_byte_more_is_not() -> None:
    decoder = FrameDecoder(max_frame_bytes=len(ROUTE_JSON))
    decoder.feed(ROUTE_JSON)
    assert decoder.next_command() is not None

    decoder = FrameDecoder(max_frame_bytes=len(ROUTE_JSON) - 1)
    decoder.feed(ROUTE_JSON)
    with pytest.raises(RemoteProtocolError, match="a frame of 128 bytes announced, allowed are 4 to 127"):
        decoder.next_command()


def test_a_decoder_raises_the_same_error_after_a_bad_frame() -> None:
    """The start of the next frame is unknown, so frames after a bad one must not be read."""
    decoder = FrameDecoder()
    decoder.feed(json_frame(b"[]") + ROUTE_JSON)
    with pytest.raises(RemoteProtocolError) as first:
        decoder.next_command()

    decoder.feed(ROUTE_JSON)

    assert decoder.buffered == 0
    with pytest.raises(RemoteProtocolError) as second:
        decoder.next_command()
    assert str(second.value) == str(first.value) == "the header must be a JSON object, got []"
    assert isinstance(second.value, BrokerError)


def test_whole_frames_before_a_bad_one_are_decoded() -> None:
    decoder = FrameDecoder()
    decoder.feed(ROUTE_JSON + json_frame(b"nothing"))

    assert decoder.next_command() == decode_command(ROUTE_JSON)
    with pytest.raises(RemoteProtocolError, match="the header is not JSON: .*; it starts with b'nothing'"):
        decoder.next_command()


def test_frames_are_read_whole_and_decoded_later() -> None:
    decoder = FrameDecoder()
    decoder.feed(ROUTE_JSON * 2 + ROUTE_JSON[:20])

    frames = [decoder.next_frame(), decoder.next_frame()]

    assert decoder.next_frame() is None
    assert (decoder.has_more, decoder.buffered) == (True, 20)
    assert [decoder.decode(frame) for frame in frames if frame is not None] == [decode_command(ROUTE_JSON)] * 2
    decoder.feed(ROUTE_JSON[20:])
    assert decoder.next_frame() == frames[0]
    assert (decoder.has_more, decoder.buffered) == (False, 0)


def test_only_one_whole_frame_decodes_to_a_command() -> None:
    for data in (ROUTE_JSON[:-1], ROUTE_JSON + b"\0", b""):
        with pytest.raises(RemoteProtocolError, match=f"{len(data)} bytes are not one whole frame"):
            decode_command(data)


def test_a_decoder_accepts_each_kind_of_buffer() -> None:
    decoder = FrameDecoder()
    decoder.feed(bytearray(ROUTE_JSON[:50]))
    decoder.feed(memoryview(ROUTE_JSON)[50:])

    assert decoder.next_command() == decode_command(ROUTE_JSON)


# --- headers that are tolerated, and headers that are refused ---------------------------------------


@pytest.mark.usefixtures("json_library")
def test_a_json_header_that_java_tolerates_is_read() -> None:
    """Unknown keys, missing keys, nulls, blanks, numbers as text, numbers and booleans among the ext fields."""
    header = (
        b' {"code" : "11", "opaque":5,\n"version":null, "language":"COBOL", "remark":null, "later":[{}],'
        b'"extFields":{"queueId":3,"suspend":true,"gone":null,"tps":0.5,"topic":"T"}} '
    )

    command = decode_command(json_frame(header))

    assert (command.code, command.opaque, command.flag, command.version) == (11, 5, 0, 0)
    assert (command.language, command.remark) == (LanguageCode.OTHER, None)
    assert command.ext_fields == {"queueId": "3", "suspend": "true", "tps": "0.5", "topic": "T"}


@pytest.mark.usefixtures("json_library")
@pytest.mark.parametrize("header", [b"\xff{}", b"[" * 100_000])
def test_a_header_that_is_not_json_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="the header is not JSON"):
        decode_command(json_frame(header))


@pytest.mark.usefixtures("json_library")
def test_a_lone_surrogate_in_a_header_becomes_a_question_mark() -> None:
    """Otherwise nothing could encode it again. A whole pair of surrogates is an ordinary character."""
    command = decode_command(
        json_frame(rb'{"code":1,"opaque":1,"remark":"\udc00","extFields":{"topic":"a\ud800b\ud83d\ude00"}}')
    )

    assert (command.remark, command.ext_fields) == ("?", {"topic": "a?b\N{GRINNING FACE}"})


def test_the_error_for_a_header_without_a_binary_form_names_the_alternative() -> None:
    command = RemotingCommand(34, version=40_000, serialize_type=SerializeType.ROCKETMQ)

    with pytest.raises(MessageError, match="has no binary form: .*; send it with a JSON header"):
        encode_command(command)


@pytest.mark.usefixtures("json_library")
@pytest.mark.parametrize("serialize_type", SerializeType)
def test_a_text_that_utf_8_cannot_encode_is_refused_before_it_is_sent(serialize_type: SerializeType) -> None:
    command = RemotingCommand(34, ext_fields={"topic": "\ud800"}, serialize_type=serialize_type)

    with pytest.raises(MessageError, match="the header of request 34 HEART_BEAT, opaque 0"):
        encode_command(command)


def test_a_frame_that_is_too_large_is_not_encoded() -> None:
    command = RemotingCommand(310)

    with pytest.raises(MessageError, match="request 310 SEND_MESSAGE_V2.* allowed are 16777216; send less at once"):
        encode_head(command, MAX_FRAME_BYTES)


def test_a_head_and_its_body_are_the_frame() -> None:
    """A large body from a mapped file is sent without a copy."""
    command = RemotingCommand(0, flag=1, body=b"messages")

    assert encode_head(command, 8) + b"messages" == encode_command(command)


# --- the command itself -----------------------------------------------------------------------------


def test_a_response_has_the_opaque_of_its_request() -> None:
    request = RemotingCommand.request(RequestCode.HEART_BEAT, opaque=41)

    response = request.response(ResponseCode.SYSTEM_BUSY, remark="later")

    assert (response.opaque, response.code, response.remark, response.is_response) == (41, 2, "later", True)
    assert not request.is_response


def test_a_code_without_a_name_stays_a_number() -> None:
    assert RequestCode.of(310) is RequestCode.SEND_MESSAGE_V2
    assert RequestCode.of(31_000) == 31_000
    assert ResponseCode.of(17) is ResponseCode.TOPIC_NOT_EXIST
    assert ResponseCode.of(-7) == -7
    assert decode_command(json_frame({"code": 31_000, "opaque": 1})).code == 31_000


def test_the_text_of_a_command_has_no_secrets() -> None:
    request = RemotingCommand(310, 7, 2, ext_fields={"AccessKey": "AK", "Signature": "s3cret"}, body=b"private")

    assert str(request) == "one-way request 310 SEND_MESSAGE_V2, opaque 7, body of 7 bytes"
    assert str(request.response(17, remark="no topic")) == (
        "response 17 TOPIC_NOT_EXIST, opaque 7, body of 0 bytes, 'no topic'"
    )
    assert str(RemotingCommand(31_000)) == "request 31000 unknown, opaque 0, body of 0 bytes"


def test_our_own_codes_are_in_a_range_that_rocketmq_does_not_use() -> None:
    rocketmqs = {int(number) for number in golden("code").values()}

    assert set(OUR_CODES) & set(RequestCode), "there are codes of our own"
    assert rocketmqs.isdisjoint(OUR_CODES)
    assert max(rocketmqs) < min(OUR_CODES)


@pytest.mark.parametrize("kind", [RequestCode, ResponseCode])
def test_codes_are_rocketmqs(kind: type[RequestCode] | type[ResponseCode]) -> None:
    """Except our own, and the four codes of ACL 1.0, which 5.x removed."""
    old = {"UPDATE_AND_CREATE_ACL_CONFIG", "DELETE_ACL_CONFIG", "GET_BROKER_CLUSTER_ACL_INFO"}
    old.add("UPDATE_GLOBAL_WHITE_ADDRS_CONFIG")

    ours = {code.name: code.value for code in kind if code.name not in old and code not in OUR_CODES}

    assert ours == {name: int(golden("code")[name]) for name in ours}


def test_languages_and_versions_are_rocketmqs() -> None:
    assert {one.name: str(one.value) for one in LanguageCode} == golden("language")
    assert {one.name: str(one.value) for one in Version} == golden("version")

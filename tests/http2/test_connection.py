"""The server's side of HTTP/2, by the sections of RFC 9113: valid frames, and the error of each invalid one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.http2 import frames
from mqtemplate.http2.frames import ErrorCode, frame, rst_stream_frame, settings_frame, window_update_frame
from mqtemplate.http2.hpack import HpackEncoder
from mqtemplate.http2.limits import Http2Limits
from tests.http2.wire import ConnectionPeer, changed, data, headers

END_HEADERS, END_STREAM = frames.END_HEADERS, frames.END_STREAM
HEAD = ((":status", "200"), ("content-type", "application/grpc"))
TRAILERS = (("grpc-status", "0"),)
BLOCK = HpackEncoder().encode(changed())


@pytest.fixture
def peer() -> ConnectionPeer:
    return ConnectionPeer()


def open_call(peer: ConnectionPeer, stream_id: int = 1) -> None:
    peer.send(headers(stream_id, flags=END_HEADERS))


def closed_call(peer: ConnectionPeer, stream_id: int = 1) -> None:
    peer.send(headers(stream_id))
    peer.receivers[stream_id].stream.respond(HEAD, b"", TRAILERS)
    peer.take()


# --- start of a connection: 3.4 -------------------------------------------------------------------


def test_the_server_sends_its_settings_first_and_acknowledges_those_of_the_client() -> None:
    peer = ConnectionPeer()

    assert [each.kind for each in peer.greeting] == [frames.SETTINGS, frames.WINDOW_UPDATE]
    assert frames.parse_settings(peer.greeting[0].payload) == [(3, 1_000), (4, 1 << 20), (6, 16_384)]
    assert peer.send(settings_frame({4: 70_000})) == [(frames.SETTINGS, frames.ACK, 0, b"")]


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX", b"\0\0\0\x20"])
def test_a_connection_without_the_preface_is_closed(start: bytes) -> None:
    [goaway] = ConnectionPeer(greets=False).send(start)

    assert (goaway.kind, goaway.code) == (frames.GOAWAY, ErrorCode.PROTOCOL_ERROR)


# --- requests: 8.1 and 8.3 ------------------------------------------------------------------------


def test_a_request_and_its_response(peer: ConnectionPeer) -> None:
    peer.send(headers(1, flags=END_HEADERS), data(1, b"request"))
    receiver = peer.receivers[1]
    receiver.stream.respond(HEAD, b"response", TRAILERS)

    head, content, trailers = peer.take()

    assert (receiver.fields, receiver.data, receiver.is_complete) == (dict(changed()), b"request", True)
    assert peer.fields(head) == list(HEAD)
    assert content == (frames.DATA, 0, 1, b"response")
    assert (trailers.flags, peer.fields(trailers)) == (END_HEADERS | END_STREAM, list(TRAILERS))
    assert not receiver.stream.is_open
    assert peer.connection.outbound.streams == {}


@given(cuts=st.lists(st.integers(1, 40), max_size=40))
def test_frames_survive_any_slicing(cuts: list[int]) -> None:
    peer = ConnectionPeer()
    sent = (
        headers(1, flags=END_HEADERS) + data(1, b"one", 0) + headers(3) + data(1, b"two") + frame(6, 0, 0, b"12345678")
    )
    at, parts = 0, []
    for cut in cuts:
        parts.append(sent[at : at + cut])
        at += cut

    answers = peer.send(*parts, sent[at:])

    assert answers == [(frames.PING, frames.ACK, 0, b"12345678")]
    assert [(each.data, each.is_complete) for each in peer.receivers.values()] == [(b"onetwo", True), (b"", True)]


def test_a_ping_is_answered_after_all_frames_before_it(peer: ConnectionPeer) -> None:
    """One PING after the other, however many functions wait. Other PINGs of the peer are no answers."""
    answered: list[str] = []
    for name in "abc":
        peer.connection.ping(lambda name=name: answered.append(name))  # type: ignore[misc]
    [first] = peer.take()

    assert peer.send(frame(frames.PING, frames.ACK, 0, b"12345678")) == []
    assert answered == []
    [second] = peer.send(frame(frames.PING, frames.ACK, 0, first.payload))
    assert answered == ["a"]
    assert peer.send(frame(frames.PING, frames.ACK, 0, first.payload)) == []
    assert peer.send(frame(frames.PING, frames.ACK, 0, second.payload)) == []
    assert answered == ["a", "b", "c"]

    peer.connection.ping(lambda: answered.append("d"))
    peer.connection.ping()  # of a connection that is idle: its answer is one to the other, too
    _, last = peer.take()
    peer.send(frame(frames.PING, frames.ACK, 0, last.payload))
    assert answered[3:] == ["d"]


def test_a_stream_that_the_peer_resets_after_its_end_is_remembered() -> None:
    peer = ConnectionPeer(Http2Limits(max_streams=2))
    for stream_id in (1, 3, 5):
        peer.send(headers(stream_id))
        peer.receivers[stream_id].stream.respond(HEAD, b"response", TRAILERS)
        peer.send(rst_stream_frame(stream_id, ErrorCode.CANCEL))

    assert [peer.connection.was_reset(stream_id) for stream_id in (1, 3, 5, 7)] == [False, True, True, False]


@given(garbage=st.binary(max_size=300))
def test_any_bytes_are_processed_or_end_the_connection_by_an_error(garbage: bytes) -> None:
    peer = ConnectionPeer()

    peer.send(garbage)

    assert peer.error is None or peer.connection.is_going_away


def test_a_header_block_may_continue_and_be_padded_and_have_a_priority(peer: ConnectionPeer) -> None:
    """6.2 and 6.10."""
    payload = b"\x03" + b"\0\0\0\0\x10" + BLOCK[:5] + b"\0\0\0"
    first = frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY | END_STREAM, 1, payload)

    peer.send(
        first, frame(frames.CONTINUATION, 0, 1, BLOCK[5:8]), frame(frames.CONTINUATION, END_HEADERS, 1, BLOCK[8:])
    )

    assert peer.receivers[1].fields == dict(changed())
    assert peer.receivers[1].is_complete


def test_padding_of_data_counts_for_the_windows_and_is_removed(peer: ConnectionPeer) -> None:
    peer.send(headers(1, flags=END_HEADERS), data(1, b"\x05abc" + bytes(5), frames.PADDED))

    assert peer.receivers[1].data == b"abc"
    assert peer.receivers[1].stream.receive_window == (1 << 20) - 9


def test_trailers_of_a_request_end_it(peer: ConnectionPeer) -> None:
    open_call(peer)

    peer.send(headers(1, [("checksum", "1")]))

    assert peer.receivers[1].is_complete


def test_values_of_one_name_are_joined(peer: ConnectionPeer) -> None:
    peer.send(headers(1, changed(("a", "1"), ("b", "2"), ("a", "3"))))

    assert peer.receivers[1].fields["a"] == "1, 3"


@pytest.mark.parametrize(
    "fields",
    [
        changed(without=":method"),
        changed(without=":scheme"),
        changed(without=":path"),
        (("a", "b"), *changed()),
        changed((":path", "/b")),
        changed((":protocol", "websocket")),
        changed((":status", "200")),
        ((":path", ""), *changed(without=":path")),
        changed(("connection", "close")),
        changed(("transfer-encoding", "chunked")),
        changed(("te", "gzip"), without="te"),
        changed(("Upper", "a")),
        changed(("a", "line\nline")),
        changed(("a", "zero\0")),
        changed(("content-length", "5")),
        changed(("content-length", "x")),
    ],
)
def test_a_malformed_request_is_reset_and_the_next_one_served(
    peer: ConnectionPeer, fields: tuple[tuple[str, str], ...]
) -> None:
    """8.1.1, 8.2 and 8.3: a stream error PROTOCOL_ERROR."""
    [reset] = peer.send(headers(1, fields))

    assert (reset.kind, reset.stream_id, reset.code) == (frames.RST_STREAM, 1, ErrorCode.PROTOCOL_ERROR)
    peer.send(headers(3))
    assert list(peer.receivers) == [3]


def test_a_malformed_field_is_found_again_in_the_table(peer: ConnectionPeer) -> None:
    """The field was added to the table of the connection; a later block refers to it by one byte."""
    block = BLOCK + b"\x40\x01A\x011"

    for stream_id, each in ((1, block), (3, BLOCK + b"\xbe")):
        [reset] = peer.send(frame(frames.HEADERS, END_HEADERS | END_STREAM, stream_id, each))
        assert reset.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(("content", "flags"), [(b"abcdef", 0), (b"abc", END_STREAM)])
def test_data_of_another_size_than_announced_are_refused(peer: ConnectionPeer, content: bytes, flags: int) -> None:
    """8.1.1."""
    peer.send(headers(1, changed(("content-length", "5")), END_HEADERS))

    [reset] = peer.send(data(1, content, flags))

    assert reset.code is ErrorCode.PROTOCOL_ERROR
    assert peer.receivers[1].reset is not None


# --- errors of the connection ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(frames.DATA, 0, 0, b"a"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 5, b"a"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 0, BLOCK), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 2, BLOCK), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS | frames.PADDED, 1, b"\xff" + BLOCK), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS | frames.HAS_PRIORITY, 1, b"\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK[:4]) + frame(frames.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK[:4]) + frame(0xFF, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK[:4]) + headers(3), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK[:4]) + frame(frames.CONTINUATION, 4, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, END_HEADERS, 1, BLOCK), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, frames.ACK, 0, b"a"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (settings_frame({frames.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
        (settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
        (settings_frame({frames.MAX_FRAME_SIZE: 100}), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (window_update_frame(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update_frame(1, 1), ErrorCode.PROTOCOL_ERROR),
        (window_update_frame(0, 0x7FFF_FFFF), ErrorCode.FLOW_CONTROL_ERROR),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_an_invalid_frame_ends_the_connection_with_the_code_of_the_rfc(
    peer: ConnectionPeer, sent: bytes, code: ErrorCode
) -> None:
    """5.1, 6.1 to 6.10: GOAWAY is the last frame, and names the last stream."""
    *_, goaway = peer.send(sent)

    assert (goaway.kind, goaway.code) == (frames.GOAWAY, code)
    assert peer.error is not None
    assert peer.error.code is code


def test_the_first_frame_must_be_settings() -> None:
    """3.4."""
    [goaway] = ConnectionPeer(greets=False).send(frames.PREFACE + headers(1))

    assert goaway.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(1), ErrorCode.STREAM_CLOSED),
        (data(1, b"a"), ErrorCode.STREAM_CLOSED),
    ],
)
def test_a_frame_of_a_closed_stream_ends_the_connection(peer: ConnectionPeer, sent: bytes, code: ErrorCode) -> None:
    """5.1: both sides had ended it."""
    closed_call(peer)

    [goaway] = peer.send(sent)

    assert goaway.code is code


def test_a_skipped_stream_is_closed(peer: ConnectionPeer) -> None:
    """5.1.1: the first use of a stream closes those with lower numbers that were not used."""
    peer.send(headers(5))

    [goaway] = peer.send(headers(3))

    assert goaway.code is ErrorCode.STREAM_CLOSED


@pytest.mark.parametrize(
    "sent", [rst_stream_frame(1, ErrorCode.CANCEL), window_update_frame(1, 9), frame(2, 0, 1, bytes(5))]
)
def test_late_frames_of_a_closed_stream_are_ignored(peer: ConnectionPeer, sent: bytes) -> None:
    """5.1: the client may have sent them before it knew."""
    closed_call(peer)

    assert peer.send(sent) == []
    assert peer.error is None


# --- errors of a stream ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (data(1, b"a"), ErrorCode.STREAM_CLOSED),
        (headers(1), ErrorCode.STREAM_CLOSED),
        (window_update_frame(1, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update_frame(1, 0x7FFF_FFFF), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_an_invalid_frame_of_a_half_closed_stream_ends_the_stream(
    peer: ConnectionPeer, sent: bytes, code: ErrorCode
) -> None:
    """5.1 and 6.9.1."""
    peer.send(headers(1))

    [reset] = peer.send(sent)

    assert (reset.kind, reset.stream_id, reset.code) == (frames.RST_STREAM, 1, code)
    assert peer.receivers[1].reset is not None
    assert peer.error is None


def test_trailers_must_end_the_request(peer: ConnectionPeer) -> None:
    """8.1."""
    open_call(peer)

    [reset] = peer.send(headers(1, [("a", "b")], END_HEADERS))

    assert reset.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("field", [(":path", "/"), ("Upper", "a"), ("a", "line\n")])
def test_trailers_have_neither_pseudo_header_fields_nor_invalid_ones(
    peer: ConnectionPeer, field: tuple[str, str]
) -> None:
    """8.1 and 8.2.1."""
    open_call(peer)

    [reset] = peer.send(headers(1, [field]))

    assert reset.code is ErrorCode.PROTOCOL_ERROR
    assert peer.receivers[1].reset is not None


def test_frames_that_cross_a_reset_of_the_server_are_ignored(peer: ConnectionPeer) -> None:
    """5.1: the client has sent them before it read RST_STREAM. The table of fields is kept up to date."""
    open_call(peer)
    peer.receivers[1].stream.reset(ErrorCode.CANCEL)
    peer.take()

    late = frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, b"\x40\x01a\x011")
    assert peer.send(data(1, b"late", 0), late) == []
    peer.send(frame(frames.HEADERS, END_HEADERS | END_STREAM, 3, BLOCK + b"\xbe"))

    assert peer.receivers[3].fields["a"] == "1"


def test_a_reset_of_the_client_is_reported_to_the_owner_of_the_stream(peer: ConnectionPeer) -> None:
    open_call(peer)

    assert peer.send(rst_stream_frame(1, ErrorCode.CANCEL)) == []
    assert peer.receivers[1].reset == "the client reset the call, code 8"
    peer.receivers[1].stream.respond(HEAD, b"too late", TRAILERS)
    assert peer.take() == []


def test_a_response_before_the_end_of_the_request_stops_the_request(peer: ConnectionPeer) -> None:
    """8.1: RST_STREAM with NO_ERROR after the complete response."""
    open_call(peer)

    peer.receivers[1].stream.respond(HEAD, b"early", TRAILERS)

    *_, trailers, reset = peer.take()
    assert trailers.flags & END_STREAM
    assert (reset.kind, reset.code) == (frames.RST_STREAM, ErrorCode.NO_ERROR)


def test_more_streams_than_allowed_are_refused() -> None:
    """5.1.2: the client may retry them."""
    peer = ConnectionPeer(Http2Limits(max_streams=2))

    [reset] = peer.send(headers(1), headers(3), headers(5))

    assert (reset.stream_id, reset.code) == (5, ErrorCode.REFUSED_STREAM)
    peer.receivers[1].stream.respond(HEAD, b"", TRAILERS)
    peer.send(headers(7))
    assert list(peer.receivers) == [1, 3, 7]


def test_after_goaway_new_streams_are_refused_and_the_open_ones_go_on(peer: ConnectionPeer) -> None:
    """6.8."""
    open_call(peer)
    peer.connection.go_away(frames.Http2Error(ErrorCode.NO_ERROR, "stop"))

    goaway, reset = peer.send(data(1, b"rest"), headers(3))

    assert (goaway.code, int.from_bytes(goaway.payload[:4], "big")) == (ErrorCode.NO_ERROR, 1)
    assert (reset.stream_id, reset.code) == (3, ErrorCode.REFUSED_STREAM)
    assert peer.receivers[1].data == b"rest"


# --- flow control: 5.2 and 6.9 --------------------------------------------------------------------


def test_windows_are_refilled_when_half_of_them_is_used() -> None:
    peer = ConnectionPeer(Http2Limits(stream_window_bytes=1_000, connection_window_bytes=70_000))
    open_call(peer)

    updates = peer.send(data(1, bytes(400), 0), data(1, bytes(200), 0))

    assert updates == [(frames.WINDOW_UPDATE, 0, 1, (600).to_bytes(4, "big"))]
    assert peer.receivers[1].stream.receive_window == 1_000


def test_more_data_than_a_window_is_an_error() -> None:
    peer = ConnectionPeer(Http2Limits(stream_window_bytes=1_000, connection_window_bytes=70_000))
    open_call(peer)

    [reset] = peer.send(data(1, bytes(1_001), 0))

    assert reset.code is ErrorCode.FLOW_CONTROL_ERROR


def test_a_response_waits_for_the_window_of_its_stream() -> None:
    peer = ConnectionPeer(settings={frames.INITIAL_WINDOW_SIZE: 10})
    peer.send(headers(1))
    peer.receivers[1].stream.respond(HEAD, b"0123456789abcdef", TRAILERS)

    _, first = peer.take()
    assert first.payload == b"0123456789"
    [second] = peer.send(window_update_frame(1, 1))
    rest = peer.send(window_update_frame(1, 100))

    assert [second.payload, rest[0].payload] == [b"a", b"bcdef"]
    assert rest[1].flags & END_STREAM
    assert peer.connection.outbound.queued_bytes == 0


def test_a_setting_changes_the_windows_of_open_streams_which_may_become_negative() -> None:
    """6.9.2."""
    peer = ConnectionPeer(settings={frames.INITIAL_WINDOW_SIZE: 10})
    peer.send(headers(1))
    peer.receivers[1].stream.respond(HEAD, b"0123456789abcdef", TRAILERS)
    peer.take()

    peer.send(settings_frame({frames.INITIAL_WINDOW_SIZE: 5}))
    assert peer.receivers[1].stream.send_window == -5
    assert peer.send(window_update_frame(1, 5)) == []
    [update] = [each for each in peer.send(settings_frame({frames.INITIAL_WINDOW_SIZE: 7})) if each.kind == frames.DATA]

    assert update.payload == b"ab"


def test_streams_take_turns_when_the_window_of_the_connection_opens() -> None:
    peer = ConnectionPeer(settings={frames.INITIAL_WINDOW_SIZE: 1 << 20})
    peer.send(headers(1), headers(3))
    for stream_id in (1, 3):
        peer.receivers[stream_id].stream.send_headers(HEAD)
        peer.receivers[stream_id].stream.send_data(bytes(100_000))
    sent = sum(len(each.payload) for each in peer.take() if each.kind == frames.DATA)
    assert sent == 65_535

    order = [each.stream_id for each in peer.send(window_update_frame(0, 65_536))]

    assert sorted(order[:2]) == [1, 3]
    assert len(order) == 4


def test_frames_are_as_large_as_the_client_permits(peer: ConnectionPeer) -> None:
    peer.send(settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 20, frames.MAX_FRAME_SIZE: 30_000}), headers(1))

    peer.receivers[1].stream.send_data(bytes(40_000))

    assert [len(each.payload) for each in peer.take()] == [30_000, 10_000]


def test_a_window_of_a_stream_must_not_overflow_by_a_setting() -> None:
    """6.9.2."""
    peer = ConnectionPeer()
    open_call(peer)
    peer.send(window_update_frame(1, 0x7FFF_FFFF - 65_535))

    *_, goaway = peer.send(settings_frame({frames.INITIAL_WINDOW_SIZE: 65_536}))

    assert goaway.code is ErrorCode.FLOW_CONTROL_ERROR


# --- a client that leaves -------------------------------------------------------------------------


def test_goaway_of_the_client_is_reported_to_the_open_streams_once(peer: ConnectionPeer) -> None:
    """It opens no more streams, and may wait for the open ones. 6.8."""
    peer.send(headers(1), headers(3))
    peer.receivers[1].stream.respond(((":status", "200"),), b"", (("grpc-status", "0"),))
    peer.take()

    for _ in range(2):
        assert peer.send(frame(frames.GOAWAY, 0, 0, bytes(8))) == []

    assert [each.goaways for each in peer.receivers.values()] == [0, 1]
    peer.receivers[3].stream.respond(((":status", "200"),), b"last", (("grpc-status", "0"),))
    assert b"last" in [each.payload for each in peer.take()]


# --- frames that are ignored ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        frame(0xAB, 0xFF, 77, b"anything"),
        settings_frame({0xFF00: 7}),
        frame(frames.PRIORITY, 0, 9, bytes(5)),
        frame(frames.GOAWAY, 0, 0, bytes(8)),
        frame(frames.PING, frames.ACK, 0, bytes(8)),
    ],
)
def test_what_a_server_need_not_know_is_ignored(peer: ConnectionPeer, sent: bytes) -> None:
    """5.5, 6.5.2 and 6.8."""
    answers = peer.send(sent)

    assert [each for each in answers if each.kind != frames.SETTINGS] == []
    peer.send(headers(1))
    assert peer.receivers[1].is_complete


def test_a_reserved_bit_is_ignored(peer: ConnectionPeer) -> None:
    """4.1."""
    sent = bytearray(headers(1))
    sent[5] |= 0x80

    peer.send(bytes(sent))

    assert peer.receivers[1].is_complete

"""gRPC on HTTP/2, byte by byte: what no client library sends, and what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.http2 import frames
from mqtemplate.http2.frames import ErrorCode, frame, rst_stream_frame, window_update_frame
from mqtemplate.http2.grpc_server import GrpcLimits
from mqtemplate.http2.grpc_wire import GrpcStatus, framed, parse_timeout, status_fields
from tests.http2.conftest import OpenSocket, StartGrpc
from tests.http2.grpc_kit import CHAT, ECHO, GATHERED, HOLD, METADATA, NOTED, PARTS, SLOW, GrpcEcho
from tests.http2.wire import SocketPeer, call, changed, data, headers
from tests.server.fast_path.fast_serving import in_one_turn
from tests.waiting import PATIENCE_S, eventually


@pytest.fixture
def peer(grpc_server: GrpcEcho, open_socket: OpenSocket) -> SocketPeer:
    return open_socket(grpc_server)


def start_of(path: str, stream_id: int = 1) -> bytes:
    return headers(stream_id, ((":path", path), *changed(without=":path")), frames.END_HEADERS)


def status_of(peer: SocketPeer) -> tuple[GrpcStatus, str]:
    fields, _ = peer.response()
    return GrpcStatus(int(fields["grpc-status"])), unquote(fields.get("grpc-message", ""))


# --- requests -------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), cuts=st.lists(st.integers(1, 12), max_size=30))
def test_messages_may_be_cut_anywhere(
    grpc_server: GrpcEcho, open_socket: OpenSocket, sizes: list[int], cuts: list[int]
) -> None:
    """A DATA frame may have a part of a message, or several messages."""
    sent = [bytes((number,)) * size for number, size in enumerate(sizes)]
    stream = b"".join(map(framed, sent))
    peer = open_socket(grpc_server)
    parts, at = [], 0
    for cut in cuts:
        parts.append(data(1, stream[at : at + cut], 0))
        at += cut

    peer.send(start_of(CHAT), *parts, data(1, stream[at:]))

    assert peer.response()[1] == sent
    peer.socket.close()


def test_a_unary_call_may_end_with_an_empty_frame_or_with_trailers(peer: SocketPeer) -> None:
    peer.send(start_of(ECHO), data(1, framed(b"first"), 0), data(1, b""))
    assert peer.response()[1] == [b"first"]

    peer.send(start_of(ECHO, 3), data(3, framed(b"second"), 0), headers(3, [("checksum", "1")]))
    assert peer.response()[1] == [b"second"]


def test_calls_that_are_read_together_are_processed_together(
    grpc_server: GrpcEcho, peer: SocketPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not more than 64 of them: that takes a millisecond."""
    in_one_turn(monkeypatch)
    peer.send(call(1, GATHERED, b"alone"))
    assert peer.response()[1] == [b"1"]

    peer.send(*(call(3 + 2 * number, GATHERED, b"together") for number in range(100)))

    found = [int(messages[0]) for _, messages in peer.responses(100).values()]
    assert (found[:64], found[64:]) == ([64] * 64, [36] * 36)


def test_gathered_calls_are_processed_before_a_call_of_another_method(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, GATHERED, b"1"), call(3, GATHERED, b"2"), call(5, HOLD, b"3"), call(7, GATHERED, b"4"))

    assert sorted(peer.responses(3)) == [1, 3, 7]
    assert grpc_server.order == [b"1", b"2", b"3", b"4"]


def test_gathered_calls_before_an_error_of_the_connection_are_answered(peer: SocketPeer) -> None:
    peer.send(call(1, GATHERED, b"1"), call(3, GATHERED, b"2"), frame(frames.PUSH_PROMISE, 0, 1, b""))

    assert [fields["grpc-status"] for fields, _ in peer.responses(2).values()] == ["0", "0"]
    assert peer.until(frames.GOAWAY).code is ErrorCode.PROTOCOL_ERROR


def test_calls_whose_handler_raises_an_exception_end_with_internal(
    peer: SocketPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that it has answered before."""
    in_one_turn(monkeypatch)

    peer.send(call(1, GATHERED, b"1"), call(3, GATHERED, b"raise"), call(5, GATHERED, b"3"), call(7, ECHO, b"4"))

    statuses = [fields["grpc-status"] for fields, _ in peer.responses(4).values()]
    assert sorted(statuses) == ["0", "0", "13", "13"]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (changed((":method", "GET"), without=":method")[-1:] + changed(without=":method"), ("405", "allow", "POST")),
        (changed(("content-type", "text/html"), without="content-type"), ("415", "accept", "application/grpc")),
        (changed(without="content-type"), ("415", "accept", "application/grpc")),
        (changed(("content-type", "application/grpcx"), without="content-type"), ("415", "accept", "application/grpc")),
    ],
)
def test_a_request_that_is_no_call_gets_an_http_status(
    peer: SocketPeer, fields: tuple[tuple[str, str], ...], answer: tuple[str, str, str]
) -> None:
    peer.send(headers(1, fields))

    found, _ = peer.response()

    status, name, value = answer
    assert (found[":status"], found[name]) == (status, value)


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_a_content_type_may_have_a_suffix(peer: SocketPeer, content_type: str) -> None:
    fields = changed(("content-type", content_type), without="content-type")

    peer.send(headers(1, fields, frames.END_HEADERS), data(1, framed(b"x")))

    assert peer.response()[1] == [b"x"]


@pytest.mark.parametrize(
    ("content", "status", "details"),
    [
        (b"", GrpcStatus.INTERNAL, "the client sent no message; this method takes one"),
        (b"\0\0", GrpcStatus.INTERNAL, "the request ends inside a message"),
        (framed(b"abc")[:-1], GrpcStatus.INTERNAL, "the request ends inside a message"),
        (
            framed(b"a") + framed(b"b"),
            GrpcStatus.INTERNAL,
            "the client sent more than one message; this method takes one",
        ),
        (b"\x01\0\0\0\x01a", GrpcStatus.INTERNAL, "a message is compressed, but the call has no grpc-encoding"),
        (b"\x02\0\0\0\x01a", GrpcStatus.INTERNAL, "the prefix of a message starts with 2, allowed are 0 and 1"),
        (
            b"\0\xff\xff\xff\xff",
            GrpcStatus.RESOURCE_EXHAUSTED,
            "a message of 4294967295 bytes, allowed are 136314880",
        ),
    ],
)
def test_an_invalid_request_gets_a_status(peer: SocketPeer, content: bytes, status: GrpcStatus, details: str) -> None:
    peer.send(start_of(ECHO), data(1, content))

    assert status_of(peer) == (status, details)


def test_a_message_that_is_too_large_is_refused_before_it_arrives(peer: SocketPeer) -> None:
    """The client need not send the rest."""
    peer.send(start_of(ECHO), data(1, b"\0\xff\xff\xff\xff", 0))

    assert status_of(peer)[0] is GrpcStatus.RESOURCE_EXHAUSTED
    assert peer.until(frames.RST_STREAM).code is ErrorCode.NO_ERROR


@pytest.mark.parametrize(
    "content", [framed(b"abc")[:-1], b"\x01\0\0\0\x01a", b"\x02\0\0\0\x01a", b"\0\xff\xff\xff\xff", framed(b"") * 65]
)
def test_the_handler_of_a_stream_learns_that_its_client_was_refused(
    grpc_server: GrpcEcho, peer: SocketPeer, content: bytes
) -> None:
    """It could hold what belongs to the call for ever."""
    peer.send(start_of(CHAT), data(1, content))

    assert int(peer.response()[0]["grpc-status"]) != GrpcStatus.OK
    assert grpc_server.closed_calls.get(timeout=PATIENCE_S) is grpc_server.chats.get(timeout=PATIENCE_S).call
    assert grpc_server.closed_calls.empty()


@pytest.mark.parametrize(("count", "status"), [(16, GrpcStatus.OK), (17, GrpcStatus.RESOURCE_EXHAUSTED)])
def test_a_frame_may_have_a_few_messages(
    grpc_server: GrpcEcho, peer: SocketPeer, count: int, status: GrpcStatus
) -> None:
    """All of them are handled before the other connections are served; a frame could have 3,000."""
    peer.send(start_of(CHAT), data(1, framed(b"x") * count))

    fields, content = peer.response()

    assert (int(fields["grpc-status"]), content) == (status, [b"x"] * 16)
    if status:
        assert unquote(fields["grpc-message"]) == (
            "a frame has more than 16 messages; wait for answers before you send more"
        )


def test_a_refused_encoding_names_the_accepted_one(peer: SocketPeer) -> None:
    fields = ((":path", ECHO), *changed(("grpc-encoding", "gzip"), without=":path"))
    peer.send(headers(1, fields, frames.END_HEADERS), data(1, b"\x01\0\0\0\x01a"))

    found, _ = peer.response()

    assert (found["grpc-status"], found["grpc-accept-encoding"]) == ("12", "identity")


def test_an_uncompressed_message_of_a_call_with_compression_is_accepted(peer: SocketPeer) -> None:
    """Clients leave small messages as they are."""
    peer.send(call(1, ECHO, b"small", grpc_encoding="gzip"))

    assert peer.response()[1] == [b"small"]


# --- deadlines and status -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "timeout_ms"),
    [
        ("1H", 3_600_000),
        ("2M", 120_000),
        ("3S", 3_000),
        ("99999999m", 99_999_999),
        ("500u", 0.5),
        ("1000000n", 1),
        ("", None),
        ("S", None),
        ("3s", None),
        ("-1S", None),
        ("123456789S", None),
    ],
)
def test_a_timeout_has_a_number_and_a_unit(text: str, timeout_ms: float | None) -> None:
    assert parse_timeout(text) == timeout_ms


def test_an_invalid_timeout_ends_a_call_that_waits(peer: SocketPeer) -> None:
    peer.send(call(1, HOLD, grpc_timeout="soon"))

    assert status_of(peer) == (
        GrpcStatus.INTERNAL,
        "grpc-timeout is 'soon', allowed are 1 to 8 digits and H M S m u n",
    )


def test_a_call_whose_request_never_ends_has_a_deadline_too(peer: SocketPeer) -> None:
    fields = ((":path", ECHO), *changed(("grpc-timeout", "1m"), without=":path"))
    peer.send(headers(1, fields, frames.END_HEADERS))

    assert status_of(peer)[0] is GrpcStatus.DEADLINE_EXCEEDED


@given(details=st.text(max_size=60))
def test_details_survive_as_ascii(details: str) -> None:
    fields = dict(status_fields(GrpcStatus.NOT_FOUND, details))

    encoded = fields.get("grpc-message", "")
    assert encoded.isascii()
    assert encoded.isprintable()
    assert unquote(encoded) == details.encode("utf-8", "replace").decode()


def test_details_have_a_bound() -> None:
    """Clients refuse large trailers, so they would show another error."""
    for text, length in (("x", 2_000), ("\U0001f600", 6_000)):
        assert len(dict(status_fields(GrpcStatus.INTERNAL, text * 100_000))["grpc-message"]) == length


# --- responses ------------------------------------------------------------------------------------


def test_all_calls_of_one_read_are_answered_in_their_order(peer: SocketPeer) -> None:
    peer.send(*(call(number, ECHO, str(number).encode()) for number in range(1, 201, 2)))

    assert [peer.response()[1] for _ in range(100)] == [[str(number).encode()] for number in range(1, 201, 2)]


def test_calls_of_one_connection_do_not_wait_for_each_other(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, HOLD), call(3, ECHO, b"second"))
    assert peer.response()[1] == [b"second"]

    grpc_server.held.get(timeout=PATIENCE_S).reply(b"first")

    assert peer.response()[1] == [b"first"]


def test_messages_of_one_thread_arrive_in_their_order(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, HOLD))
    held = grpc_server.held.get(timeout=PATIENCE_S)

    for number in range(500):
        held.write(str(number).encode())
    held.finish(GrpcStatus.OK)
    held.write(b"too late")
    held.finish(GrpcStatus.ABORTED)

    fields, received = peer.response()
    assert received == [str(number).encode() for number in range(500)]
    assert fields["grpc-status"] == "0"


def test_a_call_is_answered_once_by_many_threads(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    for stream_id in range(1, 101, 2):
        peer.send(call(stream_id, HOLD))
    held = [grpc_server.held.get(timeout=PATIENCE_S) for _ in range(50)]

    threads = [threading.Thread(target=lambda: [each.reply(b"done") for each in held]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [peer.response()[1] for _ in range(50)] == [[b"done"]] * 50


def test_a_response_without_messages_has_only_trailers(peer: SocketPeer) -> None:
    peer.send(call(1, PARTS, b"0"))

    head = peer.until(frames.HEADERS)

    assert head.flags & frames.END_STREAM


def test_metadata_have_no_fields_of_http2(peer: SocketPeer) -> None:
    for number, name in enumerate((b":path", b":authority", b"x-mq-client-id")):
        peer.send(call(2 * number + 1, METADATA, name, **{"x-mq-client-id": "a@1"}))

    assert [peer.response()[1] for _ in range(3)] == [[b"-"], [b"-"], [b"a@1"]]


def test_a_value_may_have_spaces_at_its_ends(peer: SocketPeer) -> None:
    """HTTP/2 forbids them, but Go's client sends them, and gRPC permits that."""
    peer.send(call(1, METADATA, b"name", name=" a "))

    assert peer.response()[1] == [b" a "]


# --- ends -----------------------------------------------------------------------------------------


def test_a_lost_connection_ends_its_calls(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, HOLD), start_of(CHAT, 3))
    connection = grpc_server.held.get(timeout=PATIENCE_S).connection

    peer.socket.close()

    assert {grpc_server.closed_calls.get(timeout=PATIENCE_S).method for _ in range(2)} == {HOLD, CHAT}
    assert grpc_server.closed.get(timeout=PATIENCE_S) is connection
    assert not connection.is_open


def test_a_handler_may_close_the_connection(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, HOLD))
    held = grpc_server.held.get(timeout=PATIENCE_S)

    held.connection.close("the client has no rights any more")

    assert peer.is_ended()
    eventually(lambda: not held.is_open, "the call has ended")


def test_a_finished_call_is_not_reported_as_ended(grpc_server: GrpcEcho, peer: SocketPeer) -> None:
    peer.send(call(1, HOLD))
    grpc_server.held.get(timeout=PATIENCE_S).finish()
    assert peer.response()[1] == []

    peer.send(rst_stream_frame(1, ErrorCode.CANCEL), call(3, ECHO, b"next"))

    assert peer.response()[1] == [b"next"]
    assert grpc_server.closed_calls.empty()


def test_work_of_a_cancelled_call_is_dropped(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    server = start_grpc(GrpcLimits(slow_workers=1))
    peer = open_socket(server)
    peer.send(call(1, SLOW), call(3, SLOW), rst_stream_frame(3, ErrorCode.CANCEL), call(5, SLOW))
    eventually(lambda: server.request_count == 3, "the calls arrived")

    for _ in range(2):  # a third one would wait
        server.gate.release()

    assert [len(peer.response()[1]) for _ in range(2)] == [1, 1]


def test_a_stop_tells_clients_with_goaway(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    server = start_grpc()
    peer = open_socket(server)
    peer.send(call(1, ECHO))
    peer.response()

    server.stop(PATIENCE_S)

    goaway = peer.until(frames.GOAWAY)
    assert (goaway.code, goaway.payload[:4], goaway.payload[8:]) == (
        ErrorCode.NO_ERROR,
        (1).to_bytes(4, "big"),
        b"the server is stopped",
    )
    assert peer.is_ended()


def test_a_connection_error_is_explained(peer: SocketPeer) -> None:
    peer.send(frame(frames.PING, 0, 0, b"short"))

    goaway = peer.until(frames.GOAWAY)

    assert (goaway.code, goaway.payload[8:]) == (ErrorCode.FRAME_SIZE_ERROR, b"PING with 5 bytes")
    assert peer.is_ended()


# --- responses that do not arrive -----------------------------------------------------------------


SIZE = 1_005
"""Bytes of a message of `NOTED` with its prefix."""


def open_noted(
    server: GrpcEcho, open_socket: OpenSocket, window: int, count: int = 10, stream_id: int = 1
) -> SocketPeer:
    """Start a call whose response has *count* messages, and read the part of it that a window permits."""
    peer = open_socket(server, settings={frames.INITIAL_WINDOW_SIZE: window})
    peer.send(call(stream_id, NOTED, b"%d" % count))
    peer.until(frames.HEADERS)
    received = 0
    while received < window:
        received += len(peer.until(frames.DATA).payload)
    return peer


def reset(peer: SocketPeer) -> None:
    peer.send(rst_stream_frame(1, ErrorCode.CANCEL))


def close(peer: SocketPeer) -> None:
    peer.socket.close()


@pytest.mark.parametrize("leave", [reset, close])
@pytest.mark.parametrize(("window", "sent"), [(0, 0), (SIZE - 1, 0), (SIZE, 1), (3 * SIZE - 1, 2), (10 * SIZE - 1, 9)])
def test_the_owner_of_a_finished_call_learns_which_messages_were_not_sent(
    grpc_server: GrpcEcho, open_socket: OpenSocket, window: int, sent: int, leave: Callable[[SocketPeer], None]
) -> None:
    peer = open_noted(grpc_server, open_socket, window)

    leave(peer)

    assert grpc_server.unsent.get(timeout=PATIENCE_S) == sent


def test_the_owner_learns_it_when_the_server_cancels_a_call_that_stalls(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    clock = VirtualClock()
    server = start_grpc(GrpcLimits(stall_ms=60_000), clock)
    peer = open_noted(server, open_socket, SIZE)

    clock.move_ms(61_000)
    server.loop.wake()

    assert peer.until(frames.RST_STREAM).code is ErrorCode.CANCEL
    assert server.unsent.get(timeout=PATIENCE_S) == 1


def test_a_response_that_was_sent_is_not_reported(grpc_server: GrpcEcho, open_socket: OpenSocket) -> None:
    """Also if the window opens later than the call is finished."""
    peer = open_noted(grpc_server, open_socket, SIZE)
    peer.send(window_update_frame(1, 9 * SIZE))
    while not peer.until(frames.DATA).payload.endswith(bytes(1_000)):
        pass
    peer.send(call(3, ECHO))
    peer.until(frames.HEADERS)

    peer.socket.close()

    grpc_server.closed.get(timeout=PATIENCE_S)
    assert grpc_server.unsent.empty()


def test_what_the_socket_has_not_accepted_was_not_sent(grpc_server: GrpcEcho, open_socket: OpenSocket) -> None:
    """The windows of the client are large, but it reads nothing: the rest of 30 MB is in the buffer of the server."""
    peer = open_socket(grpc_server, settings={frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
    peer.send(window_update_frame(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW), call(1, NOTED, b"30000"))
    eventually(lambda: grpc_server.unread_output.held > 1_000_000, "the server has sent what the socket accepts")

    peer.socket.close()

    assert 0 < grpc_server.unsent.get(timeout=PATIENCE_S) < 30_000


def test_messages_of_another_thread_that_the_end_of_the_call_overtakes_were_not_sent(
    grpc_server: GrpcEcho, open_socket: OpenSocket
) -> None:
    """The thread has seen an open call, whose client resets it meanwhile."""
    peer = open_socket(grpc_server)
    peer.send(call(1, HOLD))
    held = grpc_server.held.get(timeout=PATIENCE_S)
    peer.send(rst_stream_frame(1, ErrorCode.CANCEL))
    grpc_server.closed_calls.get(timeout=PATIENCE_S)

    held.on_unsent = grpc_server.unsent.put
    held.write(b"message")
    held.finish()

    assert grpc_server.unsent.get(timeout=PATIENCE_S) == 0


def test_messages_that_another_thread_has_sent_and_the_io_thread_has_not_were_not_sent(
    grpc_server: GrpcEcho, open_socket: OpenSocket
) -> None:
    """The thread has finished the call, and the call ends before the I/O thread has sent anything of it."""
    peer = open_socket(grpc_server)
    peer.send(call(1, HOLD))
    held = grpc_server.held.get(timeout=PATIENCE_S)
    held.on_unsent = grpc_server.unsent.put

    def answer() -> None:
        held.write(b"message")
        held.finish()

    def end_of_the_call() -> None:
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()
        held.cancel(ErrorCode.CANCEL)

    grpc_server.loop.call_soon(end_of_the_call)

    assert grpc_server.unsent.get(timeout=PATIENCE_S) == 0


# --- a client that leaves -------------------------------------------------------------------------


def test_a_call_that_waits_may_end_when_its_client_leaves(grpc_server: GrpcEcho, open_socket: OpenSocket) -> None:
    peer = open_socket(grpc_server)
    peer.send(call(1, HOLD))
    held = grpc_server.held.get(timeout=PATIENCE_S)
    held.on_leaving = lambda: held.reply(b"at once")

    peer.send(frame(frames.GOAWAY, 0, 0, bytes(8)))

    assert peer.response()[1] == [b"at once"]

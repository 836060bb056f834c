"""Clients that abuse HTTP/2: each is bounded, and its connection closed; the other connections are served meanwhile."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import weakref
from functools import partial
from urllib.parse import unquote

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.http2 import frames, grpc_server
from mqtemplate.http2.frames import ErrorCode, frame, rst_stream_frame, settings_frame, window_update_frame
from mqtemplate.http2.grpc_server import GrpcCall, GrpcConnection, GrpcLimits, GrpcStatus, Http2Limits
from mqtemplate.http2.grpc_wire import framed
from mqtemplate.http2.hpack import HpackEncoder
from mqtemplate.http2.limits import AddressBudgets
from mqtemplate.remoting.settings import ConnectionLimits
from tests.http2.conftest import OpenSocket, StartGrpc
from tests.http2.grpc_kit import BIG, CHAT, ECHO, HOLD, GrpcEcho
from tests.http2.wire import ConnectionPeer, Frame, SocketPeer, call, changed, data, headers, hello
from tests.waiting import PATIENCE_S, eventually

FEW = Http2Limits(max_control_frames=100, control_frames_per_s=10, max_resets=100, resets_per_s=10)
BLOCK = HpackEncoder().encode(changed())


def ended_by(answers: list[Frame]) -> ErrorCode | None:
    """Return the code of GOAWAY, if the connection was ended."""
    return answers[-1].code if answers and answers[-1].kind == frames.GOAWAY else None


# --- floods ---------------------------------------------------------------------------------------


FLOODS = {
    "PING": frame(frames.PING, 0, 0, bytes(8)),
    "SETTINGS": settings_frame({}),
    "SETTINGS ACK": frame(frames.SETTINGS, frames.ACK, 0, b""),
    "PRIORITY": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "WINDOW_UPDATE": window_update_frame(0, 1),
    "WINDOW_UPDATE of a stream": window_update_frame(1, 1),
    "empty DATA": data(1, b"", 0),
    "padding": data(1, b"\x09" + bytes(9), frames.PADDED),
    "unknown frames": frame(0xEE, 0, 0, b""),
    "GOAWAY": frame(frames.GOAWAY, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_control_frames_ends_the_connection(flood: str) -> None:
    peer = ConnectionPeer(FEW)
    peer.send(headers(1, flags=frames.END_HEADERS))

    answers = peer.send(FLOODS[flood] * 130)

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(answers) <= 130


@pytest.mark.parametrize("flood", FLOODS)
def test_as_many_control_frames_are_permitted_over_time(flood: str) -> None:
    peer = ConnectionPeer(FEW)
    peer.send(headers(1, flags=frames.END_HEADERS))

    for _ in range(130):
        peer.now_ms += 100
        assert ended_by(peer.send(FLOODS[flood])) is None


def test_calls_permit_further_control_frames() -> None:
    """A client may send a PING and windows with each of thousands of calls."""
    peer = ConnectionPeer(FEW)

    for stream_id in range(1, 1_001, 2):
        peer.send(headers(stream_id), *[FLOODS["PING"], FLOODS["WINDOW_UPDATE"]] * 2)
        peer.receivers[stream_id].stream.respond(((":status", "200"),), b"", (("grpc-status", "0"),))

    assert peer.error is None


def test_many_settings_in_one_frame_are_refused() -> None:
    """Each change of the initial window has to be added to each stream."""
    payload = b"".join((4).to_bytes(2, "big") + value.to_bytes(4, "big") for value in range(65))

    answers = ConnectionPeer().send(frame(frames.SETTINGS, 0, 0, payload))

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM


def test_a_changed_window_costs_more_with_many_open_streams() -> None:
    """It is added to each of them."""
    peer = ConnectionPeer(FEW)
    peer.send(*(headers(number, flags=frames.END_HEADERS) for number in range(1, 1_001, 2)))

    answers = peer.send(*(settings_frame({frames.INITIAL_WINDOW_SIZE: size}) for size in range(20)))

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(answers) <= 3


def test_a_client_that_permits_a_byte_at_a_time_is_disconnected() -> None:
    """Each byte of a response costs a frame in both directions."""
    peer = ConnectionPeer(FEW, settings={frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(headers(1))
    peer.receivers[1].stream.respond(((":status", "200"),), bytes(1_000), (("grpc-status", "0"),))

    answers = peer.send(window_update_frame(1, 1) * 200)

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert sum(len(each.payload) for each in answers if each.kind == frames.DATA) <= 110
    assert peer.connection.outbound.queued_bytes < 1_000


# --- resets ---------------------------------------------------------------------------------------


def test_rapid_resets_end_the_connection() -> None:
    """CVE-2023-44487: the client opens streams and resets them at once, so that their number stays small."""
    peer = ConnectionPeer(FEW)
    attack = [headers(number, flags=4) + rst_stream_frame(number, ErrorCode.CANCEL) for number in range(1, 401, 2)]

    answers = peer.send(*attack)

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(peer.receivers) == 101


def test_resets_that_the_client_makes_the_server_send_are_counted_too() -> None:
    """CVE-2025-8671: an invalid frame of each stream makes the server reset it, while its handler still works."""
    peer = ConnectionPeer(FEW)

    answers = peer.send(*(headers(number) + window_update_frame(number, 0) for number in range(1, 401, 2)))

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(peer.receivers) == 101


def test_some_cancelled_calls_are_permitted_all_the_time() -> None:
    peer = ConnectionPeer(FEW)

    for number in range(1, 2_001, 2):
        peer.now_ms += 100
        peer.send(headers(number), rst_stream_frame(number, ErrorCode.CANCEL))

    assert peer.error is None


RESETS = [headers(number) + window_update_frame(number, 0) for number in range(1, 401, 2)]
"""Each makes the server reset a stream. `FEW` permits 100 of them at once."""


def has_resets_left(peer: SocketPeer, count: int) -> bool:
    """Return True if a client may reset *count* streams, and is disconnected for one more."""
    peer.send(*RESETS[: count + 1])  # no more: the connection would end before the server has read it all
    resets = 0
    while (found := peer.next_frame()) is not None and found.kind != frames.GOAWAY:
        resets += found.kind == frames.RST_STREAM
    return found is not None and found.code is ErrorCode.ENHANCE_YOUR_CALM and resets == count and peer.is_ended()


def test_a_client_that_was_disconnected_for_its_resets_goes_on_with_what_is_left(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    clock = VirtualClock()
    server = start_grpc(GrpcLimits(http2=FEW), clock)

    assert has_resets_left(open_socket(server), 100)
    server.closed.get(timeout=PATIENCE_S)
    assert has_resets_left(open_socket(server), 0)
    server.closed.get(timeout=PATIENCE_S)
    assert has_resets_left(open_socket(server, source="127.0.0.2"), 100)
    server.closed.get(timeout=PATIENCE_S)

    clock.move_ms(3_000)

    assert has_resets_left(open_socket(server), 28)  # 10 for each second, but two were too many
    server.closed.get(timeout=PATIENCE_S)

    clock.move_ms(60_000)

    assert has_resets_left(open_socket(server), 100)


def test_a_client_that_connects_again_before_its_last_reset_goes_on_with_what_is_left(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    server = start_grpc(GrpcLimits(http2=FEW), VirtualClock())
    first = open_socket(server)
    first.send(*RESETS[:90])
    for _ in range(90):
        first.until(frames.RST_STREAM)
    first.socket.close()
    server.closed.get(timeout=PATIENCE_S)

    assert has_resets_left(open_socket(server), 10)


def test_a_client_with_few_resets_leaves_the_others_of_its_address_their_own(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    server = start_grpc(GrpcLimits(http2=FEW), VirtualClock())
    first = open_socket(server)
    first.send(*RESETS[:5])
    for _ in range(5):
        first.until(frames.RST_STREAM)
    first.socket.close()
    server.closed.get(timeout=PATIENCE_S)

    assert [has_resets_left(each, 100) for each in (open_socket(server), open_socket(server))] == [True, True]


def test_budgets_of_many_addresses_are_bounded() -> None:
    budgets = AddressBudgets(100, 10, lambda: 0.0)

    for number in range(3_000):
        budget = budgets.of(f"10.0.{number // 250}.{number % 250}")
        budget.spend(50, "resets")
        budgets.keep(f"10.0.{number // 250}.{number % 250}", budget)

    assert len(budgets) == 1_000


# --- header blocks --------------------------------------------------------------------------------


def test_a_flood_of_continuation_ends_the_connection() -> None:
    """CVE-2024-24549 and others: the block never ends."""
    peer = ConnectionPeer(FEW)

    answers = peer.send(frame(frames.HEADERS, 0, 1, BLOCK), *[frame(frames.CONTINUATION, 0, 1, b"")] * 3)

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM


def test_a_header_block_above_the_limit_ends_the_connection() -> None:
    peer = ConnectionPeer()

    answers = peer.send(frame(frames.HEADERS, 0, 1, BLOCK), *[frame(frames.CONTINUATION, 0, 1, bytes(9_000))] * 2)

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.connection.partial_bytes < 20_000


def test_a_block_that_expands_is_refused_without_its_fields() -> None:
    """One byte refers to a field of 4,000."""
    peer = ConnectionPeer()
    peer.send(frame(frames.HEADERS, 5, 1, BLOCK + b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4_000))
    bomb = BLOCK + b"\xbe" * 30

    [reset] = peer.send(frame(frames.HEADERS, 5, 3, bomb))

    assert (reset.stream_id, reset.code) == (3, ErrorCode.ENHANCE_YOUR_CALM)
    assert list(peer.receivers) == [1]


def test_a_block_that_expands_a_thousandfold_ends_the_connection() -> None:
    """16 KB of such references would be 64 MB, which takes milliseconds to decode."""
    peer = ConnectionPeer()
    peer.send(frame(frames.HEADERS, 5, 1, BLOCK + b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4_000))

    answers = peer.send(frame(frames.HEADERS, 5, 3, BLOCK + b"\xbe" * 15_000))

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert list(peer.receivers) == [1]


def test_many_blocks_that_expand_end_the_connection() -> None:
    peer = ConnectionPeer(FEW)
    peer.send(frame(frames.HEADERS, 5, 1, BLOCK + b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4_000))
    bomb = BLOCK + b"\xbe" * 30

    answers = peer.send(*(frame(frames.HEADERS, 5, number, bomb) for number in range(3, 99, 2)))

    assert ended_by(answers) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(answers) <= 5


def test_a_block_that_changes_the_table_again_and_again_ends_the_connection() -> None:
    """An encoder needs two changes."""
    peer = ConnectionPeer()
    assert peer.send(frame(frames.HEADERS, 5, 1, b"\x20\x3f\xe1\x1f" + BLOCK)) == []

    answers = peer.send(frame(frames.HEADERS, 5, 3, b"\x20\x3f\xe1\x1f" * 2 + BLOCK))

    assert ended_by(answers) is ErrorCode.COMPRESSION_ERROR


# --- memory and time, over a socket ---------------------------------------------------------------


def limits(**options: object) -> GrpcLimits:
    return GrpcLimits(**options)  # type: ignore[arg-type]


def is_served(peer: SocketPeer, stream_id: int) -> bool:
    peer.send(call(stream_id, ECHO, b"served"))
    return peer.response()[1] == [b"served"]


def reason_of_end(server: GrpcEcho, log: list[dict[str, object]]) -> str:
    """Return why the server closed the next connection."""
    connection = server.closed.get(timeout=PATIENCE_S)
    assert isinstance(connection, GrpcConnection)
    return next(
        str(each["reason"])
        for each in reversed(log)
        if each.get("remote") == str(connection.remote) and "reason" in each
    )


def test_a_client_with_a_closed_window_cannot_make_the_server_hold_much(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    """Its window is 0, so no response can leave."""
    server = start_grpc(limits(limits=ConnectionLimits(max_unread_bytes=1_000_000)))
    attacker, other = open_socket(server, settings={frames.INITIAL_WINDOW_SIZE: 0}), open_socket(server)

    with capture_logs() as log:
        attacker.send(*(call(number, BIG, b"300000") for number in range(1, 20, 2)))

        assert "the client does not permit to send" in reason_of_end(server, log)
    assert is_served(other, 1)
    assert eventually(lambda: server.unread_output.held == 0, "the bytes are not counted any more")


def test_clients_with_closed_windows_share_one_limit(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """The one with most queued bytes is closed."""
    server = start_grpc(limits(max_unread_bytes=1_000_000))
    small, large = (open_socket(server, settings={frames.INITIAL_WINDOW_SIZE: 0}) for _ in range(2))
    small.send(call(1, BIG, b"300000"))
    eventually(lambda: server.unread_output.held, "the response is queued")

    with capture_logs() as log:
        large.send(call(1, BIG, b"900000"))

        assert "all connections hold" in reason_of_end(server, log)
    assert server.closed.empty()
    assert small.until(frames.HEADERS)


def test_a_response_that_waits_too_long_for_its_window_is_cancelled(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    """A window of a byte now and then keeps nothing alive: the first message must leave in time."""
    clock = VirtualClock()
    server = start_grpc(limits(stall_ms=60_000), clock)
    peer = open_socket(server, settings={frames.INITIAL_WINDOW_SIZE: 10})
    peer.send(call(1, BIG, b"1000"))
    peer.until(frames.DATA)

    for _ in range(5):
        peer.send(window_update_frame(1, 1), frame(frames.PING, 0, 0, bytes(8)))
        peer.until(frames.PING)
        clock.move_ms(10_000)
        server.loop.wake()

    clock.move_ms(31_000)  # the server looks each 30 s
    server.loop.wake()

    assert peer.until(frames.RST_STREAM).code is ErrorCode.CANCEL
    assert is_served(open_socket(server), 1)


def test_incomplete_messages_of_all_clients_share_one_limit(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """A message announces 100 MB and never ends; many clients do that."""
    server = start_grpc(limits(max_partial_bytes=500_000))
    other = open_socket(server)
    start = headers(1, changed((":path", CHAT), without=":path")[-1:] + changed(without=":path"), frames.END_HEADERS)

    with capture_logs() as log:
        for _ in range(3):
            peer = open_socket(server)
            peer.send(start, *(data(1, b"\0\x05\xf5\xe1\x00" + bytes(10_000), 0) for _ in range(20)))
        assert "bytes of incomplete frames" in reason_of_end(server, log)

    assert is_served(other, 1)
    assert server.partial_input.held <= 500_000


def test_work_that_waits_for_a_thread_counts_with_what_it_holds(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """The messages of a receive are larger than its request."""
    server, path = start_grpc(limits(slow_workers=1, slow_queue_bytes=1_000)), "/test.Service/Large"
    gate = threading.Event()
    server.register(
        path,
        lambda call, message: server.run(call, lambda: call.reply(b"%d" % gate.wait(PATIENCE_S)), int(message)),
    )
    peer = open_socket(server)

    peer.send(call(1, path, b"900"), call(3, path, b"900"), call(5, path, b"900"))

    fields, content = peer.response()
    assert (fields["grpc-status"], content) == (str(GrpcStatus.RESOURCE_EXHAUSTED), [])
    assert "too many calls wait for a thread already" in unquote(fields["grpc-message"])
    gate.set()
    assert [peer.response()[1] for _ in range(2)] == [[b"1"]] * 2


def test_above_a_common_limit_the_address_that_holds_most_is_closed(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    """One that opens many connections, with a little on each, must not cause the end of another client's connection."""
    server = start_grpc(limits(max_unread_bytes=1_000_000))
    shut = {frames.INITIAL_WINDOW_SIZE: 0}
    large = open_socket(server, settings=shut)
    large.send(call(1, BIG, b"400000"))
    eventually(lambda: server.unread_output.held == 400_005, "the response is queued")

    with capture_logs() as log:
        for _ in range(4):
            open_socket(server, settings=shut, source="127.0.1.9").send(call(1, BIG, b"200000"))
        assert "all connections hold" in reason_of_end(server, log)

    ended = [each for each in log if "all connections hold" in str(each.get("reason"))]
    assert {str(each["remote"]).partition(":")[0] for each in ended} == {"127.0.1.9"}
    assert large.until(frames.HEADERS)


def test_the_calls_of_a_lost_connection_end_a_turn_at_a_time(
    start_grpc: StartGrpc, open_socket: OpenSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand, and each may have to be cancelled in other parts of the server."""
    monkeypatch.setattr(grpc_server, "TURN_S", 0.0)  # one call in each turn
    server = start_grpc()
    many, other = open_socket(server), open_socket(server)
    many.send(*(call(number, HOLD, b"x") for number in range(1, 201, 2)))
    calls = [server.held.get(timeout=PATIENCE_S) for _ in range(100)]

    many.socket.close()

    assert {server.closed_calls.get(timeout=PATIENCE_S) for _ in range(100)} == set(calls)
    assert server.closed.get(timeout=PATIENCE_S) is calls[0].connection
    assert not any(each.is_open for each in calls)
    assert is_served(other, 1)


def test_a_stop_ends_the_calls_of_all_connections(
    start_grpc: StartGrpc, open_socket: OpenSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "TURN_S", 0.0)
    server = start_grpc()
    peer = open_socket(server)
    peer.send(*(call(number, HOLD, b"x") for number in range(1, 201, 2)))
    calls = {server.held.get(timeout=PATIENCE_S) for _ in range(100)}

    server.stop(0)

    assert {server.closed_calls.get_nowait() for _ in range(100)} == calls
    assert server.connections() == []


def test_ended_calls_and_connections_are_freed_without_the_garbage_collector(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    """A collection holds all threads, for as long as there are objects that refer to each other."""
    server = start_grpc()
    peer, other = open_socket(server), open_socket(server)
    peer.send(*(call(number, HOLD, b"x") for number in (1, 3, 5)))
    held = [server.held.get(timeout=PATIENCE_S) for _ in range(3)]
    metadata = [_Watched(each.metadata) for each in held]
    connection = weakref.ref(held[0].connection)
    freed = [weakref.ref(each) for each in metadata]
    for each in held:
        each.metadata = metadata.pop()  # a call itself cannot be watched
    gc.disable()
    try:
        held[0].reply(b"answer")
        peer.until(frames.DATA)
        peer.send(rst_stream_frame(3, ErrorCode.CANCEL))
        server.closed_calls.get(timeout=PATIENCE_S)
        peer.socket.close()
        server.closed_calls.get(timeout=PATIENCE_S)
        server.closed.get(timeout=PATIENCE_S)
        held.clear()
        del each
        assert is_served(other, 1)  # the loop refers to the connection until the next event

        assert eventually(lambda: [each() for each in freed] == [None] * 3, "the calls are freed")
        assert eventually(lambda: connection() is None, "the connection is freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [100, 300_000])
def test_calls_that_watch_what_the_socket_accepts_are_freed_without_the_garbage_collector(
    start_grpc: StartGrpc, open_socket: OpenSocket, size: int
) -> None:
    """Each receive with messages is such a call."""
    server = start_grpc()
    freed: queue.Queue[weakref.ref[_Watched]] = queue.Queue()

    def respond(call: GrpcCall, message: bytes) -> None:
        call.metadata = _Watched(call.metadata)
        freed.put(weakref.ref(call.metadata))
        call.on_unsent = lambda sent: call.fail(ValueError(f"{sent} messages were sent"))
        call.write(bytes(size))
        call.finish()

    server.register("/test.Service/Watched", respond)
    peer = open_socket(server)
    gc.disable()
    try:
        peer.send(call(1, "/test.Service/Watched", b""), window_update_frame(1, 1 << 20))
        peer.send(window_update_frame(0, 1 << 20))
        assert peer.response()[1] == [bytes(size)]
        found = freed.get(timeout=PATIENCE_S)
        assert is_served(peer, 3)

        assert eventually(lambda: found() is None, "the call is freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("ending", [b"end", b""])
def test_handlers_of_streams_are_freed_without_the_garbage_collector(
    start_grpc: StartGrpc, open_socket: OpenSocket, ending: bytes
) -> None:
    server = start_grpc()
    peer, other, numbers = open_socket(server), open_socket(server), itertools.count(1, 2)
    gc.disable()
    try:
        peer.send(
            headers(1, ((":path", CHAT), *changed(without=":path")), frames.END_HEADERS), data(1, framed(b"hello"), 0)
        )
        handler = weakref.ref(server.chats.get(timeout=PATIENCE_S))
        if ending:
            peer.send(data(1, framed(ending), 0))
        else:
            peer.socket.close()
            server.closed_calls.get(timeout=PATIENCE_S)

        assert eventually(lambda: is_served(other, next(numbers)) and handler() is None, "the handler is freed")
    finally:
        gc.enable()


def test_a_connection_that_responds_to_no_ping_is_freed_without_the_garbage_collector(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    server = start_grpc()
    peer, other, numbers = open_socket(server), open_socket(server), itertools.count(1, 2)
    peer.send(call(1, HOLD))
    held = server.held.get(timeout=PATIENCE_S)
    connection = weakref.ref(held.connection)
    gc.disable()
    try:
        held.reply(b"answer")
        server.loop.call_soon(partial(held.when_read, lambda: None))
        peer.until(frames.PING)
        del held
        peer.socket.close()
        server.closed.get(timeout=PATIENCE_S)

        assert eventually(lambda: is_served(other, next(numbers)) and connection() is None, "the connection is freed")
    finally:
        gc.enable()


class _Watched(dict[str, str]):
    """A dictionary with weak references."""


def test_a_frame_must_end_in_time(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """A byte now and then keeps nothing alive."""
    clock = VirtualClock()
    server = start_grpc(limits(), clock)
    peer = open_socket(server)
    for number, byte in enumerate(frame(frames.HEADERS, 0, 1, BLOCK)[:7]):
        peer.send(bytes((byte,)))
        eventually(
            lambda n=number: [each for each in server.connections() if each.partial_bytes == n + 1], "it arrived"
        )
        clock.move_ms(4_000)
        server.loop.wake()

    clock.move_ms(31_000)
    server.loop.wake()

    assert peer.is_ended()


def test_a_connection_whose_long_call_ends_is_not_idle_yet(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """A stream may be open for hours; the client may use the connection after it."""
    clock = VirtualClock()
    server = start_grpc(limits(), clock)
    peer = open_socket(server)
    peer.send(call(1, HOLD))
    held = server.held.get(timeout=PATIENCE_S)
    for _ in range(6):
        clock.move_ms(31_000)
        peer.send(frame(frames.PING, 0, 0, bytes(8)))
        peer.until(frames.PING)
    held.reply(b"")
    peer.response()

    clock.move_ms(31_000)
    server.loop.wake()

    assert is_served(peer, 3)


def test_a_connection_without_calls_is_closed_with_goaway(start_grpc: StartGrpc, open_socket: OpenSocket) -> None:
    """PINGs do not count: RocketMQ's proxy closes such a connection after 120 s, too."""
    clock = VirtualClock()
    server = start_grpc(limits(), clock)
    peer = open_socket(server)
    assert is_served(peer, 1)

    for _ in range(12):
        peer.send(frame(frames.PING, 0, 0, bytes(8)))
        eventually(lambda: peer.until(frames.PING), "the server reads")
        clock.move_ms(9_500)
        server.loop.wake()

    clock.move_ms(31_000)
    server.loop.wake()

    assert peer.until(frames.GOAWAY).code is ErrorCode.NO_ERROR
    assert peer.is_ended()


def test_a_client_with_calls_that_is_silent_gets_a_ping_and_is_closed_without_a_response(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    clock = VirtualClock()
    server = start_grpc(limits(), clock)
    peer = open_socket(server)
    peer.send(call(1, HOLD))
    server.held.get(timeout=PATIENCE_S)

    clock.move_ms(61_000)
    server.loop.wake()
    ping = peer.until(frames.PING)
    peer.send(frame(frames.PING, frames.ACK, 0, ping.payload))
    eventually(
        lambda: all(each.read_ms == server.loop.now_ms() for each in server.connections()), "the response arrived"
    )
    clock.move_ms(121_000)
    server.loop.wake()

    assert peer.is_ended()
    assert server.closed_calls.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("greeting", [b"", b"PRI * HT", hello()[:30]])
def test_a_connection_that_does_not_finish_its_greeting_is_closed(
    start_grpc: StartGrpc, open_socket: OpenSocket, greeting: bytes
) -> None:
    clock = VirtualClock()
    server = start_grpc(limits(), clock)
    peer = open_socket(server, greets=False)
    peer.send(greeting)
    eventually(lambda: [each for each in server.connections() if each.partial_bytes or not greeting], "it is open")

    clock.move_ms(121_000)
    server.loop.wake()

    assert peer.is_ended()


@pytest.mark.parametrize("flood", ["PING", "SETTINGS", "empty DATA", "unknown frames"])
def test_the_others_are_served_during_a_flood(start_grpc: StartGrpc, open_socket: OpenSocket, flood: str) -> None:
    server = start_grpc()
    attacker, other = open_socket(server), open_socket(server)

    attacker.send(headers(1, flags=frames.END_HEADERS))
    attacker.socket.setblocking(False)
    number = 1
    pending = FLOODS[flood] * 30_000
    while server.closed.empty():
        try:
            pending = pending[attacker.socket.send(pending) :]
        except (BlockingIOError, ConnectionError):
            pass  # the server reads slower, or has closed the connection
        assert is_served(other, number)
        number += 2

    assert server.closed.get() is not None


def test_calls_of_one_client_take_turns_with_those_of_the_others(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    """Thousands of calls in one packet do not hold the others."""
    server = start_grpc()
    many, other = open_socket(server), open_socket(server)

    many.send(*(call(number, ECHO, b"x") for number in range(1, 4_001, 2)))

    assert is_served(other, 1)
    answers = [many.response()[1] for _ in range(2_000)]
    assert answers == [[b"x"]] * 2_000

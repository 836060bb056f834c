"""Faulty peers: a peer can only lose its own connection. Other connections are not affected, and memory is bounded."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting import ConnectionLimits, RemotingServerSettings
from mqtemplate.remoting.protocol import RemotingCommand, encode_command
from tests.remoting.conftest import OpenPeer, StartServer
from tests.remoting.wire import BIG, ECHO, HOLD, EchoServer, RawPeer, echo, hold
from tests.waiting import PATIENCE_S

FRAME = encode_command(RemotingCommand(ECHO, opaque=1, body=b"body"))


@pytest.fixture
def other(server: EchoServer, open_peer: OpenPeer) -> Iterator[RawPeer]:
    """Another peer, which is served before the test and after it; its connection is the first of the server."""
    other = open_peer(server)
    assert other.invoke(echo(b"before")).body == b"before"
    yield other
    assert other.invoke(echo(b"after")).body == b"after"


def reasons(logs: list[dict[str, object]]) -> list[str]:
    return [str(entry["reason"]) for entry in logs if entry["event"] == "remoting.connection_closed"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 64, "allowed are 4 to 16777212"),
        (struct.pack(">i", 1 << 30), "a frame of 1073741824 bytes announced"),
        (struct.pack(">iI", 10, 6) + b"{nope}", "the header is not JSON"),
        (struct.pack(">iI", 18, 14) + b'{"code":"one"}', "code must be a number"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it is an HTTP request"),
    ],
)
def test_a_bad_frame_closes_its_connection_with_a_log_line(
    server: EchoServer, peer: RawPeer, other: RawPeer, data: bytes, reason: str
) -> None:
    """``refused_frames.script`` has further frames."""
    with capture_logs() as logs:
        peer.send(data)
        assert peer.is_closed_by_peer()
        closed = server.closed.get(timeout=PATIENCE_S)

    (line,) = [entry for entry in logs if entry["event"] == "remoting.connection_closed"]
    assert reason in line["reason"]
    assert (line["log_level"], line["remote"]) == ("warning", str(closed.remote))


def test_requests_before_a_bad_frame_are_answered(peer: RawPeer, other: RawPeer) -> None:
    with capture_logs():
        peer.send(FRAME + b"\xff" * 8)

        assert peer.next_command().body == b"body"
        assert peer.is_closed_by_peer()


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 8, 20, len(FRAME) - 1])
def test_the_request_of_an_incomplete_frame_is_not_carried_out(
    server: EchoServer, peer: RawPeer, other: RawPeer, cut: int
) -> None:
    server.seen.get()
    with capture_logs() as logs:
        peer.send(FRAME[:cut])
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.is_closed_by_peer()
        server.closed.get(timeout=PATIENCE_S)

    assert reasons(logs) == [f"the peer closed it after {cut} bytes of an incomplete frame"]
    assert server.seen.empty()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_frame_may_arrive_in_pieces_of_any_size(server: EchoServer, cuts: list[int]) -> None:
    with RawPeer(server.address) as peer:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data, at = FRAME * 3, 0
        for cut in [*cuts, len(data)]:
            peer.send(data[at : at + cut])
            at += cut

        assert [peer.next_command().body for _ in range(3)] == [b"body"] * 3


def test_a_response_without_a_request_is_ignored(peer: RawPeer) -> None:
    peer.send(encode_command(RemotingCommand(0, opaque=12, flag=1)))

    assert peer.invoke(echo()).code == 0


def test_a_frame_larger_than_allowed_is_refused_before_it_is_complete(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    server = start_server(RemotingServerSettings(limits=ConnectionLimits(max_frame_bytes=1_000)))
    bad, good = open_peer(server), open_peer(server)

    with capture_logs() as logs:
        bad.send(encode_command(echo(bytes(2_000)))[:500])
        assert bad.is_closed_by_peer()
        server.closed.get(timeout=PATIENCE_S)

    assert "allowed are 4 to 996" in reasons(logs)[0]
    assert good.invoke(echo(bytes(500))).code == 0


# --- slow and silent peers ------------------------------------------------------------------------------


def test_a_frame_that_takes_too_long_closes_its_connection(start_server: StartServer, open_peer: OpenPeer) -> None:
    clock = VirtualClock()
    server = start_server(RemotingServerSettings(limits=ConnectionLimits(frame_timeout_ms=30_000)), clock)
    slow, good = open_peer(server), open_peer(server)
    assert slow.invoke(echo()).code == 0
    slow.send(FRAME + FRAME[:30])  # the response to the first shows that the piece of the second has arrived too
    assert slow.next_command().body == b"body"
    assert good.invoke(echo()).code == 0

    with capture_logs() as logs:
        for _ in range(4):
            slow.send(FRAME[30:31])
            clock.move_ms(7_500)
            server.loop.wake()
            assert good.invoke(echo()).code == 0
        assert slow.is_closed_by_peer()

    assert reasons(logs) == ["a frame is not complete after 30s"]


def test_only_an_idle_connection_is_closed(start_server: StartServer, open_peer: OpenPeer) -> None:
    clock = VirtualClock()
    server = start_server(None, clock)
    idle, busy = open_peer(server), open_peer(server)
    assert idle.invoke(echo()).code == busy.invoke(echo()).code == 0

    for _ in range(2):
        clock.move_ms(60_000)
        assert busy.invoke(echo()).code == 0

    assert idle.is_closed_by_peer()
    assert busy.invoke(echo()).code == 0
    assert [connection.remote.port for connection in server.connections()] == [busy.socket.getsockname()[1]]


def test_a_connection_on_which_only_the_server_sends_is_not_idle(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    clock = VirtualClock()
    server = start_server(None, clock)
    peer, other = open_peer(server), open_peer(server)
    connection, _ = hold(server, peer)

    for _ in range(3):
        clock.move_ms(60_000)
        connection.send_one_way(RemotingCommand(40))
        assert other.invoke(echo()).code == 0

    assert [peer.next_command().code for _ in range(3)] == [40] * 3
    assert peer.invoke(echo()).code == 0


def test_the_server_stops_reading_from_a_client_that_never_reads(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    """The client requests 200 MiB and reads nothing; the server creates a few responses and waits."""
    server = start_server(RemotingServerSettings(limits=ConnectionLimits(pause_reading_bytes=1 << 20)))
    bad, good = open_peer(server), open_peer(server)
    bad.send(b"".join(encode_command(RemotingCommand(BIG, opaque=n, body=b"1048576")) for n in range(200)))

    assert good.invoke(echo()).code == 0
    held = server.unread_output.held

    assert held <= 4 << 20
    assert [bad.next_command().opaque for _ in range(200)] == list(range(200))
    assert good.invoke(echo()).code == 0


def test_a_connection_with_too_much_unread_output_is_closed(start_server: StartServer, open_peer: OpenPeer) -> None:
    """The server responds to held requests even if the client does not read."""
    server = start_server(RemotingServerSettings(limits=ConnectionLimits(max_unread_bytes=32 << 20)))
    bad, good = open_peer(server), open_peer(server)
    bad.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(64)))

    with capture_logs() as logs:
        # All of them before the first response: a connection with much unread output is not read.
        for connection, held in [server.held.get(timeout=PATIENCE_S) for _ in range(64)]:
            connection.reply(held.response(body=bytes(1 << 20)))
        assert server.closed.get(timeout=PATIENCE_S) is connection

    (line,) = [entry for entry in logs if entry["event"] == "remoting.connection_closed"]
    assert ("bytes of responses unread" in line["reason"], line["log_level"]) == (True, "warning")
    assert good.invoke(echo()).code == 0
    assert server.unread_output.held == 0


def test_the_connection_with_the_most_unread_output_is_closed_above_the_common_limit(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    """Each connection is below the limit of a single one. The modest connections stay open."""
    server = start_server(RemotingServerSettings(max_unread_bytes=40 << 20))
    modest, greedy = [open_peer(server), open_peer(server)], open_peer(server)

    with capture_logs() as logs:
        for opaque, peer in enumerate((*modest, greedy, greedy, greedy, greedy)):
            peer.send(encode_command(RemotingCommand(HOLD, opaque=opaque)))
        # All of them before the first response: a connection with much unread output is not read.
        for connection, held in [server.held.get(timeout=PATIENCE_S) for _ in range(6)]:
            is_greedy = connection.remote.port == greedy.socket.getsockname()[1]
            connection.reply(held.response(body=bytes(15 << 20 if is_greedy else 10 << 20)))
        closed = server.closed.get(timeout=PATIENCE_S)

    assert closed.remote.port == greedy.socket.getsockname()[1]
    assert "bytes of unread responses, this one" in reasons(logs)[0]
    assert [peer.next_command().body for peer in modest] == [bytes(10 << 20)] * 2


def test_the_connection_with_the_largest_incomplete_frame_is_closed_above_the_common_limit(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    """Each frame is below the limit of one connection, but a thousand such peers would fill the memory."""
    server = start_server(RemotingServerSettings(max_partial_bytes=1 << 20))
    good, modest, greedy = open_peer(server), open_peer(server), open_peer(server)
    whole = encode_command(echo(bytes(400_000)))

    with capture_logs() as logs:
        greedy.send(encode_command(echo(bytes(900_000)))[:-1])
        modest.send(whole[:-1])
        assert server.closed.get(timeout=PATIENCE_S).remote.port == greedy.socket.getsockname()[1]
        assert good.invoke(echo()).code == 0
        modest.send(whole[-1:])
        assert modest.next_command().code == 0
        assert good.invoke(echo()).code == 0

    assert "bytes of incomplete frames, this one" in reasons(logs)[0]
    assert server.partial_input.held == 0


def test_a_peer_with_too_many_unanswered_requests_gets_system_busy(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    server = start_server(RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3)))
    peer = open_peer(server)
    peer.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(4)))

    refused = peer.next_command()
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response())

    assert (refused.opaque, refused.code) == (3, 2)
    assert refused.remark == "3 requests of this connection are unanswered already"
    assert peer.next_command().opaque == 0
    assert peer.invoke(RemotingCommand(ECHO, opaque=9)).code == 0


def test_requests_of_a_half_closed_connection_are_answered_before_it_is_closed(peer: RawPeer, other: RawPeer) -> None:
    peer.send(FRAME * 3)
    peer.socket.shutdown(socket.SHUT_WR)

    assert [peer.next_command().body for _ in range(3)] == [b"body"] * 3
    assert peer.is_closed_by_peer()


# --- many peers -----------------------------------------------------------------------------------------


def test_2500_dropped_connections_leave_no_memory_behind(
    server: EchoServer, open_peer: OpenPeer, other: RawPeer
) -> None:
    """Some send nothing, half a frame, or a request without waiting; some reset the connection, some close it."""
    kinds = [b"", FRAME, FRAME[:9]]
    for number in range(2_500):
        peer = RawPeer(server.address)
        peer.send(kinds[number % 3])
        if number % 2:
            peer.reset()
        else:
            peer.socket.close()
        if number % 100 == 0:
            assert other.invoke(echo()).code == 0

    closed = [server.closed.get(timeout=PATIENCE_S) for _ in range(2_500)]

    assert len({connection.id for connection in closed}) == 2_500
    assert len(server.connections()) == 1
    assert server.partial_input.held == server.unread_output.held == 0


def test_more_connections_than_allowed_are_closed_at_once(start_server: StartServer, open_peer: OpenPeer) -> None:
    server = start_server(RemotingServerSettings(max_connections=3))
    first = [open_peer(server) for _ in range(3)]
    assert [peer.invoke(echo()).code for peer in first] == [0, 0, 0]

    with capture_logs() as logs:
        assert open_peer(server).is_closed_by_peer()
        assert open_peer(server).is_closed_by_peer()
        first[0].socket.close()
        server.closed.get(timeout=PATIENCE_S)
        assert open_peer(server).invoke(echo()).code == 0

    reasons = [entry["reason"] for entry in logs if entry["event"] == "remoting.connection_refused"]
    assert reasons == ["max-connections is 3"] * 2
    assert server.refused_connections.value == 2


def test_the_server_accepts_again_when_file_descriptors_are_free(
    start_server: StartServer, open_peer: OpenPeer
) -> None:
    """EMFILE neither ends the loop nor makes it spin. Clients wait in the backlog and are accepted later."""
    clock = VirtualClock()
    server = start_server(None, clock)
    good = open_peer(server)
    assert good.invoke(echo()).code == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    try:
        with capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            spare = fill_descriptors()
            waiting.connect(tuple(server.address))
            for _ in range(50):  # a loop that spins would log each time
                assert good.invoke(echo()).code == 0
    finally:
        for sock in spare:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    clock.move_ms(1_000)
    server.loop.wake()
    waiting.settimeout(PATIENCE_S)
    waiting.sendall(FRAME)

    assert waiting.recv(4)
    waiting.close()
    events = [entry for entry in logs if entry["event"] == "remoting.accept_failed"]
    assert len(events) == 1
    assert "ulimit -n" in events[0]["hint"]


def fill_descriptors() -> list[socket.socket]:
    """Open sockets until this process has no file descriptor left, and return them."""
    spare = []
    while True:
        try:
            spare.append(socket.socket())
        except OSError:
            return spare

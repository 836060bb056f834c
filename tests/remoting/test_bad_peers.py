"""Whatever a peer does, it ends its own connection at most: others notice nothing, and memory stays bounded."""

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
from tests.remoting.conftest import Dial, Serve
from tests.remoting.wire import BIG, ECHO, HOLD, PATIENCE_S, EchoServer, RawPeer, echo

FRAME = encode_command(RemotingCommand(ECHO, opaque=1, body=b"body"))


@pytest.fixture
def neighbour(server: EchoServer, dial: Dial) -> Iterator[RawPeer]:
    """Somebody who is served before and after; its connection is the first of the server."""
    neighbour = dial(server)
    assert neighbour.ask(echo(b"before")).body == b"before"
    yield neighbour
    assert neighbour.ask(echo(b"after")).body == b"after"


def reasons(logs: list[dict[str, object]]) -> list[str]:
    return [str(entry["reason"]) for entry in logs if entry["event"] == "remoting.connection_closed"]


BAD_FRAMES = {
    "garbage": (b"\xff" * 64, "allowed are 4 to 16777212"),
    "zeros": (b"\0" * 64, "a frame of 0 bytes announced"),
    "oversized": (struct.pack(">i", 1 << 30), "a frame of 1073741824 bytes announced"),
    "header beyond the frame": (struct.pack(">iI", 10, 100) + b"x" * 6, "a header of 100 bytes announced"),
    "unknown serialize type": (struct.pack(">iI", 10, 7 << 24) + b"x" * 6, "serialize type 7 is unknown"),
    "a header that is no JSON": (struct.pack(">iI", 10, 6) + b"{nope}", "header"),
    "a header without code": (struct.pack(">iI", 6, 2) + b"{}", "code"),
    "a code that is a text": (struct.pack(">iI", 18, 14) + b'{"code":"one"}', "code"),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it is an HTTP request"),
    "TLS to a plain server": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "it is a TLS handshake"),
    "PROXY preamble, v1": (b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n", "it is a PROXY preamble: switch it off"),
    "PROXY preamble, v2": (b"\r\n\r\n\0\r\nQUIT\n!\x11\0\x0c" + bytes(12), "it is a PROXY preamble: switch it off"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_ends_its_connection_with_a_line_in_the_log(
    server: EchoServer, dial: Dial, neighbour: RawPeer, name: str
) -> None:
    data, expected = BAD_FRAMES[name]
    bad = dial(server)

    with capture_logs() as logs:
        bad.send(data)
        assert bad.is_closed_by_peer()
        gone = server.closed.get(timeout=PATIENCE_S)

    (line,) = [entry for entry in logs if entry["event"] == "remoting.connection_closed"]
    assert expected in line["reason"]
    assert (line["log_level"], line["remote"]) == ("warning", str(gone.remote))


def test_what_came_before_a_bad_frame_is_answered(server: EchoServer, dial: Dial, neighbour: RawPeer) -> None:
    bad = dial(server)

    with capture_logs():
        bad.send(FRAME + b"\xff" * 8)

        assert bad.next_command().body == b"body"
        assert bad.is_closed_by_peer()


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 8, 20, len(FRAME) - 1])
def test_a_frame_that_is_cut_off_is_not_carried_out(
    server: EchoServer, dial: Dial, neighbour: RawPeer, cut: int
) -> None:
    server.seen.get()
    bad = dial(server)

    with capture_logs() as logs:
        bad.send(FRAME[:cut])
        bad.socket.shutdown(socket.SHUT_WR)
        assert bad.is_closed_by_peer()
        server.closed.get(timeout=PATIENCE_S)

    assert reasons(logs) == [f"the peer closed it within a frame of which {cut} bytes had come"]
    assert server.seen.empty()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_frame_may_come_in_any_pieces(server: EchoServer, cuts: list[int]) -> None:
    with RawPeer(server.address) as peer:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data, at = FRAME * 3, 0
        for cut in [*cuts, len(data)]:
            peer.send(data[at : at + cut])
            at += cut

        assert [peer.next_command().body for _ in range(3)] == [b"body"] * 3


def test_an_answer_that_nobody_asked_for_is_passed_over(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)

    peer.send(encode_command(RemotingCommand(0, opaque=12, flag=1)))

    assert peer.ask(echo()).code == 0


def test_a_frame_larger_than_allowed_is_refused_before_it_is_complete(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(limits=ConnectionLimits(max_frame_bytes=1_000)))
    bad, good = dial(server), dial(server)

    with capture_logs() as logs:
        bad.send(encode_command(echo(bytes(2_000)))[:500])
        assert bad.is_closed_by_peer()
        server.closed.get(timeout=PATIENCE_S)

    assert "allowed are 4 to 996" in reasons(logs)[0]
    assert good.ask(echo(bytes(500))).code == 0


# --- those who are slow, or silent ----------------------------------------------------------------------


def test_a_frame_too_long_on_its_way_ends_its_connection(serve: Serve, dial: Dial) -> None:
    clock = VirtualClock()
    server = serve(RemotingServerSettings(limits=ConnectionLimits(frame_timeout_ms=30_000)), clock)
    slow, good = dial(server), dial(server)
    assert slow.ask(echo()).code == 0
    slow.send(FRAME + FRAME[:30])  # the answer to the first says that the piece of the second has come too
    assert slow.next_command().body == b"body"
    assert good.ask(echo()).code == 0

    with capture_logs() as logs:
        for _ in range(4):
            slow.send(FRAME[30:31])
            clock.move_ms(7_500)
            server.loop.wake()
            assert good.ask(echo()).code == 0
        assert slow.is_closed_by_peer()

    assert reasons(logs) == ["a frame is not complete after 30000 ms"]


def test_whoever_idles_is_closed_and_whoever_talks_is_not(serve: Serve, dial: Dial) -> None:
    clock = VirtualClock()
    server = serve(None, clock)
    idle, busy = dial(server), dial(server)
    assert idle.ask(echo()).code == busy.ask(echo()).code == 0

    for _ in range(2):
        clock.move_ms(60_000)
        assert busy.ask(echo()).code == 0

    assert idle.is_closed_by_peer()
    assert busy.ask(echo()).code == 0
    assert [connection.remote.port for connection in server.connections()] == [busy.socket.getsockname()[1]]


def test_what_the_server_sends_is_traffic_too(serve: Serve, dial: Dial) -> None:
    clock = VirtualClock()
    server = serve(None, clock)
    peer, other = dial(server), dial(server)
    peer.send(encode_command(RemotingCommand(HOLD)))
    connection, _ = server.held.get(timeout=PATIENCE_S)

    for _ in range(3):
        clock.move_ms(60_000)
        connection.send_one_way(RemotingCommand(40))
        assert other.ask(echo()).code == 0

    assert [peer.next_command().code for _ in range(3)] == [40] * 3
    assert peer.ask(echo()).code == 0


def test_a_client_that_never_reads_is_not_read_from_either(serve: Serve, dial: Dial) -> None:
    """It asks for 200 MiB and reads nothing; the server makes a few answers and waits."""
    server = serve(RemotingServerSettings(limits=ConnectionLimits(pause_reading_bytes=1 << 20)))
    bad, good = dial(server), dial(server)
    bad.send(b"".join(encode_command(RemotingCommand(BIG, opaque=n, body=b"1048576")) for n in range(200)))

    assert good.ask(echo()).code == 0
    held = server.unread_output.held

    assert held <= 4 << 20
    assert [bad.next_command().opaque for _ in range(200)] == list(range(200))
    assert good.ask(echo()).code == 0


def test_a_client_that_leaves_too_much_unread_is_closed(serve: Serve, dial: Dial) -> None:
    """Answers to held requests come whether it reads or not."""
    server = serve(RemotingServerSettings(limits=ConnectionLimits(max_unread_bytes=32 << 20)))
    bad, good = dial(server), dial(server)
    bad.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(64)))

    with capture_logs() as logs:
        for _ in range(64):
            connection, held = server.held.get(timeout=PATIENCE_S)
            connection.reply(held.response(body=bytes(1 << 20)))
        assert server.closed.get(timeout=PATIENCE_S) is connection

    (line,) = [entry for entry in logs if entry["event"] == "remoting.connection_closed"]
    assert ("bytes of answers unread" in line["reason"], line["log_level"]) == (True, "warning")
    assert good.ask(echo()).code == 0
    assert server.unread_output.held == 0


def test_of_all_who_leave_too_much_unread_together_the_worst_is_closed(serve: Serve, dial: Dial) -> None:
    """Each leaves less than one alone may; the modest ones are not made to pay for the greedy one."""
    server = serve(RemotingServerSettings(max_unread_bytes=40 << 20))
    modest, greedy = [dial(server), dial(server)], dial(server)

    with capture_logs() as logs:
        for opaque, peer in enumerate((*modest, greedy, greedy, greedy, greedy)):
            peer.send(encode_command(RemotingCommand(HOLD, opaque=opaque)))
        for _ in range(6):
            connection, held = server.held.get(timeout=PATIENCE_S)
            is_greedy = connection.remote.port == greedy.socket.getsockname()[1]
            connection.reply(held.response(body=bytes(15 << 20 if is_greedy else 10 << 20)))
        gone = server.closed.get(timeout=PATIENCE_S)

    assert gone.remote.port == greedy.socket.getsockname()[1]
    assert "bytes of answers are unread" in reasons(logs)[0]
    assert [peer.next_command().body for peer in modest] == [bytes(10 << 20)] * 2


def test_all_together_may_not_hold_too_much_of_unfinished_frames(serve: Serve, dial: Dial) -> None:
    """Each frame is within what is allowed; a thousand such peers would fill the memory. The worst one goes."""
    server = serve(RemotingServerSettings(max_partial_bytes=1 << 20))
    good, modest, greedy = dial(server), dial(server), dial(server)
    whole = encode_command(echo(bytes(400_000)))

    with capture_logs() as logs:
        greedy.send(encode_command(echo(bytes(900_000)))[:-1])
        modest.send(whole[:-1])
        assert server.closed.get(timeout=PATIENCE_S).remote.port == greedy.socket.getsockname()[1]
        assert good.ask(echo()).code == 0
        modest.send(whole[-1:])
        assert modest.next_command().code == 0
        assert good.ask(echo()).code == 0

    assert "bytes of frames that are not complete are held" in reasons(logs)[0]
    assert server.partial_input.held == 0


def test_a_peer_with_too_many_open_requests_is_told_that_the_server_is_busy(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3)))
    peer = dial(server)
    peer.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(4)))

    refused = peer.next_command()
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response())

    assert (refused.opaque, refused.code) == (3, 2)
    assert refused.remark == "3 requests of this connection wait for an answer already"
    assert peer.next_command().opaque == 0
    assert peer.ask(RemotingCommand(ECHO, opaque=9)).code == 0


def test_a_half_closed_connection_is_answered_what_was_asked_and_closed(
    server: EchoServer, dial: Dial, neighbour: RawPeer
) -> None:
    peer = dial(server)

    peer.send(FRAME * 3)
    peer.socket.shutdown(socket.SHUT_WR)

    assert [peer.next_command().body for _ in range(3)] == [b"body"] * 3
    assert peer.is_closed_by_peer()


# --- those who are many ---------------------------------------------------------------------------------


def test_2500_connections_opened_and_dropped_leave_nothing_behind(
    server: EchoServer, dial: Dial, neighbour: RawPeer
) -> None:
    """Some say nothing, some half a frame, some ask and do not wait; some break off, some close."""
    kinds = [b"", FRAME, FRAME[:9]]
    for number in range(2_500):
        peer = RawPeer(server.address)
        peer.send(kinds[number % 3])
        if number % 2:
            peer.reset()
        else:
            peer.socket.close()
        if number % 100 == 0:
            assert neighbour.ask(echo()).code == 0

    gone = [server.closed.get(timeout=PATIENCE_S) for _ in range(2_500)]

    assert len({connection.id for connection in gone}) == 2_500
    assert len(server.connections()) == 1
    assert server.partial_input.held == server.unread_output.held == 0


def test_more_connections_than_allowed_are_closed_at_once(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(max_connections=3))
    first = [dial(server) for _ in range(3)]
    assert [peer.ask(echo()).code for peer in first] == [0, 0, 0]

    with capture_logs() as logs:
        assert dial(server).is_closed_by_peer()
        assert dial(server).is_closed_by_peer()
        first[0].socket.close()
        server.closed.get(timeout=PATIENCE_S)
        assert dial(server).ask(echo()).code == 0

    assert [entry["max_connections"] for entry in logs if entry["event"] == "remoting.full"] == [3]


def test_without_room_for_another_file_it_rests_and_then_goes_on(serve: Serve, dial: Dial) -> None:
    """EMFILE neither ends the loop nor makes it spin: who waits at the door is let in later."""
    clock = VirtualClock()
    server = serve(None, clock)
    good = dial(server)
    assert good.ask(echo()).code == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    try:
        with capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            spare = fill_files()
            waiting.connect(tuple(server.address))
            for _ in range(50):  # a loop that spins would log each time
                assert good.ask(echo()).code == 0
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
    events = [entry for entry in logs if entry["event"] == "remoting.cannot_accept"]
    assert len(events) == 1
    assert "ulimit -n" in events[0]["hint"]


def fill_files() -> list[socket.socket]:
    """Take what is left of the files this process may open."""
    spare = []
    while True:
        try:
            spare.append(socket.socket())
        except OSError:
            return spare

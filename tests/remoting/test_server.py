"""The server: each request gets a response from its processor, in any thread, or the reason for the refusal."""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerClosedError, BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Connection, RemotingServer, RemotingServerSettings
from mqtemplate.remoting import transport as transport_module
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode, SerializeType, Version, encode_command
from tests.remoting.conftest import OpenPeer, StartServer
from tests.remoting.wire import (
    BIG,
    ECHO,
    HOLD,
    LOOPBACK,
    PARSE,
    PARTS,
    RAISE,
    SLOW,
    UNKNOWN,
    EchoServer,
    RawPeer,
    Results,
    echo,
    hold,
    response_of,
)
from tests.waiting import PATIENCE_S


def one_way(code: int, body: bytes = b"") -> bytes:
    return encode_command(RemotingCommand.request(code, body=body, opaque=7, one_way=True))


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_a_response_has_the_opaque_of_its_request_in_each_encoding(
    peer: RawPeer, serialize_type: SerializeType
) -> None:
    request = RemotingCommand(ECHO, opaque=-5, body=b"body", ext_fields={"a": "1"}, serialize_type=serialize_type)

    response = peer.invoke(request)

    assert (response.code, response.opaque, response.body, response.ext_fields) == (0, -5, b"body", {"a": "1"})
    assert response.is_response


def test_requests_that_arrive_together_are_answered_in_order(peer: RawPeer) -> None:
    peer.send(b"".join(encode_command(RemotingCommand(ECHO, opaque=number)) for number in range(500)))

    assert [peer.next_command().opaque for _ in range(500)] == list(range(500))


def test_connections_take_turns_in_the_io_thread(
    server: EchoServer, open_peer: OpenPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection with many complete requests waits for the others after each turn; here a turn is one request."""
    monkeypatch.setattr(transport_module, "_TURN_S", 0.0)
    busy, neighbour, gate = open_peer(server), open_peer(server), threading.Event()
    for peer in (busy, neighbour):
        peer.invoke(echo(b"connected"))
        server.seen.get(timeout=PATIENCE_S)

    server.loop.call_soon(partial(gate.wait, PATIENCE_S))  # both have sent when the I/O thread looks
    busy.send(b"".join(encode_command(echo(b"busy")) for _ in range(5)))
    neighbour.send(encode_command(echo(b"neighbour")))
    gate.set()

    order = [server.seen.get(timeout=PATIENCE_S).body for _ in range(6)]
    assert order.index(b"neighbour") <= 1
    assert [busy.next_command() is not None for _ in range(5)] == [True] * 5


def test_a_held_request_does_not_block_the_next(server: EchoServer, peer: RawPeer) -> None:
    """The broker may hold a pull for half a minute; later requests are answered before it."""
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1)))

    first = peer.invoke(RemotingCommand(ECHO, opaque=2))
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response(body=b"at last"))

    assert first.opaque == 2
    second = peer.next_command()
    assert (second.opaque, second.body) == (1, b"at last")


def test_several_threads_may_respond_at_the_same_time(server: EchoServer, peer: RawPeer) -> None:
    """Frames of several threads are never interleaved, even if the peer reads slowly."""
    count = 200
    peer.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(count)))
    held = [server.held.get(timeout=PATIENCE_S) for _ in range(count)]

    def reply(some: list[tuple[Connection, RemotingCommand]]) -> None:
        for connection, request in some:
            connection.reply(request.response(), body=[b"x" * (request.opaque * 97), b"y" * request.opaque])

    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(reply, held[part::4]) for part in range(4)]
        responses = [peer.next_command() for _ in range(count)]
    assert not any(each.exception() for each in done)

    assert {response.opaque: response.body for response in responses} == {
        number: b"x" * (number * 97) + b"y" * number for number in range(count)
    }


def test_a_body_may_consist_of_parts(peer: RawPeer) -> None:
    assert peer.invoke(RemotingCommand(PARTS)).body == b"one" + b"two" * 10_000


def test_a_response_too_large_for_a_frame_becomes_an_error(peer: RawPeer) -> None:
    response = peer.invoke(RemotingCommand(BIG, opaque=3, body=b"17000000"))

    assert (response.code, response.opaque) == (1, 3)
    assert "allowed are 16777216" in response.remark


def test_a_request_with_an_unknown_code_is_refused_at_once(peer: RawPeer) -> None:
    """Without a response the client would wait for its whole timeout."""
    unnamed, named = peer.invoke(RemotingCommand(UNKNOWN, opaque=1)), peer.invoke(RemotingCommand(105, opaque=2))

    assert (unnamed.code, unnamed.remark) == (3, "request code 9999 is not supported here")
    assert (named.code, named.remark) == (3, "request code 105 GET_ROUTEINFO_BY_TOPIC is not supported here")


def test_the_exception_of_a_processor_becomes_a_system_error(peer: RawPeer) -> None:
    with capture_logs() as logs:
        response = peer.invoke(RemotingCommand(RAISE))

    assert (response.code, response.remark) == (1, "ValueError: no such thing")
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["remoting.processor_failed"]
    assert peer.invoke(echo()).code == 0


def test_the_owner_of_a_server_may_convert_an_exception_to_a_response(server: EchoServer, peer: RawPeer) -> None:
    server.convert_error = lambda request, exc: request.response(13, remark=f"illegal: {exc}")

    response = peer.invoke(RemotingCommand(RAISE))

    assert (response.code, response.remark) == (13, "illegal: no such thing")


def test_a_client_gets_a_response_even_if_the_conversion_fails(server: EchoServer, peer: RawPeer) -> None:
    """It returns None, or raises an exception itself."""
    with capture_logs():
        server.convert_error = lambda request, exc: None
        unknown = peer.invoke(RemotingCommand(RAISE))
        server.convert_error = lambda request, exc: request.nothing_like_this  # type: ignore[attr-defined]
        broken = peer.invoke(RemotingCommand(RAISE))

    assert (unknown.code, broken.code) == (1, 1)


@pytest.mark.parametrize("code", [ECHO, UNKNOWN, RAISE])
def test_a_one_way_request_is_never_answered(peer: RawPeer, code: int) -> None:
    """Not even with an error, and independent of the processor's result."""
    with capture_logs():
        peer.send(one_way(code))
        response = peer.invoke(RemotingCommand(ECHO, opaque=8))

    assert response.opaque == 8


def test_a_late_response_to_a_one_way_request_is_dropped(server: EchoServer, peer: RawPeer) -> None:
    peer.send(one_way(HOLD))
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response())

    assert peer.invoke(RemotingCommand(ECHO, opaque=8)).opaque == 8


def test_a_request_gets_one_response(server: EchoServer, peer: RawPeer) -> None:
    """A held pull may end by its timeout and by a new message at the same moment."""
    connection, held = hold(server, peer)

    connection.reply(held.response(body=b"first"))
    connection.reply(held.response(body=b"second"))

    assert peer.next_command().body == b"first"
    assert peer.invoke(RemotingCommand(ECHO, opaque=2)).opaque == 2


def test_a_response_after_the_client_has_disconnected_is_dropped(server: EchoServer, open_peer: OpenPeer) -> None:
    """The server responds to a held pull whose client has disconnected."""
    peer = open_peer(server)
    connection, held = hold(server, peer)
    peer.reset()
    assert server.closed.get(timeout=PATIENCE_S) is connection

    connection.reply(held.response())
    connection.send_one_way(RemotingCommand(40))

    assert not connection.is_open
    assert open_peer(server).invoke(echo()).code == 0


def test_the_guard_checks_a_request_before_its_processor(server: EchoServer, peer: RawPeer) -> None:
    def require_key(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return None if request.ext_fields.get("key") else request.response(16, remark="no key")

    server.check = require_key
    refused, taken = peer.invoke(echo()), peer.invoke(echo(key="k"))

    assert (refused.code, refused.remark, taken.code) == (16, "no key", 0)
    assert server.seen.qsize() == 1


def test_the_exception_of_a_guard_refuses_the_request(server: EchoServer, peer: RawPeer) -> None:
    def broken(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        raise LookupError("no list of keys")

    server.check = broken

    with capture_logs():
        response = peer.invoke(echo())

    assert (response.code, response.remark) == (1, "LookupError: no list of keys")
    assert server.seen.empty()


def test_a_slow_processor_runs_in_a_worker_and_blocks_no_other_request(server: EchoServer, open_peer: OpenPeer) -> None:
    slow, other = open_peer(server), open_peer(server)
    slow.send(encode_command(RemotingCommand(SLOW, opaque=1, body=b"wait")))

    assert other.invoke(echo()).code == 0
    assert slow.invoke(RemotingCommand(ECHO, opaque=2)).opaque == 2
    server.gate.put(None)

    assert slow.next_command().body.startswith(b"mqtemplate-server-worker")


@pytest.mark.parametrize(
    ("limits", "size", "count"), [({"slow_queue": 2}, 4, 4), ({"slow_queue_bytes": 1_000_000}, 600_000, 3)]
)
def test_slow_requests_beyond_the_queue_get_system_busy(
    start_server: StartServer, open_peer: OpenPeer, limits: dict[str, Any], size: int, count: int
) -> None:
    """The queue has a limit of requests, and one of their bytes."""
    server = start_server(RemotingServerSettings(slow_workers=1, **limits))
    peer = open_peer(server)
    peer.send(b"".join(encode_command(RemotingCommand(SLOW, opaque=n, body=bytes(size))) for n in range(count)))

    refused = peer.next_command()
    for _ in range(count):
        server.gate.put(None)
    answered = [peer.next_command() for _ in range(count - 1)]

    assert (refused.opaque, refused.code) == (count - 1, 2)
    assert refused.remark == "too many requests of this kind wait for a thread already; try again later"
    assert [(response.opaque, response.code) for response in answered] == [(n, 0) for n in range(count - 1)]
    assert peer.invoke(RemotingCommand(SLOW, body=b"again")).code == 0


@pytest.mark.parametrize(
    ("size", "thread"),
    [(16_384, b"mqtemplate-server"), (16_385, b"mqtemplate-server-worker"), (100_000, b"mqtemplate-server-worker")],
)
def test_a_large_body_is_parsed_in_a_worker_with_its_guard(
    server: EchoServer, peer: RawPeer, size: int, thread: bytes
) -> None:
    """Parsing 16 MiB of JSON takes seconds, in which the I/O thread would serve no other client."""
    guarded: list[str] = []
    server.check = lambda connection, request: guarded.append(threading.current_thread().name)

    response = peer.invoke(RemotingCommand(PARSE, body=bytes(size)))

    assert response.body.partition(b"_")[0] == thread
    assert [name.partition("_")[0] for name in guarded] == [thread.decode()]


def test_a_body_that_is_too_large_to_be_parsed_is_refused(peer: RawPeer) -> None:
    response = peer.invoke(RemotingCommand(PARSE, body=bytes(100_001)))

    assert (response.code, response.remark) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "the body of this request has 100001 bytes, allowed are 100000; send several smaller requests",
    )


def test_the_guard_refuses_a_request_with_a_large_body_too(server: EchoServer, peer: RawPeer) -> None:
    server.check = lambda connection, request: request.response(16, remark="no")

    assert peer.invoke(RemotingCommand(PARSE, body=bytes(50_000))).remark == "no"


def test_a_connection_has_the_address_of_its_peer(server: EchoServer, peer: RawPeer) -> None:
    connection, _ = hold(server, peer)

    assert connection.remote == HostAddress(*peer.socket.getsockname())
    assert server.connections() == [connection]
    assert str(connection) == f"connection {connection.id} with {connection.remote}"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize(("listen", "ip"), [("::1", "::1"), ("::", "127.0.0.1")])
def test_the_server_listens_on_ipv6(start_server: StartServer, listen: str, ip: str) -> None:
    """A peer with IPv4 has an IPv4 address: otherwise the store would record a born host of 16 bytes for it."""
    server = start_server(listen=HostAddress(listen, 0))
    with RawPeer(HostAddress(ip, server.address.port)) as peer:
        connection, _ = hold(server, peer)

    assert connection.remote.ip == ip
    assert str(server.address) == f"[{listen}]:{server.address.port}"


# --- requests of the server ---------------------------------------------------------------------------


def test_the_server_sends_requests_over_the_same_connection(server: EchoServer, peer: RawPeer) -> None:
    """Both sides count opaques on their own, so equal numbers do not conflict."""
    connection, _ = hold(server, peer)
    responses: Results = queue.Queue()

    connection.request(RemotingCommand(39, body=b"how is it?"), 60_000, responses.put)
    received = peer.next_command()
    assert peer.invoke(RemotingCommand(ECHO, opaque=received.opaque)).opaque == received.opaque
    peer.send(encode_command(received.response(body=b"fine")))

    response = response_of(responses)
    assert (received.code, received.body, received.flag, response.body) == (39, b"how is it?", 0, b"fine")
    assert connection.pending == 0


def test_a_request_to_a_peer_that_does_not_respond_times_out(server: EchoServer, peer: RawPeer) -> None:
    connection, _ = hold(server, peer)
    responses: Results = queue.Queue()

    connection.request(RemotingCommand(307), 1, responses.put)

    error = responses.get(timeout=PATIENCE_S)
    assert isinstance(error, RemoteTimeoutError)
    assert str(error).startswith(
        f"{connection.remote} did not answer request 307 GET_CONSUMER_RUNNING_INFO within 1ms; "
        "it may have been carried out all the same"
    )
    peer.send(encode_command(peer.next_command().response()))  # too late: dropped
    assert peer.invoke(RemotingCommand(ECHO, opaque=5)).opaque == 5


def test_a_request_to_a_peer_that_disconnects_fails_at_once(server: EchoServer, peer: RawPeer) -> None:
    connection, _ = hold(server, peer)
    responses: Results = queue.Queue()
    connection.request(RemotingCommand(39), 3_600_000, responses.put)

    peer.reset()

    error = responses.get(timeout=PATIENCE_S)
    assert isinstance(error, RemoteConnectError)
    assert f"the connection to {connection.remote} was lost before the response arrived" in str(error)
    connection.request(RemotingCommand(39), 3_600_000, responses.put)
    assert isinstance(responses.get(timeout=PATIENCE_S), RemoteConnectError)


def test_a_one_way_request_of_the_server_has_its_flag(server: EchoServer, peer: RawPeer) -> None:
    hold(server, peer)[0].send_one_way(RemotingCommand(40, ext_fields={"consumerGroup": "g"}))

    received = peer.next_command()
    assert (received.code, received.flag, received.ext_fields) == (40, 2, {"consumerGroup": "g"})


def test_the_server_can_close_a_connection(server: EchoServer, peer: RawPeer) -> None:
    connection, _ = hold(server, peer)

    connection.close("it is time")
    connection.close("again")

    assert peer.is_closed_by_peer()
    assert server.closed.get(timeout=PATIENCE_S) is connection
    assert server.connections() == []


def test_the_exception_of_a_close_callback_does_not_prevent_the_next_one(server: EchoServer, peer: RawPeer) -> None:
    closed: queue.Queue[Connection] = queue.Queue()
    server.on_close(lambda connection: 1 // 0)
    server.on_close(closed.put)
    connection, _ = hold(server, peer)

    with capture_logs() as logs:
        peer.socket.close()
        assert closed.get(timeout=PATIENCE_S) is connection

    assert "remoting.callback_failed" in [entry["event"] for entry in logs]


# --- start and stop -----------------------------------------------------------------------------------


def test_the_error_for_an_address_in_use_names_what_to_check(server: EchoServer) -> None:
    second = RemotingServer(server.address, RemotingServerSettings(), SystemClock())

    with pytest.raises(
        BrokerError, match=rf"cannot listen at {server.address} \(.*\); is another server running there"
    ):
        second.start()


def test_a_stopped_server_cannot_be_started_again(start_server: StartServer) -> None:
    server = start_server()
    server.stop()
    server.stop()

    with pytest.raises(BrokerClosedError, match="was stopped; create another one"):
        server.start()


def test_the_port_is_known_before_the_server_starts(open_peer: OpenPeer) -> None:
    """So the first stored record has the right address. Clients that connect early wait in the backlog."""
    server = EchoServer()
    server.bind()
    server.bind()
    early = open_peer(server)
    early.send(encode_command(echo(b"early")))

    server.start()

    assert early.next_command().body == b"early"
    server.stop()


def test_stopping_a_bound_server_frees_its_address() -> None:
    server = EchoServer()
    server.bind()

    server.stop()

    with pytest.raises(OSError):
        RawPeer(server.address)


def test_a_server_that_was_never_started_can_be_stopped() -> None:
    RemotingServer(LOOPBACK, RemotingServerSettings(), SystemClock()).stop()


def test_stopping_waits_for_responses_in_progress(start_server: StartServer, open_peer: OpenPeer) -> None:
    server = start_server(RemotingServerSettings(drain_ms=60_000))
    peer = open_peer(server)
    connection, held = hold(server, peer)

    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while peer.invoke(RemotingCommand(ECHO, opaque=2, version=Version.V5_5_0)).code != 1500:
        pass  # the stop has not started yet
    old = peer.invoke(RemotingCommand(ECHO, opaque=3, version=Version.V4_9_8))
    connection.reply(held.response(body=b"done"))

    assert old.code == 0, "an older client does not understand GO_AWAY"
    assert peer.next_command().body == b"done"
    assert peer.is_closed_by_peer()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    with pytest.raises(OSError):
        RawPeer(server.address)


class SlowParts(list[bytes]):
    """Parts of a body that take their time to be put together."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(parts)
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        self.is_asked.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().__len__()


def test_stopping_waits_for_a_response_that_is_being_encoded(start_server: StartServer, open_peer: OpenPeer) -> None:
    """Earlier its request counted as answered before the bytes were in the buffer, so that a stop could drop them."""
    server = start_server(RemotingServerSettings(drain_ms=60_000))
    peer = open_peer(server)
    connection, held = hold(server, peer)
    parts = SlowParts([b"do", b"ne"])
    replying = threading.Thread(target=lambda: connection.reply(held.response(), body=parts))
    replying.start()
    assert parts.is_asked.wait(PATIENCE_S)

    assert connection.unanswered == 1
    parts.may_go_on.set()
    replying.join(PATIENCE_S)

    assert connection.unanswered == 0
    assert peer.next_command().body == b"done"


def test_stopping_waits_for_a_limited_time(start_server: StartServer, open_peer: OpenPeer) -> None:
    server = start_server(RemotingServerSettings(drain_ms=1))
    peer = open_peer(server)
    hold(server, peer)

    server.stop()

    assert peer.is_closed_by_peer()
    assert server.closed.get(timeout=PATIENCE_S).is_open is False

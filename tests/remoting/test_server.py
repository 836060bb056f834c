"""Who asks is answered: by the processor, from any thread, or with the reason why not."""

from __future__ import annotations

import queue
import socket
import threading

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerClosedError, BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Connection, RemotingServer, RemotingServerSettings
from mqtemplate.remoting.protocol import RemotingCommand, SerializeType, Version, encode_command
from tests.remoting.conftest import Dial, Serve
from tests.remoting.wire import (
    BIG,
    ECHO,
    HOLD,
    LOOPBACK,
    NOBODY,
    PARTS,
    PATIENCE_S,
    RAISE,
    SLOW,
    EchoServer,
    RawPeer,
    echo,
)


def one_way(code: int, body: bytes = b"") -> bytes:
    return encode_command(RemotingCommand.request(code, body=body, opaque=7, one_way=True))


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_a_request_is_answered_with_its_opaque_whatever_its_form(
    server: EchoServer, dial: Dial, serialize_type: SerializeType
) -> None:
    request = RemotingCommand(ECHO, opaque=-5, body=b"body", ext_fields={"a": "1"}, serialize_type=serialize_type)

    answer = dial(server).ask(request)

    assert (answer.code, answer.opaque, answer.body, answer.ext_fields) == (0, -5, b"body", {"a": "1"})
    assert answer.is_response


def test_requests_that_come_at_once_are_answered_in_order(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)

    peer.send(b"".join(encode_command(RemotingCommand(ECHO, opaque=number)) for number in range(500)))

    assert [peer.next_command().opaque for _ in range(500)] == list(range(500))


def test_a_held_request_does_not_hold_up_the_next(server: EchoServer, dial: Dial) -> None:
    """A pull may wait for half a minute; what is asked after it is answered before it."""
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1)))

    first = peer.ask(RemotingCommand(ECHO, opaque=2))
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response(body=b"at last"))

    assert first.opaque == 2
    second = peer.next_command()
    assert (second.opaque, second.body) == (1, b"at last")


def test_answers_may_come_from_any_thread_at_the_same_time(server: EchoServer, dial: Dial) -> None:
    """Frames of several threads never mingle, also where the peer is slow to take them."""
    peer = dial(server)
    count = 200
    peer.send(b"".join(encode_command(RemotingCommand(HOLD, opaque=number)) for number in range(count)))
    held = [server.held.get(timeout=PATIENCE_S) for _ in range(count)]

    def answer(some: list[tuple[Connection, RemotingCommand]]) -> None:
        for connection, request in some:
            connection.reply(request.response(), body=[b"x" * (request.opaque * 97), b"y" * request.opaque])

    threads = [threading.Thread(target=answer, args=(held[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    answers = [peer.next_command() for _ in range(count)]
    for thread in threads:
        thread.join()

    assert {answer.opaque: answer.body for answer in answers} == {
        number: b"x" * (number * 97) + b"y" * number for number in range(count)
    }


def test_a_body_may_be_given_in_parts(server: EchoServer, dial: Dial) -> None:
    assert dial(server).ask(RemotingCommand(PARTS)).body == b"one" + b"two" * 10_000


def test_a_large_answer_arrives_whole(server: EchoServer, dial: Dial) -> None:
    """It is more than the sockets hold, so the loop sends most of it."""
    assert dial(server).ask(RemotingCommand(BIG, body=b"16000000")).body == bytes(16_000_000)


def test_an_answer_too_large_for_a_frame_becomes_an_error(server: EchoServer, dial: Dial) -> None:
    answer = dial(server).ask(RemotingCommand(BIG, opaque=3, body=b"17000000"))

    assert (answer.code, answer.opaque) == (1, 3)
    assert "allowed are 16777216" in answer.remark


def test_an_unknown_code_is_answered_at_once_and_says_so(server: EchoServer, dial: Dial) -> None:
    """A silent server would cost the client its whole time-out."""
    peer = dial(server)

    unnamed, named = peer.ask(RemotingCommand(NOBODY, opaque=1)), peer.ask(RemotingCommand(105, opaque=2))

    assert (unnamed.code, unnamed.remark) == (3, "request code 9999 is not supported here")
    assert (named.code, named.remark) == (3, "request code 105 GET_ROUTEINFO_BY_TOPIC is not supported here")


def test_a_processor_that_raises_is_answered_as_system_error(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)

    with capture_logs() as logs:
        answer = peer.ask(RemotingCommand(RAISE))

    assert (answer.code, answer.remark) == (1, "ValueError: no such thing")
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["remoting.processor_failed"]
    assert peer.ask(echo()).code == 0


def test_who_knows_an_error_answers_it_in_its_own_way(server: EchoServer, dial: Dial) -> None:
    server.problem = lambda request, exc: request.response(13, remark=f"illegal: {exc}")

    answer = dial(server).ask(RemotingCommand(RAISE))

    assert (answer.code, answer.remark) == (13, "illegal: no such thing")


def test_an_error_nobody_has_an_answer_for_is_still_answered(server: EchoServer, dial: Dial) -> None:
    """Neither None nor another exception leaves the client waiting."""
    peer = dial(server)
    with capture_logs():
        server.problem = lambda request, exc: None
        unknown = peer.ask(RemotingCommand(RAISE))
        server.problem = lambda request, exc: request.nothing_like_this  # type: ignore[attr-defined]
        broken = peer.ask(RemotingCommand(RAISE))

    assert (unknown.code, broken.code) == (1, 1)


@pytest.mark.parametrize("code", [ECHO, NOBODY, RAISE])
def test_a_one_way_request_is_never_answered(server: EchoServer, dial: Dial, code: int) -> None:
    """Not even with an error, and whatever its processor returns."""
    peer = dial(server)

    with capture_logs():
        peer.send(one_way(code))
        answer = peer.ask(RemotingCommand(ECHO, opaque=8))

    assert answer.opaque == 8


def test_an_answer_to_a_one_way_request_is_dropped_also_later(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)
    peer.send(one_way(HOLD))
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response())

    assert peer.ask(RemotingCommand(ECHO, opaque=8)).opaque == 8


def test_a_request_is_answered_once(server: EchoServer, dial: Dial) -> None:
    """A hold that ends by time-out and by a message at the same moment must not confuse the client."""
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1)))
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response(body=b"first"))
    connection.reply(held.response(body=b"second"))

    assert peer.next_command().body == b"first"
    assert peer.ask(RemotingCommand(ECHO, opaque=2)).opaque == 2


def test_an_answer_after_the_client_has_gone_is_dropped(server: EchoServer, dial: Dial) -> None:
    """A held pull whose client left must harm nobody."""
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1)))
    connection, held = server.held.get(timeout=PATIENCE_S)
    peer.reset()
    assert server.closed.get(timeout=PATIENCE_S) is connection

    connection.reply(held.response())
    connection.send_one_way(RemotingCommand(40))

    assert not connection.is_open
    assert dial(server).ask(echo()).code == 0


def test_the_guard_is_asked_before_the_processor(server: EchoServer, dial: Dial) -> None:
    def refuse_strangers(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return None if request.ext_fields.get("key") else request.response(16, remark="no key")

    server.guard = refuse_strangers
    peer = dial(server)

    refused, taken = peer.ask(echo()), peer.ask(echo(key="k"))

    assert (refused.code, refused.remark, taken.code) == (16, "no key", 0)
    assert server.seen.qsize() == 1


def test_a_guard_that_raises_refuses(server: EchoServer, dial: Dial) -> None:
    def broken(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        raise LookupError("no list of keys")

    server.guard = broken

    with capture_logs():
        answer = dial(server).ask(echo())

    assert (answer.code, answer.remark) == (1, "LookupError: no list of keys")
    assert server.seen.empty()


def test_a_slow_processor_runs_beside_and_holds_nobody_up(server: EchoServer, dial: Dial) -> None:
    slow, other = dial(server), dial(server)
    slow.send(encode_command(RemotingCommand(SLOW, opaque=1, body=b"wait")))

    assert other.ask(echo()).code == 0
    assert slow.ask(RemotingCommand(ECHO, opaque=2)).opaque == 2
    server.gate.put(None)

    assert slow.next_command().body.startswith(b"mqtemplate-server-worker")


def test_more_slow_requests_than_may_wait_are_told_that_the_server_is_busy(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(slow_workers=1, slow_queue=2))
    peer = dial(server)
    peer.send(b"".join(encode_command(RemotingCommand(SLOW, opaque=number, body=b"wait")) for number in range(4)))

    refused = peer.next_command()
    for _ in range(3):
        server.gate.put(None)
    answered = [peer.next_command() for _ in range(3)]

    assert (refused.opaque, refused.code) == (3, 2)
    assert refused.remark == "too many requests of this kind wait for a thread already; try again later"
    assert [(answer.opaque, answer.code) for answer in answered] == [(0, 0), (1, 0), (2, 0)]


def test_large_slow_requests_wait_in_bounded_memory(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(slow_workers=1, slow_queue_bytes=1_000_000))
    peer = dial(server)
    peer.send(b"".join(encode_command(RemotingCommand(SLOW, opaque=n, body=bytes(600_000))) for n in range(3)))

    refused = peer.next_command()
    for _ in range(2):
        server.gate.put(None)
    answered = [peer.next_command() for _ in range(2)]

    assert (refused.opaque, refused.code) == (2, 2)
    assert [answer.code for answer in answered] == [0, 0]
    server.gate.put(None)
    assert peer.ask(RemotingCommand(SLOW, body=b"again")).code == 0


def test_the_peer_is_known_by_its_address(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD)))

    connection, _ = server.held.get(timeout=PATIENCE_S)

    assert connection.remote == HostAddress(*peer.socket.getsockname())
    assert server.connections() == [connection]
    assert str(connection) == f"connection {connection.id} with {connection.remote}"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@needs_ipv6
def test_it_listens_on_ipv6(serve: Serve, dial: Dial) -> None:
    server = serve(listen=HostAddress("::1", 0))
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD)))

    connection, _ = server.held.get(timeout=PATIENCE_S)

    assert connection.remote.ip == "::1"
    assert str(server.address) == f"[::1]:{server.address.port}"


@needs_ipv6
def test_on_all_addresses_an_ipv4_peer_is_told_as_ipv4(serve: Serve) -> None:
    """A born host of 16 bytes for an IPv4 client would be a lie that is stored."""
    server = serve(listen=HostAddress("::", 0))
    with RawPeer(HostAddress("127.0.0.1", server.address.port)) as peer:
        peer.send(encode_command(RemotingCommand(HOLD)))

        connection, _ = server.held.get(timeout=PATIENCE_S)

    assert connection.remote.ip == "127.0.0.1"


# --- the server asks ----------------------------------------------------------------------------------


def connection_of(server: EchoServer, peer: RawPeer) -> Connection:
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1_000_000)))
    return server.held.get(timeout=PATIENCE_S)[0]


def test_the_server_asks_over_the_same_connection(server: EchoServer, dial: Dial) -> None:
    """Both sides count their opaques apart: equal numbers do not meet."""
    peer = dial(server)
    connection = connection_of(server, peer)
    answers: queue.Queue[object] = queue.Queue()

    connection.request(RemotingCommand(39, body=b"how is it?"), 60_000, answers.put)
    asked = peer.next_command()
    assert peer.ask(RemotingCommand(ECHO, opaque=asked.opaque)).opaque == asked.opaque
    peer.send(encode_command(asked.response(body=b"fine")))

    answer = answers.get(timeout=PATIENCE_S)
    assert isinstance(answer, RemotingCommand)
    assert (asked.code, asked.body, asked.flag, answer.body) == (39, b"how is it?", 0, b"fine")
    assert connection.outstanding == 0


def test_a_peer_that_does_not_answer_is_given_up(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)
    connection = connection_of(server, peer)
    answers: queue.Queue[object] = queue.Queue()

    connection.request(RemotingCommand(307), 1, answers.put)

    error = answers.get(timeout=PATIENCE_S)
    assert isinstance(error, RemoteTimeoutError)
    assert str(error).startswith(
        f"{connection.remote} did not answer request 307 GET_CONSUMER_RUNNING_INFO within 1 ms; "
        "it may have been carried out all the same"
    )
    peer.send(encode_command(peer.next_command().response()))  # too late: dropped
    assert peer.ask(RemotingCommand(ECHO, opaque=5)).opaque == 5


def test_what_is_asked_of_a_peer_that_goes_fails_at_once(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)
    connection = connection_of(server, peer)
    answers: queue.Queue[object] = queue.Queue()
    connection.request(RemotingCommand(39), 3_600_000, answers.put)

    peer.reset()

    error = answers.get(timeout=PATIENCE_S)
    assert isinstance(error, RemoteConnectError)
    assert f"the connection to {connection.remote} was lost before the answer came" in str(error)
    connection.request(RemotingCommand(39), 3_600_000, answers.put)
    assert isinstance(answers.get(timeout=PATIENCE_S), RemoteConnectError)


def test_a_one_way_request_of_the_server_is_marked_so(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)

    connection_of(server, peer).send_one_way(RemotingCommand(40, ext_fields={"consumerGroup": "g"}))

    told = peer.next_command()
    assert (told.code, told.flag, told.ext_fields) == (40, 2, {"consumerGroup": "g"})


def test_the_server_can_close_a_connection(server: EchoServer, dial: Dial) -> None:
    peer = dial(server)
    connection = connection_of(server, peer)

    connection.close("it is time")
    connection.close("again")

    assert peer.is_closed_by_peer()
    assert server.closed.get(timeout=PATIENCE_S) is connection
    assert server.connections() == []


def test_who_listens_for_ends_may_raise(server: EchoServer, dial: Dial) -> None:
    told: queue.Queue[Connection] = queue.Queue()
    server.on_close(lambda connection: 1 // 0)
    server.on_close(told.put)
    peer = dial(server)
    connection = connection_of(server, peer)

    with capture_logs() as logs:
        peer.socket.close()
        assert told.get(timeout=PATIENCE_S) is connection

    assert "remoting.callback_failed" in [entry["event"] for entry in logs]


# --- start and stop -----------------------------------------------------------------------------------


def test_an_address_in_use_is_told_with_what_to_look_at(server: EchoServer) -> None:
    second = RemotingServer(server.address, RemotingServerSettings(), SystemClock())

    with pytest.raises(
        BrokerError, match=rf"cannot listen at {server.address} \(.*\); is another server running there"
    ):
        second.start()


def test_a_server_that_stopped_is_not_started_again(serve: Serve) -> None:
    server = serve()
    server.stop()
    server.stop()

    with pytest.raises(BrokerClosedError, match="was stopped; make another one"):
        server.start()


def test_the_port_is_known_before_anybody_is_served(dial: Dial) -> None:
    """What goes into records can be right from the first one; who comes early waits at the door."""
    server = EchoServer()
    server.bind()
    server.bind()
    early = dial(server)
    early.send(encode_command(echo(b"early")))

    server.start()

    assert early.next_command().body == b"early"
    server.stop()


def test_an_address_that_was_only_taken_is_given_back() -> None:
    server = EchoServer()
    server.bind()

    server.stop()

    with pytest.raises(OSError):
        RawPeer(server.address)


def test_a_server_that_was_never_started_can_be_stopped() -> None:
    RemotingServer(LOOPBACK, RemotingServerSettings(), SystemClock()).stop()


def test_stopping_waits_for_answers_under_way(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(drain_ms=60_000))
    peer = dial(server)
    peer.send(encode_command(RemotingCommand(HOLD, opaque=1)))
    connection, held = server.held.get(timeout=PATIENCE_S)

    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while peer.ask(RemotingCommand(ECHO, opaque=2, version=Version.V5_5_0)).code != 1500:
        pass  # it has not begun yet
    old = peer.ask(RemotingCommand(ECHO, opaque=3, version=Version.V4_9_8))
    connection.reply(held.response(body=b"done"))

    assert old.code == 0, "an older client does not know GO_AWAY"
    assert peer.next_command().body == b"done"
    assert peer.is_closed_by_peer()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    with pytest.raises(OSError):
        RawPeer(server.address)


def test_stopping_does_not_wait_for_ever(serve: Serve, dial: Dial) -> None:
    server = serve(RemotingServerSettings(drain_ms=1))
    peer = dial(server)
    connection_of(server, peer)

    server.stop()

    assert peer.is_closed_by_peer()
    assert server.closed.get(timeout=PATIENCE_S).is_open is False

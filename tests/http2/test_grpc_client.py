"""grpcio's client with our server."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from mqtemplate.http2.grpc_server import GrpcLimits, GrpcStatus
from mqtemplate.remoting.settings import ServerTls, TlsMode
from tests.http2.conftest import StartGrpc
from tests.http2.grpc_kit import BIG, CHAT, ECHO, FAIL, HOLD, METADATA, PARTS, RAISE, SLOW, GrpcEcho
from tests.remoting.certificates import Certificates, has_openssl
from tests.waiting import PATIENCE_S, eventually

OpenChannel = Callable[..., grpc.Channel]
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture
def open_channel() -> Iterator[OpenChannel]:
    """Connect a client to a server."""
    channels: list[grpc.Channel] = []

    def connect(server: GrpcEcho, *options: tuple[str, object]) -> grpc.Channel:
        channel = grpc.insecure_channel(server.target, options=[*UNLIMITED, *options])
        channels.append(channel)
        return channel

    yield connect
    for channel in channels:
        channel.close()


@pytest.fixture
def channel(grpc_server: GrpcEcho, open_channel: OpenChannel) -> grpc.Channel:
    return open_channel(grpc_server)


def unary(channel: grpc.Channel, method: str) -> grpc.UnaryUnaryMultiCallable:
    return channel.unary_unary(method, lambda message: message, lambda message: message)


def ask(channel: grpc.Channel, method: str, message: bytes = b"", **options: object) -> bytes:
    return unary(channel, method)(message, timeout=PATIENCE_S, **options)


def error_of(channel: grpc.Channel, method: str, message: bytes = b"", **options: object) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as failed:
        unary(channel, method)(message, **{"timeout": PATIENCE_S, **options})
    return failed.value.code().name, failed.value.details()


# --- kinds of calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1_024, 16_379, 16_380, 65_536, 5_000_000])
def test_a_unary_call_of_any_size(channel: grpc.Channel, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)

    assert ask(channel, ECHO, message) == message


def test_a_server_stream(channel: grpc.Channel) -> None:
    parts = channel.unary_stream(PARTS, lambda message: message, lambda message: message)

    assert list(parts(b"1000", timeout=PATIENCE_S)) == [str(number).encode() for number in range(1_000)]
    assert list(parts(b"0", timeout=PATIENCE_S)) == []


def test_a_bidirectional_stream_answers_each_message_before_the_next(channel: grpc.Channel) -> None:
    chat = channel.stream_stream(CHAT, lambda message: message, lambda message: message)
    sent: queue.Queue[bytes | None] = queue.Queue()
    call = chat(iter(sent.get, None), timeout=PATIENCE_S)

    for number in range(20):
        sent.put(str(number).encode())
        assert next(call) == str(number).encode()
    sent.put(None)

    assert list(call) == []
    assert call.code() is grpc.StatusCode.OK


def test_a_server_may_end_a_bidirectional_stream_with_a_status(channel: grpc.Channel) -> None:
    """The details are any text; they travel percent-encoded."""
    chat = channel.stream_stream(CHAT, lambda message: message, lambda message: message)
    sent: queue.Queue[bytes | None] = queue.Queue()
    call = chat(iter(sent.get, None), timeout=PATIENCE_S)

    sent.put(b"end")
    with pytest.raises(grpc.RpcError):
        list(call)
    sent.put(None)

    assert call.code() is grpc.StatusCode.ABORTED
    assert call.details() == "the client said so: 100 % ä\n"


def test_metadata_reach_the_handler(channel: grpc.Channel) -> None:
    metadata = (("x-mq-client-id", "client@1"), ("twice", "a"), ("twice", "b"))

    assert ask(channel, METADATA, b"x-mq-client-id", metadata=metadata) == b"client@1"
    assert ask(channel, METADATA, b"twice", metadata=metadata).replace(b" ", b"") == b"a,b"
    assert ask(channel, METADATA, b":path", metadata=metadata) == b"-"


def test_each_call_has_metadata_of_its_own(channel: grpc.Channel) -> None:
    """Header blocks and their fields are cached: a new value must not become an old one."""
    for number in range(300):
        metadata = (("x-mq-request-id", f"request-{number}"), ("authorization", f"Signature={number}"))
        assert ask(channel, METADATA, b"x-mq-request-id", metadata=metadata) == f"request-{number}".encode()


# --- errors ---------------------------------------------------------------------------------------


def test_a_status_has_details(channel: grpc.Channel) -> None:
    assert error_of(channel, FAIL, b"no topic Orders") == ("NOT_FOUND", "no topic Orders")


def test_an_exception_of_a_handler_is_internal(channel: grpc.Channel) -> None:
    assert error_of(channel, RAISE) == ("INTERNAL", "ValueError: no such thing")
    assert ask(channel, ECHO, b"the next one") == b"the next one"


def test_an_exception_of_a_stream_handler_ends_its_call(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    chat = channel.stream_stream(CHAT, lambda message: message, lambda message: message)

    call = chat(iter([b"raise"]), timeout=PATIENCE_S)

    with pytest.raises(grpc.RpcError):
        list(call)
    assert (call.code(), call.details()) == (grpc.StatusCode.INTERNAL, "ValueError: no such thing")


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    assert error_of(channel, "/test.Service/Other") == (
        "UNIMPLEMENTED",
        "this server has no method /test.Service/Other",
    )


def test_a_message_above_the_limit_is_refused(start_grpc: StartGrpc, open_channel: OpenChannel) -> None:
    channel = open_channel(start_grpc(GrpcLimits(max_message_bytes=10_000)))

    assert error_of(channel, ECHO, bytes(10_001)) == (
        "RESOURCE_EXHAUSTED",
        "a message of 10001 bytes, allowed are 10000",
    )
    assert ask(channel, ECHO, bytes(10_000)) == bytes(10_000)


def test_a_compressed_message_is_refused_with_what_is_accepted(channel: grpc.Channel) -> None:
    code, details = error_of(channel, ECHO, bytes(10_000), compression=grpc.Compression.Gzip)

    assert (code, details) == (
        "UNIMPLEMENTED",
        "messages with the grpc-encoding gzip are not supported; send them with identity",
    )


# --- deadlines and cancellation -------------------------------------------------------------------


def test_a_call_ends_at_its_deadline(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    """The server ends it, too: its handler learns that."""
    assert error_of(channel, HOLD, timeout=0.2)[0] == "DEADLINE_EXCEEDED"

    call = grpc_server.closed_calls.get(timeout=PATIENCE_S)
    assert not call.is_open
    assert call.deadline_ms is not None
    call.reply(b"too late")


def test_a_deadline_decades_ahead_is_no_error(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    future = unary(channel, HOLD).future(b"", timeout=10 * 365 * 86_400)

    call = grpc_server.held.get(timeout=PATIENCE_S)
    call.reply(b"held")

    assert future.result(PATIENCE_S) == b"held"


def test_a_call_that_the_client_cancels_is_reported(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    future = unary(channel, HOLD).future(b"")
    call = grpc_server.held.get(timeout=PATIENCE_S)

    future.cancel()

    assert grpc_server.closed_calls.get(timeout=PATIENCE_S) is call
    assert not call.is_open


def test_a_killed_client_ends_its_calls(grpc_server: GrpcEcho) -> None:
    program = (
        "import grpc, sys\n"
        f"call = grpc.insecure_channel({grpc_server.target!r}).unary_unary({HOLD!r})\n"
        "call.future(b'').result()\n"
    )
    client = subprocess.Popen([sys.executable, "-c", program])
    call = grpc_server.held.get(timeout=PATIENCE_S)

    client.kill()
    client.wait()

    assert grpc_server.closed_calls.get(timeout=PATIENCE_S) is call


def test_handlers_in_other_threads_answer(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    futures = [unary(channel, SLOW).future(b"", timeout=PATIENCE_S) for _ in range(5)]

    for _ in futures:
        grpc_server.gate.release()

    assert all(future.result().startswith(b"mqtemplate-grpc-worker") for future in futures)


def test_more_work_than_the_queue_takes_is_refused(start_grpc: StartGrpc, open_channel: OpenChannel) -> None:
    server = start_grpc(GrpcLimits(slow_workers=1, slow_queue_per_connection=2))
    channel = open_channel(server)

    futures = [unary(channel, SLOW).future(b"", timeout=PATIENCE_S) for _ in range(5)]
    refused = eventually(lambda: [each for each in futures if each.done()], "calls are refused")

    assert refused[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused[0].details() == "too many calls wait for a thread already; try again later"
    for _ in futures:
        server.gate.release()


# --- many and large -------------------------------------------------------------------------------


def test_a_thousand_calls_are_open_at_once(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    futures = [unary(channel, HOLD).future(str(number).encode()) for number in range(1_000)]
    calls = [grpc_server.held.get(timeout=PATIENCE_S) for _ in futures]

    for number, call in enumerate(calls):
        call.reply(str(number).encode())

    assert {future.result(PATIENCE_S) for future in futures} == {str(number).encode() for number in range(1_000)}


def test_large_responses_of_many_calls_arrive_whole(channel: grpc.Channel) -> None:
    """They share the client's windows."""
    futures = [unary(channel, BIG).future(b"1000000", timeout=PATIENCE_S) for _ in range(20)]

    assert [len(future.result()) for future in futures] == [1_000_000] * 20


def test_pings_of_a_client_each_10_seconds_are_permitted(grpc_server: GrpcEcho, open_channel: OpenChannel) -> None:
    """A server of grpcio itself would close this connection after three of them; here they come faster."""
    options = (
        ("grpc.keepalive_time_ms", 10),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    )
    channel = open_channel(grpc_server, *options)

    for number in range(200):
        assert ask(channel, ECHO, str(number).encode()) == str(number).encode()
    assert grpc_server.closed.empty()


# --- stop -----------------------------------------------------------------------------------------


def test_a_stop_waits_for_open_calls(start_grpc: StartGrpc, open_channel: OpenChannel) -> None:
    """Clients open no more calls on the connection after GOAWAY."""
    server = start_grpc()
    channel = open_channel(server)
    future = unary(channel, SLOW).future(b"", timeout=PATIENCE_S)
    eventually(lambda: server.request_count, "the call arrived")

    server.loop.call_later(50, server.gate.release)
    server.stop(PATIENCE_S)

    assert future.result(PATIENCE_S).startswith(b"mqtemplate-grpc-worker")
    assert error_of(channel, ECHO, timeout=0.5)[0] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_calls_are_counted_by_method(grpc_server: GrpcEcho, channel: grpc.Channel) -> None:
    ask(channel, ECHO)
    error_of(channel, "/test.Service/Other")

    metrics = grpc_server.metrics.snapshot()

    assert metrics["grpc.calls{method=/test.Service/Echo}"] == 1
    assert metrics["grpc.calls{method=_unknown}"] == 1
    assert metrics["grpc.connections"] == 1
    assert metrics["grpc.open_calls"] == 0


def test_statuses_have_grpcs_numbers() -> None:
    assert {each.name: each.value for each in GrpcStatus} == {each.name: each.value[0] for each in grpc.StatusCode}


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if not has_openssl():
        pytest.skip("there is no openssl command to make certificates with")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def own(certificates: Certificates) -> tuple[Path, Path]:
    return certificates.issue("server", "IP:127.0.0.1", "DNS:localhost")


def secure_channel(server: GrpcEcho, certificates: Certificates) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
    return grpc.secure_channel(server.target, credentials, options=UNLIMITED)


def test_calls_with_and_without_tls_on_one_port(
    start_grpc: StartGrpc, open_channel: OpenChannel, certificates: Certificates, own: tuple[Path, Path]
) -> None:
    """The mode is permissive by default."""
    server = start_grpc(GrpcLimits(tls=ServerTls(cert_path=str(own[0]), key_path=str(own[1]))))

    with secure_channel(server, certificates) as secure:
        assert ask(secure, ECHO, bytes(1_000_000)) == bytes(1_000_000)
        assert ask(open_channel(server), ECHO, b"plain") == b"plain"
        futures = [unary(secure, ECHO).future(bytes(100), timeout=PATIENCE_S) for _ in range(500)]
        assert [future.result() for future in futures] == [bytes(100)] * 500


def test_a_server_may_enforce_tls(
    start_grpc: StartGrpc, open_channel: OpenChannel, certificates: Certificates, own: tuple[Path, Path]
) -> None:
    tls = ServerTls(cert_path=str(own[0]), key_path=str(own[1]), mode=TlsMode.ENFORCING)
    server = start_grpc(GrpcLimits(tls=tls))

    assert error_of(open_channel(server), ECHO)[0] == "UNAVAILABLE"
    with secure_channel(server, certificates) as secure:
        assert ask(secure, ECHO, b"secret") == b"secret"

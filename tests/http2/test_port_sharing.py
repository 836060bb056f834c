"""gRPC and RocketMQ's protocol on one port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.http2 import frames
from mqtemplate.http2.grpc_server import GrpcLimits
from mqtemplate.remoting import (
    ClientTls,
    ConnectionLimits,
    RemotingClient,
    RemotingClientSettings,
    RemotingServerSettings,
    ServerTls,
)
from tests.http2.conftest import OpenSocket, StartGrpc
from tests.http2.grpc_kit import ECHO, GrpcEcho
from tests.http2.wire import call, hello
from tests.remoting.certificates import Certificates, has_openssl
from tests.remoting.wire import EchoServer, echo
from tests.waiting import PATIENCE_S, eventually


def shared(grpc_server: GrpcEcho, settings: RemotingServerSettings | None = None) -> Iterator[EchoServer]:
    server = EchoServer(settings or RemotingServerSettings())
    server.share_port(grpc_server.adopt)
    server.start()
    yield server
    server.stop(0)


@pytest.fixture
def server(grpc_server: GrpcEcho) -> Iterator[EchoServer]:
    """A server of RocketMQ's protocol, whose port gRPC shares."""
    yield from shared(grpc_server)


def test_the_first_byte_decides_about_the_protocol(
    server: EchoServer, grpc_server: GrpcEcho, open_socket: OpenSocket
) -> None:
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    peer = open_socket(server)

    peer.send(call(1, ECHO, b"over gRPC"))
    answer = client.invoke(str(server.address), echo(b"over remoting"), 60_000)
    client.close()

    assert peer.response()[1] == [b"over gRPC"]
    assert answer.body == b"over remoting"
    assert len(grpc_server.connections()) == 1


def test_connections_of_both_protocols_have_numbers_of_their_own(
    server: EchoServer, grpc_server: GrpcEcho, open_socket: OpenSocket
) -> None:
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    peer = open_socket(server)
    peer.send(call(1, ECHO))
    peer.response()
    client.invoke(str(server.address), echo(b""), 60_000)

    ids = [each.id for each in (*server.connections(), *grpc_server.connections())]
    client.close()

    assert len(set(ids)) == len(ids) == 2


def test_a_client_that_sends_one_byte_at_a_time_is_recognised(server: EchoServer, open_socket: OpenSocket) -> None:
    peer = open_socket(server, greets=False)

    for byte in hello() + call(1, ECHO, b"slow"):
        peer.send(bytes((byte,)))

    assert peer.response()[1] == [b"slow"]


def test_a_client_of_neither_protocol_is_refused(server: EchoServer, open_socket: OpenSocket) -> None:
    peer = open_socket(server, greets=False)

    peer.send(b"POST / HTTP/1.1\r\n\r\n")

    assert peer.until(frames.GOAWAY)
    assert peer.is_ended()


def test_connections_that_were_handed_over_count_for_the_other_server(
    start_grpc: StartGrpc, open_socket: OpenSocket
) -> None:
    grpc_server = start_grpc(GrpcLimits(max_connections=1))
    for server in shared(grpc_server, RemotingServerSettings(max_connections=2)):
        peers = [open_socket(server) for _ in range(2)]
        for peer in peers:
            with suppress(ConnectionError):  # it may be refused already
                peer.send(call(1, ECHO))
        eventually(lambda: grpc_server.refused_connections.value, "the second one is refused")

        assert sorted(peer.response()[0].get("grpc-status", "refused") for peer in peers) == ["0", "refused"]
        client = RemotingClient(RemotingClientSettings(), SystemClock())
        assert client.invoke(str(server.address), echo(b"x"), 60_000).body == b"x"
        client.close()


def test_a_silent_client_of_a_shared_port_is_closed_in_time(grpc_server: GrpcEcho, open_socket: OpenSocket) -> None:
    """It has not shown yet which protocol it uses."""
    settings = RemotingServerSettings(limits=ConnectionLimits(idle_ms=10))

    for server in shared(grpc_server, settings):
        assert open_socket(server, greets=False).is_ended()


def test_alpn_decides_with_tls(grpc_server: GrpcEcho, tmp_path: Path) -> None:
    if not has_openssl():
        pytest.skip("there is no openssl command to make certificates with")
    certificates = Certificates(tmp_path)
    cert, key = certificates.issue("server", "IP:127.0.0.1")
    tls = ServerTls(cert_path=str(cert), key_path=str(key))
    trusted = ClientTls(trust_cert_path=str(certificates.authority))

    for server in shared(grpc_server, RemotingServerSettings(tls=tls)):
        client = RemotingClient(RemotingClientSettings(tls=trusted), SystemClock())
        answer = client.invoke(str(server.address), echo(b"over remoting"), 60_000)
        credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
        with grpc.secure_channel(str(server.address), credentials) as channel:
            over_grpc = channel.unary_unary(ECHO)(b"over gRPC", timeout=PATIENCE_S)
        client.close()

        assert (answer.body, over_grpc) == (b"over remoting", b"over gRPC")

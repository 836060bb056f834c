"""Fixtures: servers and clients that are stopped at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.http2.grpc_kit import GrpcEcho
from tests.http2.wire import SocketPeer

StartGrpc = Callable[..., GrpcEcho]
OpenSocket = Callable[..., SocketPeer]


@pytest.fixture
def start_grpc() -> Iterator[StartGrpc]:
    """Start a `GrpcEcho`; takes its arguments."""
    servers: list[GrpcEcho] = []

    def start(*args: object, **options: object) -> GrpcEcho:
        server = GrpcEcho(*args, **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture
def grpc_server(start_grpc: StartGrpc) -> GrpcEcho:
    return start_grpc()


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    """Connect a `SocketPeer` to a server."""
    peers: list[SocketPeer] = []

    def connect(server: GrpcEcho, **options: object) -> SocketPeer:
        peer = SocketPeer(server.address, **options)  # type: ignore[arg-type]
        peers.append(peer)
        return peer

    yield connect
    for peer in peers:
        peer.socket.close()

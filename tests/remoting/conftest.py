"""Servers and clients that are stopped when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from tests.remoting.wire import EchoServer, RawPeer

Serve = Callable[..., EchoServer]
Connect = Callable[..., RemotingClient]
Dial = Callable[..., RawPeer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start an `EchoServer`; takes what that takes."""
    servers: list[EchoServer] = []

    def serve_(*args: object, **options: object) -> EchoServer:
        server = EchoServer(*args, **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield serve_
    for server in servers:
        server.stop()


@pytest.fixture
def server(serve: Serve) -> EchoServer:
    return serve()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make a client, with other settings than usual if need be."""
    clients: list[RemotingClient] = []

    def connect_(settings: RemotingClientSettings | None = None, **options: object) -> RemotingClient:
        client = RemotingClient(settings or RemotingClientSettings(), SystemClock(), **options)  # type: ignore[arg-type]
        clients.append(client)
        return client

    yield connect_
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Connect) -> RemotingClient:
    return connect()


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Connect a `RawPeer` to a server."""
    peers: list[RawPeer] = []

    def dial_(server: EchoServer, **options: object) -> RawPeer:
        peer = RawPeer(server.address, **options)  # type: ignore[arg-type]
        peers.append(peer)
        return peer

    yield dial_
    for peer in peers:
        peer.socket.close()

"""Fixtures: servers and clients that are stopped at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from tests.remoting.wire import EchoServer, RawPeer

StartServer = Callable[..., EchoServer]
NewClient = Callable[..., RemotingClient]
OpenPeer = Callable[..., RawPeer]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start an `EchoServer`; takes its arguments."""
    servers: list[EchoServer] = []

    def start(*args: object, **options: object) -> EchoServer:
        server = EchoServer(*args, **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server: StartServer) -> EchoServer:
    return start_server()


@pytest.fixture
def new_client() -> Iterator[NewClient]:
    """Create a client; takes its settings and options."""
    clients: list[RemotingClient] = []

    def create(settings: RemotingClientSettings | None = None, **options: object) -> RemotingClient:
        client = RemotingClient(settings or RemotingClientSettings(), SystemClock(), **options)  # type: ignore[arg-type]
        clients.append(client)
        return client

    yield create
    for client in clients:
        client.close()


@pytest.fixture
def client(new_client: NewClient) -> RemotingClient:
    return new_client()


@pytest.fixture
def open_peer() -> Iterator[OpenPeer]:
    """Connect a `RawPeer` to a server."""
    peers: list[RawPeer] = []

    def connect(server: EchoServer, **options: object) -> RawPeer:
        peer = RawPeer(server.address, **options)  # type: ignore[arg-type]
        peers.append(peer)
        return peer

    yield connect
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def peer(server: EchoServer, open_peer: OpenPeer) -> RawPeer:
    """A peer of the server."""
    return open_peer(server)

"""Connections of hostile clients: they take neither the files of the store nor the connections of other addresses."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.message import HostAddress
from mqtemplate.remoting import RemotingServerSettings
from mqtemplate.remoting.settings import ConnectionLimit
from tests.remoting.conftest import OpenPeer, StartServer
from tests.remoting.wire import RawPeer, echo

HERE, ABROAD = HostAddress("127.0.0.1", 1), HostAddress("10.0.0.9", 1)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        yield sock


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Lower the limit of open files so that 96 more can be opened, and yield it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        free = [os.dup(probe.fileno()) for _ in range(95)]  # there may be open ones between them
        limit = max(free) + 1
        for descriptor in free:
            os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_address_has_half_of_the_connections(sock: socket.socket) -> None:
    limit = ConnectionLimit(200, None)
    assert [limit.refusal(sock, HERE) for _ in range(100)] == [None] * 100

    assert limit.refusal(sock, HERE) == "max-connections-per-address is 100"
    assert [limit.refusal(sock, ABROAD) for _ in range(100)] == [None] * 100
    assert limit.refusal(sock, ABROAD) == "max-connections is 200"
    limit.leave(HERE)
    assert limit.refusal(sock, HERE) is None


def test_the_number_for_one_address_can_be_set(start_server: StartServer, open_peer: OpenPeer) -> None:
    server = start_server(RemotingServerSettings(max_connections_per_address=2))
    peers = [open_peer(server) for _ in range(2)]
    assert [peer.invoke(echo()).code for peer in peers] == [0, 0]

    assert open_peer(server).is_closed_by_peer()

    other = socket.create_connection(server.address, 20.0, source_address=("127.0.0.9", 0))
    with RawPeer(server.address, wrap=lambda own: own.close() or other) as abroad:
        assert abroad.invoke(echo()).code == 0
    assert server.refused_connections.value == 2  # with the one that `wrap` replaced


def test_the_last_quarter_of_the_descriptors_is_not_for_connections(few_descriptors: int) -> None:
    """With a limit of 1,024 idle connections took all of them, and no client could store a message."""
    limit, socks, reason = ConnectionLimit(1 << 20, 1 << 20), [], None
    while reason is None:
        socks.append(socket.socket())
        reason = limit.refusal(socks[-1], HERE)
    for sock in socks:
        sock.close()

    assert socks
    assert reason == (
        f"the process may have {few_descriptors} open files, and the last {few_descriptors // 4} are not for "
        "connections; raise the limit (ulimit -n, or LimitNOFILE)"
    )


def test_a_start_raises_the_limit_of_open_files(few_descriptors: int, start_server: StartServer) -> None:
    start_server()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard > few_descriptors


def test_refused_connections_write_a_few_lines(start_server: StartServer, open_peer: OpenPeer) -> None:
    server = start_server(RemotingServerSettings(max_connections=1))
    assert open_peer(server).invoke(echo()).code == 0

    with capture_logs() as events:
        for _ in range(30):
            assert open_peer(server).is_closed_by_peer()

    assert [event["event"] for event in events if event["log_level"] == "warning"] == [
        "remoting.connection_refused"
    ] * 10
    assert server.refused_connections.value == 30

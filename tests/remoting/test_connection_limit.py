"""Connections of hostile clients: they take neither the files of the store nor the connections of other addresses."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress
from mqtemplate.processes import raise_descriptor_limit
from mqtemplate.remoting import RemotingServer, RemotingServerSettings
from mqtemplate.remoting.settings import ConnectionLimit
from tests.remoting.conftest import OpenPeer, StartServer
from tests.remoting.wire import RawPeer, echo
from tests.waiting import eventually

HERE, ABROAD = HostAddress("127.0.0.1", 1), HostAddress("10.0.0.9", 1)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        yield sock


@pytest.fixture
def open_files() -> Iterator[int]:
    """Raise the limit of open files as far as possible, and yield it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    yield resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads TCP_INFO of Linux")
def test_clients_that_connect_at_once_while_the_server_is_busy_all_find_a_place(open_files: int) -> None:
    """A connection that finds no place in the queue of the socket is tried again after 1 s, then 2 s, then 4 s."""
    limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    count = min(1_100, limit, open_files // 3)
    settings = RemotingServerSettings(max_connections_per_address=count)
    server = RemotingServer(HostAddress("127.0.0.1", 0), settings, SystemClock())
    server.bind()  # it accepts no connection yet

    with contextlib.ExitStack() as stack:
        stack.callback(server.stop, 0)
        socks = [stack.enter_context(socket.create_connection(server.address, 20.0)) for _ in range(count)]
        repeated = [syns for sock in socks if (syns := total_retransmits(sock))]
        server.start()

        assert not repeated
        eventually(lambda: len(server.connections()) == count, "the server accepts all of them")
        assert server.refused_connections.value == 0


def total_retransmits(sock: socket.socket) -> int:
    """Return how many packets of a connection were sent again. Source: ``linux/tcp.h``: ``tcp_info``."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[100:104], sys.byteorder)


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

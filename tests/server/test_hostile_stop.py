"""SIGTERM while hostile clients keep the server busy: it ends within its drain time."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData
from tests.server.process import BrokerProcess
from tests.server.tool import Tool, pull_header

_CLIENTS = 4


def heartbeats(client: int) -> bytes:
    """Return heartbeats with new groups each, as one client sends them without waiting for responses."""
    frames = []
    for number in range(40):
        names = [f"hostile-{client}-{number}-{index}" for index in range(500)]
        heartbeat = HeartbeatData(
            client_id=f"hostile-{client}", consumer_data_set=[ConsumerData(group_name=name) for name in names]
        )
        frames.append(encode_command(RemotingCommand(RequestCode.HEART_BEAT, opaque=number, body=heartbeat.encode())))
    return b"".join(frames)


def pulls(client: int) -> bytes:
    """Return pulls that the server holds."""
    frames = []
    for number in range(5_000):
        fields = {"sys_flag": 6, "suspend_timeout_millis": 1 << 62, "subscription": "*", "sub_version": 0}
        header = pull_header("orders", 1, group="hostile", **fields)
        request = RemotingCommand.request(RequestCode.PULL_MESSAGE, header, opaque=number)
        frames.append(encode_command(request))
    return b"".join(frames)


def send_all(address: HostAddress, data: bytes) -> socket.socket:
    """Send *data* as far as the server reads it, and read no response."""
    sock = socket.create_connection(address, 20.0)
    sock.settimeout(0.5)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


@pytest.mark.parametrize("attack", [heartbeats, pulls])
def test_sigterm_ends_the_server_though_clients_keep_it_busy(tmp_path: Path, attack: object) -> None:
    """The heartbeats held its threads for minutes, and SIGTERM waited for them."""
    with BrokerProcess(tmp_path) as server, Tool(server.address) as neighbour:
        neighbour.send("orders", b"before")
        hostile = [send_all(server.address, attack(client)) for client in range(_CLIENTS)]  # type: ignore[operator]
        neighbour.send("orders", b"beside", queue_id=1)

        code, output, errors = server.stop()

        for sock in hostile:
            sock.close()
    assert (code, output.splitlines()[-1]) == (0, "stopped; all acknowledged messages are on disk"), errors[-2_000:]
    with BrokerProcess(tmp_path) as server, Tool(server.address) as neighbour:
        assert neighbour.send("orders", b"after", queue_id=1).code == ResponseCode.SUCCESS

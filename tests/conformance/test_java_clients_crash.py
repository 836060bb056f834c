"""The server is killed with SIGKILL while RocketMQ's Java clients send. No acknowledged message is lost."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import java_program
from tests.conformance.servers import BrokerProcess

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_THREADS = 8
_ACKNOWLEDGED_BEFORE_KILL = 300


def test_acknowledged_messages_survive_a_kill(rocketmq: None, tmp_path: Path) -> None:
    """Kill the server twice: while a producer 5.5.0 sends, and while a producer 4.9.8 sends."""
    acknowledged: list[str] = []
    for version in ("5.5.0", "4.9.8"):
        with (
            BrokerProcess(tmp_path) as server,
            java_program("Flood", server.address, "flood", str(_THREADS), version, version=version) as lines,
        ):
            acknowledged += islice(lines, _ACKNOWLEDGED_BEFORE_KILL)
            server.kill()
            acknowledged += lines

    with BrokerProcess(tmp_path) as server, JavaClient(server) as client:
        client.connect()
        found = [message.body.decode() for message in client.read("flood")]

    assert len(acknowledged) >= 2 * _ACKNOWLEDGED_BEFORE_KILL
    assert set(map(str.strip, acknowledged)) - set(found) == set()

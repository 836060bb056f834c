"""Our server is killed with SIGKILL while RocketMQ's Java clients send: what they were told was stored is there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import java_program, why_not
from tests.conformance.servers import OurServer

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_THREADS = 8
_TOLD_BEFORE_THE_KILL = 300


def test_what_producers_were_told_was_stored_is_there_after_a_kill(tmp_path: Path) -> None:
    """Two kills, each under a producer of another version."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    told: list[str] = []
    for version in ("5.5.0", "4.9.8"):
        with (
            OurServer(tmp_path) as server,
            java_program("Flood", server.address, "flood", str(_THREADS), version, version=version) as lines,
        ):
            told += islice(lines, _TOLD_BEFORE_THE_KILL)
            server.kill()
            told += lines

    with OurServer(tmp_path) as server, JavaClient(server) as client:
        client.connect()
        found = [message.body.decode() for message in client.read("flood")]

    assert len(told) >= 2 * _TOLD_BEFORE_THE_KILL
    assert set(map(str.strip, told)) - set(found) == set()

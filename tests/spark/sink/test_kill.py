"""Kills while the sink publishes: each row is stored once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from bench.spark_kill import query_kill_rounds, sink_kill_rounds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_writers_and_of_the_server_store_each_row_once(tmp_path: Path) -> None:
    """The tasks' own code in processes, a server with a folder, and SIGKILLs at random moments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    outcome = sink_kill_rounds(tmp_path, port, kills=3, seed=4_466, batches=20)

    assert (outcome.lost, outcome.doubled) == ([], [])
    assert outcome.kills == {"executor": 3, "server": 3}


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_kills_of_driver_jvm_and_workers_lose_and_double_nothing(tmp_path: Path) -> None:
    """A query copies a topic through the sink, and a listener notes the numbers of each ``(query_id, batch_id)``."""
    outcome = query_kill_rounds(tmp_path, kills=1, seed=4_466, count=4_000)

    assert (outcome.lost, outcome.doubled) == ([], [])
    assert outcome.kills == {"driver": 1, "jvm": 1, "executor": 1}

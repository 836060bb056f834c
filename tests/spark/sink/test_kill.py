"""Kills while the sink publishes: each row is stored once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from bench.peer.rocketmq import free_port
from bench.spark_kill import query_kill_rounds, sink_kill_rounds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_writers_and_of_the_server_store_each_row_once(tmp_path: Path) -> None:
    """The tasks' own code in processes, a server with a folder, and SIGKILLs at random moments."""
    outcome = sink_kill_rounds(tmp_path, free_port(), kills=3, seed=4_466, batches=20)

    assert (outcome.lost, outcome.doubled) == ([], [])
    assert outcome.kills == {"executor": 3, "server": 3}


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["embedded", "server"])
def test_kills_of_a_query_and_its_broker_lose_and_double_nothing(tmp_path: Path, place: str) -> None:
    """A query copies a topic through the sink, and a listener notes the numbers of each ``(query_id, batch_id)``."""
    port = free_port() if place == "server" else None
    outcome = query_kill_rounds(tmp_path, kills=1, seed=4_466, count=4_000, port=port)

    assert (outcome.lost, outcome.doubled) == ([], [])
    assert outcome.kills == dict.fromkeys(["driver", "jvm", "executor", *(["server"] if port else [])], 1)

"""Kills while listeners write tables: each message is in each table once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from bench.spark_exactly_once import SINKS, kill_rounds, unavailable_reason

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(1_500)]


def test_kills_of_a_driver_and_its_executors_lose_and_double_nothing(tmp_path: Path) -> None:
    """All tables of `examples/spark_tables.py` at once; Delta and Iceberg by ``make test-spark VERSION=4.1``."""
    names = [name for name in SINKS if unavailable_reason(name) is None]

    outcomes = kill_rounds(tmp_path, names, kills=1, seed=4_466, count=1_000)

    assert "parquet" in outcomes
    for name, outcome in outcomes.items():
        assert (name, outcome.lost, outcome.doubled) == (name, [], [])
        assert set(outcome.kills) == {"driver", "executor"}

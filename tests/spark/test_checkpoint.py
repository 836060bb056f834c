"""Checkpoint folder of a query, read without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.errors import SparkError
from mqtemplate.spark.checkpoint import QueryCheckpoint


def test_a_checkpoint_has_the_planned_and_the_committed_batches(tmp_path: Path) -> None:
    """Spark writes the end of a batch before it runs, and a commit file after it."""
    checkpoint = QueryCheckpoint(tmp_path)
    assert (checkpoint.planned(), checkpoint.committed(), checkpoint.end_of(0)) == (-1, -1, None)

    (tmp_path / "offsets").mkdir()
    (tmp_path / "commits").mkdir()
    (tmp_path / "metadata").write_text('{"id":"one-and-only"}')
    for batch_id in range(3):
        lines = ["v1", "{}", json.dumps({"orders": {"0": 10 * batch_id}})]
        (tmp_path / "offsets" / str(batch_id)).write_text("\n".join(lines))
    (tmp_path / "offsets" / ".2.crc").write_text("")
    (tmp_path / "commits" / "1").write_text("v1\n{}")

    assert (checkpoint.planned(), checkpoint.committed()) == (2, 1)
    assert checkpoint.end_of(2) == {("orders", 0): 20}
    assert checkpoint.query_id() == "one-and-only"
    assert checkpoint.is_committed(1)
    assert not checkpoint.is_committed(2)


def test_a_checkpoint_of_another_query_is_refused(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text('v1\n{}\n{"logOffset":3}\n{"logOffset":4}')

    with pytest.raises(SparkError, match="is not of a Spark listener's query"):
        QueryCheckpoint(tmp_path).end_of(0)


def test_the_start_of_the_first_batch_is_stored(tmp_path: Path) -> None:
    checkpoint = QueryCheckpoint(tmp_path / "new")
    assert checkpoint.first_offsets() is None

    checkpoint.write_first_offsets({("orders", 0): 7, ("orders", 1): 0})

    assert QueryCheckpoint(tmp_path / "new").first_offsets() == {("orders", 0): 7, ("orders", 1): 0}

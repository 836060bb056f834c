"""Checkpoint folder of a query, read without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.errors import SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.spark.checkpoint import QueryCheckpoint

QUEUE = MessageQueue("orders", "broker-a", 0)


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
    assert checkpoint.end_of(2) == {QUEUE: 20}
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

    checkpoint.write_first_offsets({QUEUE: 7, MessageQueue("orders", "broker-b", 0): 0})

    expected = {QUEUE: 7, MessageQueue("orders", "broker-b", 0): 0}
    assert QueryCheckpoint(tmp_path / "new").first_offsets() == expected


FIRST_OFFSETS = "mqtemplate-first-offsets.json"


def write_version_1(folder: Path) -> QueryCheckpoint:
    """Write the files of a query after its second batch, as releases with offsets of version 1 left them."""
    for name, text in {
        "metadata": '{"id":"8b2d6a3c-64d2-4a8f-9d4b-1f6a4b8f9d10"}',
        FIRST_OFFSETS: '{"orders": {"0": 5, "1": 0}}',
        "offsets/0": 'v1\n{"batchWatermarkMs":0}\n{"orders":{"0":15,"1":4}}',
        "offsets/1": 'v1\n{"batchWatermarkMs":0}\n{"orders":{"0":25,"1":4}}',
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return QueryCheckpoint(folder)


def test_a_checkpoint_with_offsets_of_version_1_is_read(tmp_path: Path) -> None:
    checkpoint = write_version_1(tmp_path)

    assert checkpoint.first_offsets() == {QUEUE: 5, MessageQueue("orders", "broker-a", 1): 0}
    assert checkpoint.end_of(1) == {QUEUE: 25, MessageQueue("orders", "broker-a", 1): 4}
    checkpoint.check()


def read_all(checkpoint: QueryCheckpoint) -> None:
    checkpoint.check()
    checkpoint.query_id()
    checkpoint.first_offsets()


@pytest.mark.parametrize("name", ["metadata", FIRST_OFFSETS, "offsets/0", "offsets/1"])
@pytest.mark.parametrize("damage", [b"", b"{", b"v1\n{}", b"null", b"\xff\xfe garbled", b"[1]"])
def test_the_error_for_a_damaged_file_names_it_and_says_what_to_do(tmp_path: Path, name: str, damage: bytes) -> None:
    """A disk that was full leaves empty files. Offsets of version 2 are damaged in the same ways."""
    checkpoint = write_version_1(tmp_path)
    (tmp_path / name).write_bytes(damage)

    with pytest.raises(SparkError, match=rf"checkpoint .*{name}.*(from a backup|permissions)"):
        read_all(checkpoint)


@pytest.mark.parametrize("name", ["metadata", FIRST_OFFSETS, "offsets/0", "offsets/1"])
def test_a_file_that_was_cut_off_is_an_error_or_reads_as_before(tmp_path: Path, name: str) -> None:
    checkpoint = write_version_1(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for length in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:length])

        with pytest.raises(SparkError, match="checkpoint .*"):
            read_all(checkpoint)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A file is in the place of the folder: like missing permissions, but also for root."""
    (tmp_path / "offsets").write_text("no folder")

    with pytest.raises(SparkError, match="offsets cannot be read .*; check the permissions and the owner"):
        QueryCheckpoint(tmp_path).planned()

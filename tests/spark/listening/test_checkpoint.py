"""Checkpoint folder of a query, read without Spark."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.errors import SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.spark.listening.checkpoint import QueryCheckpoint
from mqtemplate.spark.records.offsets import to_spark

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


# --- every file of a query, damaged in every way ---------------------------------------------------


def write_like_spark(path: Path, text: str) -> None:
    """Write a file and its checksums, as Hadoop does for Spark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(data)
    sums = b"".join(zlib.crc32(data[at : at + 512]).to_bytes(4, "big") for at in range(0, len(data), 512))
    path.with_name(f".{path.name}.crc").write_bytes(b"crc\0" + (512).to_bytes(4, "big") + sums)


def offsets_text(end: int) -> str:
    metadata = {"batchWatermarkMs": 0, "conf": {"spark.sql.shuffle.partitions": "2", "padding": "x" * 600}}
    return f"v1\n{json.dumps(metadata)}\n{json.dumps(to_spark({QUEUE: end}))}"


def write_interrupted(folder: Path, batches: int) -> QueryCheckpoint:
    """Write the checkpoint of a query that was killed in its last batch."""
    checkpoint = QueryCheckpoint(folder)
    checkpoint.write_first_offsets({QUEUE: 0})
    write_like_spark(folder / "metadata", '{"id":"8b2d6a3c-64d2-4a8f-9d4b-1f6a4b8f9d10"}')
    for batch_id in range(batches):
        write_like_spark(folder / f"offsets/{batch_id}", offsets_text(10 * (batch_id + 1)))
        if batch_id < batches - 1:
            write_like_spark(folder / f"commits/{batch_id}", 'v1\n{"nextBatchWatermarkMs":0}')
    return checkpoint


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "emptied": lambda path: path.write_bytes(b""),
    "garbled": lambda path: path.write_bytes(path.read_bytes()[:9] + b"\xff" + path.read_bytes()[10:]),
    "changed": lambda path: path.write_bytes(path.read_bytes().translate(bytes.maketrans(b"013", b"103"))),
    "deleted": Path.unlink,
}
SAME, REPLAY = "reads as before", "repeats a committed batch"
OUTCOMES = {
    "metadata": dict.fromkeys(DAMAGES, "metadata is (damaged|missing)|metadata cannot be read"),
    "offsets/2": dict.fromkeys(DAMAGES, "offsets/2 (is damaged|is missing|cannot be read)"),
    "offsets/1": dict.fromkeys(DAMAGES, "offsets/1 (is damaged|is missing|cannot be read)"),
    "offsets/0": dict.fromkeys(DAMAGES, SAME),
    "commits/1": dict.fromkeys(DAMAGES, "commits/1 (is damaged|cannot be read)") | {"deleted": REPLAY},
    "commits/0": dict.fromkeys(DAMAGES, SAME),
    ".metadata.crc": dict.fromkeys(DAMAGES, SAME)
    | {"truncated": "metadata is damaged", "garbled": "metadata is damaged"},
    "offsets/.2.crc": dict.fromkeys(DAMAGES, SAME)
    | {"truncated": "offsets/2 is damaged", "garbled": "offsets/2 is damaged"},
    FIRST_OFFSETS: dict.fromkeys(DAMAGES, f"{FIRST_OFFSETS} (is damaged|cannot be read)")
    | {"deleted": SAME, "changed": SAME},
}
"""File -> damage -> the text of the error, `SAME` or `REPLAY`. Spark does not read older batches. Checksums that are
missing or no checksums are not compared, as by Spark; the file that was changed in our own format cannot be noticed."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OUTCOMES)
def test_each_damaged_file_of_a_query_is_an_error_that_names_it_or_does_no_harm(
    tmp_path: Path, name: str, damage: str
) -> None:
    """The query was killed in its third batch."""
    checkpoint = write_interrupted(tmp_path, 3)
    DAMAGES[damage](tmp_path / name)

    outcome = OUTCOMES[name][damage]
    if outcome not in (SAME, REPLAY):
        with pytest.raises(SparkError, match=rf"checkpoint .*({outcome}).*(backup|permissions|Delete the file)"):
            read_all(checkpoint)
        return
    read_all(checkpoint)
    assert checkpoint.committed() == (0 if outcome == REPLAY else 1)
    assert checkpoint.end_of(1) == {QUEUE: 20}


def test_the_first_batch_is_not_repeated_from_another_start(tmp_path: Path) -> None:
    checkpoint = write_interrupted(tmp_path, 1)
    (tmp_path / FIRST_OFFSETS).unlink()

    with pytest.raises(SparkError, match=f"{FIRST_OFFSETS} is missing; it has the start of the first batch"):
        checkpoint.check()


@pytest.mark.parametrize("left", ["metadata", "offsets"])
def test_a_folder_with_a_missing_part_is_not_a_new_query(tmp_path: Path, left: str) -> None:
    """Spark would go on with another id, or give a committed batch other messages under its id."""
    checkpoint = write_interrupted(tmp_path, 3)
    shutil.rmtree(tmp_path / "offsets") if left == "offsets" else (tmp_path / "metadata").unlink()

    with pytest.raises(SparkError, match=r"checkpoint .* is missing; .*or delete it: the query then starts at"):
        checkpoint.check()


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A file is in the place of the folder: like missing permissions, but also for root."""
    (tmp_path / "offsets").write_text("no folder")

    with pytest.raises(SparkError, match="offsets cannot be read .*; check the permissions and the owner"):
        QueryCheckpoint(tmp_path).planned()

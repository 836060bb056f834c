"""Store folder, read by a process that does not own it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.location.folder import LogWindow, MappedFiles, StoreFolder

QUEUE = MessageQueue("orders", "broker-a", 0)


def test_the_end_of_a_queue_follows_its_owner(broker: EmbeddedBroker) -> None:
    """Files are created full of zeros, so a queue ends at the first unit of size 0."""
    folder = StoreFolder(broker.path)
    seen = []
    for number in range(3):
        broker.sends.send(Message("orders", b"%d" % number), QUEUE)
        seen.append(folder.max_offset("orders", 0))

    assert seen == [1, 2, 3]
    assert folder.topics() == ["orders"]
    assert folder.queue_ids("orders") == [0]


def test_units_are_read_across_files(tmp_path: Path) -> None:
    small = EmbeddedSettings(mapped_file_size_consume_queue=10 * 20)
    with EmbeddedBroker(tmp_path / "store", small, VirtualClock()) as broker:
        for _ in range(30):
            broker.sends.send(Message("orders", b""), QUEUE)
        folder = StoreFolder(tmp_path / "store")

        units = folder.units("orders", 0, 7, 26)

        assert folder.max_offset("orders", 0) == 30
        assert len(units) == 19
        assert (np.diff(units["physical_offset"].astype(np.int64)) == units["size"][0]).all()


def test_a_topic_without_messages_is_an_empty_queue(broker: EmbeddedBroker) -> None:
    folder = StoreFolder(broker.path)

    assert folder.queue_ids("orders") == []
    assert (folder.min_offset("orders", 0), folder.max_offset("orders", 0)) == (0, 0)


def test_missing_offsets_are_an_error_with_the_existing_ones(broker: EmbeddedBroker) -> None:
    broker.sends.send(Message("orders", b""), QUEUE)

    with pytest.raises(OffsetOutOfRangeError, match="offsets 0 to 5 are not all stored: the queue goes from 0 to 1"):
        StoreFolder(broker.path).units("orders", 0, 0, 5)


def test_a_queue_starts_at_the_first_record_that_is_not_deleted(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """The owner deletes old commit log files first; their units are deleted later."""
    store = write_foreign_folder(tmp_path / "store", [foreign_record(body=bytes(400))] * 20, log_file_size=1_200)
    folder = StoreFolder(store)
    for segment in folder.log_segments()[:4]:
        segment.path.unlink()

    assert folder.min_offset("orders", 0) == 8  # two records a file
    assert folder.max_offset("orders", 0) == 20


def test_blanks_before_the_first_message_are_not_messages(tmp_path: Path, write_foreign_folder: Any) -> None:
    """A queue that was rebuilt from a truncated log starts with blanks. RocketMQ marks them by their size."""
    store = write_foreign_folder(tmp_path / "store", [])
    unit = np.array([(0, 0x7FFF_FFFF, 0)] * 3 + [(0, 91, 0)], [("p", ">i8"), ("s", ">i4"), ("t", ">i8")])
    (queue,) = (store / "consumequeue" / "orders" / "0").iterdir()
    queue.write_bytes(unit.tobytes().ljust(2_000, b"\0"))

    assert StoreFolder(store).min_offset("orders", 0) == 3
    assert StoreFolder(store).max_offset("orders", 0) == 4


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_queue_is_searched_by_store_time(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any, ipv6: bool
) -> None:
    """The offset of the store time depends on the length of the producer's address."""
    host = bytes(20 if ipv6 else 8)
    records = [foreign_record(store_timestamp=1_000 + 10 * n, born_host=host, body=bytes(200)) for n in range(50)]
    folder = StoreFolder(write_foreign_folder(tmp_path / "store", records))

    found = [folder.search_offset("orders", 0, at) for at in (0, 1_000, 1_001, 1_250, 1_490, 1_491)]

    assert found == [0, 0, 1, 25, 49, 50]


def test_reading_takes_no_lock_and_writes_nothing(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to another process: its files are opened for reading only."""
    broker.sends.send(Message("orders", b"body"), QUEUE)
    flags = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flag, *rest: flags.append(flag) or opened(path, flag, *rest))
    folder = StoreFolder(broker.path)

    units = folder.units("orders", 0, folder.min_offset("orders", 0), folder.max_offset("orders", 0))
    windows = list(folder.windows(units["physical_offset"].astype(np.int64)))
    folder.make_durable(0, 100)

    assert set(flags) == {os.O_RDONLY}
    assert not windows[0][0].data.flags.writeable


def test_the_queues_of_a_task_map_each_file_once(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """Their records are in the same files. A file that was replaced is mapped again."""
    store = write_foreign_folder(tmp_path / "store", [foreign_record(body=bytes(400))] * 4, log_file_size=1_200)
    mapped = MappedFiles()
    first, again = (windows(store, mapped) for _ in range(2))
    path = first[0].path
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)

    replaced = windows(store, mapped)

    assert [window is same for window, same in zip(first, again, strict=True)] == [True, True]
    assert [window is same for window, same in zip(first, replaced, strict=True)] == [False, True]
    assert len(pickle.loads(pickle.dumps(mapped))) == 0


def windows(store: Path, mapped: MappedFiles) -> list[LogWindow]:
    folder = StoreFolder(store, mapped)
    return [window for window, _ in folder.windows(folder.units("orders", 0, 0, 4)["physical_offset"].astype(np.int64))]


def test_only_the_files_that_were_used_last_stay_mapped(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file counts as memory of the task."""
    store = write_foreign_folder(tmp_path / "store", [foreign_record(body=bytes(400))] * 4, log_file_size=1_200)
    mapped = MappedFiles()
    monkeypatch.setattr(MappedFiles, "MAX_BYTES", 1_200)

    first, again = (windows(store, mapped) for _ in range(2))

    assert len(mapped) == 1
    assert first[0] is not again[0]


def test_records_are_flushed_before_they_are_read(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power failure could remove messages that Spark has counted."""
    broker.sends.send(Message("orders", b"body"), QUEUE)
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name))

    StoreFolder(broker.path).make_durable(0, 100)

    assert flushed == [f"{0:020d}"]


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), (".", "is not a store")])
def test_a_folder_that_is_not_a_store_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SparkError, match=words):
        StoreFolder(tmp_path / name)

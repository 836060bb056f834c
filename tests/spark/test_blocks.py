"""The folder as a stranger sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.blocks import LocalBlocks

QUEUE = MessageQueue("orders", "broker-a", 0)


def test_the_end_of_a_queue_moves_with_its_owner(broker: EmbeddedBroker) -> None:
    """Files are made full of zeros: a unit of size 0 is where the data ends."""
    blocks = LocalBlocks(broker.path)
    seen = []
    for number in range(3):
        broker.send(Message("orders", b"%d" % number), QUEUE)
        seen.append(blocks.max_offset("orders", 0))

    assert seen == [1, 2, 3]
    assert blocks.topics() == ["orders"]
    assert blocks.queue_ids("orders") == [0]


def test_units_are_read_over_file_borders(tmp_path: Path) -> None:
    small = EmbeddedSettings(mapped_file_size_consume_queue=10 * 20)
    with EmbeddedBroker(tmp_path / "store", small, VirtualClock()) as broker:
        for _ in range(30):
            broker.send(Message("orders", b""), QUEUE)
        blocks = LocalBlocks(tmp_path / "store")

        units = blocks.units("orders", 0, 7, 26)

        assert blocks.max_offset("orders", 0) == 30
        assert len(units) == 19
        assert (np.diff(units["physical_offset"].astype(np.int64)) == units["size"][0]).all()


def test_a_topic_without_messages_is_an_empty_queue(broker: EmbeddedBroker) -> None:
    blocks = LocalBlocks(broker.path)

    assert blocks.queue_ids("orders") == []
    assert (blocks.min_offset("orders", 0), blocks.max_offset("orders", 0)) == (0, 0)


def test_offsets_that_are_not_there_are_an_error_that_tells_what_is(broker: EmbeddedBroker) -> None:
    broker.send(Message("orders", b""), QUEUE)

    with pytest.raises(OffsetOutOfRangeError, match="offsets 0 to 5 are not all there: the queue goes from 0 to 1"):
        LocalBlocks(broker.path).units("orders", 0, 0, 5)


def test_a_queue_begins_at_the_first_record_that_was_kept(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """The owner deletes old commit log files first; the units that pointed there stay for a while."""
    store = write_foreign_folder(tmp_path / "store", [foreign_record(body=bytes(400))] * 20, log_file_size=1_200)
    blocks = LocalBlocks(store)
    for segment in blocks.log_segments()[:4]:
        segment.path.unlink()

    assert blocks.min_offset("orders", 0) == 8  # two records a file
    assert blocks.max_offset("orders", 0) == 20


def test_blanks_before_the_first_message_are_not_messages(tmp_path: Path, write_foreign_folder: Any) -> None:
    """A queue that was rebuilt from a cut log begins with them. Upstream marks them by their size."""
    store = write_foreign_folder(tmp_path / "store", [])
    unit = np.array([(0, 0x7FFF_FFFF, 0)] * 3 + [(0, 91, 0)], [("p", ">i8"), ("s", ">i4"), ("t", ">i8")])
    (queue,) = (store / "consumequeue" / "orders" / "0").iterdir()
    queue.write_bytes(unit.tobytes().ljust(2_000, b"\0"))

    assert LocalBlocks(store).min_offset("orders", 0) == 3
    assert LocalBlocks(store).max_offset("orders", 0) == 4


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_queue_is_searched_by_store_time(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any, ipv6: bool
) -> None:
    """The time stands behind the sender's address, whose length varies."""
    host = bytes(20 if ipv6 else 8)
    records = [foreign_record(store_timestamp=1_000 + 10 * n, born_host=host, body=bytes(200)) for n in range(50)]
    blocks = LocalBlocks(write_foreign_folder(tmp_path / "store", records))

    found = [blocks.search_offset("orders", 0, at) for at in (0, 1_000, 1_001, 1_250, 1_490, 1_491)]

    assert found == [0, 0, 1, 25, 49, 50]


def test_reading_takes_no_lock_and_writes_nothing(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to another process: its files are opened for reading only."""
    broker.send(Message("orders", b"body"), QUEUE)
    flags = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flag, *rest: flags.append(flag) or opened(path, flag, *rest))
    blocks = LocalBlocks(broker.path)

    units = blocks.units("orders", 0, blocks.min_offset("orders", 0), blocks.max_offset("orders", 0))
    windows = list(blocks.windows(units["physical_offset"].astype(np.int64)))
    blocks.make_durable(0, 100)

    assert set(flags) == {os.O_RDONLY}
    assert not windows[0][0].data.flags.writeable


def test_what_will_be_read_is_brought_to_the_disk_first(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could take back what Spark has counted already."""
    broker.send(Message("orders", b"body"), QUEUE)
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name))

    LocalBlocks(broker.path).make_durable(0, 100)

    assert flushed == [f"{0:020d}"]


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), (".", "is not a store")])
def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SparkError, match=words):
        LocalBlocks(tmp_path / name)

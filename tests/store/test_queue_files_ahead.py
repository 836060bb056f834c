"""A consume queue file may be created before its first unit. RocketMQ must not count the empty file as one unit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqtemplate.errors import StoreFullError
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.layout import CQ_UNIT_SIZE, NO_UNIT_YET, unpack_cq_unit
from mqtemplate.store.message_store import MessageStore
from tests.store.small_store import OpenStore, bodies, draft, kill, opened

TIMEOUT_S = 10


def first_unit(path: Path, file_start: int = 0) -> bytes:
    return (path / f"consumequeue/orders/0/{file_start:020d}").read_bytes()[:CQ_UNIT_SIZE]


def test_a_queue_file_created_ahead_starts_with_a_unit_past_every_log(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ takes the first bytes for a unit, even zeros, and would count the first message as the second. It drops
    a file whose first unit points past the end of the log."""
    store = open_store()

    store.prepare("orders", 0)

    assert first_unit(tmp_path) == NO_UNIT_YET
    assert unpack_cq_unit(NO_UNIT_YET) == ((1 << 63) - 1, 0, 0)


@pytest.mark.parametrize("count", [0, 10])
@pytest.mark.parametrize("was_killed", [False, True])
def test_a_queue_continues_in_a_file_that_was_created_ahead(
    open_store: OpenStore, tmp_path: Path, count: int, was_killed: bool
) -> None:
    """The first file, or the one after a full one; after a clean stop and after a kill."""
    store = open_store()
    for number in range(count):
        store.put(draft(b"%d" % number))
    store.prepare("orders", 0)
    assert first_unit(tmp_path, count * CQ_UNIT_SIZE) == NO_UNIT_YET

    if was_killed:
        kill(store)
    else:
        store.close()
    again = open_store()
    again.confirm(again.put(draft(b"next")).end, ["orders"])

    assert again.consume_queue("orders", 0).max_offset == count + 1
    assert bodies(again) == [*(b"%d" % number for number in range(count)), b"next"]


# --- a slow disk ----------------------------------------------------------------------------------


class SlowDisk(Disk):
    """A disk that creates the files of the topic ``slow`` when it is told to."""

    def __init__(self) -> None:
        self.started, self.go_on, self.is_full = threading.Event(), threading.Event(), False

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        if "slow" in path.parts:
            self.started.set()
            assert self.go_on.wait(TIMEOUT_S)
        return super().open(path, flags=flags)

    def allocate(self, fd: int, at: int, size: int) -> None:
        if self.is_full:
            raise OSError(28, os.strerror(28))
        super().allocate(fd, at, size)


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def store(tmp_path: Path, disk: SlowDisk) -> Iterator[MessageStore]:
    store = opened(tmp_path, disk=disk)
    yield store
    disk.go_on.set()
    store.close()


def test_other_queues_are_written_while_a_slow_disk_creates_a_file(store: MessageStore, disk: SlowDisk) -> None:
    with ThreadPoolExecutor() as threads:
        prepared = threads.submit(store.prepare, "slow", 0)
        assert disk.started.wait(TIMEOUT_S)

        store.put(draft(b"x", "fast"))

        assert not prepared.done()
        disk.go_on.set()
        prepared.result(TIMEOUT_S)
    assert bodies(store, "fast") == [b"x"]


def test_writers_to_the_queue_wait_for_its_file(store: MessageStore, disk: SlowDisk) -> None:
    with ThreadPoolExecutor() as threads:
        prepared = [threads.submit(store.prepare, "slow", 0) for _ in range(2)]
        assert disk.started.wait(TIMEOUT_S)
        puts = [threads.submit(store.put, draft(b"%d" % number, "slow")) for number in range(3)]
        disk.go_on.set()
        for each in (*prepared, *puts):
            each.result(TIMEOUT_S)

    assert sorted(bodies(store, "slow")) == [b"0", b"1", b"2"]


def test_a_file_that_a_full_disk_refused_is_created_later(store: MessageStore, disk: SlowDisk) -> None:
    disk.go_on.set()
    disk.is_full = True
    with pytest.raises(StoreFullError):
        store.prepare("slow", 0)
    assert not store.has_queue("slow", 0)

    disk.is_full = False
    store.put(draft(b"x", "slow"))

    assert bodies(store, "slow") == [b"x"]

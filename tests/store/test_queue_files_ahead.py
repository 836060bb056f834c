"""A consume queue file may be created before its first unit, also by a slow disk; see the golden script as well."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqtemplate.errors import StoreFullError
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.message_store import MessageStore
from tests.store.small_store import bodies, draft, opened
from tests.waiting import PATIENCE_S

# --- a slow disk ----------------------------------------------------------------------------------


class SlowDisk(Disk):
    """A disk that creates the files of the topic ``slow`` when it is told to."""

    def __init__(self) -> None:
        self.started, self.go_on, self.is_full = threading.Event(), threading.Event(), False

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        if "slow" in path.parts:
            self.started.set()
            assert self.go_on.wait(PATIENCE_S)
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
        assert disk.started.wait(PATIENCE_S)

        store.put(draft(b"x", "fast"))

        assert not prepared.done()
        disk.go_on.set()
        prepared.result(PATIENCE_S)
    assert bodies(store, "fast") == [b"x"]


def test_writers_to_the_queue_wait_for_its_file(store: MessageStore, disk: SlowDisk) -> None:
    with ThreadPoolExecutor() as threads:
        prepared = [threads.submit(store.prepare, "slow", 0) for _ in range(2)]
        assert disk.started.wait(PATIENCE_S)
        puts = [threads.submit(store.put, draft(b"%d" % number, "slow")) for number in range(3)]
        disk.go_on.set()
        for each in (*prepared, *puts):
            each.result(PATIENCE_S)

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

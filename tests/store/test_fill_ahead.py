"""With SYNC_FLUSH the log is filled with zeros ahead of the writer, in another thread: never where a record may be."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFullError
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import Drafts, RecordDraft
from mqtemplate.store import commit_log
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.files.disk_files import DiskFileQueue
from mqtemplate.store.settings import FlushDiskType
from tests.store.faulty_disk import FaultyDisk
from tests.store.small_store import bodies, draft, kill, opened, small

STEP = 1_024
FILE = 16_384
HOST = HostAddress("127.0.0.1", 10_911)


@pytest.fixture(autouse=True)
def small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "_FILL_STEP", STEP)


class RecordingDisk(FaultyDisk):
    """A disk that records where zeros are written, and lets a test act just before."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: list[tuple[int, int]] = []
        self.before_fill: Callable[[], object] = lambda: None

    def write_at(self, fd: int, data: bytes | memoryview, at: int) -> int:
        if not bytes(data).strip(b"\0"):
            self.filled.append((at, at + len(data)))
            self.before_fill()
        return super().write_at(fd, data, at)


@pytest.fixture
def disk() -> RecordingDisk:
    return RecordingDisk()


@pytest.fixture
def log(tmp_path: Path, disk: RecordingDisk) -> Iterator[CommitLog]:
    log = CommitLog(DiskFileQueue(tmp_path, FILE, disk), VirtualClock(), HOST, fills_ahead=True)
    yield log
    log.close()


def append(log: CommitLog, count: int = 1, size: int = 100) -> list[int]:
    """Append records with bodies of this size; return their physical offsets."""
    return [log.append(draft(b"\1" * size), number).physical_offset for number in range(count)]


def read_all(log: CommitLog, offsets: list[int]) -> list[bytes]:
    records = [log.read_at(offset) for offset in offsets]
    return [record.body for record in records if record is not None]


def test_the_next_part_is_filled_when_the_writer_comes_near(log: CommitLog, disk: RecordingDisk) -> None:
    wakes: list[int] = []
    log.on_wake(lambda: wakes.append(log.end))
    append(log)
    assert wakes == [log.end]

    log.step()
    assert disk.filled == [(STEP, 2 * STEP)]
    append(log, 2)
    assert len(wakes) == 1
    append(log, 3)
    log.step()

    assert len(wakes) == 2
    assert disk.filled == [(STEP, 2 * STEP), (2 * STEP, 3 * STEP)]


def test_nothing_is_filled_twice_or_far_ahead(log: CommitLog, disk: RecordingDisk) -> None:
    append(log)
    for _ in range(5):
        log.step()

    assert disk.filled == [(STEP, 2 * STEP)]


def test_a_writer_that_is_faster_needs_no_filling(log: CommitLog, disk: RecordingDisk) -> None:
    offsets = append(log, 200)

    assert disk.filled == []
    assert len(read_all(log, offsets)) == 200


def test_the_next_file_is_filled_before_it_is_used(log: CommitLog, disk: RecordingDisk) -> None:
    log.on_wake(log.step)
    offsets: list[int] = []
    while log.end < FILE + 100:
        before = log.end
        offsets += append(log)
        if before < FILE <= log.end:
            assert (0, STEP) in disk.filled

    assert len(read_all(log, offsets)) == len(offsets)
    assert [span for span in disk.filled if span[0] == 0] == [(0, STEP)]


def test_without_the_setting_nothing_is_filled(tmp_path: Path, disk: RecordingDisk) -> None:
    log = CommitLog(DiskFileQueue(tmp_path, FILE, disk), VirtualClock(), HOST)
    log.on_wake(log.step)
    append(log, 300)
    log.close()

    assert disk.filled == []


def test_a_record_that_is_written_during_the_filling_stays_whole(log: CommitLog, disk: RecordingDisk) -> None:
    """It fits before the part that is filled, so the writer does not wait."""
    offsets = append(log)
    disk.before_fill = lambda: offsets.extend(append(log, 3))
    log.step()

    assert read_all(log, offsets) == [b"\1" * 100] * 4


def test_the_writer_does_not_take_bytes_that_are_filled_now(
    log: CommitLog, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moves the limit of the writer has the lock: a writer that needs more waits for the end of the filling."""
    locked: list[bool] = []
    claim = log._claim

    def noted(size: int) -> None:
        locked.append(log._claim_lock.locked())
        claim(size)

    monkeypatch.setattr(log, "_claim", noted)
    disk.before_fill = lambda: locked.append(log._claim_lock.locked())
    append(log)
    log.step()
    append(log, 30)

    assert len(locked) > 2
    assert all(locked)


def test_no_record_is_overwritten_while_threads_write_and_fill(tmp_path: Path) -> None:
    """One thread fills without a pause, others append records of any size: each record stays whole."""
    settings = small(mapped_file_size_commit_log=FILE, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    store = opened(tmp_path, settings, disk=FaultyDisk())
    stopped = threading.Event()

    def fill() -> None:
        while not stopped.is_set():
            store._commit_log.step()

    def write(queue_id: int) -> None:
        for number in range(300):
            body = b"%d-%d " % (queue_id, number) * (1 + number % 40)
            if number % 7:
                store.put(draft(body, queue_id=queue_id))
            else:
                store.put(Drafts([draft(body, queue_id=queue_id)] * 3))

    filler = threading.Thread(target=fill)
    writers = [threading.Thread(target=write, args=(queue_id,)) for queue_id in range(3)]
    for thread in (filler, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stopped.set()
    filler.join()
    stored = [bodies(store, queue_id=queue_id) for queue_id in range(3)]
    kill(store)
    again = opened(tmp_path, settings)

    assert [len(each) for each in stored] == [300 + 2 * 43] * 3
    assert [bodies(again, queue_id=queue_id) for queue_id in range(3)] == stored
    again.close()


def test_a_full_disk_stops_the_filling_and_not_the_writer(log: CommitLog, disk: RecordingDisk) -> None:
    offsets = append(log)
    disk.judge = lambda number, kind: errno.ENOSPC if kind == "write" else 0
    with pytest.raises(StoreFullError, match="no room on the disk for 0000"):
        log.step()
    disk.judge = lambda number, found: 0
    offsets += append(log, 100)

    assert len(read_all(log, offsets)) == 101


def test_after_a_filled_part_the_log_ends_where_it_ended(tmp_path: Path) -> None:
    """The zeros after the last record do not count as records; the next process continues there."""
    settings = small(mapped_file_size_commit_log=FILE, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    store = opened(tmp_path, settings)
    store.put(RecordDraft("orders", 0, b"1", b""))
    store._commit_log.step()
    end = store.end_offset
    kill(store)
    again = opened(tmp_path, settings)

    assert again.end_offset == end
    again.put(RecordDraft("orders", 0, b"2", b""))
    assert bodies(again) == [b"1", b"2"]
    again.close()

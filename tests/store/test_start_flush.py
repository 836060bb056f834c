"""With SYNC_FLUSH the disk begins to write a message before its producer flushes, if no other one flushes anyway."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.message import Message
from mqtemplate.record.appends import PutResult
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType
from tests.store.faulty_disk import FaultyDisk
from tests.store.small_store import bodies, draft, opened, small


class RecordingDisk(FaultyDisk):
    """A disk that records which bytes are written early, beside its other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, int]] = []

    def start_flush(self, fd: int, at: int, size: int) -> None:
        self.started.append((at, size))


@pytest.fixture
def disk() -> RecordingDisk:
    return RecordingDisk()


def loaded(folder: Path, disk: RecordingDisk, mode: FlushDiskType = FlushDiskType.SYNC_FLUSH) -> MessageStore:
    settings = small(mapped_file_size_commit_log=16_384, flush_disk_type=mode)
    return opened(folder, settings, disk=disk)


def put_early(store: MessageStore, body: bytes) -> PutResult:
    """Store a message as a producer that flushes itself."""
    put = store.put(draft(body))
    store.start_flush(put)
    return put


def test_the_first_record_after_each_flush_is_written_early(tmp_path: Path, disk: RecordingDisk) -> None:
    store = loaded(tmp_path, disk)
    puts = []
    for number in range(3):
        put = put_early(store, b"%d" % number)
        store.confirm(put.end, ["orders"])
        puts.append((put.physical_offset, put.size))
    store.close()

    assert disk.started == puts


def test_records_after_one_that_is_not_flushed_are_left_to_the_flush(tmp_path: Path, disk: RecordingDisk) -> None:
    """Many threads send: one flush writes all their records, and a call for each would cost more than a send."""
    store = loaded(tmp_path, disk)
    first, *_, last = [put_early(store, b"%d" % number) for number in range(5)]
    store.confirm(last.end, ["orders"])
    store.close()

    assert disk.started == [(first.physical_offset, first.size)]


def test_with_async_flush_nothing_is_written_early(tmp_path: Path, disk: RecordingDisk) -> None:
    store = loaded(tmp_path, disk, FlushDiskType.ASYNC_FLUSH)
    store.confirm(put_early(store, b"one").end, ["orders"])
    store.close()

    assert disk.started == []


def test_a_record_in_the_next_file_is_written_early_there(tmp_path: Path, disk: RecordingDisk) -> None:
    store = loaded(tmp_path, disk)
    body = b"x" * 5_000
    for _ in range(5):
        store.confirm(put_early(store, body).end, ["orders"])
    stored = bodies(store)
    store.close()

    assert stored == [body] * 5
    sizes = {size for _, size in disk.started}
    assert len(sizes) == 1
    size = sizes.pop()
    # The blank at the end of the first file is not flushed yet when the fourth record is written.
    assert disk.started == [(at, size) for at in (0, size, 2 * size, size)]


def test_an_early_write_does_not_count_as_a_flush(tmp_path: Path, disk: RecordingDisk) -> None:
    store = loaded(tmp_path, disk)
    put = put_early(store, b"one")
    assert disk.started
    assert store.confirm_offset == put.physical_offset

    disk.judge = lambda number, kind: errno.EIO if kind == "flush" else 0
    with pytest.raises(StoreError, match="the message is written, but not safe"):
        store.confirm(put.end, ["orders"])
    assert store.confirm_offset == put.physical_offset
    disk.judge = lambda number, kind: 0
    store.close()


def test_a_send_is_written_early_and_one_without_waiting_is_not(tmp_path: Path, disk: RecordingDisk) -> None:
    settings = EmbeddedSettings(mapped_file_size_commit_log=1 << 20)
    store_files = FolderStoreFiles(tmp_path, disk)
    with EmbeddedBroker(settings=settings, clock=VirtualClock(), store_files=store_files) as broker:
        broker.sends.send_one_way(Message("orders", b"one"))
        assert disk.started == []
        start = broker.store.end_offset
        broker.sends.send(Message("orders", b"two"))

        assert disk.started == [(start, broker.store.end_offset - start)]

"""Systems that lack some calls: the store works with others that give the same guarantee, or says why not."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import SendError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.store.files import disk
from mqtemplate.store.files.disk import Disk

QUEUE = MessageQueue("orders", "broker-a", 0)
SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 20)


def blocks(path: Path) -> int:
    """Return the bytes for which the file has disk blocks."""
    return path.stat().st_blocks * 512


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A file of 3 MiB without blocks."""
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 3 << 20)
    assert blocks(path) == 0
    return path


def allocate(path: Path, at: int, size: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        Disk().allocate(fd, at, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def refusing(code: int) -> Callable[..., None]:
    """Return a call that fails."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


# --- flushing -----------------------------------------------------------------------------------------


def test_an_early_write_changes_nothing_and_ignores_what_is_refused(sparse: Path) -> None:
    fd = os.open(sparse, os.O_RDWR)
    os.pwrite(fd, b"record", 5_000)
    Disk().start_flush(fd, 5_000, 6)
    Disk().flush(fd)
    os.close(fd)
    Disk().start_flush(fd, 5_000, 6)  # no such descriptor

    assert sparse.read_bytes()[5_000:5_006] == b"record"


def test_without_sync_file_range_messages_are_flushed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr(disk, "_sync_file_range", None)
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.sends.send(Message("orders", b"one"), QUEUE)
        assert broker.store.confirm_offset == broker.store.end_offset


# --- allocation ---------------------------------------------------------------------------------------


def test_without_posix_fallocate_blocks_are_allocated_by_writing_them(
    sparse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "posix_fallocate")

    allocate(sparse, 0, 2 << 20)

    assert 2 << 20 <= blocks(sparse) < 3 << 20
    assert sparse.read_bytes() == bytes(3 << 20)


def test_content_survives_an_allocation_that_writes(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {5: b"first", 4_096 * 7 - 2: b"over a border", (1 << 20) - 1: b"chunk", (2 << 20) + 100: b"last"}
    with sparse.open("r+b") as file:
        for at, data in content.items():
            file.seek(at)
            file.write(data)
    before = sparse.read_bytes()
    monkeypatch.delattr(os, "posix_fallocate")

    allocate(sparse, 0, 3 << 20)

    assert sparse.read_bytes() == before
    assert blocks(sparse) >= 3 << 20


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_posix_fallocate_is_written_too(
    sparse: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusing(code))

    allocate(sparse, 0, 1 << 20)

    assert blocks(sparse) >= 1 << 20


def test_a_full_disk_is_reported_and_not_written_around(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        allocate(sparse, 0, 1 << 20)

    assert blocks(sparse) == 0


def send_until_refused(broker: EmbeddedBroker) -> int:
    """Send until the disk is full. Return the number of acknowledged messages."""
    for sent in range(1_000):
        try:
            broker.sends.send(Message("orders", bytes(1_000)), QUEUE)
        except SendError as exc:
            if not re.search(r"no room on the disk for .*free space there, then send again", str(exc)):
                raise
            return sent
    raise AssertionError("no message was refused")


def test_a_broker_without_posix_fallocate_refuses_messages_on_a_full_disk_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is acknowledged without its blocks, and sending works again once there is space."""
    monkeypatch.delattr(os, "posix_fallocate")
    write, is_full = os.pwrite, False

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    monkeypatch.setattr(disk, "pwrite", pwrite)
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.sends.send(Message("orders", b"before"), QUEUE)
        is_full = True
        sent = send_until_refused(broker)
        is_full = False
        broker.sends.send(Message("orders", b"after"), QUEUE)
        expected = [b"before", *[bytes(1_000)] * sent, b"after"]
        assert [message.body for message in broker.reader.pull(QUEUE, 0, 10_000).messages] == expected

    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        assert [message.body for message in broker.reader.pull(QUEUE, 0, 10_000).messages] == expected


# --- flush --------------------------------------------------------------------------------------------


@pytest.fixture
def full_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were flushed by ``F_FULLFSYNC``, as if the system were macOS."""
    flushed: list[int] = []
    monkeypatch.setattr(disk, "_FULL_SYNC", 51)
    monkeypatch.setattr(disk, "_sync", os.fsync)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: flushed.append(fd))
    return flushed


def test_a_flush_reaches_the_disk_and_not_only_the_cache_of_the_drive(sparse: Path, full_syncs: list[int]) -> None:
    disk = Disk()
    fd = disk.open(sparse)

    disk.flush(fd)
    disk.sync_folder(sparse.parent)

    assert full_syncs[0] == fd
    assert len(full_syncs) == 2
    disk.close(fd)


def test_a_file_system_without_full_fsync_is_flushed_by_fsync(
    sparse: Path, full_syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.ENOTTY))
    monkeypatch.setattr(disk, "_sync", flushed.append)
    monkeypatch.setattr(os, "fsync", flushed.append)
    file_disk = Disk()
    fd = file_disk.open(sparse)

    file_disk.flush(fd)
    file_disk.sync_folder(sparse.parent)

    assert flushed[0] == fd
    assert len(flushed) == 2
    file_disk.close(fd)


def test_an_error_of_a_full_fsync_is_reported(
    sparse: Path, full_syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.EIO))
    disk = Disk()
    fd = disk.open(sparse)

    with pytest.raises(OSError, match="Input/output error"):
        disk.flush(fd)

    disk.close(fd)


# --- a system that cannot work ------------------------------------------------------------------------

WITHOUT_LOCKS = """
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "fcntl" else find_spec(name)

from mqtemplate.brokers import EmbeddedBroker
try:
    EmbeddedBroker(sys.argv[1]).start()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_system_that_cannot_work_is_told_so_at_the_start(tmp_path: Path) -> None:
    """Python in a browser, for example, has no locks at all."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, tmp_path / "store"],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )

    assert ended.stdout == (
        "StoreError: a store directory needs file locks, and Python has neither fcntl nor msvcrt on this system "
        f"({sys.platform}); run the broker on Linux, macOS or Windows (mqtemplate broker), and point "
        "rocketmq.name-server at it\n"
    )
    assert not (tmp_path / "store").exists()

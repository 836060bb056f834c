"""Disk space: files take as much as they need, and each byte has its disk block before it is written through a map."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFullError
from mqtemplate.message import Message
from mqtemplate.store.files.disk_files import DiskFile, DiskFileQueue
from mqtemplate.store.settings import StoreSettings
from tests.store.faulty_disk import FaultyDisk, LedgerDisk, once
from tests.store.small_store import bodies, draft, opened

MIB = 1 << 20
PAGE = 4_096


def used_bytes(folder: Path) -> int:
    """Return the disk space of a folder as ``du`` does."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


# --- little space -------------------------------------------------------------------------------------


def test_an_application_with_few_messages_takes_less_than_eight_mebibytes(tmp_path: Path) -> None:
    """Messages of five topics, with and without delays, over some restarts."""
    clock = VirtualClock()
    for _ in range(3):
        with EmbeddedBroker(tmp_path, clock=clock) as broker:
            for number in range(100):
                properties = {0: {}, 1: {"DELAY": "3"}, 2: {"TIMER_DELAY_SEC": str(3_600 + number)}}[number % 3]
                broker.sends.send(Message(f"topic-{number % 5}", bytes(200), dict(properties)))
            for service in broker.services():
                service.step()
            clock.move_ms(2_000)

    assert used_bytes(tmp_path) < 8 * MIB


def test_files_are_created_with_their_first_use(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, clock=VirtualClock()) as broker:
        assert not any((tmp_path / name).exists() for name in ("timerwheel", "timerlog", "index", "commitlog"))

        broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_SEC": "60"}))
        for service in broker.services():
            service.step()

        assert (tmp_path / "timerwheel").stat().st_blocks * 512 < MIB


def test_a_file_is_allocated_in_steps_that_double(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "file", MIB, first_step=1)
    steps = [file.allocated]

    for end in (PAGE + 1, 5 * PAGE, 5 * PAGE, 17 * PAGE, MIB):
        file.allocate(end)
        steps.append(file.allocated)

    assert steps == [PAGE, 2 * PAGE, 5 * PAGE, 5 * PAGE, 17 * PAGE, MIB]
    assert (tmp_path / "file").stat().st_size == MIB
    file.close()


def test_only_the_first_file_of_a_queue_is_allocated_in_steps(tmp_path: Path) -> None:
    queue = DiskFileQueue(tmp_path, MIB)

    assert [queue.append_file().allocated for _ in range(3)] == [PAGE, MIB, MIB]
    queue.close()


# --- a full disk --------------------------------------------------------------------------------------


def large(**changes: object) -> StoreSettings:
    sizes: dict[str, object] = {"mapped_file_size_commit_log": MIB, "mapped_file_size_consume_queue": 20_000}
    return StoreSettings(**(sizes | changes))  # type: ignore[arg-type]


def test_a_step_without_space_refuses_the_message_and_the_next_one_is_stored(tmp_path: Path) -> None:
    """Each step of log and queue: the error is clear, and the acknowledged messages stay."""
    disk = FaultyDisk()
    store = opened(tmp_path, large(), disk=disk)
    stored: list[bytes] = []
    errors: list[str] = []
    refused = 0
    # Each step fails twice, once with twice the size; then it succeeds.
    disk.judge = lambda number, kind: errno.ENOSPC if kind == "allocate" and not refused % 2 else 0
    for number in range(1_000):
        body = b"%04d" % number + bytes(500)
        try:
            store.put(draft(body))
            stored.append(body)
        except StoreFullError as exc:
            errors.append(str(exc))
            refused += 1
        else:
            refused += refused % 2  # the next step finds a full disk again

    assert len(errors) > 8
    assert all(re.match(r"no room on the disk for .*free space there, then send again", text) for text in errors)
    assert bodies(store) == stored
    store.close()


def test_a_nearly_full_disk_is_used_to_its_end(tmp_path: Path) -> None:
    """If there is no space for a step of twice the size, the message gets what it needs."""
    disk = FaultyDisk()
    file = DiskFile(tmp_path / "file", MIB, disk, first_step=8 * PAGE)
    disk.judge = once(len(disk.calls), errno.ENOSPC)

    file.allocate(8 * PAGE + 1)

    assert file.allocated == 9 * PAGE
    file.close()


def test_a_sparse_file_of_another_broker_is_allocated_before_it_is_written(tmp_path: Path) -> None:
    """RocketMQ does not allocate its files."""
    settings = large()
    with_data = opened(tmp_path, settings)
    put = with_data.put(draft(b"first"))
    with_data.close()
    path = tmp_path / "commitlog" / f"{0:020d}"
    content = path.read_bytes().rstrip(b"\0")
    path.unlink()
    path.write_bytes(content)
    os.truncate(path, MIB)
    assert path.stat().st_blocks * 512 <= PAGE

    disk = LedgerDisk()
    store = opened(tmp_path, settings, disk=disk)
    store.put(draft(bytes(3 * PAGE)))

    assert disk.pages[path.stat().st_ino] >= set(range(3))
    assert put.physical_offset == 0
    store.close()


def test_a_failed_flush_marks_no_page_without_a_block(tmp_path: Path) -> None:
    """It marks all pages that were written, so that they are written again."""
    with capture_logs():
        file = DiskFile(tmp_path / "file", 64 * PAGE, first_step=2 * PAGE)
    file.write_mapped(0, b"x")
    file.write(40 * PAGE, b"by a system call")
    os.fsync(file._fd)
    before = (tmp_path / "file").stat().st_blocks

    file._disk.write_again(file._fd, file.view, file.size, file.allocated)

    os.fsync(file._fd)
    assert (tmp_path / "file").stat().st_blocks == before
    file.close()

"""The file layer alone: its calls to the operating system, and the files that it finds after a failure."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError
from mqtemplate.store.files.disk import Disk, disk_error, make_folder
from mqtemplate.store.files.disk_files import DiskFile, DiskFileQueue
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
from mqtemplate.store.files.store_files import ABORT_FILE, MemoryStoreFiles
from tests.store.faulty_disk import FaultyDisk, never, once
from tests.store.power_loss_disk import RestartedDisk

SIZE = 4_096


def queue_of(folder: Path, *, durable: bool, disk: Disk | None = None) -> DiskFileQueue:
    return DiskFileQueue(folder, SIZE, disk, rebuildable=not durable)


def put_file(folder: Path, number: int, data: bytes | None = None) -> Path:
    """Write a file of a queue; by default a complete one with content."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{number * SIZE:020d}"
    path.write_bytes(b"x" * SIZE if data is None else data)
    return path


def open_files() -> int:
    """Return the number of descriptors of this process, and one for the listing itself."""
    return len(list(Path("/proc/self/fd").iterdir()))


def failing(kind: str, code: int = errno.EIO) -> FaultyDisk:
    return FaultyDisk(lambda number, asked: code if asked == kind else 0)


# --- files of a queue after a power failure ------------------------------------------------------------


HALF = b"start"


@pytest.mark.parametrize(
    ("durable", "files", "kept"),
    [
        pytest.param(True, {0: None, 1: b"", 2: bytes(100), 3: b""}, 1, id="at the end, without a flushed byte"),
        pytest.param(False, {0: None, 1: b"", 2: bytes(100), 3: b""}, 1, id="the same of a queue"),
        pytest.param(False, {0: None, 2: None, 3: None}, 1, id="rebuildable: from the first gap on"),
        pytest.param(False, {0: None, 1: HALF, 2: None}, 1, id="rebuildable: from the first short one on"),
        pytest.param(True, {0: None, 1: b"", 2: None}, 3, id="empty in the middle of the log: the recovery judges it"),
        pytest.param(True, {0: None, 1: HALF}, 2, id="short after a whole one"),
    ],
)
def test_files_that_a_power_failure_left_are_dropped_or_get_their_length_back(
    tmp_path: Path, durable: bool, files: dict[int, bytes | None], kept: int
) -> None:
    for number, data in files.items():
        put_file(tmp_path / "q", number, data)

    queue = queue_of(tmp_path / "q", durable=durable)

    assert queue.starts == [SIZE * number for number in range(kept)]
    assert len(list((tmp_path / "q").iterdir())) == kept
    for number in range(kept):
        data = files[number]
        assert queue.read(number * SIZE, SIZE) == (b"x" * SIZE if data is None else data.ljust(SIZE, b"\0"))
    queue.close()


def test_a_file_missing_in_the_middle_of_the_log_is_named_and_no_file_is_changed(tmp_path: Path) -> None:
    paths = [put_file(tmp_path / "q", number, data) for number, data in [(0, None), (2, None), (3, b"")]]

    with pytest.raises(StoreFormatError, match=r"a file is missing between 0+ and 0+8192; restore it"):
        queue_of(tmp_path / "q", durable=True)

    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("length", [SIZE // 2, SIZE * 2])
def test_a_first_file_of_another_size_is_refused(tmp_path: Path, durable: bool, length: int) -> None:
    path = put_file(tmp_path / "q", 0, b"x" * length)

    with pytest.raises(
        StoreFormatError, match=f"has {length} bytes, but the settings or the other files say {SIZE}, so it was cut"
    ):
        queue_of(tmp_path / "q", durable=durable)

    assert path.stat().st_size == length


def test_truncated_bytes_do_not_return(tmp_path: Path) -> None:
    """`truncate` returns when all is on the disk. Files are removed from the last one on, so no gap can remain."""
    for number in range(4):
        put_file(tmp_path / "q", number)
    disk = FaultyDisk()
    queue = queue_of(tmp_path / "q", durable=True, disk=disk)
    before = len(disk.calls)

    queue.truncate(SIZE + 10)

    removed = ["unlink", "sync_folder"] * 2
    assert disk.calls[before:] == [*removed, "open", "open", "allocate", "open", "flush"]
    assert (queue.end, queue.read(SIZE, 12)) == (2 * SIZE, b"x" * 10 + bytes(2))
    queue.close()


# --- many files -----------------------------------------------------------------------------------------


def test_full_and_flushed_files_keep_one_descriptor(tmp_path: Path) -> None:
    """The descriptor of the map. The file that is written to has two."""
    queue = queue_of(tmp_path / "q", durable=False, disk=RestartedDisk())
    before = open_files()
    for _ in range(20):
        queue.append_file()

    queue.flush(0, 19 * SIZE + 1)

    assert open_files() - before == 21
    queue.close()
    loaded = queue_of(tmp_path / "q", durable=False)
    assert open_files() - before == 20
    loaded.files[3].write_mapped(0, b"late")
    loaded.flush(3 * SIZE, 4 * SIZE)
    assert open_files() - before == 20
    loaded.close()


@pytest.fixture
def few_files() -> Iterator[int]:
    """A low soft limit of open files, which may be raised to the hard limit."""
    gc.collect()  # files that others left open must not be closed while this test opens its own
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = open_files() + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_when_it_is_reached(tmp_path: Path, few_files: int) -> None:
    queue = queue_of(tmp_path / "q", durable=True, disk=RestartedDisk())

    for _ in range(60):
        queue.append_file()

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few_files
    queue.close()


def test_a_limit_of_open_files_that_cannot_be_raised_is_named(tmp_path: Path) -> None:
    disk = failing("open", errno.EMFILE)

    with pytest.raises(StoreError, match=r"this process has \d+ open files, which is its limit; raise the limit"):
        DiskFile(tmp_path / "file", SIZE, disk)


def test_readers_find_the_right_file_while_files_are_added_and_deleted(tmp_path: Path) -> None:
    """`find` always returns the file with the requested offset."""
    queue = MappedFileQueue(64)
    for number in range(50):
        queue.append_file().view[:8] = (number * 64).to_bytes(8, "big")
    wrong: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            for offset in range(queue.start, queue.end, 64):
                found = queue.find(offset)
                if found is not None and (found[1] != offset or found[0].view[:8] != offset.to_bytes(8, "big")):
                    wrong.append(offset)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(50, 2_000):
        queue.append_file(file=numbered(number))
        queue.delete_before(queue.end - 50 * 64)
    is_over.set()
    for reader in readers:
        reader.join()

    assert wrong == []


def numbered(number: int) -> MappedFile:
    file = MappedFile(64)
    file.view[:8] = (number * 64).to_bytes(8, "big")
    return file


# --- a failing disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["set_length", "allocate", "sync_folder", "map"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_created_leaves_nothing_behind(tmp_path: Path, kind: str, code: int) -> None:
    before = open_files()

    with pytest.raises(StoreError, match="send again") as caught:
        DiskFile(tmp_path / "file", SIZE, failing(kind, code))

    assert isinstance(caught.value, StoreFullError) == (code == errno.ENOSPC)
    assert not (tmp_path / "file").exists()
    assert open_files() == before


@pytest.mark.parametrize("kind", ["open", "map", "sync_folder"])
def test_a_file_that_cannot_be_opened_is_not_deleted(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"x" * SIZE)

    with pytest.raises(StoreError, match="cannot open .*Input/output error"):
        DiskFile(tmp_path / "file", SIZE, failing(kind))

    assert (tmp_path / "file").read_bytes() == b"x" * SIZE


def test_a_write_that_fails_halfway_leaves_no_bytes(tmp_path: Path) -> None:
    """Otherwise they could become valid after a shorter record that is written there later."""
    disk = FaultyDisk()
    file = DiskFile(tmp_path / "file", SIZE, disk)
    file.write(0, b"before")
    disk.judge = once(len(disk.calls), errno.EIO)

    with pytest.raises(StoreError, match="cannot write to .*Input/output error"):
        file.write(6, b"a record that does not end")

    assert file.view[:] == b"before".ljust(SIZE, b"\0")
    file.close()


def test_a_folder_whose_name_cannot_be_made_durable_is_removed(tmp_path: Path) -> None:
    """The next call would find the folder and take its name for durable."""
    disk = failing("sync_folder")
    with pytest.raises(StoreError, match="cannot create the folder"):
        make_folder(tmp_path / "config", disk)
    disk.judge = never
    before = len(disk.calls)

    make_folder(tmp_path / "config", disk)

    assert disk.calls[before:] == ["make_folder", "sync_folder"]


def test_names_that_could_not_be_synced_are_synced_by_the_next_flush(tmp_path: Path) -> None:
    disk = FaultyDisk()
    queue = queue_of(tmp_path / "topic" / "0", durable=False, disk=disk)
    queue.append_file()
    disk.judge = once(len(disk.calls), errno.EIO)
    with pytest.raises(StoreError, match="cannot flush the folder"):
        queue.flush(0, 10)
    before = len(disk.calls)

    queue.flush(0, 10)

    assert disk.calls[before:] == ["sync_folder"] * 3 + ["flush"]
    queue.close()


def test_the_names_of_a_queue_are_durable_before_its_next_file_is_created(tmp_path: Path) -> None:
    """Otherwise a power failure could leave the second file alone. It would look as if retention had deleted the
    first."""
    disk = FaultyDisk()
    queue = queue_of(tmp_path / "topic" / "0", durable=False, disk=disk)
    queue.append_file()
    before = len(disk.calls)

    queue.append_file()

    assert disk.calls[before:] == ["sync_folder"] * 3 + ["open", "set_length", "allocate", "map"]
    queue.close()


def test_the_folder_above_all_queues_is_durable_before_the_first_queue(tmp_path: Path) -> None:
    """The folders below it become durable with the first flush of a queue."""
    disk = FaultyDisk()

    queue = FolderStoreFiles(tmp_path, disk).mapped_queue("consumequeue/orders/0", SIZE, rebuildable=True)

    assert disk.calls == ["make_folder", "sync_folder"]
    queue.close()


@pytest.mark.feature("D25")
def test_a_table_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    """RocketMQ moves the old file away first, so for a moment the file is missing."""
    disk = FaultyDisk()
    store_files = FolderStoreFiles(tmp_path, disk)
    store_files.write_bytes("config/topics.json", b"old")
    calls = len(disk.calls)
    store_files.write_bytes("config/topics.json", b"old")

    for number in range(len(disk.calls) - calls):
        disk.judge = once(len(disk.calls) + number, errno.ENOSPC)
        with pytest.raises(StoreFullError, match=r"no room on the disk for topics.json \(3 bytes\)"):
            store_files.write_bytes("config/topics.json", b"new")
        assert store_files.read_bytes("config/topics.json") in (b"old", b"new")


def test_pages_are_marked_as_changed_without_changing_them(tmp_path: Path) -> None:
    """The kernel's statistics of the map show that all its pages will be written."""
    file = DiskFile(tmp_path / "file", 64 * SIZE)
    data = os.urandom(64 * SIZE)
    file.write_mapped(0, data)
    file.flush()

    Disk().write_again(-1, file.view, 64 * SIZE, 0)

    assert file.view[:] == data
    assert dirty_kib(tmp_path / "file") == 64 * SIZE // 1_024
    file.close()


def dirty_kib(path: Path) -> int:
    """Return the unwritten part of a mapped file."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(maps) if line.endswith(str(path)))
    fields = dict(line.split(":", 1) for line in maps[first + 1 : first + 20])
    return sum(int(fields[name].split()[0]) for name in ("Shared_Dirty", "Private_Dirty"))


def test_a_disk_error_names_the_action_and_the_way_out() -> None:
    error = disk_error("write to", Path("/data/commitlog/0"), OSError(errno.EIO, "Input/output error"))

    assert str(error) == (
        "cannot write to /data/commitlog/0: [Errno 5] Input/output error; what was acknowledged is safe, "
        "and the store continues when the disk works again: see the system's log for the cause, then send again"
    )


def test_a_folder_that_cannot_exist_is_not_a_broken_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(
        StoreError,
        match="cannot create the folder .*; name a folder on a disk that this process can write to",
    ) as refused:
        make_folder(tmp_path / "file" / "data", Disk())

    assert "when the disk works again" not in str(refused.value)


def test_a_missing_permission_is_not_a_broken_disk() -> None:
    error = disk_error("open", Path("/data/commitlog/0"), PermissionError(errno.EACCES, "Permission denied"))

    assert str(error) == (
        "cannot open /data/commitlog/0: Permission denied; what was acknowledged is safe: give the user of this "
        f"process (uid {os.geteuid()}) the right to read and write in /data/commitlog, then start again"
    )


# --- the owner of a folder --------------------------------------------------------------------------------


def test_the_error_about_a_folder_in_use_names_the_process(tmp_path: Path) -> None:
    owner, other = FolderStoreFiles(tmp_path), FolderStoreFiles(tmp_path)
    owner.lock()
    owner.mark_open()

    with pytest.raises(
        StoreLockedError,
        match=f"by process {os.getpid()}, which is this one: .*; use that one, close it",
    ):
        other.lock()

    owner.unlock()


def test_the_error_names_the_process_that_has_the_lock_not_the_one_that_left_the_abort_file(tmp_path: Path) -> None:
    """The owner writes its abort file after it has the lock. A second process may look in between."""
    owner = FolderStoreFiles(tmp_path)
    owner.lock()
    (tmp_path / ABORT_FILE).write_text("1 a-boot-id", encoding="ascii")
    code = (
        "import sys; from pathlib import Path; from mqtemplate.store.files.folder_store_files import FolderStoreFiles\n"
        "try: FolderStoreFiles(Path(sys.argv[1])).lock()\n"
        "except Exception as exc: print(exc)"
    )

    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout

    assert f"is in use by process {os.getpid()}; one process owns a store folder" in said
    owner.unlock()


def test_the_abort_file_contains_process_and_boot_id(tmp_path: Path) -> None:
    store_files = FolderStoreFiles(tmp_path)

    store_files.mark_open()

    assert store_files.was_left_open()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert store_files.read_bytes(ABORT_FILE) == f"{os.getpid()} {boot_id}".encode()
    store_files.mark_closed()
    assert not store_files.was_left_open()


@pytest.mark.parametrize(
    ("text", "lost_power"),
    [
        ("4711 boot-1", True),  # another boot than the present one
        ("4711 boot-2", False),
        ("4711 -", False),
        ("4711", False),  # as RocketMQ writes it
        ("", False),
        (None, False),
    ],
)
def test_power_was_lost_if_another_boot_left_the_folder_open(
    tmp_path: Path, text: str | None, lost_power: bool
) -> None:
    """If that is unknown, no record is cut off that may have been acknowledged."""
    if text is not None:
        (tmp_path / ABORT_FILE).write_text(text)

    assert FolderStoreFiles(tmp_path, RestartedDisk()).lost_power() is lost_power


def test_memory_never_loses_power() -> None:
    assert MemoryStoreFiles().lost_power() is False


def test_a_file_that_its_owner_renames_while_the_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each write of a table does: a reader of a running broker's folder must not fail."""
    scan, new = os.scandir, tmp_path / "topics.json.tmp"
    for path in (new, tmp_path / "offsets.json"):
        path.write_bytes(b"{}")

    def scan_before_the_rename(folder: Path) -> list[os.DirEntry[str]]:
        entries = list(scan(folder))
        new.rename(tmp_path / "topics.json")
        return entries

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scan_before_the_rename)
        found = Disk().list_files(tmp_path)

    assert found == [("offsets.json", 2)]

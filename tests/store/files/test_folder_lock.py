"""The lock of a store folder: whom it excludes, and that nothing in the owner's process ends it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.errors import StoreError, StoreLockedError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.store.files import disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from tests.forking import fork, in_child


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[FolderStoreFiles]:
    files = FolderStoreFiles(tmp_path / "store")
    files.lock()
    files.mark_open()
    yield files
    files.unlock()


def lock_in_another_process(folder: Path) -> str:
    """Return what another process gets when it opens the folder: an error, or ``locked``."""

    def work() -> str:
        files = FolderStoreFiles(folder)
        files.lock()
        files.unlock()
        return "locked"

    return in_child(work)


# --- what the owner's process may do --------------------------------------------------------------


def archive(folder: Path, target: Path) -> None:
    with tarfile.open(target.with_suffix(".tar"), "w") as tar:
        tar.add(folder, "store")


READERS: dict[str, Callable[[Path, Path], object]] = {
    "copytree": shutil.copytree,
    "tarfile": archive,
    "read_bytes": lambda folder, _: (folder / "lock").read_bytes(),
    "write_text": lambda folder, _: (folder / "lock").write_text("lock"),
    "a second name": lambda folder, target: (os.link(folder / "lock", target), target.read_bytes()),
    "an open folder": lambda folder, _: os.close(os.open(folder, os.O_RDONLY)),
    "the lock's owner": lambda folder, _: FolderStoreFiles(folder).locked_by(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_the_owner_may_read_its_folder_and_keeps_the_lock(
    owner: FolderStoreFiles, tmp_path: Path, read: Callable[[Path, Path], object]
) -> None:
    """A POSIX lock ends when the process closes any descriptor of the file (man fcntl)."""
    read(owner.root, tmp_path / "copy")

    assert lock_in_another_process(owner.root).startswith("StoreLockedError")


def test_a_backup_by_the_owner_loses_no_message(tmp_path: Path) -> None:
    """A second process that opened the folder would cut off what the first one writes after that."""
    queue = MessageQueue("orders", "broker-a", 0)

    def open_too() -> str:
        EmbeddedBroker(tmp_path / "store").start()
        return "opened"

    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.send(Message("orders", b"before"), queue)
        shutil.copytree(tmp_path / "store", tmp_path / "backup")
        refused = in_child(open_too)
        broker.send(Message("orders", b"after"), queue)

    assert refused.startswith("StoreLockedError")
    with EmbeddedBroker(tmp_path / "store") as broker:
        assert [each.body for each in broker.pull(queue, 0, max_count=32).messages] == [b"before", b"after"]


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_lock_file_that_goes_away_does_not_open_the_folder(owner: FolderStoreFiles, change: str) -> None:
    """The folder itself is locked too, so a new lock file does not help."""
    (owner.root / "lock").unlink()
    if change == "replaced":
        (owner.root / "lock").write_text("lock", encoding="ascii")

    assert f"StoreLockedError: {owner.root} is in use by process {os.getpid()}; " in lock_in_another_process(owner.root)
    assert in_child(lambda: str(FolderStoreFiles(owner.root).locked_by())) == str(os.getpid())


@pytest.mark.parametrize("how", ["a link", "a relative path", "dots"])
def test_another_path_of_the_folder_is_the_same_folder(
    owner: FolderStoreFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "link").symlink_to(owner.root)
    monkeypatch.chdir(tmp_path)
    path = {"a link": tmp_path / "link", "a relative path": Path("store"), "dots": Path("store/../link/../store")}[how]

    with pytest.raises(StoreLockedError, match="which is this one"):
        FolderStoreFiles(path).lock()
    assert lock_in_another_process(path).startswith("StoreLockedError")


def test_a_closed_folder_has_the_lock_file_of_rocketmq(owner: FolderStoreFiles) -> None:
    """While the folder is open, the text names the owner for errors. RocketMQ writes the word, and does not read it."""
    while_open = (owner.root / "lock").read_text("ascii")

    owner.unlock()

    assert while_open == f"lock {os.getpid()}@{socket.gethostname()}"
    assert (owner.root / "lock").read_bytes() == b"lock"
    assert lock_in_another_process(owner.root) == "locked"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lock 4711@another-host", "process 4711 of host another-host"),
        ("lock", "another process"),
        ("lock \x1b[2J@x", "another process"),
        (f"lock {'9' * 200}", "another process"),
    ],
)
def test_the_error_names_the_owner_as_far_as_the_file_does(owner: FolderStoreFiles, text: str, named: str) -> None:
    (owner.root / "lock").write_text(text, "ascii")
    (owner.root / "abort").unlink()

    said = in_child(lambda: str(FolderStoreFiles(owner.root).locked_by()))
    error = lock_in_another_process(owner.root)

    assert said == named.removeprefix("process ")
    assert f"is in use by {named}; one process owns" in error


# --- forked processes -----------------------------------------------------------------------------


def test_a_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A lock of an open file lasts as long as one process has its descriptor. So a child closes its copy."""
    reader, writer = os.pipe()
    told, tell = os.pipe()
    parent = fork()
    if parent == 0:
        FolderStoreFiles(tmp_path).lock()
        if fork() == 0:
            os.close(writer)
            os.write(tell, b"x")
            os.read(reader, 1)  # ends with the test
            os._exit(0)
        signal.pause()
    assert os.read(told, 1) == b"x"
    while_parent_lives = lock_in_another_process(tmp_path)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    after = lock_in_another_process(tmp_path)

    os.close(writer)
    assert f"is in use by process {parent}; " in while_parent_lives
    assert after == "locked"


def test_a_child_cannot_end_the_lock_of_its_parent(owner: FolderStoreFiles) -> None:
    in_child(lambda: str(owner.unlock()))

    assert lock_in_another_process(owner.root).startswith("StoreLockedError")


def test_a_fork_without_pythons_hooks_neither_ends_nor_keeps_the_lock(tmp_path: Path) -> None:
    """UWSGI forks so. The child has the descriptors of the parent, and calls what its exit handlers call."""
    files = FolderStoreFiles(tmp_path)
    files.lock()
    reader, writer = os.pipe()
    told, tell = os.pipe()
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        try:
            os.close(writer)
            FolderStoreFiles(tmp_path).locked_by()
            files._lock.release()
            os.write(tell, b"x")
            os.read(reader, 1)
        finally:
            os._exit(0)
    assert os.read(told, 1) == b"x"

    while_open = lock_in_another_process(tmp_path)
    files.unlock()
    after = lock_in_another_process(tmp_path)

    os.close(writer)
    os.waitpid(child, 0)
    assert while_open.startswith("StoreLockedError")
    assert after == "locked"


# --- other systems --------------------------------------------------------------------------------


def test_without_open_file_locks_the_folder_is_still_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS has no open file description lock that Python knows. The lock of the folder is the one that lasts there."""
    monkeypatch.setattr(disk, "_SET_OPEN_FILE_LOCK", None)
    files = FolderStoreFiles(tmp_path)
    files.lock()
    (tmp_path / "lock").read_bytes()

    with pytest.raises(StoreLockedError, match="which is this one"):
        FolderStoreFiles(tmp_path).lock()
    assert lock_in_another_process(tmp_path).startswith("StoreLockedError")
    files.unlock()
    assert lock_in_another_process(tmp_path) == "locked"


def test_a_file_system_without_locks_of_folders_has_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS, with a descriptor that cannot write

    monkeypatch.setattr(disk._fcntl, "flock", refuse)
    files = FolderStoreFiles(tmp_path)
    files.lock()
    (tmp_path / "lock").read_bytes()

    assert f"is in use by process {os.getpid()}" in lock_in_another_process(tmp_path)
    files.unlock()
    assert lock_in_another_process(tmp_path) == "locked"


def test_a_file_system_without_locks_is_not_reported_as_a_folder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk._fcntl, "fcntl", refuse)

    with pytest.raises(StoreError, match=r"cannot lock .*/lock: .*No locks available") as raised:
        FolderStoreFiles(tmp_path).lock()

    assert not isinstance(raised.value, StoreLockedError)
    monkeypatch.undo()
    assert lock_in_another_process(tmp_path) == "locked"


def test_a_full_disk_at_the_lock_leaves_nothing_locked(tmp_path: Path) -> None:
    from mqtemplate.store.files.disk import Disk

    class FullDisk(Disk):
        @staticmethod
        def write_at(fd: int, data: bytes, at: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match="no room on the disk for lock"):
        FolderStoreFiles(tmp_path, FullDisk()).lock()

    assert lock_in_another_process(tmp_path) == "locked"


# --- RocketMQ -------------------------------------------------------------------------------------

JAVA = """
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.channels.FileLock;
import java.nio.charset.StandardCharsets;

class Lock {
    public static void main(String[] args) throws Exception {
        // as RocketMQ 5.5.0: DefaultMessageStore.start
        RandomAccessFile file = new RandomAccessFile(args[0] + "/lock", "rw");
        for (int at = 0; at < 2; at++) {
            FileLock lock = file.getChannel().tryLock(0, 1, false);
            System.out.println(lock == null || lock.isShared() || !lock.isValid() ? "refused" : "locked");
            if (lock != null) file.getChannel().write(ByteBuffer.wrap("lock".getBytes(StandardCharsets.UTF_8)));
            System.in.read();
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK")
def test_java_and_this_process_exclude_each_other(owner: FolderStoreFiles, tmp_path: Path) -> None:
    """Java's FileChannel takes a POSIX lock; ours belongs to the open file. The kernel lets them exclude each other."""
    program = tmp_path / "Lock.java"
    program.write_text(JAVA, "utf-8")
    (owner.root / "lock").read_bytes()
    with subprocess.Popen(
        ["java", "-Xint", str(program), str(owner.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as java:
        assert java.stdin is not None
        assert java.stdout is not None
        while_we_own_it = java.stdout.readline().strip()
        owner.unlock()
        java.stdin.write("x")
        java.stdin.flush()
        afterwards = java.stdout.readline().strip()

        with pytest.raises(StoreLockedError, match=rf"is in use by process {java.pid}; one process owns"):
            FolderStoreFiles(owner.root).lock()
        found = FolderStoreFiles(owner.root).locked_by()
        java.stdin.close()

    assert (while_we_own_it, afterwards) == ("refused", "locked")
    assert found == str(java.pid)
    assert FolderStoreFiles(owner.root).locked_by() is None

"""The border to the operating system: whatever the store asks of files, it asks here."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from mqtemplate.errors import StoreError, StoreFullError

_Result = TypeVar("_Result")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOUCHED_AT_ONCE = 256  # pages; numpy holds the interpreter lock over so few
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """One call each. They raise `OSError` as the system does; `disk_error` says it in the store's words.

    What lasts, when the power fails, is what these promise and no more: a file's bytes and its length since its last
    `flush`, a name (made, changed, removed) since the last `sync_folder` of the folder it stands in. Tests put a disk
    here that fails, or that forgets what was not promised.
    """

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        """A descriptor for reading and writing. By default a file that is missing is made."""
        return _with_more_files(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644))

    def close(self, fd: int) -> None:
        os.close(fd)

    def length(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def allocate(self, fd: int, size: int) -> None:
        """Make the file *size* bytes long, each with its place on the disk; those that were not there are zero."""
        os.posix_fallocate(fd, 0, size)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """The file as memory. The map keeps a descriptor of its own."""
        return _with_more_files(lambda: mmap.mmap(fd, size))

    write_at = staticmethod(os.pwrite)
    """(fd, data, at): write *data*, or the first part of it; gives how many bytes. The call itself, with nothing around
    it: every message takes it."""

    def write_again(self, fd: int, view: mmap.mmap, end: int) -> None:
        """Have the bytes before *end* written at the next `flush`, as if they had just been changed.

        After a flush that failed the system may count pages as written that are not on the disk. Here a byte of each
        is written over with itself, through the map and with the interpreter's lock held, so that no other thread's
        change is lost in between.
        """
        chunk = _TOUCHED_AT_ONCE * mmap.PAGESIZE
        for start in range(0, end, chunk):
            touched = np.frombuffer(view, np.uint8, min(chunk, end - start), start)[:: mmap.PAGESIZE]
            np.bitwise_or(touched, 0, out=touched)

    def flush(self, fd: int) -> None:
        """Return when the file's bytes and its length are on the disk."""
        os.fdatasync(fd)

    def replace(self, path: Path, target: Path) -> None:
        """Give the file at *path* the name *target*, in place of the one that has it."""
        path.replace(target)

    def link(self, path: Path, other: Path) -> None:
        """Give the file at *path* a second name."""
        os.link(path, other)

    def unlink(self, path: Path) -> None:
        """Remove a name, if it is there."""
        path.unlink(missing_ok=True)

    def make_folder(self, folder: Path) -> None:
        """Make one folder, if it is not there."""
        folder.mkdir(exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in *folder* are on the disk."""
        fd = _with_more_files(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_whole(self, path: Path) -> bytes | None:
        """A small file's content; None if there is none."""
        try:
            return _with_more_files(path.read_bytes)
        except FileNotFoundError:
            return None

    def list_files(self, folder: Path) -> list[tuple[str, int]]:
        """Name and length of each file in a folder, sorted by name; nothing if there is no such folder."""
        try:
            entries = _with_more_files(lambda: list(os.scandir(folder)))
        except FileNotFoundError:
            return []
        return sorted((entry.name, entry.stat().st_size) for entry in entries if entry.is_file())

    def boot_id(self) -> str:
        """Changes whenever the machine starts anew; "-" where nobody can tell."""
        try:
            return _BOOT_ID.read_text(encoding="ascii").strip() or "-"
        except OSError:
            return "-"


def write_all(disk: Disk, fd: int, data: bytes, at: int = 0) -> None:
    """`Disk.write_at` until all is written."""
    while (written := disk.write_at(fd, data, at)) < len(data):
        at, data = at + written, data[written:]


def disk_error(doing: str, path: Path, exc: OSError, size: int | None = None) -> StoreError:
    """What a caller of the store is told when the system refused something.

    Args:
        doing: What was asked, as a verb: ``write to``.
        size: Bytes that were asked for.
    """
    if exc.errno in _FULL:
        amount = "" if size is None else f" ({size} bytes)"
        return StoreFullError(
            f"no room on the disk for {path.name}{amount} in {path.parent}; free space there, then "
            "send again: what was acknowledged is safe"
        )
    if exc.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StoreError(
            f"cannot {doing} {path}: this process has {limit} files open, and may have no more; raise the limit "
            "(ulimit -n, or LimitNOFILE), or make the store's files larger so that there are fewer"
        )
    return StoreError(
        f"the disk refused to {doing} {path}: {exc}; what was acknowledged is safe, and the store goes on when the "
        "disk works again: see the system's log for what ails it, then send again"
    )


@contextmanager
def disk_errors(doing: str, path: Path, size: int | None = None) -> Iterator[None]:
    """What the system refuses inside is raised as `disk_error`."""
    try:
        yield
    except OSError as exc:
        raise disk_error(doing, path, exc, size) from exc


def _with_more_files(call: Callable[[], _Result]) -> _Result:
    """*call*; once more with the limit of open files raised, if that is what stopped it."""
    try:
        return call()
    except OSError as exc:
        if exc.errno != errno.EMFILE or not _raise_file_limit():
            raise
    return call()


def _raise_file_limit() -> bool:
    """Let this process have as many open files as it may allow itself; False if it has that limit already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True

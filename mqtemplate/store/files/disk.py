"""All calls of the store to the operating system's files, also those that not every system has."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.processes import OPEN_FLAGS, descriptor_limit, raise_descriptor_limit
from mqtemplate.store.files.mapped_files import only_zeros

_CHUNK = 1 << 16
_BLOCK = 4_096
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process id
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

# Looked up once: with SYNC_FLUSH each message needs them, and a name that a module lacks takes a microsecond.
_fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
_msvcrt: Any = import_module("msvcrt") if _fcntl is None and find_spec("msvcrt") else None
_FULL_SYNC: int | None = getattr(_fcntl, "F_FULLFSYNC", None)
_HAS_FLOCK_STRUCT = sys.platform == "linux" and _FLOCK.size == 32
_SET_OPEN_FILE_LOCK: int | None = getattr(_fcntl, "F_OFD_SETLK", None) if _HAS_FLOCK_STRUCT else None
_sync: Callable[[int], object] = getattr(os, "fdatasync", os.fsync)

_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Any:
    """Return Linux' ``sync_file_range``, for which Python has no function; None where the C library lacks it."""
    try:
        function = ctypes.PyDLL(None).sync_file_range  # keeps the interpreter lock, see `start_sync`
    except (AttributeError, OSError, TypeError):  # other C libraries; Windows
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()

_position_lock = threading.Lock()


def _read_by_seeking(fd: int, size: int, at: int) -> bytes:
    with _position_lock:
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, size)


def _write_by_seeking(fd: int, data: bytes | memoryview, at: int) -> int:
    with _position_lock:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)


pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _read_by_seeking)
"""Read *size* bytes at *at*: ``(fd, size, at)``. Windows has no such call, so threads take turns there."""
pwrite: Any = getattr(os, "pwrite", _write_by_seeking)
"""Write at *at*: ``(fd, data, at)``, as `pread`."""


def check_system() -> None:
    """Return if this system can have store directories.

    Raises:
        StoreError: It lacks file locks, without which two processes could write to one directory.
    """
    if _fcntl is None and _msvcrt is None:
        raise StoreError(
            f"a store directory needs file locks, and Python has neither fcntl nor msvcrt on this system "
            f"({sys.platform}); run the broker on Linux, macOS or Windows (mqtemplate broker), and point "
            "rocketmq.name-server at it"
        )


def _lock_by_msvcrt(fd: int, mode: int) -> None:
    """Lock or unlock the first byte for this open file. Windows: no other open file can read or write it then."""
    with _position_lock:
        os.lseek(fd, 0, os.SEEK_SET)
        _msvcrt.locking(fd, mode, 1)


def lock_first_byte(fd: int) -> None:
    """Lock the first byte of a file for this open file, and exclude Java's ``FileChannel.lock(0, 1, false)``.

    An open file description lock (``man 2 fcntl``) ends with its own descriptor. A POSIX lock also ends when the
    process closes any other descriptor of the file: after a copy or a backup of the folder. It is the fallback where
    the kernel or the file system lacks the first kind.

    Raises:
        BlockingIOError, PermissionError: Another open file or process has it locked.
        OSError: The file system has no locks.
    """
    if _fcntl is None:
        _lock_by_msvcrt(fd, _msvcrt.LK_NBLCK)
        return
    try:
        if _SET_OPEN_FILE_LOCK is not None:
            _fcntl.fcntl(fd, _SET_OPEN_FILE_LOCK, _FLOCK.pack(_fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            return
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
    _fcntl.lockf(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB, 1, 0)


def unlock_first_byte(fd: int) -> None:
    """End the lock, also if a forked process has a copy of the descriptor."""
    if _fcntl is None:
        _lock_by_msvcrt(fd, _msvcrt.LK_UNLCK)
        return
    if _SET_OPEN_FILE_LOCK is not None:
        with contextlib.suppress(OSError):  # the fallback was taken
            _fcntl.fcntl(fd, _SET_OPEN_FILE_LOCK, _FLOCK.pack(_fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))
    _fcntl.lockf(fd, _fcntl.LOCK_UN, 1, 0)


def lock_folder(fd: int) -> None:
    """Lock a folder for this open descriptor; do nothing where its file system cannot lock folders (NFS).

    Raises:
        BlockingIOError: Another descriptor has it locked.
    """
    try:
        _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as exc:
        if exc.errno not in (*_UNSUPPORTED, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EISDIR):
            raise


def unlock_folder(fd: int) -> None:
    """End the lock of `lock_folder`, also if a forked process has a copy of the descriptor."""
    with contextlib.suppress(OSError):  # the file system cannot lock folders
        _fcntl.flock(fd, _fcntl.LOCK_UN)


def is_folder_locked(fd: int) -> bool:
    """Return True if another descriptor has the folder locked. It takes a shared lock for a moment."""
    try:
        _fcntl.flock(fd, _fcntl.LOCK_SH | _fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system cannot lock folders
        return False
    unlock_folder(fd)
    return False


def is_locked(fd: int) -> bool:
    """Return True if the first byte of a file is locked by another. It takes no lock itself where possible."""
    if _fcntl is None:
        try:
            _lock_by_msvcrt(fd, _msvcrt.LK_NBLCK)
        except OSError:
            return True
        _lock_by_msvcrt(fd, _msvcrt.LK_UNLCK)
        return False
    lock = _lock_of_other(fd)
    if lock is not None:
        return bool(lock[0] != _fcntl.F_UNLCK)
    try:
        _fcntl.lockf(fd, _fcntl.LOCK_SH | _fcntl.LOCK_NB, 1, 0)  # a shared lock needs no write permission
    except OSError:
        return True
    _fcntl.lockf(fd, _fcntl.LOCK_UN, 1, 0)
    return False


def process_with_lock(fd: int) -> str:
    """Return the id of the process that has the first byte of a file locked; empty if the system does not tell.

    It tells it of POSIX locks, such as Java's. An open file description lock belongs to no process: its id is -1. A
    process in another pid namespace (a container) has the id 0 here.
    """
    lock = _lock_of_other(fd)
    return str(lock[1]) if lock is not None and lock[1] > 0 else ""


def _lock_of_other(fd: int) -> tuple[int, int] | None:
    """Return type and process id of another's lock on the first byte; None if the system does not tell."""
    if not _HAS_FLOCK_STRUCT:
        return None
    lock = _fcntl.fcntl(fd, _fcntl.F_GETLK, _FLOCK.pack(_fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    kind, *_, process_id = _FLOCK.unpack(lock)
    return kind, process_id


def _write_zeros(fd: int, start: int, end: int) -> None:
    """Write zeros where the file has only zeros: a block that was written exists."""
    for chunk in range(start, end, _CHUNK):
        size = min(_CHUNK, end - chunk)
        step = size if only_zeros(pread(fd, size, chunk)) else _BLOCK
        for at in range(chunk, chunk + size, step):
            count = min(step, chunk + size - at)
            if only_zeros(pread(fd, count, at)):
                _write_all(fd, bytes(count), at)


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = pwrite(fd, data, at)
        at, data = at + written, data[written:]


def start_sync(fd: int, at: int, size: int) -> None:
    """Let the disk begin to write *size* bytes from *at* on, without waiting. `sync_data` then takes less time.

    A hint: without effect where the system has no such call, or refuses it. `sync_data` reports what fails. It takes
    25 us; without the interpreter lock another thread that computes would run for 5 ms first.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, at, size, _SYNC_FILE_RANGE_WRITE)


def sync_data(fd: int) -> None:
    """Return when the bytes of a file and its length are on the disk, not only in the cache of the drive.

    macOS: ``fsync`` does not flush that cache, ``F_FULLFSYNC`` does (``man fsync``). Some of its file systems, mostly
    network file systems, lack it.
    """
    if _FULL_SYNC is None or not _full_sync(fd):
        _sync(fd)


def sync_folder_entries(fd: int) -> None:
    """Return when the names in a folder are on the disk."""
    if _FULL_SYNC is None or not _full_sync(fd):
        os.fsync(fd)


def _full_sync(fd: int) -> bool:
    """Return False if the file system has no ``F_FULLFSYNC``."""
    try:
        _fcntl.fcntl(fd, _FULL_SYNC)
    except OSError as exc:
        if exc.errno not in (*_UNSUPPORTED, errno.ENOTTY):
            raise
        return False
    return True


_Result = TypeVar("_Result")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PAGES_AT_ONCE = 256  # numpy holds the interpreter lock over so few
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSES_LINKS = hasattr(os, "O_NOFOLLOW")  # not on Windows
HAS_FOLDER_DESCRIPTORS = hasattr(os, "O_DIRECTORY")
"""False on Windows: a folder can be neither locked nor flushed there. NTFS has a journal for the names in it."""
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
_CREATE_FOLDER = "create the folder"


class Disk:
    """The operating system's calls, one method each. They raise `OSError`; `disk_errors` maps it to our errors.

    After a power failure a file has the bytes and the length of its last `flush`. A folder has the names of its last
    `sync_folder`. Nothing else is guaranteed. Tests replace this class by a disk that fails, or that loses what was not
    guaranteed.
    """

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        """Return a descriptor for reading and writing. By default a missing file is created, for its owner only.

        A symbolic link is an error: a folder from elsewhere could name any file of this user.
        """
        _check_link(path)
        return _with_more_files(lambda: os.open(path, os.O_RDWR | OPEN_FLAGS | flags, 0o600))

    def open_new(self, path: Path) -> int:
        """Return a descriptor of a new file. A file or a link that has the name is removed before."""
        try:
            return self.open(path, flags=os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self.unlink(path)
            return self.open(path, flags=os.O_CREAT | os.O_EXCL)

    def open_folder(self, folder: Path) -> int:
        """Return a descriptor of a folder."""
        return _with_more_files(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def length(self, fd: int) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(fd).st_size

    def set_length(self, fd: int, size: int) -> None:
        """Make the file *size* bytes long. New bytes are zero and have no disk blocks."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        """Reserve the disk blocks of *size* bytes from *at* on, by ``posix_fallocate``. Their content does not change.

        No other thread may write to these bytes meanwhile: where the system has no such call, their blocks are written.
        """
        # macOS has ``F_PREALLOCATE``, but that adds blocks after the last one of a file (``man fcntl``), not to the
        # middle of a file that has its full length already.
        fallocate = getattr(os, "posix_fallocate", None)
        if fallocate is not None:
            try:
                fallocate(fd, at, size)
                return
            except OSError as exc:
                if exc.errno not in _UNSUPPORTED:  # musl does not emulate it: NFS 3, ZFS
                    raise
        _write_zeros(fd, at, at + size)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """Map the file into memory. The map has a descriptor of its own."""
        return _with_more_files(lambda: mmap.mmap(fd, size))

    def read_at(self, fd: int, size: int, at: int) -> bytes:
        """Return *size* bytes from *at* on; fewer at the end of the file."""
        return pread(fd, size, at)

    write_at = staticmethod(pwrite)
    """Write *data*, or its first part, at *at*, and return the number of bytes: ``(fd, data, at)``.

    This is the system call itself, without a wrapper, because each message needs it.
    """

    def write_again(self, fd: int, view: mmap.mmap, end: int, allocated: int) -> None:
        """Mark the pages before *end* as changed, so that the next `flush` writes them again.

        After a failed flush Linux may count pages as clean that are not on the disk (``man fsync``, EIO). So one byte
        of each page is overwritten with itself. That happens through the map and under the interpreter lock, so that no
        change of another thread is lost.

        Args:
            allocated: Pages of zeros after it are left out: they may have no disk blocks, and were never written.
        """
        chunk = _PAGES_AT_ONCE * mmap.PAGESIZE
        for start in range(0, end, chunk):
            data = np.frombuffer(view, np.uint8, min(chunk, end - start), start)
            pages = np.arange(0, len(data), mmap.PAGESIZE)
            has_blocks = (np.bitwise_or.reduceat(data, pages) != 0) | (pages + start < allocated)
            touched = data[:: mmap.PAGESIZE]
            np.bitwise_or(touched, 0, out=touched, where=has_blocks)

    locks_open_files = _fcntl is None
    """True on Windows: a file that is open or mapped cannot be deleted, and `flush` writes what was written through a
    map only after ``mmap.flush``."""

    start_flush = staticmethod(start_sync)
    """Let the disk begin to write bytes that the next `flush` waits for: ``(fd, at, size)``. It never raises."""

    flush = staticmethod(sync_data)
    """Return when the bytes and the length of a file are on the disk: ``(fd)``."""

    def replace(self, path: Path, target: Path) -> None:
        """Rename the file at *path* to *target*, replacing a file of that name."""
        path.replace(target)

    def link(self, path: Path, other: Path) -> None:
        """Give the file at *path* a second name."""
        os.link(path, other)

    def unlink(self, path: Path) -> None:
        """Remove a name, if it exists."""
        path.unlink(missing_ok=True)

    def make_folder(self, folder: Path) -> None:
        """Create one folder for its owner only, if it is missing."""
        folder.mkdir(mode=0o700, exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in *folder* are on the disk, see `HAS_FOLDER_DESCRIPTORS`."""
        if not HAS_FOLDER_DESCRIPTORS:
            return
        fd = self.open_folder(folder)
        try:
            sync_folder_entries(fd)
        finally:
            os.close(fd)

    def read_whole(self, path: Path) -> bytes | None:
        """Return the content of a small file; None if it is missing."""
        file = open_to_read(path)
        if file is None:
            return None
        with file:
            return file.read()

    def read_parts(self, path: Path) -> list[tuple[int, bytes]] | None:
        """Return the parts of a sparse file that take disk space, with their offsets; None if it is missing."""
        file = open_to_read(path)
        if file is None:
            return None
        with file:
            fd = file.fileno()
            return [(start, pread(fd, end - start, start)) for start, end in data_parts(fd)]

    def list_files(self, folder: Path) -> list[tuple[str, int]]:
        """Return name and length of each file in a folder, sorted by name. A missing folder has no files.

        The owner of the folder may rename or delete files meanwhile; those are left out.
        """
        try:
            entries = _with_more_files(lambda: list(os.scandir(folder)))
        except FileNotFoundError:
            return []
        files = []
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    files.append((entry.name, entry.stat().st_size))
        return sorted(files)

    def boot_id(self) -> str:
        """Return an id that changes at each start of the machine; "-" if the system lacks it."""
        try:
            return _BOOT_ID.read_text(encoding="ascii").strip() or "-"
        except OSError:
            return "-"


def disk_error(action: str, path: Path, exc: OSError, size: int | None = None) -> StoreError:
    """Return the error for a caller of the store.

    Args:
        action: The failed action as a verb: ``write to``.
        size: Bytes of the request.
    """
    if exc.errno in _FULL:
        amount = "" if size is None else f" ({size} bytes)"
        return StoreFullError(
            f"no room on the disk for {path.name}{amount} in {path.parent}; free space there, then "
            "send again: what was acknowledged is safe"
        )
    if exc.errno == errno.EMFILE:
        limit = descriptor_limit()
        return StoreError(
            f"cannot {action} {path}: this process has {limit} open files, which is its limit; raise the limit "
            "(ulimit -n, or LimitNOFILE), or make the store's files larger so that there are fewer"
        )
    if exc.errno == errno.ELOOP:
        return link_error(path)
    if exc.errno in _FORBIDDEN:
        return StoreError(
            f"cannot {action} {path}: {exc.strerror}; what was acknowledged is safe: give the user of this process "
            f"({_user()}) the right to read and write in {path.parent}, then start again"
        )
    if exc.errno in _NO_PLACE and action == _CREATE_FOLDER:
        return StoreError(
            f"cannot {action} {path}: {exc.strerror}; name a folder on a disk that this process can write to, such as "
            "rocketmq.name-server: embedded:./data, then start again"
        )
    return StoreError(
        f"cannot {action} {path}: {exc}; what was acknowledged is safe, and the store continues when the "
        "disk works again: see the system's log for the cause, then send again"
    )


def _user() -> str:
    return f"uid {os.geteuid()}" if hasattr(os, "geteuid") else os.environ.get("USERNAME", "its name is unknown")


def link_error(path: Path) -> StoreError:
    """Return the error for a symbolic link in a store directory."""
    return StoreError(
        f"{path} is a symbolic link; a store directory may be one, but nothing in it: put the file or folder itself "
        "there (a folder of another disk by a bind mount), or remove the link"
    )


@contextlib.contextmanager
def disk_errors(action: str, path: Path, size: int | None = None) -> Iterator[None]:
    """Raise `disk_error` for an `OSError` inside the block."""
    try:
        yield
    except OSError as exc:
        raise disk_error(action, path, exc, size) from exc


def make_folder(folder: Path, disk: Disk, *, durable: bool = True) -> None:
    """Create *folder* and its missing parents.

    Args:
        durable: Return when the names are on the disk. Else the caller has to sync the parents later.

    Raises:
        StoreError: The disk failed. A folder whose name is not on the disk was removed again.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, disk, durable=durable)
    try:
        disk.make_folder(folder)
        if durable:
            disk.sync_folder(folder.parent)
    except OSError as exc:
        with contextlib.suppress(OSError):  # the next call would find it, and take its name for durable
            folder.rmdir()
        raise disk_error(_CREATE_FOLDER, folder, exc) from exc


def sync_folder(folder: Path, disk: Disk) -> None:
    """Return when the names in *folder* are on the disk.

    Raises:
        StoreError: The disk failed.
    """
    with disk_errors("flush the folder", folder):
        disk.sync_folder(folder)


def _with_more_files(call: Callable[[], _Result]) -> _Result:
    """Return the result of *call*. If the limit of open files stopped it, raise the limit and call again."""
    try:
        return call()
    except OSError as exc:
        if exc.errno != errno.EMFILE or not raise_descriptor_limit():
            raise
    return call()


def _check_link(path: Path) -> None:
    """Refuse a symbolic link where `os.open` cannot."""
    if not _REFUSES_LINKS and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def open_to_read(path: Path) -> BinaryIO | None:
    """Return an open file; None if it is missing.

    Raises:
        OSError: It cannot be read, or is a symbolic link.
        StoreError: It is not a regular file.
    """
    _check_link(path)
    try:
        fd = _with_more_files(
            lambda: os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | OPEN_FLAGS)
        )  # a pipe must not block
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{path} is not a regular file; move it away, or restore the file")
    return os.fdopen(fd, "rb")


def data_parts(fd: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of a file that takes disk space."""
    at, end = 0, os.fstat(fd).st_size
    if not hasattr(os, "SEEK_DATA"):  # Windows
        yield at, end
        return
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at

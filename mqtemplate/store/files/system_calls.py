"""Calls that not every system has: allocating disk blocks, flushing a disk, locks and positional writes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mqtemplate.errors import StoreError

_CHUNK = 1 << 20
_BLOCK = 4_096
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process id
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

# Looked up once: with SYNC_FLUSH each message needs them, and a name that a module lacks takes a microsecond.
_fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
_FULL_SYNC: int | None = getattr(_fcntl, "F_FULLFSYNC", None)
_HAS_FLOCK_STRUCT = sys.platform == "linux" and _FLOCK.size == 32
_SET_OPEN_FILE_LOCK: int | None = getattr(_fcntl, "F_OFD_SETLK", None) if _HAS_FLOCK_STRUCT else None
_sync: Callable[[int], object] = getattr(os, "fdatasync", os.fsync)

_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Any:
    """Return Linux' ``sync_file_range``, for which Python has no function; None where the C library has none."""
    try:
        function = ctypes.PyDLL(None).sync_file_range  # keeps the interpreter lock, see `start_sync`
    except (AttributeError, OSError, TypeError):  # other C libraries; Windows
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()

pwrite: Any = getattr(os, "pwrite", None)
"""``os.pwrite``; None on a system that `check_system` refuses."""


def check_system() -> None:
    """Return if this system can have store directories.

    Raises:
        StoreError: It lacks calls without which acknowledged messages would not be safe (Windows).
    """
    missing = [name for name in ("pread", "pwrite") if not hasattr(os, name)]
    if _fcntl is None:
        missing.insert(0, "fcntl")
    if missing:
        raise StoreError(
            f"a store directory needs POSIX calls that this system ({sys.platform}) does not have: "
            f"{', '.join(missing)}; run the broker on Linux or macOS (in WSL, or as a server: mqtemplate broker), "
            "and point rocketmq.name-server at it"
        )


def lock_first_byte(fd: int) -> None:
    """Lock the first byte of a file for this open file, and exclude Java's ``FileChannel.lock(0, 1, false)``.

    An open file description lock (``man 2 fcntl``) ends with its own descriptor. A POSIX lock also ends when the
    process closes any other descriptor of the file: after a copy or a backup of the folder. It is the fallback where
    the kernel or the file system lacks the first kind.

    Raises:
        BlockingIOError, PermissionError: Another open file or process has it locked.
        OSError: The file system has no locks.
    """
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


def allocate_blocks(fd: int, at: int, size: int) -> None:
    """Reserve the disk blocks of *size* bytes from *at* on, without changing their content.

    ``posix_fallocate`` where the system and the file system have it. Else zeros are written where the file has only
    zeros: a block that was written exists. macOS has ``F_PREALLOCATE``, but that adds blocks after the last one of a
    file (``man fcntl``), not to the middle of a file that has its full length already.
    """
    fallocate = getattr(os, "posix_fallocate", None)
    if fallocate is not None:
        try:
            fallocate(fd, at, size)
            return
        except OSError as exc:
            if exc.errno not in _UNSUPPORTED:  # musl does not emulate it: NFS 3, ZFS
                raise
    _write_zeros(fd, at, at + size)


def _write_zeros(fd: int, start: int, end: int) -> None:
    for chunk in range(start, end, _CHUNK):
        size = min(_CHUNK, end - chunk)
        step = _BLOCK if os.pread(fd, size, chunk).strip(b"\0") else size
        for at in range(chunk, chunk + size, step):
            count = min(step, chunk + size - at)
            if not os.pread(fd, count, at).strip(b"\0"):
                _write_all(fd, bytes(count), at)


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
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
    those of a network, lack it.
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

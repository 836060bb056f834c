"""Calls that not every system has: allocating disk blocks, flushing a disk, locks and positional writes."""

from __future__ import annotations

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


def is_locked(fd: int) -> bool:
    """Return True if another process has the first byte of a file locked. It takes no lock itself where possible."""
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

    The abort file is no source for it: the owner writes that after it has the lock, and until then the file names the
    owner before. A process in another pid namespace (a container) has the id 0 here.
    """
    lock = _lock_of_other(fd)
    return str(lock[1]) if lock is not None and lock[1] > 0 else ""


def _lock_of_other(fd: int) -> tuple[int, int] | None:
    """Return type and process id of another process' lock on the first byte; None if the system does not tell."""
    if sys.platform != "linux" or _FLOCK.size != 32:
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

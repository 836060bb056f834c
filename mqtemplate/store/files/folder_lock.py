"""Lock of a store folder: one process owns the folder, and nothing that happens in that process ends the lock."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from mqtemplate.errors import StoreError, StoreLockedError
from mqtemplate.processes import call_after_fork
from mqtemplate.store.files.disk import (
    HAS_FOLDER_DESCRIPTORS,
    Disk,
    check_system,
    disk_error,
    disk_errors,
    is_folder_locked,
    is_locked,
    lock_first_byte,
    lock_folder,
    make_folder,
    open_to_read,
    pread,
    process_with_lock,
    unlock_first_byte,
    unlock_folder,
)
from mqtemplate.store.files.store_files import ABORT_FILE

LOCK_FILE = "lock"
_CONTENT = b"lock"
"""As RocketMQ writes it; no program reads it. While we own the folder, `` <process id>@<host>`` follows."""
_MAX_CONTENT = 300
_TRIES = 10

_locks: dict[tuple[int, int], FolderLock] = {}
"""Device and inode of each folder that is locked here -> its lock. It lives as long as its descriptors are open."""


class FolderLock:
    """Lock of one store folder. It excludes other processes, RocketMQ among them, and other brokers of this process.

    There are two locks, and each belongs to an open file (``man 2 fcntl``: open file description locks; ``man 2
    flock``). So the owner may read, copy and close all files of its folder: a POSIX lock would end with that.

    - The first byte of ``lock``, which RocketMQ locks too: Java's POSIX lock and this one exclude each other.
    - The folder itself. If ``lock`` is deleted or replaced while it is in use, a second broker finds this one. RocketMQ
      does not look at it, so ``lock`` must not be deleted.

    They end with `release`, or with the process. A forked child closes its copies of the descriptors.

    Attributes:
        process_id: The process that has the lock; -1 if none does.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._folder_fd = self._file_fd = -1
        self._identity = (-1, -1)
        self.process_id = -1

    # --- lock ----------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Create the folder if it is missing, and lock it.

        Raises:
            StoreLockedError: Another process, or another broker of this process, has the lock.
            StoreError: The disk failed, or its file system has no locks.
        """
        check_system()
        make_folder(self._folder, self._disk)
        with disk_errors("open", self._folder):
            self._identity = _identity(self._folder.stat())
            if HAS_FOLDER_DESCRIPTORS:
                self._folder_fd = self._disk.open_folder(self._folder)
        try:
            self._lock_folder()
            self._lock_file()
            with disk_errors("write to", self._folder / LOCK_FILE):
                self._write_owner(b" %d@%s" % (os.getpid(), socket.gethostname().encode()))
        except BaseException:
            self._close()
            raise
        self.process_id = os.getpid()
        _locks[self._identity] = self
        call_after_fork(self)

    def _lock_folder(self) -> None:
        # A second broker of this process must not even open `lock`: where the POSIX lock is taken, closing a descriptor
        # of the file ends the first one's lock.
        if _is_locked_here(self._identity):
            raise self._own_error()
        if not HAS_FOLDER_DESCRIPTORS:
            return
        try:
            lock_folder(self._folder_fd)
        except BlockingIOError as exc:
            raise self._error(self._owner_of_file() or self._owner_of_abort_file()) from exc
        except OSError as exc:
            raise disk_error("lock", self._folder, exc) from exc

    def _lock_file(self) -> None:
        path = self._folder / LOCK_FILE
        for _ in range(_TRIES):
            with disk_errors("open", path):
                self._file_fd = fd = self._disk.open(path)
            try:
                lock_first_byte(fd)
            except (BlockingIOError, PermissionError) as exc:
                raise self._error(process_with_lock(fd) or _owner_in(fd)) from exc
            except OSError as exc:
                raise disk_error("lock", path, exc) from exc
            with contextlib.suppress(FileNotFoundError):
                if _identity(os.fstat(fd)) == _identity(path.lstat()):
                    return
            self._file_fd = -1  # another process has deleted or replaced the file between the two calls
            self._disk.close(fd)
        raise StoreError(f"{path} is replaced again and again by another program; end that one, then start again")

    def _write_owner(self, text: bytes) -> None:
        os.ftruncate(self._file_fd, 0)
        self._disk.write_at(self._file_fd, _CONTENT + text, 0)

    # --- end -----------------------------------------------------------------------------------

    def release(self) -> None:
        """End the lock. In a forked process this closes descriptors only: the lock is the parent's."""
        if self._file_fd < 0:
            return
        if self.process_id == os.getpid():
            _locks.pop(self._identity, None)
            with contextlib.suppress(OSError):  # a full disk, for example: the text has no meaning any more
                self._write_owner(b"")
            # Closing would not suffice: a process that was forked without Python's hooks has the descriptors too.
            unlock_first_byte(self._file_fd)
            if self._folder_fd >= 0:
                unlock_folder(self._folder_fd)
            self.process_id = -1
        self._close()

    def after_fork(self) -> None:
        """Close the copies of the descriptors: with them this process would keep the lock after the parent's end."""
        if self._file_fd >= 0:
            _locks.pop(self._identity, None)
            self._close()

    def _close(self) -> None:
        fds, self._file_fd, self._folder_fd = (self._file_fd, self._folder_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                self._disk.close(fd)

    # --- owner ---------------------------------------------------------------------------------

    def owner(self) -> str | None:
        """Return the id of the process that owns the folder, or "another process"; None if none does.

        Raises:
            StoreError: The lock file cannot be opened.
        """
        path = self._folder / LOCK_FILE
        try:
            if _is_locked_here(_identity(self._folder.stat())):
                return str(os.getpid())
        except OSError:  # the folder is missing
            return None
        with disk_errors("open", path):
            file = open_to_read(path)
        if file is not None:
            with file:
                if is_locked(file.fileno()):
                    return process_with_lock(file.fileno()) or _owner_in(file.fileno()) or "another process"
        # Only the folder is locked if `lock` was deleted. The owner of a locked folder has left its abort file there.
        if (self._folder / ABORT_FILE).exists() and self._is_folder_locked():
            return self._owner_of_abort_file() or "another process"
        return None

    def _is_folder_locked(self) -> bool:
        if not HAS_FOLDER_DESCRIPTORS:
            return False
        fd = self._disk.open_folder(self._folder)
        try:
            return is_folder_locked(fd)
        finally:
            self._disk.close(fd)

    def _owner_of_file(self) -> str:
        with contextlib.suppress(OSError, StoreError):
            file = open_to_read(self._folder / LOCK_FILE)
            if file is not None:
                with file:
                    return process_with_lock(file.fileno()) or _owner_in(file.fileno())
        return ""

    def _owner_of_abort_file(self) -> str:
        with contextlib.suppress(OSError, StoreError):
            words = (self._disk.read_whole(self._folder / ABORT_FILE) or b"").split()
            if words and words[0].isdigit():
                return words[0].decode()
        return ""

    def _error(self, owner: str) -> StoreLockedError:
        # This process does not own it. The same id is one of another container, or one that was used again.
        known = owner if owner != str(os.getpid()) else ""
        return StoreLockedError(
            f"{self._folder} is in use by {f'process {known}' if known else 'another process'}; one process owns a "
            "store folder. Stop that one, choose another folder, or share one broker: run it as a server and point "
            "rocketmq.name-server at it"
        )

    def _own_error(self) -> StoreLockedError:
        return StoreLockedError(
            f"{self._folder} is in use by process {os.getpid()}, which is this one: it has another broker open there; "
            "use that one, close it first, or choose another folder"
        )


def _identity(found: os.stat_result) -> tuple[int, int]:
    """Return device and inode: equal for all paths of a file or folder, links and bind mounts included."""
    return found.st_dev, found.st_ino


def _is_locked_here(folder: tuple[int, int]) -> bool:
    """Return True if this process has locked the folder. A child that was forked without Python's hooks has not."""
    lock = _locks.get(folder)
    return lock is not None and lock.process_id == os.getpid()


def _owner_in(fd: int) -> str:
    """Return the process id in the lock file, with the host if it is another one; empty without an id."""
    # Windows: only the owner can read the first byte, which is locked.
    found = pread(fd, _MAX_CONTENT, len(_CONTENT)).strip().decode(errors="replace")
    process_id, _, host = found.partition("@")
    if not process_id.isdecimal() or len(process_id) > 10 or not host.isprintable():
        return ""
    return process_id if host == socket.gethostname() else f"{process_id} of host {host}"

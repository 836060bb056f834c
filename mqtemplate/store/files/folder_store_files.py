"""The files of one store in a folder: owned by one process, or as a snapshot that is only read."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mqtemplate.errors import StoreError, StoreFormatError, StoreLockedError
from mqtemplate.processes import OwnerProcess, absolute_path
from mqtemplate.store.files.disk import Disk, disk_errors, link_error, make_folder, open_to_read
from mqtemplate.store.files.disk_files import DiskFile, DiskFileQueue, check_length
from mqtemplate.store.files.folder_lock import FolderLock
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
from mqtemplate.store.files.store_files import ABORT_FILE, STANDBY_FILE, DiskUsage, StoreFiles


class FolderStoreFiles(StoreFiles):
    """Files in a folder, which only its owner can read. They may not be symbolic links.

    `FolderLock` says which other processes its lock excludes. A forked child writes no file and removes none, and has
    no part in the lock.

    Args:
        root: The folder. A relative path is resolved here: a later change of the working directory has no effect.
        is_standby: The caller keeps the folder current from the copy of another store. No other process may own
            such a folder.
    """

    def __init__(self, root: Path, disk: Disk | None = None, *, is_standby: bool = False) -> None:
        self.root = absolute_path(root)
        self._is_standby = is_standby
        self._disk = disk or Disk()
        self._lock = FolderLock(self.root, self._disk)
        self._owner: OwnerProcess | None = None

    def boot_id(self) -> str:
        return self._disk.boot_id()

    # --- the owner -----------------------------------------------------------------------------

    def lock(self) -> None:
        self._lock.acquire()
        if not self._is_standby and (self.root / STANDBY_FILE).exists():
            self._lock.release()
            raise StoreLockedError(
                f"the store directory {self.root} follows the copy of another one, which may be in use; to use it, let "
                f"it take over with: mqtemplate promote {self.root}"
            )
        self._owner = OwnerProcess(f"the broker of store directory {self.root}")

    def locked_by(self) -> str | None:
        """Return the id of the process that owns the folder, or "another process"; None if none does.

        Raises:
            StoreError: The lock file cannot be opened.
        """
        return self._lock.owner()

    def unlock(self) -> None:
        self._lock.release()
        self._owner = None

    def _check_owner(self) -> None:
        if self._owner is not None:
            self._owner.check()

    def _path(self, name: str) -> Path:
        """Return the path of a file or folder by its name.

        Raises:
            StoreError: It leads out of this folder, or a part of it is a symbolic link. The folder itself may be one.
        """
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or "\0" in name:
            raise StoreError(f"{name!r} leads out of the store directory {self.root}; use names without '..' and '/'")
        path = self.root
        with disk_errors("read", path):
            for part in relative.parts:
                path = path / part
                if path.is_symlink():
                    raise link_error(path)
        return path

    # --- mapped files --------------------------------------------------------------------------

    def open_mapped(self, name: str, size: int, *, sparse: bool = False) -> MappedFile:
        self._check_owner()
        return DiskFile(self._path(name), size, self._disk, first_step=0 if sparse else None)

    def mapped_queue(self, folder: str, size: int, *, setting: str = "", rebuildable: bool = False) -> MappedFileQueue:
        try:
            return self._open_queue(folder, size, rebuildable=rebuildable)
        except StoreFormatError as exc:
            hint = ", or delete the folder consumequeue, which is rebuilt from the commit log" if rebuildable else ""
            lengths = Counter(length for length in self.file_sizes(folder).values() if length)
            if not lengths or size in lengths:
                raise
            if not setting:
                raise StoreFormatError(f"{exc}{hint}") from exc
            found = lengths.most_common(1)[0][0]
            raise StoreFormatError(
                f"the files in {folder} have {found} bytes, but {setting} is {size}; a folder keeps the sizes it "
                f"was created with, so leave {setting} out, or set it to {found}. If {size} is right, a file was cut: "
                f"restore it{hint}"
            ) from exc

    def _open_queue(self, folder: str, size: int, *, rebuildable: bool) -> MappedFileQueue:
        path = self._path(folder)
        if rebuildable:  # the folders below become durable with the first flush, this one must be durable before
            make_folder(self.root / Path(folder).parts[0], self._disk)
        return DiskFileQueue(path, size, self._disk, rebuildable=rebuildable)

    # --- small files ---------------------------------------------------------------------------

    def read_bytes(self, name: str) -> bytes | None:
        path = self._path(name)
        with disk_errors("read", path):
            return self._disk.read_whole(path)

    def write_bytes(self, name: str, data: bytes) -> None:
        self._check_owner()
        path = self._path(name)
        make_folder(path.parent, self._disk)
        with disk_errors("write", path, len(data)):
            new = path.with_name(path.name + ".tmp")
            self._write_whole(new, data)
            if path.exists():
                backup = path.with_name(path.name + ".bak")
                self._disk.unlink(backup)
                self._disk.link(path, backup)
            self._disk.replace(new, path)
            self._disk.sync_folder(path.parent)

    def _write_whole(self, path: Path, data: bytes) -> None:
        fd = self._disk.open_new(path)
        try:
            at = 0
            while at < len(data):
                at += self._disk.write_at(fd, data[at:], at)
            self._disk.flush(fd)
        finally:
            self._disk.close(fd)

    def exists(self, name: str) -> bool:
        path = self._path(name)
        with disk_errors("read", path):
            return path.exists()

    def delete(self, name: str) -> None:
        self._check_owner()
        path = self._path(name)
        with disk_errors("remove", path):
            self._disk.unlink(path)
            if path.parent.is_dir():
                self._disk.sync_folder(path.parent)

    # --- the folder ----------------------------------------------------------------------------

    def list_folders(self, name: str) -> list[str]:
        folder = self._path(name)
        with disk_errors("read", folder):
            return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def file_sizes(self, folder: str) -> dict[str, int]:
        path = self._path(folder)
        with disk_errors("read", path):
            return dict(self._disk.list_files(path))

    def disk_usage(self) -> DiskUsage:
        with disk_errors("read", self.root):
            usage = shutil.disk_usage(self.root)
        return DiskUsage(usage.used, usage.free)


STORE_ENTRIES = ("commitlog", "lock")
"""A directory with one of these names in it is a store. A store without messages has only the second one."""

_FIRST = (ABORT_FILE, "checkpoint")
_MAX_COPIED = 64 << 20


class SnapshotStoreFiles(FolderStoreFiles):
    """Files of a store directory, also one that another process has open. All changes stay in memory.

    - Large files are mapped privately (``MAP_PRIVATE`` of ``man mmap``): a page takes memory once it is written here.
    - Checkpoints, tables and timer wheels are copied when the object is created, before the commit log is read. So they
      are never ahead of the log, and the recovery brings them up to it, as after a crash of the owner.
    - It takes no lock, so an owner continues, and later messages of the owner are not visible. Create another object to
      see them.

    Args:
        root: The store directory.

    Raises:
        StoreError: The directory is missing, or is not a store.
    """

    def __init__(self, root: Path) -> None:
        check_store(root)
        super().__init__(root, _ReadingDisk())
        self._had_owner = self._has_owner()
        self._contents: dict[str, bytes | None] = {}
        # Length, and only the parts that take disk space: 38 MB have few messages in them.
        self._wheels: dict[str, tuple[int, list[tuple[int, bytes]]]] = {}
        for name in _FIRST:
            self._copy(name)
        for name, length in super().file_sizes("").items():
            if length <= _MAX_COPIED and name.startswith("timerwheel"):
                path = self._path(name)
                with disk_errors("read", path):
                    self._wheels[name] = length, self._disk.read_parts(path) or []
        config = self._path("config")
        with disk_errors("read", config):
            names = sorted(each.name for each in config.iterdir()) if config.exists() else []
        for name in names:
            self._copy(f"config/{name}")

    def _copy(self, name: str) -> None:
        with contextlib.suppress(StoreError):  # the reader of the file gets the error, as from the folder itself
            self._contents[name] = super().read_bytes(name)

    def lock(self) -> None:
        return

    def unlock(self) -> None:
        return

    def is_written_by_others(self) -> bool:
        # An owner that has stopped since wrote until then, and another one may have started.
        return self._had_owner or self._has_owner()

    def _has_owner(self) -> bool:
        try:
            return self.locked_by() is not None
        except StoreError:  # a start would report the lock file
            return False

    # --- mapped files --------------------------------------------------------------------------

    def open_mapped(self, name: str, size: int, *, sparse: bool = False) -> MappedFile:
        path = self._path(name)
        if name in self._contents:
            data = self._contents[name] or b""
            parts, length = [(0, data)], len(data)
        elif name in self._wheels:
            length, parts = self._wheels[name]
        else:
            return PrivateFile(path, size) if path.exists() else MappedFile(size)
        check_length(path, length, size)
        return _CopiedFile(path, size, parts)

    def _open_queue(self, folder: str, size: int, *, rebuildable: bool) -> MappedFileQueue:
        path = self._path(folder)
        if rebuildable:
            make_folder(self.root / Path(folder).parts[0], self._disk)
        return _SnapshotQueue(path, size, self._disk, self._is_deleted, rebuildable=rebuildable)

    def _is_deleted(self, path: Path) -> bool:
        return self._contents.get(path.relative_to(self.root).as_posix(), b"") is None

    # --- small files ---------------------------------------------------------------------------

    def read_bytes(self, name: str) -> bytes | None:
        return self._contents[name] if name in self._contents else super().read_bytes(name)

    def write_bytes(self, name: str, data: bytes) -> None:
        self._contents[name] = data

    def exists(self, name: str) -> bool:
        return self._contents[name] is not None if name in self._contents else super().exists(name)

    def delete(self, name: str) -> None:
        self._contents[name] = None

    def file_sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{folder}/" if folder else ""
        sizes = super().file_sizes(folder)
        return {name: size for name, size in sizes.items() if self._contents.get(prefix + name, b"") is not None}


class _CopiedFile(MappedFile):
    """A file of the disk that was copied to memory: those of its parts that are not zero."""

    def __init__(self, path: Path, size: int, parts: Sequence[tuple[int, bytes]]) -> None:
        super().__init__(size)
        self.path = path
        self.is_new = not any(data for _, data in parts)
        self._parts = [(at, min(at + len(data), size)) for at, data in parts]
        for at, data in parts:
            self.write_mapped(at, data[: max(size - at, 0)])

    def data_parts(self) -> list[tuple[int, int]]:
        return self._parts


class PrivateFile(MappedFile):
    """A file of the disk in memory. What is written to it stays in memory.

    Args:
        size: Bytes of the result. Bytes that the file on the disk does not have are zero.
        grows: The file may be shorter, see `DiskFile`.

    Raises:
        StoreFormatError: It has another length, so a start would refuse it.
    """

    def __init__(self, path: Path, size: int, *, grows: bool = False) -> None:
        with disk_errors("read", path), _opened(path) as file:
            length = file.seek(0, 2)
            check_length(path, length, size, grows=grows)
            if length >= size:
                self.view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            else:  # a byte after the end of a mapped file is a bus error
                self.view = mmap.mmap(-1, size)
                file.seek(0)
                self.view[:length] = file.read(length)
        self.path = path
        self.size = self.allocated = size


def _opened(path: Path) -> BinaryIO:
    file = open_to_read(path)
    if file is None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    return file


class _SnapshotQueue(DiskFileQueue):
    """The files of a folder. Those that are added stay in memory, and removed ones stay on the disk.

    What would keep a file from being added on the disk is an error here, too: another kind of file in its place.

    Args:
        is_deleted: Returns True for a file that the broker of the snapshot has deleted.
    """

    def __init__(
        self, folder: Path, file_size: int, disk: Disk, is_deleted: Callable[[Path], bool], *, rebuildable: bool
    ) -> None:
        self._is_deleted = is_deleted
        super().__init__(folder, file_size, disk, rebuildable=rebuildable)

    def _existing_file(self, path: Path, *, grows: bool) -> MappedFile:
        return PrivateFile(path, self.file_size, grows=grows)

    def new_file(self, start: int) -> MappedFile:
        make_folder(self.folder, self._disk)
        path = self.path_of(start)
        with disk_errors("create", path):
            found = None if self._is_deleted(path) else open_to_read(path)
        if found is not None:  # one that was dropped at the load
            found.close()
        return MappedFile(self.file_size)

    def _remove_name(self, path: Path) -> None:
        return

    # The methods of the base class would write to the disk.
    remove = MappedFileQueue.remove
    flush = MappedFileQueue.flush


class _ReadingDisk(Disk):
    """The calls that read, and what others would have answered."""

    def make_folder(self, folder: Path) -> None:
        if os.path.lexists(folder):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def sync_folder(self, folder: Path) -> None:
        return


def check_store(root: Path) -> None:
    """Check that a directory is a store.

    Raises:
        StoreError: It is missing, or is not a store.
    """
    with disk_errors("read", root):
        is_store = any((root / name).exists() for name in STORE_ENTRIES)
    if not is_store:
        what = "is not a store (it has no 'commitlog' or 'lock')" if root.is_dir() else "does not exist"
        raise StoreError(f"store directory {str(root)!r} {what}; give the directory of a broker that was started")

"""A store directory as it is now: readers and a whole broker can work on it, and nothing on the disk changes."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import BinaryIO

from mqtemplate.errors import StoreError
from mqtemplate.store.files.disk import Disk, disk_errors, open_to_read
from mqtemplate.store.files.disk_files import DiskFileQueue, check_length
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.files.store_files import ABORT_FILE

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
        self._contents: dict[str, bytes | None] = {}
        # Length, and only the parts that are no hole: 38 MB have few messages in them.
        self._wheels: dict[str, tuple[int, list[tuple[int, bytes]]]] = {}
        for name in _FIRST:
            self._copy(name)
        for name, length in super().file_sizes("").items():
            if length <= _MAX_COPIED and name.startswith("timerwheel"):
                path = self._path(name)
                with disk_errors("read", path):
                    self._wheels[name] = length, self._disk.read_parts(path) or []
        for name in super().file_sizes("config"):
            self._copy(f"config/{name}")

    def _copy(self, name: str) -> None:
        self._contents[name] = super().read_bytes(name)

    def lock(self) -> None:
        return

    def unlock(self) -> None:
        return

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
        file = MappedFile(size)
        for at, data in parts:
            file.write_mapped(at, data[: max(size - at, 0)])
        return file

    def _open_queue(self, folder: str, size: int, *, rebuildable: bool) -> MappedFileQueue:
        return _SnapshotQueue(self._path(folder), size, self._disk, rebuildable=rebuildable)

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
    """The files of a folder. Those that are added stay in memory, and removed ones stay on the disk."""

    def _existing_file(self, path: Path, *, grows: bool) -> MappedFile:
        return PrivateFile(path, self.file_size, grows=grows)

    def new_file(self, start: int) -> MappedFile:
        return MappedFile(self.file_size)

    def _remove_name(self, path: Path) -> None:
        return

    # The methods of the base class would write to the disk.
    remove = MappedFileQueue.remove
    flush = MappedFileQueue.flush


class _ReadingDisk(Disk):
    """The calls that read."""

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

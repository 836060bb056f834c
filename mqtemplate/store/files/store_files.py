"""Where a store lives: in a folder that one process owns, or in memory."""

from __future__ import annotations

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path

from mqtemplate.errors import StoreLockedError
from mqtemplate.store.files.disk import Disk, disk_errors, write_all
from mqtemplate.store.files.folders import make_folder
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue

ABORT_FILE = "abort"
"""Exists while a process owns the directory: "<pid> <boot id>". A file found at start was left by a process that did
not close the store. RocketMQ writes the pid alone, and reads neither."""


class StoreFiles(ABC):
    """Gives out files by their names, such as ``config/delayOffset.json``. Both kinds run the same code above."""

    @abstractmethod
    def lock(self) -> None:
        """Own it, until ``unlock``.

        Raises:
            StoreLockedError: Another process owns it.
        """

    @abstractmethod
    def unlock(self) -> None: ...

    @abstractmethod
    def open_mapped(self, name: str, size: int) -> MappedFile:
        """A mapped file; made if missing."""

    @abstractmethod
    def mapped_queue(self, folder: str, file_size: int, *, lasting: bool = True) -> MappedFileQueue:
        """A queue of mapped files, with those that are there."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""

    @abstractmethod
    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a small file: it is at each moment the old one or the new one, whole. The old is kept as ``.bak``."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a small file, if it is there."""

    @abstractmethod
    def list_folders(self, name: str) -> list[str]:
        """The names of the folders in a folder, sorted."""

    def boot_id(self) -> str:
        """Changes whenever the machine starts anew; "-" where nobody can tell."""
        return "-"

    def mark_open(self) -> None:
        """Note that this process owns the store_files, until `mark_closed`."""
        self.write_bytes(ABORT_FILE, f"{os.getpid()} {self.boot_id()}".encode())

    def mark_closed(self) -> None:
        self.delete(ABORT_FILE)

    def was_left_open(self) -> bool:
        """Whether the last owner went without closing the store."""
        return self.exists(ABORT_FILE)

    def lost_power(self) -> bool:
        """Whether the machine, not only the process, went down under the last owner, so that any part of what was
        written but not flushed may be missing.

        True only if both boots are known and differ. Where nobody can tell (RocketMQ was the owner, or there is no
        boot id), it is False: a hole in the log is then reported as damage, and nothing is cut off that might have been
        acknowledged.
        """
        words = (self.read_bytes(ABORT_FILE) or b"").decode(errors="replace").split()
        return len(words) == 2 and "-" not in (words[1], self.boot_id()) and words[1] != self.boot_id()

    @abstractmethod
    def file_sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder, sorted by name, and their lengths."""

    def disk_used_ratio(self, roomy_bytes: int | None = None) -> float:
        """How full the disk is that it lies on, from 0 to 1; 0 where there is none, or *roomy_bytes* are free."""
        return 0.0


class MemoryStoreFiles(StoreFiles):
    """Nothing outlives the object: for tests, and for work that may be lost."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._mapped: dict[str, MappedFile] = {}

    def lock(self) -> None:
        return

    def unlock(self) -> None:
        return

    def open_mapped(self, name: str, size: int) -> MappedFile:
        if name not in self._mapped:
            self._mapped[name] = MappedFile(None, size)
        return self._mapped[name]

    def mapped_queue(self, folder: str, file_size: int, *, lasting: bool = True) -> MappedFileQueue:
        return MappedFileQueue(None, file_size)

    def read_bytes(self, name: str) -> bytes | None:
        return self._files.get(name)

    def write_bytes(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def exists(self, name: str) -> bool:
        return name in self._files or name in self._mapped

    def delete(self, name: str) -> None:
        self._files.pop(name, None)
        self._mapped.pop(name, None)

    def list_folders(self, name: str) -> list[str]:
        return []

    def file_sizes(self, folder: str) -> dict[str, int]:
        return {}


class FolderStoreFiles(StoreFiles):
    """A folder. Its ``lock`` file is held the way RocketMQ holds it, so that neither opens what the other has open."""

    _LOCK = "lock"

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or Disk()
        self._lock_fd = -1

    def boot_id(self) -> str:
        return self._disk.boot_id()

    def lock(self) -> None:
        make_folder(self.root, self._disk)
        path = (self.root / self._LOCK).resolve()
        # A POSIX lock does not exclude its own process, and closing any descriptor of the file gives it up:
        # so a second broker here is told before it opens the file.
        if path in _OWNED_HERE:
            raise self._locked()
        with disk_errors("open", path):
            fd = self._disk.open(path)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as exc:
            self._disk.close(fd)
            raise self._locked() from exc
        os.pwrite(fd, b"lock", 0)  # as RocketMQ does; nobody reads it
        self._lock_fd = fd
        _OWNED_HERE.add(path)

    def _locked(self) -> StoreLockedError:
        words = (self.read_bytes(ABORT_FILE) or b"").decode(errors="replace").split()
        owner = f"process {words[0]}" if words else "another process"
        return StoreLockedError(
            f"{self.root} is in use by {owner}; one process owns a store folder. Stop that one, choose another "
            "folder, or share one broker: run it as a server and point rocketmq.name-server at it"
        )

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            _OWNED_HERE.discard((self.root / self._LOCK).resolve())
            self._disk.close(self._lock_fd)
            self._lock_fd = -1

    def open_mapped(self, name: str, size: int) -> MappedFile:
        return MappedFile(self.root / name, size, disk=self._disk)

    def mapped_queue(self, folder: str, file_size: int, *, lasting: bool = True) -> MappedFileQueue:
        if not lasting:  # the folders below last from the first flush on, and need one above them that does
            make_folder(self.root / Path(folder).parts[0], self._disk)
        return MappedFileQueue(self.root / folder, file_size, lasting=lasting, disk=self._disk)

    def read_bytes(self, name: str) -> bytes | None:
        path = self.root / name
        with disk_errors("read", path):
            return self._disk.read_whole(path)

    def write_bytes(self, name: str, data: bytes) -> None:
        path = self.root / name
        make_folder(path.parent, self._disk)
        with disk_errors("write", path, len(data)):
            self._replace(path, data)

    def _replace(self, path: Path, data: bytes) -> None:
        fresh = path.with_name(path.name + ".tmp")
        fd = self._disk.open(fresh, flags=os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._disk, fd, data)
            self._disk.flush(fd)
        finally:
            self._disk.close(fd)
        if path.exists():
            kept = path.with_name(path.name + ".bak")
            self._disk.unlink(kept)
            self._disk.link(path, kept)
        self._disk.replace(fresh, path)
        self._disk.sync_folder(path.parent)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def delete(self, name: str) -> None:
        path = self.root / name
        with disk_errors("remove", path):
            self._disk.unlink(path)
            if path.parent.is_dir():
                self._disk.sync_folder(path.parent)

    def disk_used_ratio(self, roomy_bytes: int | None = None) -> float:
        usage = shutil.disk_usage(self.root)
        if roomy_bytes is not None and usage.free >= roomy_bytes:
            return 0.0
        return usage.used / max(usage.used + usage.free, 1)  # as df counts: what is kept for root is not there

    def list_folders(self, name: str) -> list[str]:
        folder = self.root / name
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def file_sizes(self, folder: str) -> dict[str, int]:
        path = self.root / folder
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
        return {file.name: file.stat().st_size for file in files}


_OWNED_HERE: set[Path] = set()

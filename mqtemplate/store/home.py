"""Where a store lives: in a folder that one process owns, or in memory."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from pathlib import Path

from mqtemplate.errors import StoreLockedError
from mqtemplate.store.folders import make_folder, sync_folder
from mqtemplate.store.mapped_file import MappedFile
from mqtemplate.store.mapped_file_queue import MappedFileQueue

__all__ = ["FolderHome", "Home", "MemoryHome"]


class Home(ABC):
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


class MemoryHome(Home):
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

    def list_folders(self, name: str) -> list[str]:
        return []


class FolderHome(Home):
    """A folder. Its ``lock`` file is held the way RocketMQ holds it, so that neither opens what the other has open."""

    _LOCK = "lock"
    _ABORT = "abort"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock_fd = -1

    def lock(self) -> None:
        make_folder(self.root)
        path = (self.root / self._LOCK).resolve()
        # A POSIX lock does not exclude its own process, and closing any descriptor of the file gives it up:
        # so a second broker here is told before it opens the file.
        if path in _OWNED_HERE:
            raise self._locked()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as exc:
            os.close(fd)
            raise self._locked() from exc
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"lock", 0)
        self._lock_fd = fd
        _OWNED_HERE.add(path)

    def _locked(self) -> StoreLockedError:
        text = self.read_bytes(self._ABORT)
        owner = f"process {text.decode(errors='replace').strip()}" if text else "another process"
        return StoreLockedError(
            f"{self.root} is in use by {owner}; one process owns a store folder. Stop that one, choose another "
            "folder, or share one broker: run it as a server and point rocketmq.name-server at it"
        )

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            _OWNED_HERE.discard((self.root / self._LOCK).resolve())
            os.close(self._lock_fd)
            self._lock_fd = -1

    def open_mapped(self, name: str, size: int) -> MappedFile:
        return MappedFile(self.root / name, size)

    def mapped_queue(self, folder: str, file_size: int, *, lasting: bool = True) -> MappedFileQueue:
        return MappedFileQueue(self.root / folder, file_size, lasting=lasting)

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_bytes(self, name: str, data: bytes) -> None:
        path = self.root / name
        make_folder(path.parent)
        fresh = path.with_name(path.name + ".tmp")
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            kept = path.with_name(path.name + ".bak")
            kept.unlink(missing_ok=True)
            os.link(path, kept)
        fresh.replace(path)
        sync_folder(path.parent)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def list_folders(self, name: str) -> list[str]:
        folder = self.root / name
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


_OWNED_HERE: set[Path] = set()

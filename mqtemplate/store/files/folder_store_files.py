"""The files of one store in a folder that one process owns."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path, PurePosixPath

from mqtemplate.errors import StoreError, StoreFormatError
from mqtemplate.processes import OwnerProcess, absolute_path
from mqtemplate.store.files.disk import Disk, disk_errors, link_error, make_folder
from mqtemplate.store.files.disk_files import DiskFile, DiskFileQueue
from mqtemplate.store.files.folder_lock import FolderLock
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.files.store_files import StoreFiles


class FolderStoreFiles(StoreFiles):
    """Files in a folder, which only its owner can read. They may not be symbolic links.

    `FolderLock` says which other processes its lock excludes. A forked child writes no file and removes none, and has
    no part in the lock.

    Args:
        root: The folder. A relative path is resolved here: a later change of the working directory has no effect.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = absolute_path(root)
        self._disk = disk or Disk()
        self._lock = FolderLock(self.root, self._disk)
        self._owner: OwnerProcess | None = None

    def boot_id(self) -> str:
        return self._disk.boot_id()

    # --- the owner -----------------------------------------------------------------------------

    def lock(self) -> None:
        self._lock.acquire()
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

    def disk_used_ratio(self, roomy_bytes: int | None = None) -> float:
        usage = shutil.disk_usage(self.root)
        if roomy_bytes is not None and usage.free >= roomy_bytes:
            return 0.0
        return usage.used / max(usage.used + usage.free, 1)  # as df: blocks reserved for root do not count

"""The files of one store, by name: the interface, and its implementation in memory."""

from __future__ import annotations

import os
from typing import Protocol

from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue

ABORT_FILE = "abort"
"""Name of the file that exists while a process has the store open. It contains ``<pid> <boot id>``.

If it exists at the start, the last owner did not close the store. RocketMQ writes the pid alone, and reads neither.
"""


class StoreFiles(Protocol):
    """Files by their names, such as ``config/delayOffset.json``. The engine is the same for all implementations."""

    def lock(self) -> None:
        """Own the files until `unlock`.

        Raises:
            StoreLockedError: Another process owns them.
        """

    def unlock(self) -> None:
        """End the ownership."""

    def open_mapped(self, name: str, size: int, *, sparse: bool = False) -> MappedFile:
        """Return a mapped file; create it if missing.

        Args:
            sparse: Only what is written takes disk space. The file may be written by `MappedFile.write` only.
        """

    def mapped_queue(self, folder: str, size: int, *, setting: str = "", rebuildable: bool = False) -> MappedFileQueue:
        """Return the queue of the mapped files in a folder.

        Args:
            size: Bytes of each file.
            setting: Configuration key of the size, for the error message; empty if the size is that of the files.
            rebuildable: The files can be rebuilt from the commit log, so their names become durable with the next
                flush.

        Raises:
            StoreFormatError: The files have another size; or a file has another name, or is missing.
        """

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is missing."""

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a small file. A crash leaves the old content or the new. The old file is kept as ``.bak``."""

    def exists(self, name: str) -> bool:
        """Return True if there is a file of this name."""

    def delete(self, name: str) -> None:
        """Remove a small file, if it exists."""

    def list_folders(self, name: str) -> list[str]:
        """Return the names of the folders in a folder, sorted."""

    def file_sizes(self, folder: str) -> dict[str, int]:
        """Return the lengths of the files in a folder, sorted by name."""

    def disk_used_ratio(self, roomy_bytes: int | None = None) -> float:
        """Return the used part of the disk, 0 to 1; 0 without a disk, or if *roomy_bytes* are free."""
        return 0.0

    def boot_id(self) -> str:
        """Return an id that changes at each start of the machine; "-" if the system has none."""
        return "-"

    def mark_open(self) -> None:
        """Write the abort file. It stays until `mark_closed`."""
        self.write_bytes(ABORT_FILE, f"{os.getpid()} {self.boot_id()}".encode())

    def mark_closed(self) -> None:
        """Remove the abort file: the store was closed cleanly."""
        self.delete(ABORT_FILE)

    def was_left_open(self) -> bool:
        """Return True if the last owner did not close the store."""
        return self.exists(ABORT_FILE)

    def owner(self) -> tuple[str, str]:
        """Return process id and boot id of the last owner, as far as the abort file contains them."""
        words = (self.read_bytes(ABORT_FILE) or b"").decode(errors="replace").split()
        return words[0] if words else "", words[1] if len(words) == 2 else "-"

    def lost_power(self) -> bool:
        """Return True if the whole machine stopped under the last owner. Then any unflushed bytes may be missing.

        That is certain only if both boot ids are known and differ. After RocketMQ, or without boot ids, the result is
        False: a hole in the log is then reported as damage, and no record is cut off that might be acknowledged.
        """
        boot_id = self.owner()[1]
        return "-" not in (boot_id, self.boot_id()) and boot_id != self.boot_id()


class MemoryStoreFiles(StoreFiles):
    """Files in memory, for tests and for messages that may be lost with the process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._mapped: dict[str, MappedFile] = {}

    def lock(self) -> None:
        return

    def unlock(self) -> None:
        return

    def open_mapped(self, name: str, size: int, *, sparse: bool = False) -> MappedFile:
        if name not in self._mapped:
            self._mapped[name] = MappedFile(size)
        return self._mapped[name]

    def mapped_queue(self, folder: str, size: int, *, setting: str = "", rebuildable: bool = False) -> MappedFileQueue:
        return MappedFileQueue(size)

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

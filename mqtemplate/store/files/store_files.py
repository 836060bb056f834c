"""The files of one store, by name: the interface, its implementation in memory, and formats that are refused."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue

ABORT_FILE = "abort"
"""Name of the file that exists while a process has the store open. It contains ``<pid> <boot id>``.

If it exists at the start, the last owner did not close the store. RocketMQ writes the pid alone, and reads neither.
"""

STANDBY_FILE = "standby/state.json"
"""Name of the file that exists while a folder follows the copy of another store. No broker may own such a folder."""


class DiskUsage(NamedTuple):
    """Bytes of a file system, as ``df`` counts them: blocks that are reserved for root are neither used nor free."""

    used: int
    free: int

    @property
    def used_ratio(self) -> float:
        """Used part, 0 to 1."""
        return self.used / max(self.used + self.free, 1)


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
            setting: Configuration key of the size, for the error message; empty if the size was taken from the files.
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

    def disk_usage(self) -> DiskUsage | None:
        """Return the space of the disk; None without one."""
        return None

    def is_written_by_others(self) -> bool:
        """Return True if another broker may append while the files are read: they are a snapshot of a folder in use."""
        return False

    def is_log_verified(self) -> bool:
        """Return True if this process has just written the log, from verified bytes, and no other file before."""
        return False

    def boot_id(self) -> str:
        """Return an id that changes at each start of the machine; "-" if the system lacks it."""
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


def refuse_unsupported_formats(store_files: StoreFiles) -> None:
    """Raise an error if the store has consume queues in another format.

    The commit log has the same format everywhere, so no message is lost. But the state of RocketMQ is in the other
    queues, not in the files that mqtemplate would read.

    Raises:
        StoreFormatError: The consume queues are in RocksDB or in batches, or have extension files.
    """
    for folder in ("consumequeue", "consumequeue_rocksdb"):
        if store_files.exists(f"{folder}/CURRENT"):
            raise StoreFormatError(
                f"the consume queues of this folder are in RocksDB ({folder}/CURRENT; RocketMQ's storeType "
                "defaultRocksDB), which cannot be read here. The messages can. The progress of the consumer groups and "
                "the queue counts of the topics are in RocksDB too, below config/, and would start from zero; "
                f"{_way_out(folder)}"
            )
    extended = _first_file(store_files, "consumequeue_ext")
    if extended is not None:
        raise StoreFormatError(
            f"the consume queues of this folder have an extension ({extended}; RocketMQ's enableConsumeQueueExt), "
            f"which cannot be read here. The messages can; {_way_out('consumequeue', 'consumequeue_ext')}"
        )
    batched = _first_file(store_files, "batchconsumequeue")
    if batched is not None:
        raise StoreFormatError(
            f"this folder has a topic whose queues are in batches ({batched}; RocketMQ's queue.type BatchCQ), which "
            "cannot be read here; open it with RocketMQ, and send its messages to a topic without that attribute"
        )


def _way_out(*folders: str) -> str:
    return (
        f"stop RocketMQ, move {' and '.join(folders)} and the file checkpoint away, and open the folder again: the "
        "queues are then rebuilt from the commit log"
    )


def _first_file(store_files: StoreFiles, folder: str) -> str | None:
    """Return a file at the position of a queue file: ``folder/topic/queue/file``."""
    for topic in store_files.list_folders(folder):
        for queue_id in store_files.list_folders(f"{folder}/{topic}"):
            for name in store_files.file_sizes(f"{folder}/{topic}/{queue_id}"):
                return f"{folder}/{topic}/{queue_id}/{name}"
    return None

"""Small stores: files of a few kilobytes are full after some messages, so tests stay fast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import DiskUsage, StoreFiles
from mqtemplate.store.index_file import RecentKeys
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import StoreSettings

OpenStore = Callable[..., MessageStore]


def draft(
    body: bytes, topic: str = "orders", queue_id: int = 0, properties: bytes = b"TAGS\x01paid\x02"
) -> RecordDraft:
    return RecordDraft(topic, queue_id, body, properties)


def small(**changes: object) -> StoreSettings:
    sizes: dict[str, object] = {"mapped_file_size_commit_log": 4_096, "mapped_file_size_consume_queue": 200}
    sizes |= {"max_hash_slot_num": 50, "max_index_num": 200}
    return StoreSettings(**(sizes | changes))  # type: ignore[arg-type]


def opened(
    files: Path | StoreFiles,
    settings: StoreSettings | None = None,
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> MessageStore:
    """Return a store in a folder, or in other files; by default on a clock of its own. The caller closes it."""
    store_files = FolderStoreFiles(files, disk) if isinstance(files, Path) else files
    store = MessageStore(store_files, settings or small(), clock or VirtualClock())
    store.load()
    return store


def used(ratio: float) -> DiskUsage:
    """Return the space of a small disk, of which this part is used."""
    return DiskUsage(round(ratio * 10_000), 10_000 - round(ratio * 10_000))


def overwrite(file: Path, at: int, data: bytes) -> None:
    """Replace bytes of a file, as damage, a power failure or RocketMQ does."""
    content = file.read_bytes()
    file.write_bytes(content[:at] + data + content[at + len(data) :])


def no_keys() -> RecentKeys:
    """Return the memory of an index that has nothing: all keys are read from the log."""
    return RecentKeys(threading.Lock(), lambda: None)


def kill(store: MessageStore) -> None:
    """Release a store as a killed process does: no progress is written, and it is not marked as closed."""
    store.release()


class NothingPending:
    """A store without delayed messages: any file may be deleted."""

    def copy_forward(self, physical_start: int, physical_end: int) -> bool:
        """Return True: no message needs the part."""
        return True

    def pending_bytes(self, physical_start: int, physical_end: int) -> int:
        """Return 0."""
        return 0


def bodies(store: MessageStore, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
    """Return the bodies of all messages in a queue."""
    queue = store.consume_queue(topic, queue_id)
    units = [queue.unit(at) for at in range(queue.min_offset, queue.max_offset)]
    return [store.read(unit.physical_offset, unit.size).body for unit in units]

"""Repair of a store directory: a copy is kept, and all files that the commit log determines are rebuilt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.admin.doctor.report import part_sizes
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.embedded.settings import EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import StoreError, StoreFormatError, StoreFullError
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.json_files import read_table
from mqtemplate.store.files.snapshot_files import check_store

_DERIVED_FOLDERS = ("consumequeue", "index", "timerlog")
_DERIVED_FILES = ("timerwheel*", "config/timercheck*")
_CHUNK = 1 << 20


@dataclass(slots=True)
class Repair:
    """Result of a repair.

    Attributes:
        copy: The copy of the directory before the repair.
        actions: The changes, one sentence each.
    """

    path: Path
    copy: Path
    actions: list[str] = field(default_factory=list)


def repair(
    path: Path,
    copy: Path,
    settings: EmbeddedSettings | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Repair:
    """Copy a store directory, and rebuild what the commit log determines: consume queues, index, timers.

    A table that cannot be read is replaced by its backup. Topics without a table get the queues that they have messages
    in. Damaged records stay damaged: their readers get an error, and all other messages are delivered. No message is
    delivered or deleted by the repair.

    Args:
        copy: Folder for the copy; it must not exist.
        on_progress: Called with the number of bytes that were copied since the last call.

    Raises:
        StoreLockedError: Another process has the directory open.
        StoreFullError: The disk has no space for the copy. Nothing was changed.
        StoreError: The directory is not a store, or *copy* exists. Nothing was changed.
    """
    check_store(path)
    if copy.exists():
        raise StoreError(f"{copy} exists; give a folder for the copy that does not exist yet")
    files = FolderStoreFiles(path)
    files.lock()
    try:
        _check_space(path, copy)
        _copy(path, copy, on_progress)
        done = Repair(path, copy, [f"copied the directory to {copy}"])
        _delete_derived(path, done)
        _replace_tables(files, path, done)
    finally:
        files.unlock()
    _rebuild(path, settings or EmbeddedSettings(), done)
    return done


def _check_space(path: Path, copy: Path) -> None:
    needed = sum(part.disk_bytes for part in part_sizes(path))
    free = shutil.disk_usage(copy.absolute().parent).free
    if free < needed:
        raise StoreFullError(f"the copy needs {needed} bytes and the disk has {free}; give a folder on another disk")


def _copy(path: Path, copy: Path, on_progress: Callable[[int], None]) -> None:
    copy.mkdir(parents=True)
    for entry in sorted(path.rglob("*")):
        target = copy / entry.relative_to(path)
        if entry.is_dir():
            target.mkdir(exist_ok=True)
        elif entry.is_file() and entry != path / "lock":  # closing a second descriptor would release our lock
            _copy_file(entry, target, on_progress)
    (copy / "lock").write_bytes(b"lock")


def _copy_file(source: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Copy one file; long runs of zeros take no disk space in the copy."""
    with source.open("rb") as reading, target.open("wb") as writing:
        while data := reading.read(_CHUNK):
            if data.strip(b"\0"):
                writing.write(data)
            else:
                writing.seek(len(data), os.SEEK_CUR)
            on_progress(len(data))
        writing.truncate(source.stat().st_size)
        writing.flush()
        os.fsync(writing.fileno())
    shutil.copystat(source, target)


def _delete_derived(path: Path, done: Repair) -> None:
    for name in _DERIVED_FOLDERS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
    for pattern in _DERIVED_FILES:
        for file in path.glob(pattern):
            file.unlink()
    done.actions.append("rebuilt consume queues, index and timers from the commit log")


def _replace_tables(files: FolderStoreFiles, path: Path, done: Repair) -> None:
    """Move tables that cannot be read away. Their backups are read then."""
    for table in sorted(path.glob("config/*.json")):
        name = f"config/{table.name}"
        try:
            read_table(files, name)
        except StoreFormatError:
            table.rename(table.with_name(f"{table.name}.damaged"))
            done.actions.append(f"moved {name} away, which is damaged; {_substitute(files, path, name)}")


def _substitute(files: FolderStoreFiles, path: Path, name: str) -> str:
    try:
        if read_table(files, name):
            return "its backup is used"
    except StoreFormatError:
        (path / f"{name}.bak").rename(path / f"{name}.bak.damaged")
    return "it has no valid backup, so it starts empty"


def _rebuild(path: Path, settings: EmbeddedSettings, done: Repair) -> None:
    """Open and close the directory. The clock stands still, so nothing is delivered or deleted."""
    with EmbeddedBroker(path, settings, VirtualClock(SystemClock().now_ms())) as broker:
        for topic in broker.store.store_files.list_folders("consumequeue"):
            queue_ids = broker.store.store_files.list_folders(f"consumequeue/{topic}")
            count = max((int(each) + 1 for each in queue_ids if each.isdecimal()), default=0)
            if broker.topics.queue_count(topic) < count:
                broker.topics.create(topic, count)
                done.actions.append(f"created topic {topic} with {count} queues, which was not in the table of topics")

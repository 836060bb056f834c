"""Repair of a store directory: a copy is kept, and all files that the commit log determines are rebuilt."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.copy.backup import create_missing_topics
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import StoreError, StoreFormatError, StoreFullError
from mqtemplate.operations.doctor import part_sizes
from mqtemplate.processes import absolute_path
from mqtemplate.store.files.disk import HAS_FOLDER_DESCRIPTORS, disk_errors, link_error
from mqtemplate.store.files.folder_lock import LOCK_FILE
from mqtemplate.store.files.folder_store_files import FolderStoreFiles, check_store
from mqtemplate.store.files.mapped_files import only_zeros
from mqtemplate.store.tables import read_table

_DERIVED_FOLDERS = ("consumequeue", "index", "timerlog")
_DERIVED_FILES = "timerwheel*"
_DERIVED_TABLES = "timercheck*"
_MAX_DEPTH = 16  # a store directory has 3: consumequeue, topic, queue
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
        StoreError: The directory is not a store, or has a symbolic link in it; or *copy* exists. Nothing was changed.
    """
    check_store(path)
    if not HAS_FOLDER_DESCRIPTORS:
        raise StoreError(
            f"a repair of {path} opens each file relative to its folder, which this system (Windows) cannot do; copy "
            "the directory to Linux or macOS, or to the file system of WSL, and repair it there"
        )
    if os.path.lexists(copy):
        raise StoreError(f"{copy} exists; give a folder for the copy that does not exist yet")
    if path.resolve() in (copy.resolve(), *copy.resolve().parents):
        raise StoreError(f"{copy} is in {path}; give a folder for the copy that is not in the store directory")
    files = FolderStoreFiles(path)
    files.lock()
    try:
        with disk_errors("read", path), _opened(path) as root:
            _refuse_links(root, path)
            _check_space(path, copy)
        with disk_errors("write to", copy), _opened(path) as root:
            _copy(root, copy, on_progress)
        done = Repair(path, copy, [f"copied the directory to {copy}"])
        with disk_errors("write to", path), _opened(path) as root:
            _delete_derived(root, done)
            _replace_tables(files, root, done)
    finally:
        files.unlock()
    _rebuild(path, settings or EmbeddedSettings(), done)
    return done


# --- no links -----------------------------------------------------------------------------------
#
# Another user may have written the directory, or may write to it now. So each file is opened by its name in a folder
# that is open already, and never through a symbolic link: a path that was checked could lead elsewhere a moment later.


@contextlib.contextmanager
def _opened(folder: Path | str, parent: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder. Only the store directory itself, which has no *parent*, may be a link."""
    no_link = 0 if parent is None else os.O_NOFOLLOW
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | no_link, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _entries(folder: int) -> list[tuple[str, int]]:
    """Return name and mode of each entry of a folder, sorted. A link has the mode of the link."""
    with os.scandir(folder) as entries:
        return sorted((entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries)


def _refuse_links(folder: int, path: Path, depth: int = 0) -> None:
    """Check that the directory has only files and folders.

    Raises:
        StoreError: It has a symbolic link, a pipe or the like, or folders below folders without end.
    """
    if depth > _MAX_DEPTH:
        raise StoreError(f"{path} is nested too deeply for a store directory; move it away")
    for name, mode in _entries(folder):
        if stat.S_ISLNK(mode):
            raise link_error(path / name)
        if stat.S_ISDIR(mode):
            with _opened(name, folder) as below:
                _refuse_links(below, path / name, depth + 1)
        elif not stat.S_ISREG(mode):
            raise StoreError(f"{path / name} is neither a file nor a folder; move it away")


# --- the copy -----------------------------------------------------------------------------------


def _check_space(path: Path, copy: Path) -> None:
    needed = sum(part.disk_bytes for part in part_sizes(path))
    parents = absolute_path(copy).parents
    free = shutil.disk_usage(next(parent for parent in parents if parent.exists())).free
    if free < needed:
        raise StoreFullError(f"the copy needs {needed} bytes and the disk has {free}; give a folder on another disk")


def _copy(root: int, copy: Path, on_progress: Callable[[int], None]) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.mkdir(mode=0o700)  # as the store directory: its messages are for the owner only
    with _opened(copy) as target:
        _copy_folder(root, target, on_progress)
        with _created(LOCK_FILE, target) as lock:
            lock.write(b"lock")


def _copy_folder(source: int, target: int, on_progress: Callable[[int], None], depth: int = 0) -> None:
    for name, mode in _entries(source):
        if stat.S_ISDIR(mode) and depth <= _MAX_DEPTH:
            os.mkdir(name, 0o700, dir_fd=target)
            with _opened(name, source) as below, _opened(name, target) as copied:
                _copy_folder(below, copied, on_progress, depth + 1)
        elif depth or name != LOCK_FILE:  # its text names us as the owner
            _copy_file(name, source, target, on_progress)


def _copy_file(name: str, source: int, target: int, on_progress: Callable[[int], None]) -> None:
    """Copy one file; long runs of zeros take no disk space in the copy."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=source), "rb") as reading, _created(name, target) as writing:
        found = os.fstat(reading.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{name} is not a regular file any more")
        while data := reading.read(_CHUNK):
            if only_zeros(data):
                writing.seek(len(data), os.SEEK_CUR)
            else:
                writing.write(data)
            on_progress(len(data))
        writing.truncate(found.st_size)
        writing.flush()
        os.fsync(writing.fileno())
        os.fchmod(writing.fileno(), stat.S_IMODE(found.st_mode) & 0o777)
        os.utime(writing.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def _created(name: str, folder: int) -> BinaryIO:
    """Return a new file, for its owner only. A file or a link of that name is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb")


# --- the repair ---------------------------------------------------------------------------------


def _delete_derived(root: int, done: Repair) -> None:
    for name, mode in _entries(root):
        if name in _DERIVED_FOLDERS or fnmatch(name, _DERIVED_FILES):
            _delete(name, mode, root)
    with _config(root) as config:
        for name, mode in _entries(config) if config is not None else ():
            if fnmatch(name, _DERIVED_TABLES):
                _delete(name, mode, config)
    done.actions.append("rebuilt consume queues, index and timers from the commit log")


def _delete(name: str, mode: int, folder: int | None) -> None:
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=folder)  # follows no link, see `shutil.rmtree.avoids_symlink_attacks`
    else:
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _config(root: int) -> Iterator[int | None]:
    """Yield a descriptor of the folder with the tables; None if it is missing."""
    if any(name == "config" for name, _ in _entries(root)):
        with _opened("config", root) as config:
            yield config
    else:
        yield None


def _replace_tables(files: FolderStoreFiles, root: int, done: Repair) -> None:
    """Move tables that cannot be read away. Their backups are read then."""
    with _config(root) as config:
        names = [] if config is None else [name for name, _ in _entries(config) if name.endswith(".json")]
        for name in names:
            try:
                read_table(files, f"config/{name}")
            except StoreFormatError:
                _move_away(config, name)
                substitute = _substitute(files, config, name)
                done.actions.append(f"moved config/{name} away, which is damaged; {substitute}")


def _substitute(files: FolderStoreFiles, config: int | None, name: str) -> str:
    try:
        if read_table(files, f"config/{name}"):
            return "its backup is used"
    except StoreFormatError:
        _move_away(config, f"{name}.bak")
    return "it has no valid backup, so it starts empty"


def _move_away(config: int | None, name: str) -> None:
    os.rename(name, f"{name}.damaged", src_dir_fd=config, dst_dir_fd=config)


def _rebuild(path: Path, settings: EmbeddedSettings, done: Repair) -> None:
    """Open and close the directory. The clock stands still, so nothing is delivered or deleted."""
    with EmbeddedBroker(path, settings, VirtualClock(SystemClock().now_ms())) as broker:
        done.actions += create_missing_topics(broker)

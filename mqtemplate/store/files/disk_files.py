"""Mapped files on a disk: one file, and a queue of files in a folder."""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from mqtemplate.errors import StoreError, StoreFormatError, StoreFullError
from mqtemplate.event_log import get_logger
from mqtemplate.store.files.disk import Disk, data_parts, disk_error, disk_errors, make_folder, sync_folder
from mqtemplate.store.files.layout import file_name
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue, only_zeros

_FIRST_STEP = 256  # the part of a queue's first file that is allocated at once: 256 KiB of 64 MiB

_log = get_logger("mqtemplate.store")


class DiskFile(MappedFile):
    """A file of fixed length, mapped completely, whose disk blocks are allocated ahead of the writer.

    - Its length never changes. Writing to the map before ``allocated`` cannot fail: each of these bytes has its disk
      block. A full disk is reported by `allocate`, before anything is written, and never as a bus error.
    - `allocate` takes growing steps, so a file with little content takes little space.
    - Bytes after ``allocated`` may only be written by `write`: that is a system call, which reports a full disk.
    - After a failed flush the system may count bytes as written that are not on the disk (``man fsync``). They are
      marked as changed again, so the next flush that succeeds has written them.

    Args:
        path: The file; created if missing.
        durable_name: The name is on the disk when the constructor returns. Else the owner calls `sync_folder` when it
            flushes, which saves one or two milliseconds for each new file.
        grows: A file that is too short was longer before a power failure. Replace the missing bytes by zeros.
        first_step: Bytes to allocate now; by default all.

    Raises:
        StoreFullError: There is no space for it; nothing is left behind.
        StoreFormatError: It exists with another length.
        StoreError: The disk failed; nothing is left behind.
    """

    path: Path

    def __init__(
        self,
        path: Path,
        size: int,
        disk: Disk | None = None,
        *,
        durable_name: bool = True,
        grows: bool = False,
        first_step: int | None = None,
    ) -> None:
        self.path = path
        self.size = size
        self._disk = disk = disk or Disk()
        self._fd_lock = threading.Lock()  # a flush and `release_descriptor` run in different threads
        self._is_closed = False
        make_folder(path.parent, disk, durable=durable_name)
        self.allocated = size if first_step is None else min(_whole_pages(first_step), size)
        self._fd, self.view, self.is_new = _open_allocated(
            disk, path, size, self.allocated, durable_name=durable_name, grows=grows
        )

    def allocate(self, end: int) -> None:
        """See `MappedFile.allocate`. Not thread-safe: the one writer of the file calls it."""
        self.map()
        if end <= self.allocated:
            return
        # Twice as much each time: few calls for a file that is filled, and never much more than what it contains.
        needed = min(_whole_pages(end), self.size)
        doubled = min(max(needed, 2 * self.allocated), self.size)
        try:
            self._allocate_to(doubled)
        except StoreFullError:
            if doubled == needed:
                raise
            self._allocate_to(needed)

    def _allocate_to(self, end: int) -> None:
        size = end - self.allocated
        with disk_errors("allocate disk space for", self.path, size), self._descriptor() as fd:
            self._disk.allocate(fd, self.allocated, size)
        self.allocated = end

    def fill(self, start: int, end: int) -> None:
        if self._fd >= 0:
            self.write(start, bytes(end - start))

    def read(self, at: int, size: int) -> bytes:
        with disk_errors("read", self.path), self._descriptor() as fd:
            return self._disk.read_at(fd, size, at)

    def data_parts(self) -> list[tuple[int, int]]:
        with disk_errors("read", self.path), self._descriptor() as fd:
            return list(data_parts(fd))

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yield the descriptor of the file, or a new one if it was released."""
        if self._fd >= 0:
            yield self._fd
            return
        fd = self._disk.open(self.path, flags=0)
        try:
            yield fd
        finally:
            self._disk.close(fd)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write through the file: a system call.

        The first write to a mapped page may block while the file system flushes that page: tens of milliseconds with
        the interpreter lock held. The system call releases that lock, so other threads run. If they would only block on
        the lock of this writer, `write_mapped` is faster.
        """
        fd = self._fd
        if fd < 0:
            self.write_mapped(at, data)
            return
        start, write_at = at, self._disk.write_at
        try:
            while (written := write_at(fd, data, at)) < len(data):
                at, data = at + written, data[written:]
        except OSError as exc:
            self.view[start:at] = bytes(at - start)  # else the bytes would follow a shorter record written there later
            raise disk_error("write to", self.path, exc) from exc

    def start_flush(self, at: int, size: int) -> None:
        """See `Disk.start_flush`. May run beside `release_descriptor`: at worst another file is written early."""
        if self._fd >= 0:
            self._disk.start_flush(self._fd, at, size)

    def flush(self, end: int | None = None) -> None:
        with self._fd_lock:
            if self._is_closed:
                return
            if self._fd < 0:
                with disk_errors("open", self.path):
                    self._fd = self._disk.open(self.path, flags=0)
            try:
                if self._disk.locks_open_files and self.is_mapped:
                    self.view.flush()
                self._disk.flush(self._fd)
            except OSError as exc:
                touched_end = self.size if end is None else min(end, self.size)
                self._disk.write_again(self._fd, self.map(), touched_end, self.allocated)
                raise disk_error("flush", self.path, exc) from exc
            if not self.is_mapped:
                self._close_descriptor()

    def map(self) -> mmap.mmap:
        view = self.view
        if not self.is_mapped:
            with disk_errors("open", self.path), self._descriptor() as fd:
                self.view = view = self._disk.map(fd, self.size)
            self.is_mapped = True
        return view

    def release(self) -> None:
        if self.is_mapped and not self._is_closed:
            self.is_mapped = False
            # A reader that has the map continues with it; it is freed with the last one.
            self.view = cast("mmap.mmap", _UnmappedView(self))
            self.release_descriptor()

    def release_descriptor(self) -> None:
        with self._fd_lock:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)

    def close(self) -> None:
        self.view.close()
        self._is_closed = True
        self.release_descriptor()

    def unlink(self) -> None:
        self._is_closed = True
        if self._disk.locks_open_files:
            self.is_mapped = False
            self.view = cast("mmap.mmap", _UnmappedView(self))
        self.release_descriptor()
        with disk_errors("remove", self.path):
            self._disk.unlink(self.path)


class _UnmappedView:
    """The bytes of a file that is not mapped: each slice is read from the file."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._file.size)
        try:
            return self._file.read(start, max(stop - start, 0))
        except StoreError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return b""  # retention deleted it
            raise

    def close(self) -> None:
        """Do nothing: there is no map."""


def _open_allocated(
    disk: Disk, path: Path, size: int, allocated: int, *, durable_name: bool, grows: bool
) -> tuple[int, mmap.mmap, bool]:
    """Return the descriptor, the map, and True if the file was created now."""
    fd = length = -1
    try:
        fd = disk.open(path)
        length = disk.length(fd)
        check_length(path, length, size, grows=grows)
        if length != size:
            disk.set_length(fd, size)
        if allocated:
            disk.allocate(fd, 0, allocated)
        if durable_name:
            disk.sync_folder(path.parent)
        return fd, disk.map(fd, size), length == 0
    except BaseException as exc:
        if fd >= 0:
            disk.close(fd)
        if length == 0:
            with contextlib.suppress(OSError):
                disk.unlink(path)
        if isinstance(exc, OSError):
            raise disk_error("create" if length == 0 else "open", path, exc, size) from exc
        raise


def check_length(path: Path, length: int, size: int, *, grows: bool = False) -> None:
    """Check the length of an existing file of *size* bytes. A new one is empty until it gets its length.

    Raises:
        StoreFormatError: It has another one.
    """
    if length not in (0, size) and not (grows and length < size):
        raise StoreFormatError(
            f"{path} has {length} bytes, but the settings or the other files say {size}, so it was cut, or belongs "
            "to another folder; restore it"
        )


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class _FoundFile(NamedTuple):
    path: Path
    length: int

    @property
    def start(self) -> int:
        return int(self.path.name)


class DiskFileQueue(MappedFileQueue):
    """A queue of mapped files in a folder. Only the files at the end keep a descriptor beside the one of their map.

    A power failure may leave names without their bytes. An empty file is one whose length was not on the disk, so no
    byte of it was. Such files at the end are dropped. A missing file, or an empty one before others, is a gap:

    - Rebuildable files are dropped from the gap on.
    - In the commit log a missing file is an error, because its names are durable from the start. An empty file gets its
      length back, and the recovery judges the zeros in it.

    Args:
        folder: The folder; it need not exist.
        rebuildable: The files can be rebuilt from the commit log. Their names become durable with the next `flush`.

    Raises:
        StoreFormatError: The folder has a file of another size, a file with another name, or a gap.
    """

    def __init__(self, folder: Path, file_size: int, disk: Disk | None = None, *, rebuildable: bool = False) -> None:
        super().__init__(file_size)
        self.folder = folder
        self._rebuildable = rebuildable
        self._disk = disk or Disk()
        self._has_new_names = False
        self._undeleted: list[MappedFile] = []
        if folder.is_dir():
            self._load()

    def _load(self) -> None:
        with disk_errors("read", self.folder):
            found = [_FoundFile(self.folder / name, length) for name, length in self._disk.list_files(self.folder)]
        for path, _ in found:
            if not (path.name.isdecimal() and len(path.name) == 20):
                raise StoreFormatError(
                    f"{path} does not belong there; only files named by a 20-digit offset may be in {self.folder}"
                )
        kept = found[: self._count_usable(found)]
        files: list[MappedFile] = []
        try:
            for each in kept:
                grows = bool(files) or self._is_unfinished(each)
                files.append(self._existing_file(each.path, grows=grows))
            if not self._rebuildable:
                sync_folder(self.folder, self._disk)  # a killed process may have left names that are not durable
            for path, length in reversed(found[len(kept) :]):
                # A process may be killed while it creates a file. It is empty then.
                log = _log.warning if length else _log.info
                log("store.unfinished_file_dropped", file=str(path), length=length)
                self._remove_name(path)
        except BaseException:
            for file in files:
                file.close()
            raise
        self._has_new_names = self._rebuildable and bool(files)
        self.is_short = len(kept) < len(found) or not found
        self._run = [each.start for each in kept], files

    def _existing_file(self, path: Path, *, grows: bool) -> MappedFile:
        # Nothing is allocated yet: the file may be sparse (RocketMQ's are), and mostly it is full.
        file = DiskFile(path, self.file_size, self._disk, durable_name=False, grows=grows, first_step=0)
        file.release_descriptor()
        return file

    def _remove_name(self, path: Path) -> None:
        with disk_errors("remove", path):
            self._disk.unlink(path)
        sync_folder(self.folder, self._disk)

    def _count_usable(self, found: Sequence[_FoundFile]) -> int:
        """Return the number of leading files to keep.

        Raises:
            StoreFormatError: A file is missing that cannot be rebuilt.
        """
        for index, each in enumerate(found):
            if index and each.start != found[index - 1].start + self.file_size:
                if not self._rebuildable:
                    raise StoreFormatError(
                        f"{self.folder}: a file is missing between {found[index - 1].path.name} and "
                        f"{each.path.name}; restore it"
                    )
                return index
            # The file before shows that the size setting is right, so a shorter file is an unfinished one.
            is_cut = index > 0 and each.length < self.file_size
            if self._rebuildable and (is_cut or self._is_unfinished(each)):
                return index
        count = len(found)
        while count and self._is_unfinished(found[count - 1]):
            count -= 1
        return count

    def _is_unfinished(self, each: _FoundFile) -> bool:
        """Return True if the file is too short and empty: the process or the power stopped while it was created."""
        if each.length == 0:
            return True
        with disk_errors("read", each.path):
            return each.length < self.file_size and only_zeros(self._disk.read_whole(each.path) or b"")

    def path_of(self, start: int) -> Path:
        return self.folder / file_name(start)

    def new_file(self, start: int) -> MappedFile:
        self._sync_names()  # else a power failure could leave this file without the files before it
        self._has_new_names = self._rebuildable
        # The first file of an application with few messages stays small. One that needs a second file will fill it.
        first_step = None if self.files else max(self.file_size // _FIRST_STEP, 1)
        return DiskFile(
            self.path_of(start),
            self.file_size,
            self._disk,
            durable_name=not self._rebuildable,
            first_step=first_step,
        )

    def remove(self, files: Sequence[MappedFile]) -> None:
        # In this order, also after a failure: a later file that is deleted before an earlier one would leave a gap.
        pending, self._undeleted = [*self._undeleted, *files], []
        try:
            while pending:
                pending[0].unlink()
                sync_folder(self.folder, self._disk)
                del pending[0]
        finally:  # only old files: the name of one that was cut off at the end may be used again
            self._undeleted = [file for file in pending if file.path is not None and int(file.path.name) < self.start]

    def flush(self, start: int, end: int) -> None:
        self._sync_names()
        starts, files = self._run
        for index in range(max(0, bisect_right(starts, start) - 1), bisect_right(starts, end - 1)):
            file, file_end = files[index], starts[index] + self.file_size
            if file_end > start:
                file.flush(end - starts[index])
                if file_end <= end:
                    file.release_descriptor()

    def _sync_names(self) -> None:
        """Make the names of new files and folders durable."""
        if not self._has_new_names:
            return
        self._has_new_names = False
        try:
            for folder in (self.folder, *self.folder.parents[:2]):  # queue, topic, consumequeue
                sync_folder(folder, self._disk)
        except BaseException:
            self._has_new_names = True
            raise

"""Files of a fixed size as memory, and sequences of them that form one range of bytes."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path


class MappedFile:
    """Memory of a fixed size: anonymous here, a file on disk in `DiskFile`. Bytes never written are zero.

    Attributes:
        path: The file; None in memory.
        size: Length in bytes; it never changes.
        allocated: Bytes before it may be written through the map. Those in memory may all be.
        view: All bytes. After `release` it can be read by slices only.
        is_mapped: False after `release`.
        is_new: The file was created by this object.
    """

    path: Path | None = None
    is_new = False
    is_mapped = True
    view: mmap.mmap

    def __init__(self, size: int) -> None:
        self.size = self.allocated = size
        self.view = mmap.mmap(-1, size)

    def read(self, at: int, size: int) -> bytes:
        """Return bytes, also those that may not be allocated; fewer at the end of the file.

        Reading such bytes through the map needs memory that is not there if a file system in memory (tmpfs) is full.
        """
        return self.view[at : at + size]

    def data_parts(self) -> list[tuple[int, int]]:
        """Return start and end of each part that may have other bytes than zero, as the file system knows it."""
        return [(0, self.size)]

    def allocate(self, end: int) -> None:
        """Reserve the memory or the disk space for all bytes before *end*. Writing there cannot fail then.

        Raises:
            StoreFullError: The disk has no space for it.
            StoreError: The disk failed.
        """

    def fill(self, start: int, end: int) -> None:
        """Write zeros to allocated bytes that were never written. The next write and flush of them are faster then.

        A file system marks allocated blocks as unwritten. The flush of the first bytes in them has to change that in
        its journal too. Not thread-safe: no other thread may write to these bytes meanwhile.

        Raises:
            StoreError: The disk failed.
        """

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write *data* at *at*: all of it or, if that fails, nothing.

        Raises:
            StoreError: The disk failed.
        """
        self.write_mapped(at, data)

    def write_mapped(self, at: int, data: bytes | memoryview) -> None:
        """Write *data* at *at* through the map. No other thread runs in between."""
        self.view[at : at + len(data)] = data

    def start_flush(self, at: int, size: int) -> None:
        """Let the disk begin to write these bytes. The `flush` after it takes less time, and reports what fails."""

    def flush(self, end: int | None = None) -> None:
        """Return when all bytes written so far are on the disk.

        Args:
            end: Bytes before it do not change any more. By default that is the whole file, or all later writes go
                through the map.

        Raises:
            StoreError: The disk failed. Call again: the next flush that succeeds has written the bytes.
        """

    def map(self) -> mmap.mmap:
        """Return ``view`` for writing: after `release` the file is mapped again."""
        return self.view

    def release(self) -> None:
        """Unmap the file and close its descriptors until the next `map`. Reading opens it each time. Not in memory."""

    def release_descriptor(self) -> None:
        """Close the file descriptor until the next flush. For full files; the map has a descriptor of its own."""

    def close(self) -> None:
        """Unmap the file."""
        self.view.close()

    def unlink(self) -> None:
        """Remove the file's name. Readers may continue; the map is freed with the last one.

        Raises:
            StoreError: The disk failed.
        """

    def delete(self) -> None:
        """Unmap and remove the file."""
        self.close()
        self.unlink()


_CHUNK = 1 << 16  # larger ones do not stay in the cache of the processor
_PAGE = 4_096

_Files = tuple[list[int], list[MappedFile]]
"""Starts and files at one moment; never changed, only replaced. A tuple, because `find` unpacks it fastest."""


class MappedFileQueue:
    """Files of one size, each named by the offset of its first byte: in memory here, in a folder in `DiskFileQueue`.

    - ``starts`` ascends in steps of ``file_size``. The first may be greater than 0, because old files are deleted.
    - Reading takes no lock. Files are added at the end and removed at the front only, and a reader sees the files
      before or after such a change.

    Args:
        file_size: Bytes of each file.

    Attributes:
        is_short: Files at the end were dropped when it was opened, or the folder was empty.
    """

    is_short = False

    def __init__(self, file_size: int) -> None:
        self.file_size = file_size
        self._run: _Files = ([], [])

    @property
    def starts(self) -> list[int]:
        """Offset of the first byte of each file."""
        return self._run[0]

    @property
    def files(self) -> list[MappedFile]:
        """All files, oldest first."""
        return self._run[1]

    @property
    def start(self) -> int:
        """Offset of the first byte that still exists."""
        starts = self._run[0]
        return starts[0] if starts else 0

    @property
    def end(self) -> int:
        """Offset after the last file."""
        starts = self._run[0]
        return starts[-1] + self.file_size if starts else 0

    def find(self, offset: int) -> tuple[MappedFile, int] | None:
        """Return the file with the byte at *offset*, and the offset of its first byte."""
        starts, files = self._run
        index = bisect_right(starts, offset) - 1
        if index < 0 or offset >= starts[index] + self.file_size:
            return None
        return files[index], starts[index]

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes of one file; fewer at the file's end, none without a file."""
        found = self.find(offset)
        if found is None:
            return b""
        file, start = found
        return file.view[offset - start : offset - start + size]

    def append_file(self, start: int | None = None, file: MappedFile | None = None) -> MappedFile:
        """Add a file at the end; to an empty queue at *start*.

        Args:
            file: One that `new_file` returned earlier.

        Raises:
            StoreFullError: There is no space for it; the queue is as before.
        """
        starts, files = self._run
        start = self.end if starts or start is None else start
        file = file or self.new_file(start)
        self._run = [*starts, start], [*files, file]
        return file

    def new_file(self, start: int) -> MappedFile:
        """Create a file for `append_file`. The first one of a queue is allocated in steps (`MappedFile.allocate`)."""
        return MappedFile(self.file_size)

    def path_of(self, start: int) -> Path | None:
        """Return the path of the file that starts at *start*; None in memory."""
        return None

    def truncate(self, end: int) -> None:
        """Delete the files after *end*, and clear the rest of the file with *end*.

        That is on the disk when this returns. Otherwise the old bytes might return after a power failure, next to newer
        ones that rely on their absence.
        """
        starts, files = self._run
        count = bisect_right(starts, end - 1)
        self._run = starts[:count], files[:count]
        for file in reversed(files[count:]):  # from the end, so that a crash leaves no gap
            file.close()
            self.remove([file])
        if count and end < self.end and _clear_from(files[count - 1], end - starts[count - 1]):
            files[count - 1].flush()

    def delete_before(self, end: int) -> int:
        """Delete the files that end at *end* or before it, but never the last file. Return the number of files."""
        removed = self.detach_before(end)
        self.remove(removed)
        return len(removed)

    def detach_before(self, end: int) -> list[MappedFile]:
        """Detach the files that `delete_before` would delete. `remove` deletes them, without the owner's lock."""
        starts, files = self._run
        count = max(min(bisect_right(starts, end), len(starts)) - 1, 0)
        if count:
            self._run = starts[count:], files[count:]
        return files[:count]

    def remove(self, files: Sequence[MappedFile]) -> None:
        """Delete detached files. When this returns, no power failure restores a part of them and thus a gap.

        The names are removed at once. A map is freed when its last reader is done.
        """
        for file in files:
            file.unlink()

    def flush(self, start: int, end: int) -> None:
        """Return when all bytes from *start* to *end* are on the disk.

        Raises:
            StoreError: The disk failed. Call again.
        """

    def close(self) -> None:
        """Unmap all files."""
        files, self._run = self._run[1], ([], [])
        for file in files:
            file.close()


def only_zeros(data: bytes) -> bool:
    """Return True if all bytes are zero. A comparison takes a fiftieth of the time of ``strip`` (measured)."""
    return data == bytes(len(data))


def _clear_from(file: MappedFile, at: int) -> bool:
    """Set the bytes from *at* on to zero. Return True if one was not. Pages of zeros stay untouched.

    A page with other bytes has its disk space. A page of zeros may lack it, and writing to it could fail.
    """
    found = False
    for chunk in range(at, file.size, _CHUNK):
        data = file.read(chunk, _CHUNK)
        if only_zeros(data):
            continue
        found = True
        for start in range(0, len(data), _PAGE):
            if content := data[start : start + _PAGE].rstrip(b"\0"):
                file.allocate(chunk + start + len(content))  # so that it counts as written, see `Disk.write_again`
                file.write_mapped(chunk + start, bytes(len(content)))
    return found

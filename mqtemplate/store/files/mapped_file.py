"""One file of fixed size, mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path


class MappedFile:
    """Memory of a fixed size: anonymous here, that of a file in `DiskFile`. Bytes never written are zero.

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

"""A sequence of mapped files that together are one long run of bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.folders import sync_folder
from mqtemplate.store.layout import file_name
from mqtemplate.store.mapped_file import MappedFile

__all__ = ["MappedFileQueue"]


class MappedFileQueue:
    """Files of one size, each named by the offset of its first byte.

    - ``starts`` ascends in steps of ``file_size``; the first need not be 0, since old files are deleted.
    - Reading takes no lock: files are only ever added at the end, and taken away at the front.

    Args:
        folder: Where they are; None keeps them in memory.
        file_size: Bytes of each.
        lasting: New files' names last from the start; else `flush` sees to that, for files that can be made again.

    Raises:
        StoreFormatError: The folder holds a file of another size or another name, or a gap.
    """

    def __init__(self, folder: Path | None, file_size: int, *, lasting: bool = True) -> None:
        self.folder = folder
        self._lasting = lasting
        self._has_new_names = False
        self.file_size = file_size
        self.starts: list[int] = []
        self.files: list[MappedFile] = []
        if folder is not None and folder.is_dir():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        if paths and paths[-1].stat().st_size == 0:
            paths.pop().unlink()  # made, but not yet given its length, when the process died
        for path in paths:
            if not (path.name.isdecimal() and len(path.name) == 20):
                raise StoreFormatError(
                    f"{path} does not belong there; only files named by a 20-digit offset may lie in {folder}"
                )
            start = int(path.name)
            if self.starts and start != self.end:
                raise StoreFormatError(
                    f"{folder}: a file is missing between {paths[len(self.starts) - 1].name} and {path.name}"
                )
            self.files.append(MappedFile(path, self.file_size))
            self.starts.append(start)

    @property
    def begin(self) -> int:
        """Offset of the first byte that is still there."""
        return self.starts[0] if self.starts else 0

    @property
    def end(self) -> int:
        """Offset behind the last file."""
        return self.starts[-1] + self.file_size if self.starts else 0

    def find(self, offset: int) -> tuple[MappedFile, int] | None:
        """The file that holds *offset*, and the offset of its first byte."""
        index = bisect_right(self.starts, offset) - 1
        if index < 0 or offset >= self.starts[index] + self.file_size:
            return None
        return self.files[index], self.starts[index]

    def append_file(
        self, start: int | None = None, make: Callable[[Path | None], MappedFile] | None = None
    ) -> MappedFile:
        """Add a file behind the last one; in an empty queue at *start*.

        Raises:
            StoreFullError: There is no room for it; the queue is as before.
        """
        start = self.end if self.starts or start is None else start
        file = self.new_file(start) if make is None else make(self.path_of(start))
        self.files.append(file)
        self.starts.append(start)
        return file

    def path_of(self, start: int) -> Path | None:
        return None if self.folder is None else self.folder / file_name(start)

    def new_file(self, start: int) -> MappedFile:
        self._has_new_names = not self._lasting
        return MappedFile(self.path_of(start), self.file_size, lasting=self._lasting)

    def read(self, offset: int, size: int) -> bytes:
        """*size* bytes from *offset* on, all in one file; fewer at the file's end, none where there is no file."""
        found = self.find(offset)
        if found is None:
            return b""
        file, start = found
        at = offset - start
        return file.view[at : at + size]

    def truncate(self, end: int) -> None:
        """Keep what lies before *end*: later files are deleted, the rest of the file that holds it becomes zero."""
        while self.starts and self.starts[-1] >= end:
            self.starts.pop()
            self.files.pop().delete()
        if self.starts and end < self.end:
            _zero_from(self.files[-1], end - self.starts[-1])

    def delete_before(self, begin: int) -> int:
        """Delete the files that end at *begin* or before it, but never the last one; gives how many went."""
        count = 0
        while len(self.starts) > 1 and self.starts[1] <= begin:
            # The name goes at once. A reader may still be looking at the map, which goes when the last one lets go.
            file = self.files[0]
            self.files, self.starts = self.files[1:], self.starts[1:]
            file.unlink()
            count += 1
        return count

    def flush(self, start: int, end: int) -> None:
        """Return when the files that hold bytes of ``start..end`` are on the disk."""
        if self._has_new_names and self.folder is not None:
            self._has_new_names = False
            for folder in (self.folder, *self.folder.parents[:2]):
                sync_folder(folder)
        for file, file_start in zip(self.files, self.starts, strict=True):
            if file_start < end and file_start + self.file_size > start:
                file.flush()

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files, self.starts = [], []


def _zero_from(file: MappedFile, at: int) -> None:
    """Clear what is not zero yet; pages that never were written stay so."""
    chunk = 1 << 20
    for start in range(at, file.size, chunk):
        piece = file.view[start : start + chunk]
        if piece.strip(b"\0"):
            file.view[start : start + len(piece)] = bytes(len(piece))

"""A sequence of mapped files that together are one long run of bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.disk import Disk, disk_errors
from mqtemplate.store.files.folders import sync_folder
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.layout import file_name

_log = structlog.stdlib.get_logger("mqtemplate.store")


_Run = tuple[list[int], list[MappedFile]]
"""Starts and files at one moment; never changed, only replaced. A plain tuple, which `find` takes apart quickest."""


class _Found(NamedTuple):
    """A file in the folder."""

    path: Path
    length: int


class MappedFileQueue:
    """Files of one size, each named by the offset of its first byte.

    - ``starts`` ascends in steps of ``file_size``; the first need not be 0, since old files are deleted.
    - Reading takes no lock: files are only ever added at the end, and taken away at the front, and who looks for one
      sees the run before such a change or after it.
    - Only the files at the end keep a descriptor beside that of their map.

    A power failure may leave names without their bytes. An empty file is one whose length was not on the disk yet,
    so nothing in it was: at the end such files are dropped. One that is missing, or empty with others behind it, is a
    gap. Files that can be made again are dropped from there on. Of others a missing one is an error, since names last
    from the start; an empty one gets its length back, and the recovery judges the zeros in it.

    Args:
        folder: Where they are; None keeps them in memory.
        file_size: Bytes of each.
        lasting: New files' names last from the start; else `flush` sees to that, for files that can be made again.

    Attributes:
        is_short: Files were dropped at its end, or there was a folder and nothing in it.

    Raises:
        StoreFormatError: The folder holds a file of another size or another name, or a gap.
    """

    def __init__(self, folder: Path | None, file_size: int, *, lasting: bool = True, disk: Disk | None = None) -> None:
        self.folder = folder
        self._lasting = lasting
        self._disk = disk or Disk()
        self._has_new_names = False
        self.is_short = False
        self.file_size = file_size
        self._run: _Run = ([], [])
        if folder is not None and folder.is_dir():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        with disk_errors("read", folder):
            found = [_Found(folder / name, length) for name, length in self._disk.list_files(folder)]
        for path, _ in found:
            if not (path.name.isdecimal() and len(path.name) == 20):
                raise StoreFormatError(
                    f"{path} does not belong there; only files named by a 20-digit offset may lie in {folder}"
                )
        kept = found[: self._count_usable(found)]
        files: list[MappedFile] = []
        try:
            for each in kept:
                grows = bool(files) or self._is_unfinished(each)
                files.append(MappedFile(each.path, self.file_size, lasting=False, grows=grows, disk=self._disk))
                files[-1].rest()
            if self._lasting:
                sync_folder(folder, self._disk)  # names that a killed process made may not last yet
            for path, length in reversed(found[len(kept) :]):
                _log.warning("store.unfinished_file_dropped", file=str(path), length=length)
                with disk_errors("remove", path):
                    self._disk.unlink(path)
                sync_folder(folder, self._disk)
        except BaseException:
            for file in files:
                file.close()
            raise
        self._has_new_names = not self._lasting and bool(files)
        self.is_short = len(kept) < len(found) or not found
        self._run = [int(each.path.name) for each in kept], files

    def _count_usable(self, found: Sequence[_Found]) -> int:
        """How many files from the first on are kept.

        Raises:
            StoreFormatError: A file is missing that cannot be made again.
        """
        for index, each in enumerate(found):
            if index and int(each.path.name) != int(found[index - 1].path.name) + self.file_size:
                if self._lasting:
                    raise StoreFormatError(
                        f"{each.path.parent}: a file is missing between {found[index - 1].path.name} and "
                        f"{each.path.name}; restore it, or open the folder with the sizes it was made with"
                    )
                return index
            if not self._lasting and self._is_unfinished(each, judges_by_length=index > 0):
                return index
        count = len(found)
        while count and self._is_unfinished(found[count - 1]):
            count -= 1
        return count

    def _is_unfinished(self, each: _Found, *, judges_by_length: bool = False) -> bool:
        """Whether a file has not all of its length, and nothing in it: it was being made when the process or the power
        went. Where another file shows that the size is right, its length is enough to tell."""
        if each.length == 0 or (judges_by_length and each.length < self.file_size):
            return True
        with disk_errors("read", each.path):
            return each.length < self.file_size and not (self._disk.read_whole(each.path) or b"").strip(b"\0")

    @property
    def starts(self) -> list[int]:
        """Offset of each file's first byte."""
        return self._run[0]

    @property
    def files(self) -> list[MappedFile]:
        return self._run[1]

    @property
    def begin(self) -> int:
        """Offset of the first byte that is still there."""
        starts = self._run[0]
        return starts[0] if starts else 0

    @property
    def end(self) -> int:
        """Offset behind the last file."""
        starts = self._run[0]
        return starts[-1] + self.file_size if starts else 0

    def find(self, offset: int) -> tuple[MappedFile, int] | None:
        """The file that holds *offset*, and the offset of its first byte."""
        starts, files = self._run
        index = bisect_right(starts, offset) - 1
        if index < 0 or offset >= starts[index] + self.file_size:
            return None
        return files[index], starts[index]

    def append_file(
        self, start: int | None = None, make: Callable[[Path | None], MappedFile] | None = None
    ) -> MappedFile:
        """Add a file behind the last one; in an empty queue at *start*.

        Raises:
            StoreFullError: There is no room for it; the queue is as before.
        """
        starts, files = self._run
        start = self.end if starts or start is None else start
        file = self.new_file(start) if make is None else make(self.path_of(start))
        self._run = [*starts, start], [*files, file]
        return file

    def path_of(self, start: int) -> Path | None:
        return None if self.folder is None else self.folder / file_name(start)

    def new_file(self, start: int) -> MappedFile:
        self._sync_names()  # or a power failure could leave this file without those before it
        self._has_new_names = not self._lasting
        return MappedFile(self.path_of(start), self.file_size, lasting=self._lasting, disk=self._disk)

    def read(self, offset: int, size: int) -> bytes:
        """*size* bytes from *offset* on, all in one file; fewer at the file's end, none where there is no file."""
        found = self.find(offset)
        if found is None:
            return b""
        file, start = found
        at = offset - start
        return file.view[at : at + size]

    def truncate(self, end: int) -> None:
        """Keep what lies before *end*: later files are deleted, the rest of the file that holds it becomes zero.

        It is on the disk when this returns: what was forgotten may not come back at the next power failure, when
        other bytes that counted on that are there.
        """
        starts, files = self._run
        count = bisect_right(starts, end - 1)
        self._run = starts[:count], files[:count]
        for file in reversed(files[count:]):
            file.close()
            self.remove([file])
        if count and end < self.end and _zero_from(files[count - 1], end - starts[count - 1]):
            files[count - 1].flush()

    def delete_before(self, begin: int) -> int:
        """Delete the files that end at *begin* or before it, but never the last one; gives how many went."""
        gone = self.take_before(begin)
        self.remove(gone)
        return len(gone)

    def take_before(self, begin: int) -> list[MappedFile]:
        """Take out the files that `delete_before` would delete; `remove` deletes them, without the owner's lock."""
        starts, files = self._run
        count = max(min(bisect_right(starts, begin), len(starts)) - 1, 0)
        if count:
            self._run = starts[count:], files[count:]
        return files[:count]

    def remove(self, files: Sequence[MappedFile]) -> None:
        """Delete files that were taken out, for good: no power failure brings their names back, or some of them and
        so a gap.

        The names go at once. A reader may still be looking at a map, which goes when the last one lets go.
        """
        for file in files:
            file.unlink()
            if self.folder is not None:
                sync_folder(self.folder, self._disk)

    def flush(self, start: int, end: int) -> None:
        """Return when the files that hold bytes of ``start..end`` are on the disk.

        Raises:
            StoreError: The disk refused; ask again.
        """
        self._sync_names()
        starts, files = self._run
        for index in range(max(0, bisect_right(starts, start) - 1), bisect_right(starts, end - 1)):
            file, file_end = files[index], starts[index] + self.file_size
            if file_end > start:
                file.flush(end - starts[index])
                if file_end <= end:
                    file.rest()

    def _sync_names(self) -> None:
        """Make the names of files and folders last that were made in haste."""
        if not self._has_new_names or self.folder is None:
            return
        self._has_new_names = False
        try:
            for folder in (self.folder, *self.folder.parents[:2]):
                sync_folder(folder, self._disk)
        except BaseException:
            self._has_new_names = True
            raise

    def close(self) -> None:
        files, self._run = self._run[1], ([], [])
        for file in files:
            file.close()


def _zero_from(file: MappedFile, at: int) -> bool:
    """Clear what is not zero yet; pages that never were written stay so. Tells whether there was anything."""
    chunk = 1 << 20
    found = False
    for start in range(at, file.size, chunk):
        piece = file.view[start : start + chunk]
        if piece.strip(b"\0"):
            file.write_mapped(start, bytes(len(piece)))
            found = True
    return found

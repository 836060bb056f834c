"""A disk whose calls fail as a test decides. It works on real files and syncs nothing."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mqtemplate.store.files.disk import Disk

_PAGE = 4_096

Judge = Callable[[int, str], int]
"""Takes the number and the kind of a call, and returns the error number of its failure; 0 for success."""


def never(number: int, kind: str) -> int:
    """Let every call succeed."""
    return 0


def once(at: int, code: int) -> Judge:
    """Let only the call with this number fail."""
    return lambda number, kind: code if number == at else 0


def during(first: int, last: int, code: int) -> Judge:
    """Let all calls from *first* to *last* fail."""
    return lambda number, kind: code if first <= number <= last else 0


CodePath = tuple[tuple[str, int], ...]


def code_path(frame: FrameType | None) -> CodePath:
    """Return function and line of each frame inside the library."""
    path = []
    while frame is not None:
        if frame.f_globals["__name__"].startswith("mqtemplate."):
            path.append((frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return tuple(path)


class FaultyDisk(Disk):
    """A disk that numbers its calls from 0, and asks *judge* about each.

    Attributes:
        calls: Kinds of the calls so far.
        paths: For each call, the lines of code that led to it, from the disk upwards.
        started: Parts of files that were written early: position and size. Such a hint cannot fail.
        judge: May be replaced at any time.
    """

    def __init__(self, judge: Judge = never) -> None:
        self.judge = judge
        self.calls: list[str] = []
        self.paths: list[CodePath] = []
        self.started: list[tuple[int, int]] = []
        self._torn: dict[int, int] = {}  # descriptor -> error of its next write

    def _check(self, kind: str, path: Path | None = None) -> None:
        code = self._code(kind)
        if code:
            raise OSError(code, os.strerror(code), None if path is None else str(path))

    def _code(self, kind: str) -> int:
        self.calls.append(kind)
        self.paths.append(code_path(sys._getframe(1)))
        return self.judge(len(self.calls) - 1, kind)

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        self._check("open", path)
        return super().open(path, flags=flags)

    def set_length(self, fd: int, size: int) -> None:
        self._check("set_length")
        super().set_length(fd, size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        self._check("allocate")

    def map(self, fd: int, size: int) -> mmap.mmap:
        self._check("map")
        return super().map(fd, size)

    def write_at(self, fd: int, data: bytes | memoryview, at: int) -> int:
        """Write the first half, if the call fails."""
        if fd in self._torn:
            code = self._torn.pop(fd)
            raise OSError(code, os.strerror(code))
        if code := self._code("write"):
            self._torn[fd] = code
            data = data[: len(data) // 2]
        return super().write_at(fd, data, at)

    def start_flush(self, fd: int, at: int, size: int) -> None:
        self.started.append((at, size))

    def flush(self, fd: int) -> None:
        self._check("flush")

    def replace(self, path: Path, target: Path) -> None:
        self._check("replace", path)
        super().replace(path, target)

    def link(self, path: Path, other: Path) -> None:
        self._check("link", path)
        super().link(path, other)

    def unlink(self, path: Path) -> None:
        self._check("unlink", path)
        super().unlink(path)

    def make_folder(self, folder: Path) -> None:
        self._check("make_folder", folder)
        super().make_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        self._check("sync_folder", folder)

    def read_whole(self, path: Path) -> bytes | None:
        self._check("read", path)
        return super().read_whole(path)

    def list_files(self, folder: Path) -> list[tuple[str, int]]:
        self._check("list", folder)
        return super().list_files(folder)


FULL = (errno.ENOSPC,)
FAILS_FULL = {"set_length", "allocate", "write", "flush", "make_folder", "link", "replace", "open", "sync_folder"}
"""Kinds of calls that fail on a full disk."""


class LedgerDisk(FaultyDisk):
    """A disk that notes which bytes of each file have their blocks: allocated, or written by a system call."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: defaultdict[int, set[int]] = defaultdict(set)  # inode -> pages

    def allocate(self, fd: int, at: int, size: int) -> None:
        super().allocate(fd, at, size)
        self._note(fd, at, size)

    def write_at(self, fd: int, data: bytes | memoryview, at: int) -> int:
        written = super().write_at(fd, data, at)
        self._note(fd, at, written)
        return written

    def _note(self, fd: int, at: int, size: int) -> None:
        self.pages[os.fstat(fd).st_ino].update(range(at // _PAGE, -(-(at + size) // _PAGE)))

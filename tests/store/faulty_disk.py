"""A disk that refuses what a test tells it to refuse. It works on real files, and asks the system for no syncing."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from mqtemplate.store.files.disk import Disk

Judge = Callable[[int, str], int]


def never(number: int, kind: str) -> int:
    return 0


def once(at: int, code: int) -> Judge:
    """Refuse the call with this number, and no other."""
    return lambda number, kind: code if number == at else 0


def during(first: int, last: int, code: int) -> Judge:
    """Refuse every call from one to another."""
    return lambda number, kind: code if first <= number <= last else 0


class FaultyDisk(Disk):
    """Numbers its calls, and asks of each whether it fails.

    Args:
        judge: Takes the number of a call, from 0 on, and its kind; gives the error it fails with, 0 for none.

    Attributes:
        calls: Kinds of the calls so far.
        judge: May be replaced at any time.
    """

    def __init__(self, judge: Judge = never) -> None:
        self.judge = judge
        self.calls: list[str] = []
        self._torn: dict[int, int] = {}  # descriptor -> what its next write fails with

    def _ask(self, kind: str, path: Path | None = None) -> None:
        code = self._code(kind)
        if code:
            raise OSError(code, os.strerror(code), None if path is None else str(path))

    def _code(self, kind: str) -> int:
        self.calls.append(kind)
        return self.judge(len(self.calls) - 1, kind)

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        self._ask("open", path)
        return super().open(path, flags=flags)

    def allocate(self, fd: int, size: int) -> None:
        self._ask("allocate")
        os.truncate(fd, size)

    def map(self, fd: int, size: int) -> mmap.mmap:
        self._ask("map")
        return super().map(fd, size)

    def write_at(self, fd: int, data: bytes, at: int) -> int:
        """A write that fails has written the first half."""
        if fd in self._torn:
            code = self._torn.pop(fd)
            raise OSError(code, os.strerror(code))
        if code := self._code("write"):
            self._torn[fd] = code
            data = data[: len(data) // 2]
        return super().write_at(fd, data, at)

    def flush(self, fd: int) -> None:
        self._ask("flush")

    def replace(self, path: Path, target: Path) -> None:
        self._ask("replace", path)
        super().replace(path, target)

    def link(self, path: Path, other: Path) -> None:
        self._ask("link", path)
        super().link(path, other)

    def unlink(self, path: Path) -> None:
        self._ask("unlink", path)
        super().unlink(path)

    def make_folder(self, folder: Path) -> None:
        self._ask("make_folder", folder)
        super().make_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        self._ask("sync_folder", folder)

    def read_whole(self, path: Path) -> bytes | None:
        self._ask("read", path)
        return super().read_whole(path)

    def list_files(self, folder: Path) -> list[tuple[str, int]]:
        self._ask("list", folder)
        return super().list_files(folder)


FULL = (errno.ENOSPC,)
FAILS_FULL = {"allocate", "write", "flush", "make_folder", "link", "replace", "open", "sync_folder"}
"""Calls that a full disk may refuse."""

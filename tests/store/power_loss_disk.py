"""A disk that computes what a power failure at this moment may leave.

It works on real files and syncs nothing. In addition it records the bytes of each file at its last flush, the names of
each folder at its last sync, and the changes of names since then. From both it builds images: folders that a machine
may find after the next start.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mqtemplate.store.files.disk import Disk

_FOLDER = -1


@dataclass
class Change:
    """An unsynced change of names in one folder: the new file of each name, or None if it was removed."""

    names: dict[str, int | None]


@dataclass
class Folder:
    """The durable names of a folder, and the later changes in order."""

    durable: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


class Choice(NamedTuple):
    """Something that may be on the disk or not: a change of names, the length of a file, or a piece of a file."""

    kind: str
    where: object
    number: int = 0


Image = tuple[tuple[str, bytes | None], ...]
"""Content of a folder: path and bytes of each file; None for a folder, which precedes its content."""


def write_image(image: Image, folder: Path) -> None:
    """Create *folder* with the content of an image."""
    folder.mkdir()
    for name, data in image:
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


class PowerLossDisk(Disk):
    """Model of a disk that may lose its power; see the module.

    Args:
        root: Folder of the store. Its present content is durable.
        sector: Bytes that reach the disk together.
        on_event: Called before each call that may change the disk.
        fails: Returns True if the n-th flush fails. Then the pages count as written, but they are not on the disk.
    """

    def __init__(
        self,
        root: Path,
        sector: int = 4_096,
        on_event: Callable[[], None] = lambda: None,
        boot: str = "boot-1",
        fails: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.root = root
        self.sector = sector
        self.on_event = on_event
        self.boot = boot
        self.fails = fails
        self.flushes = 0
        self._numbers = itertools.count()
        self._files: dict[Path, int] = {}  # current names
        self._gone: dict[int, bytes] = {}  # contents of files without a name
        self._durable: dict[int, bytes] = {}
        self._forgotten: dict[int, bytes] = {}  # bytes that a failed flush should have written
        self._folders: dict[Path, Folder] = {root.parent: Folder({root.name: _FOLDER})}
        self._opened: dict[int, Path] = {}
        if root.is_dir():
            self._add_folder(root)

    def _add_folder(self, folder: Path) -> None:
        self._folders[folder] = known = Folder()
        for path in folder.iterdir():
            if path.is_dir():
                known.durable[path.name] = _FOLDER
                self._add_folder(path)
            else:
                known.durable[path.name] = number = self._files[path] = next(self._numbers)
                self._durable[number] = path.read_bytes()

    # --- calls of the store --------------------------------------------------------------------

    def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
        self.on_event()
        fd = super().open(path, flags=flags)
        if path not in self._files:
            self._files[path] = next(self._numbers)
            self._change(path.parent, {path.name: self._files[path]})
        self._opened[fd] = path
        return fd

    def set_length(self, fd: int, size: int) -> None:
        self.on_event()
        super().set_length(fd, size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        self.on_event()

    def write_at(self, fd: int, data: bytes | memoryview, at: int) -> int:
        self.on_event()
        return super().write_at(fd, data, at)

    def write_again(self, fd: int, view: object, end: int, allocated: int) -> None:
        self._forgotten.pop(self._files[self._opened[fd]], None)

    def flush(self, fd: int) -> None:
        self.on_event()
        self.flushes += 1
        path = self._opened[fd]
        number, now = self._files[path], path.read_bytes()
        if self.fails(self.flushes):
            self._forgotten[number] = now
            raise OSError(5, "Input/output error", str(path))
        durable, forgotten = self._durable.get(number, b""), self._forgotten.get(number)
        self._durable[number] = now if forgotten is None else self._without(forgotten, durable, now)

    def _without(self, forgotten: bytes, durable: bytes, now: bytes) -> bytes:
        """Return *now*, but with the old bytes where nothing changed since the failed flush."""
        durable = durable.ljust(len(now), b"\0")
        pieces = [slice(at, at + self.sector) for at in range(0, len(now), self.sector)]
        return b"".join(durable[piece] if now[piece] == forgotten[piece] else now[piece] for piece in pieces)

    def replace(self, path: Path, target: Path) -> None:
        self.on_event()
        self._keep_content(target)
        super().replace(path, target)
        self._files[target] = self._files.pop(path)
        self._change(path.parent, {path.name: None, target.name: self._files[target]})

    def link(self, path: Path, other: Path) -> None:
        self.on_event()
        super().link(path, other)
        self._files[other] = self._files[path]
        self._change(other.parent, {other.name: self._files[path]})

    def unlink(self, path: Path) -> None:
        self.on_event()
        self._keep_content(path)
        super().unlink(path)
        if self._files.pop(path, None) is not None:
            self._change(path.parent, {path.name: None})

    def _keep_content(self, path: Path) -> None:
        if path in self._files:
            self._gone[self._files[path]] = path.read_bytes()

    def make_folder(self, folder: Path) -> None:
        self.on_event()
        super().make_folder(folder)
        if folder not in self._folders:
            self._folders[folder] = Folder()
            self._change(folder.parent, {folder.name: _FOLDER})

    def sync_folder(self, folder: Path) -> None:
        self.on_event()
        known = self._folders[folder]
        _apply(known.durable, known.changes)
        known.changes.clear()

    def boot_id(self) -> str:
        return self.boot

    def _change(self, folder: Path, names: dict[str, int | None]) -> None:
        self._folders[folder].changes.append(Change(names))

    # --- images --------------------------------------------------------------------------------

    def number_of(self, path: Path) -> int:
        """Return the number of a file in a `Choice`."""
        return self._files[path]

    def contents(self) -> dict[int, bytes]:
        """Return the bytes of each file as a process sees them."""
        return self._gone | {number: path.read_bytes() for path, number in self._files.items() if path.exists()}

    def choices(self, contents: dict[int, bytes]) -> list[Choice]:
        """Return everything that is not durable, about in the order of the changes."""
        found = [
            Choice("name", folder, number)
            for folder, known in self._folders.items()
            if folder != self.root.parent
            for number in range(len(known.changes))
        ]
        for number, now in contents.items():
            durable = self._durable.get(number, b"")
            if len(durable) != len(now):
                found.append(Choice("length", number))
                durable = durable.ljust(len(now), b"\0")
            found += [
                Choice("piece", number, at)
                for at in range(0, len(now), self.sector)
                if now[at : at + self.sector] != durable[at : at + self.sector]
            ]
        return found

    def image(self, contents: dict[int, bytes], chosen: set[Choice]) -> Image:
        """Return the content of a disk that has only *chosen* of everything that is not durable."""
        found: list[tuple[str, bytes | None]] = []
        self._collect(self.root, "", contents, chosen, found)
        return tuple(found)

    def _collect(
        self,
        folder: Path,
        prefix: str,
        contents: dict[int, bytes],
        chosen: set[Choice],
        found: list[tuple[str, bytes | None]],
    ) -> None:
        known = self._folders[folder]
        names = dict(known.durable)
        _apply(names, [change for at, change in enumerate(known.changes) if Choice("name", folder, at) in chosen])
        for name, number in sorted(names.items()):
            if number == _FOLDER:
                found.append((prefix + name, None))
                self._collect(folder / name, f"{prefix}{name}/", contents, chosen, found)
            else:
                found.append((prefix + name, self._bytes(number, contents.get(number, b""), chosen)))

    def _bytes(self, number: int, now: bytes, chosen: set[Choice]) -> bytes:
        durable = self._durable.get(number, b"")
        if len(durable) != len(now):
            if Choice("length", number) not in chosen:
                return durable
            durable = durable.ljust(len(now), b"\0")
        left = bytearray(durable[: len(now)])
        for at in range(0, len(now), self.sector):
            if Choice("piece", number, at) in chosen:
                left[at : at + self.sector] = now[at : at + self.sector]
        return bytes(left)


def _apply(names: dict[str, int], changes: list[Change]) -> None:
    for change in changes:
        for name, number in change.names.items():
            if number is None:
                names.pop(name, None)
            else:
                names[name] = number


def subsets(choices: list[Choice], chance: random.Random, most: int, all_up_to: int = 3) -> Iterator[set[Choice]]:
    """Yield all subsets of a few choices; else known critical subsets and random ones, at most *most*."""
    if len(choices) <= all_up_to:
        for bits in itertools.product((False, True), repeat=len(choices)):
            yield {choice for choice, is_there in zip(choices, bits, strict=True) if is_there}
        return
    whole = set(choices)
    names = {choice for choice in choices if choice.kind == "name"}
    critical = [set(), whole, {choices[-1]}, whole - {chance.choice(choices)}, names, whole - names]
    random_ones = ({choice for choice in choices if chance.random() < share} for share in (0.5, 0.8, 0.2) * most)
    yield from itertools.islice(itertools.chain(critical, random_ones), most)


class RestartedDisk(Disk):
    """The disk of a machine that was started again. It syncs nothing, because its power does not fail."""

    def __init__(self, boot: str = "boot-2") -> None:
        self.boot = boot

    def flush(self, fd: int) -> None:
        return

    def sync_folder(self, folder: Path) -> None:
        return

    def allocate(self, fd: int, at: int, size: int) -> None:
        return

    def boot_id(self) -> str:
        return self.boot

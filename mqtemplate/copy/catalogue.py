"""The objects of a copy: their names, their bytes, and which of them lead to the state of a moment.

::

    copy.json                                   format, and the id of the history that this is a copy of
    epochs/<number>.json                        one for each start of the copying process
    alive/<number>.json                         when that process was last seen, and whether it has ended
    segments/<epoch>/<start>-<end>-<ms>-<ms>-1  bytes of the commit log, and the tables that changed
    snapshots/<epoch>-<ms>-<start>-<end>        all tables, and where the log began and ended
    followers/<hash of host and folder>.json    when a follower was last seen, and how far it is; for operators

An epoch begins where the log of the epoch before ends for it, as Kafka's leader epochs do: what an older process writes
after that offset belongs to no history. An epoch is created by a conditional write, so two processes cannot create the
same one.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mqtemplate.converters.readable import time_text
from mqtemplate.copy.objects import ObjectStore
from mqtemplate.errors import ConfigurationError, CopyError
from mqtemplate.event_log import get_logger
from mqtemplate.extras import install_command

_log = get_logger("mqtemplate.copy")

FORMAT = 1
ROOT_OBJECT = "copy.json"
HISTORY_TABLE = "config/copyHistory.json"
"""Table of a store directory with the id of its history. A fork of the directory gets another one."""

ALIVE_MS = 60_000
"""Time after its last sign of life in which a process that has not ended counts as alive."""

_NOT_COPIED = ("delayOffset.json", "timercheck", "timermetrics", "figures.jsonl", "localServer.json")
"""Tables that a start computes from the commit log, or that describe the process which has the directory open."""
MAX_TABLE_BYTES = 256 << 20
"""A larger table is left out of a copy, which is logged."""

_MAGIC = b"MQTCOPY1"
_HEAD = struct.Struct(">8sII")  # magic, size of the header, CRC-32 of the header
_MAX_RAW_BYTES = 1 << 30
_LEVEL = 3
_NO_LIMIT = (1 << 63) - 1


# --- names --------------------------------------------------------------------------------------


class SegmentName(NamedTuple):
    """Name of a segment.

    Attributes:
        start: Physical offset of its first byte.
        end: Physical offset after its last byte; *start* if only tables changed.
        first_ms: Time of its first moment.
        last_ms: Time of its last one. No record in it was stored later.
        is_complete: 1 if everything that was stored until *last_ms* is in segments up to this one; 0 if the next one
            has more of it.
    """

    epoch: int
    start: int
    end: int
    first_ms: int
    last_ms: int
    is_complete: int

    def has(self, other: SegmentName) -> bool:
        """Return True if this segment has all that another one has."""
        is_longer = self.start <= other.start and other.end <= self.end
        return (
            self.epoch == other.epoch
            and is_longer
            and self.first_ms <= other.first_ms
            and other.last_ms <= self.last_ms
        )

    @property
    def object(self) -> str:
        """Name of the object."""
        span = f"{self.start:020d}-{self.end:020d}-{self.first_ms:013d}-{self.last_ms:013d}"
        return f"segments/{self.epoch:08d}/{span}-{self.is_complete}"


class SnapshotName(NamedTuple):
    """Name of a snapshot of all tables.

    Attributes:
        log_start: Physical offset of the first byte of the log that the store had.
        end: Physical offset that the copy had reached.
    """

    epoch: int
    time_ms: int
    log_start: int
    end: int

    @property
    def object(self) -> str:
        """Name of the object."""
        return f"snapshots/{self.epoch:08d}-{self.time_ms:013d}-{self.log_start:020d}-{self.end:020d}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One start of a process that copies.

    Attributes:
        start: Physical offset from which its segments count.
        file_size: Size of the files of the commit log.
        host: Host of the process, with its id and the store directory for operators.
    """

    number: int
    start: int
    time_ms: int
    file_size: int
    host: str
    pid: int
    folder: str

    @property
    def object(self) -> str:
        """Name of the object."""
        return epoch_object(self.number)


@dataclass(frozen=True, slots=True)
class Alive:
    """Last sign of life of an epoch.

    Attributes:
        seen_ms: Time of the sign.
        copied_ms: Everything stored until then is in the copy.
        is_closed: The process has stopped copying, and will not write again.
        lease_ms: Time after the sign in which the process may store messages; 0 without a limit.
    """

    seen_ms: int
    copied_ms: int
    is_closed: bool
    lease_ms: int = 0


def epoch_object(number: int) -> str:
    """Return the name of the object of an epoch."""
    return f"epochs/{number:08d}.json"


def alive_object(number: int) -> str:
    """Return the name of the object with the last sign of life of an epoch."""
    return f"alive/{number:08d}.json"


def to_json(value: Any) -> bytes:
    """Encode a small object."""
    return json.dumps(value if isinstance(value, dict) else asdict(value), sort_keys=True).encode()


def read_json(objects: ObjectStore, name: str) -> dict[str, Any]:
    """Return a small object.

    Raises:
        CopyError: It is missing, or not JSON.
    """
    try:
        value = json.loads(objects.get(name))
    except ValueError as exc:
        raise CopyError(f"{objects.url}: {name} is damaged: it is not JSON") from exc
    if not isinstance(value, dict):
        raise CopyError(f"{objects.url}: {name} is damaged: it is not an object")
    return value


def is_copied_table(name: str) -> bool:
    """Return True for a file of ``config/`` that belongs to a backup or a copy."""
    base = name.removeprefix("config/")
    return base not in _NOT_COPIED and not base.endswith((".bak", ".tmp", ".damaged"))


class _TableState(NamedTuple):
    """A table as it was read. *changed* is the state of the file before that."""

    changed: tuple[int, int, int]
    data: bytes


class ChangedTables:
    """The small files of a store directory, and which of them have changed since they were copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copied: dict[str, _TableState] = {}
        self._found: dict[str, _TableState] = {}
        self._too_large: set[str] = set()

    def changed(self) -> dict[str, bytes | None]:
        """Return the tables that differ from the copied ones; None for one that was deleted."""
        self._found = {}
        for name, changed in self._files():
            known = self._copied.get(name)
            if known is not None and known.changed == changed:
                self._found[name] = known
            elif (data := self._read(name)) is not None:
                self._found[name] = _TableState(changed, data)
        found = {
            name: state.data
            for name, state in self._found.items()
            if (known := self._copied.get(name)) is None or known.data != state.data
        }
        return found | dict.fromkeys(self._copied.keys() - self._found.keys())

    def copied(self) -> None:
        """Note that what `changed` has read was copied."""
        self._copied = self._found

    def all(self) -> dict[str, bytes | None]:
        """Return all tables as they were copied."""
        return {name: state.data for name, state in self._copied.items()}

    def _files(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        with os.scandir(self._folder / "config") as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISREG(found.st_mode) or not is_copied_table(entry.name):
                    continue
                if found.st_size <= MAX_TABLE_BYTES:
                    yield f"config/{entry.name}", (found.st_mtime_ns, found.st_size, found.st_ino)
                elif entry.name not in self._too_large:
                    self._too_large.add(entry.name)
                    _log.error("copy.table_left_out", table=entry.name, size=found.st_size, limit=MAX_TABLE_BYTES)

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:  # deleted, or between two versions
            return None


# --- segments and snapshots ---------------------------------------------------------------------


class Moment(NamedTuple):
    """A state that the copy has.

    Attributes:
        end: Physical offset up to which the log was copied at that time.
        tables: The tables that have changed since the moment before; None for a table that was deleted. The tables are
            never ahead of the log.
    """

    time_ms: int
    end: int
    tables: Mapping[str, bytes | None]


class Segment(NamedTuple):
    """Bytes of the commit log from *start* on, and the moments at which they were copied."""

    start: int
    log: bytes
    moments: Sequence[Moment]

    def name_in(self, epoch: int, is_complete: int) -> SegmentName:
        """Return its name in an epoch."""
        first, last = self.moments[0], self.moments[-1]
        return SegmentName(epoch, self.start, last.end, first.time_ms, last.time_ms, is_complete)


def encode(segment: Segment) -> bytes:
    """Encode a segment or a snapshot: a header in JSON, then log and tables, compressed together by zstd.

    Raises:
        ConfigurationError: The package zstandard is missing.
    """
    tables = [data for moment in segment.moments for data in moment.tables.values() if data is not None]
    raw = b"".join([segment.log, *tables])
    compressed: bytes = zstd().ZstdCompressor(level=_LEVEL).compress(raw)
    moments = [
        [each.time_ms, each.end, {name: None if data is None else len(data) for name, data in each.tables.items()}]
        for each in segment.moments
    ]
    header = to_json(
        {
            "start": segment.start,
            "log": len(segment.log),
            "raw": len(raw),
            "raw_crc": zlib.crc32(raw),
            "crc": zlib.crc32(compressed),
            "moments": moments,
        }
    )
    return _HEAD.pack(_MAGIC, len(header), zlib.crc32(header)) + header + compressed


def decode(name: str, data: bytes) -> Segment:
    """Decode a segment or a snapshot, and verify its checksums.

    Args:
        name: Name of the object, for the error.

    Raises:
        CopyError: It is damaged.
        ConfigurationError: The package zstandard is missing.
    """
    library = zstd()
    try:
        magic, size, crc = _HEAD.unpack_from(data)
        text = data[_HEAD.size : _HEAD.size + size]
        if magic != _MAGIC or zlib.crc32(text) != crc:
            raise ValueError("its header does not match its checksum")
        header = json.loads(text)
        compressed = memoryview(data)[_HEAD.size + size :]
        if zlib.crc32(compressed) != header["crc"]:
            raise ValueError("its content does not match its checksum")
        if header["raw"] > _MAX_RAW_BYTES:
            raise ValueError(f"its content has {header['raw']} bytes, and at most {_MAX_RAW_BYTES} are allowed")
        raw = library.ZstdDecompressor().decompress(compressed, max_output_size=header["raw"])
        if len(raw) != header["raw"] or zlib.crc32(raw) != header["raw_crc"]:
            raise ValueError("its decompressed content does not match its checksum")
        return Segment(header["start"], raw[: header["log"]], list(_moments(header, raw)))
    except (struct.error, ValueError, LookupError, TypeError, library.ZstdError) as exc:
        raise CopyError(
            f"{name} is damaged: {exc}; restore to a moment before it, or after a later snapshot, or take this object "
            "from another copy of the bucket"
        ) from exc


def _moments(header: dict[str, Any], raw: bytes) -> Iterator[Moment]:
    at = header["log"]
    for time_ms, end, sizes in header["moments"]:
        tables: dict[str, bytes | None] = {}
        for name, size in sizes.items():
            tables[name] = None if size is None else raw[at : at + size]
            at += size or 0
        yield Moment(time_ms, end, tables)


def zstd() -> Any:
    """Return the package zstandard.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import zstandard
    except ImportError as exc:
        raise ConfigurationError(
            f"copies are compressed by zstd; install the package for it with: {install_command('copy')}"
        ) from exc
    return zstandard


# --- which objects lead to a moment -------------------------------------------------------------


class Piece(NamedTuple):
    """A segment of a history, of which the bytes and moments up to *end* count.

    Attributes:
        limit: Physical offset up to which its epoch counts.
    """

    name: SegmentName
    end: int
    limit: int


class Catalogue:
    """Contents of a copy, by the names of its objects.

    Args:
        objects: The place of the copy.
        names: Names of its objects, with their sizes.

    Attributes:
        history: Id of the history.
        epochs: Oldest first.
        sizes: Name of an object -> bytes.
    """

    def __init__(self, objects: ObjectStore, history: str, epochs: Sequence[Epoch], sizes: Mapping[str, int]) -> None:
        self.objects = objects
        self.history = history
        self.epochs = list(epochs)
        self.sizes = sizes
        self.segments = _uncovered([SegmentName(*numbers) for numbers in _numbers(sizes, "segments/")])
        self._of_epoch: dict[int, list[SegmentName]] = {}
        for name in self.segments:
            self._of_epoch.setdefault(name.epoch, []).append(name)
        self.snapshots = sorted(SnapshotName(*numbers) for numbers in _numbers(sizes, "snapshots/"))

    @classmethod
    def read(cls, objects: ObjectStore, known: Iterable[Epoch] = ()) -> Catalogue:
        """Read the names of a copy.

        Args:
            known: Epochs of an earlier call, which are not read again.

        Raises:
            CopyError: There is no copy, or its form is unknown.
        """
        sizes = objects.list("")
        if ROOT_OBJECT not in sizes:
            raise CopyError(
                f"{objects.url} has no copy ({ROOT_OBJECT} is missing); give the place that mqtemplate.copy.to names"
            )
        root = read_json(objects, ROOT_OBJECT)
        if root.get("format") != FORMAT:
            raise CopyError(
                f"{objects.url} has a copy of format {root.get('format')!r}, and this version reads format {FORMAT}; "
                "use the version of mqtemplate that wrote it"
            )
        read = {each.object: each for each in known}
        epochs = [read.get(name) or read_epoch(objects, name) for name in sizes if name.startswith("epochs/")]
        return cls(objects, str(root.get("history")), sorted(epochs, key=lambda each: each.number), sizes)

    def pieces(self, epoch: Epoch) -> list[Piece]:
        """Return the segments of the history that an epoch continues, oldest first."""
        found: list[Piece] = []
        for own, limit in self._chain(epoch):
            found += [
                Piece(name, min(name.end, limit), limit)
                for name in reversed(self._of_epoch.get(own.number, []))
                if name.start < limit or name.start == name.end == limit
            ]
        return found[::-1]

    def _chain(self, epoch: Epoch) -> Iterator[tuple[Epoch, int]]:
        """Yield an epoch and those before it, each with the physical offset up to which it counts."""
        limit = _NO_LIMIT
        for each in reversed(self.epochs):
            if each.number <= epoch.number:
                yield each, limit
                limit = min(limit, each.start)

    def epoch_at(self, time_ms: int | None) -> Epoch:
        """Return the epoch of a moment; None for the newest.

        Raises:
            CopyError: The copy has no such moment.
        """
        found = [each for each in self.epochs if time_ms is None or each.time_ms <= time_ms]
        if not found:
            first = f"begins at {time_text(self.epochs[0].time_ms)}" if self.epochs else "has nothing yet"
            raise CopyError(f"{self.objects.url} has no such moment: the copy {first}")
        return found[-1]

    def snapshot_at(self, epoch: Epoch, time_ms: int | None) -> SnapshotName | None:
        """Return the last snapshot of the history of an epoch until a moment; None without one."""
        limits = {each.number: limit for each, limit in self._chain(epoch)}
        found = [
            each
            for each in self.snapshots
            if each.end <= limits.get(each.epoch, -1) and (time_ms is None or each.time_ms <= time_ms)
        ]
        return max(found, default=None)

    def alive(self, epoch: Epoch) -> Alive:
        """Return the last sign of life of an epoch: its own object, or its last segment."""
        own = self._of_epoch.get(epoch.number, ())
        table: dict[str, Any] = {}
        if alive_object(epoch.number) in self.sizes:
            table = read_json(self.objects, alive_object(epoch.number))
        seen_ms = max([epoch.time_ms, int(table.get("seen_ms", 0)), *(each.last_ms for each in own)])
        copied_ms = max([int(table.get("copied_ms", 0)), *(each.last_ms for each in own if each.is_complete)])
        before = [each for each in self.epochs if each.number < epoch.number]
        if not copied_ms and before:  # it has just begun
            copied_ms = self.alive(before[-1]).copied_ms
        return Alive(seen_ms, copied_ms, bool(table.get("is_closed")), int(table.get("lease_ms", 0)))

    def segment(self, name: SegmentName | SnapshotName) -> Segment:
        """Return a segment or a snapshot, verified.

        Raises:
            CopyError: It is missing or damaged.
        """
        return decode(f"{self.objects.url}: {name.object}", self.objects.get(name.object))

    def merged_piece(self, piece: Piece) -> tuple[Piece, Segment]:
        """Return a piece and its segment, or those that have replaced it since the names were read.

        Raises:
            CopyError: It is missing or damaged.
        """
        name, segment = self.merged_segment(piece.name)
        return Piece(name, max(piece.end, min(name.end, piece.limit)), piece.limit), segment

    def missing(self, physical_offset: int, advice: str) -> CopyError:
        """Return the error for bytes of the log that no segment has."""
        return CopyError(
            f"{self.objects.url}: the bytes of the commit log from physical offset {physical_offset} on are missing; "
            f"see what else is with 'mqtemplate copy verify', and {advice}"
        )

    def merged_segment(self, name: SegmentName) -> tuple[SegmentName, Segment]:
        """Return a segment, or the one that has replaced it since the names were read, with its name.

        Raises:
            CopyError: It is missing or damaged.
        """
        try:
            return name, self.segment(name)
        except CopyError:
            now = Catalogue.read(self.objects)
            found = [each for each in now.segments if each != name and each.has(name)]
            if name in now.segments or not found:
                raise
            return found[0], self.segment(found[0])


def read_epoch(objects: ObjectStore, name: str) -> Epoch:
    """Return an epoch.

    Raises:
        CopyError: It is missing or damaged.
    """
    table = read_json(objects, name)
    try:
        return Epoch(**table)
    except TypeError as exc:
        raise CopyError(f"{objects.url}: {name} is damaged: {exc}") from exc


def _numbers(names: Iterable[str], prefix: str) -> Iterator[list[int]]:
    """Yield the numbers in the names of segments, or of snapshots. Other objects are not ours."""
    count = len(SegmentName._fields if prefix == "segments/" else SnapshotName._fields)
    for name in names:
        parts = name.removeprefix(prefix).replace("/", "-").split("-")
        if name.startswith(prefix) and len(parts) == count and all(part.isdecimal() for part in parts):
            yield list(map(int, parts))


def _uncovered(names: Iterable[SegmentName]) -> list[SegmentName]:
    """Return segments in their order, without those that a merged one has replaced and that are not deleted yet."""
    kept: list[SegmentName] = []
    for name in sorted(names, key=lambda each: (each.epoch, each.first_ms, each.start, -each.end, -each.last_ms)):
        last = kept[-1] if kept else None
        if last is None or last.epoch != name.epoch or name.end > last.end or name.last_ms > last.last_ms:
            kept.append(name)
    return kept

"""Figures of the last day in a file of the store: a line for each minute, in a ring. The dashboard draws them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mqtemplate.errors import StoreError, StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.services import PeriodicService
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import DLQ_TOPIC_PREFIX, is_application_topic, is_system_group

_log = get_logger("mqtemplate.broker")

FIGURES_FILE = "config/figures.jsonl"
MINUTE_MS = 60_000
_HOUR_MS = 60 * MINUTE_MS
_IDLE_MINUTES = 10
_LINES = 24 * 60
_LINE_BYTES = 512
_FILE_BYTES = _LINES * _LINE_BYTES
_MAX_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFigures:
    """Figures of a broker at one time.

    Attributes:
        stored: Messages per second that were stored in topics of applications, since the figures before.
        consumed: Messages per second that groups have consumed.
        lag: Messages that groups have not consumed.
        lags: The same of the groups with the largest lags.
        pending: Pending messages; None if unknown.
        dead_letters: New dead letters since the figures before; None if unknown.
        disk_free: Free bytes of the disk; None without one.
    """

    time_ms: int
    stored: float
    consumed: float
    lag: int
    lags: Mapping[str, int] = field(default_factory=dict)
    pending: int | None = None
    dead_letters: int | None = None
    disk_free: int | None = None


def encode_figures(figures: BrokerFigures) -> bytes:
    """Return a line of `_LINE_BYTES`: JSON, spaces, and a line feed. Groups without space in it are left out."""
    values = {
        "timeMs": figures.time_ms,
        "stored": round(figures.stored, 2),
        "consumed": round(figures.consumed, 2),
        "lag": figures.lag,
        "pending": figures.pending,
        "deadLetters": figures.dead_letters,
        "diskFree": figures.disk_free,
    }
    lags: dict[str, int] = {}
    line = _line(values, lags)
    for group, lag in sorted(figures.lags.items(), key=lambda each: -each[1])[:_MAX_GROUPS]:
        longer = _line(values, {**lags, group: lag})
        if len(longer) < _LINE_BYTES:
            lags[group], line = lag, longer
    return line.ljust(_LINE_BYTES - 1) + b"\n"


def _line(values: Mapping[str, object], lags: Mapping[str, int]) -> bytes:
    return json.dumps({**values, "lags": lags}, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def decode_figures(data: bytes) -> list[BrokerFigures]:
    """Return the figures of a file, the oldest first.

    Raises:
        ValueError: The file is damaged.
    """
    if len(data) != _FILE_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, not {_FILE_BYTES:,}")
    found = []
    for number in range(_LINES):
        line = data[number * _LINE_BYTES : (number + 1) * _LINE_BYTES]
        if line.strip(b"\0"):
            try:
                found.append(_decode(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                raise ValueError(f"line {number + 1} cannot be read: {type(exc).__name__}: {exc}") from exc
    return sorted(found, key=lambda each: each.time_ms)


def _decode(values: Any) -> BrokerFigures:
    def number(name: str) -> int | None:
        return None if values[name] is None else int(values[name])

    return BrokerFigures(
        time_ms=int(values["timeMs"]),
        stored=float(values["stored"]),
        consumed=float(values["consumed"]),
        lag=int(values["lag"]),
        lags={group: int(lag) for group, lag in values["lags"].items()},
        pending=number("pending"),
        dead_letters=number("deadLetters"),
        disk_free=number("diskFree"),
    )


def read_figures(folder: Path, now_ms: int) -> list[BrokerFigures]:
    """Return the figures of the last day in a store directory, the oldest first; empty without a file, or if damaged.

    The owner of the directory may write meanwhile: a line is one write.
    """
    try:
        found = decode_figures((folder / FIGURES_FILE).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as exc:
        _log.debug("figures.unreadable", folder=str(folder), reason=str(exc))
        return []
    since_ms = now_ms - _LINES * MINUTE_MS
    return [each for each in found if since_ms <= each.time_ms <= now_ms + MINUTE_MS]


_Offsets: TypeAlias = Mapping[tuple[str, str], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Ends of the topics and committed offsets at one time. Their growth is what was stored and consumed."""

    time_ms: int
    steady_ms: int
    ends: Mapping[str, int]
    offsets: _Offsets


class FiguresRing:
    """The service that writes the figures, a line a minute, into a file of fixed size.

    The line of a minute replaces the line of the same minute of the day before. It is not flushed: a power
    failure may take the last lines. A file that cannot be read is replaced.

    On a virtual clock a broker without messages is looked at once an hour: a test that advances by a year has no
    chart, and would wait a minute for half a million lines.
    """

    def __init__(self, store: MessageStore, offsets: ConsumerOffsets, pending_count: Callable[[], int]) -> None:
        self._store = store
        self._offsets = offsets
        self._pending_count = pending_count
        self._store_files: StoreFiles = store.store_files
        self._file: MappedFile | None = None
        self._before: _Counts | None = None
        self._idle_minutes = 0
        self.service = PeriodicService("engine.figures", self._write, store.clock, MINUTE_MS)

    def _write(self) -> int | None:
        """Write a line, and return the pause until the next one; None for a minute."""
        now, before = self._counts(), self._before
        self._before = now
        if before is None or now.steady_ms <= before.steady_ms:
            return None
        figures = self._figures(before, now)
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write(figures.time_ms // MINUTE_MS % _LINES * _LINE_BYTES, encode_figures(figures))
        except StoreError as exc:  # such as a full disk, which the store logs itself: the chart has a gap
            _log.debug("figures.not_written", reason=str(exc))
        is_idle = now.ends == before.ends and now.offsets == before.offsets
        self._idle_minutes = self._idle_minutes + 1 if is_idle else 0
        return _HOUR_MS if self._store.clock.is_virtual and self._idle_minutes >= _IDLE_MINUTES else None

    def _opened(self) -> MappedFile:
        try:
            file = self._store_files.open_mapped(FIGURES_FILE, _FILE_BYTES, sparse=True)
            try:
                decode_figures(file.read(0, _FILE_BYTES))
            except ValueError:
                file.close()
                raise
        except (ValueError, StoreFormatError) as exc:
            _log.warning("figures.replaced", file=FIGURES_FILE, reason=str(exc), hint="charts start again from now")
            self._store_files.delete(FIGURES_FILE)
            file = self._store_files.open_mapped(FIGURES_FILE, _FILE_BYTES, sparse=True)
        return file

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # --- figures -------------------------------------------------------------------------------

    def _counts(self) -> _Counts:
        clock = self._store.clock
        return _Counts(clock.now_ms(), clock.steady_ms(), self._store.topic_ends(), self._offsets.all())

    def _figures(self, before: _Counts, now: _Counts) -> BrokerFigures:
        seconds = (now.steady_ms - before.steady_ms) / 1_000
        grown = {topic: end - before.ends.get(topic, 0) for topic, end in now.ends.items()}
        stored = sum(count for topic, count in grown.items() if count > 0 and is_application_topic(topic))
        letters = sum(count for topic, count in grown.items() if count > 0 and topic.startswith(DLQ_TOPIC_PREFIX))
        lags = self._lags(now.offsets)
        return BrokerFigures(
            time_ms=now.time_ms,
            stored=stored / seconds,
            consumed=sum(_consumed(before.offsets, now.offsets)) / seconds,
            lag=sum(lags.values()),
            lags={group: lag for group, lag in lags.items() if lag},
            pending=self._pending_count(),
            dead_letters=letters,
            disk_free=self._disk_free(),
        )

    def _lags(self, offsets: _Offsets) -> dict[str, int]:
        """Return the lag of each group that has committed an offset."""
        lags: dict[str, int] = {}
        queue_ids = self._store.queue_ids_by_topic()
        for (group, topic), committed in offsets.items():
            if is_system_group(group):
                continue
            for queue_id in queue_ids.get(topic, ()):
                queue = self._store.consume_queue(topic, queue_id)
                lag = max(0, queue.max_offset - committed.get(queue_id, queue.min_offset))
                lags[group] = lags.get(group, 0) + lag
        return lags

    def _disk_free(self) -> int | None:
        try:
            usage = self._store.disk.read()
        except StoreError:
            return None
        return None if usage is None else usage.free


def _consumed(before: _Offsets, now: _Offsets) -> Iterator[int]:
    """Yield by how much each committed offset has grown. The first one of a queue is where the group starts."""
    for key, offsets in now.items():
        earlier = before.get(key, {})
        if not is_system_group(key[0]):
            yield from (max(0, at - earlier[queue_id]) for queue_id, at in offsets.items() if queue_id in earlier)

"""The files of the timers, wheel, log and checkpoint: opened together, and recovered to one state."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.timer_log import (
    MIN_TIMER_LOG_SIZE,
    TIMER_UNIT_SIZE,
    Magic,
    TimerLog,
    TimerLogDamageError,
    are_valid,
    slots_of,
)
from mqtemplate.delay.timers.timer_wheel import SLOT_DTYPE, Slot, TimerWheel, wheel_file_size
from mqtemplate.errors import StoreError, StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.store.checkpoint import NEW_TIMER_LOG_SIZE, size_in_folder
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
from mqtemplate.store.files.store_files import StoreFiles

TIMER_CHECKPOINT_SIZE = 4_096


class Writer(Enum):
    """Broker that wrote the file last; `UNKNOWN` if the file is new or damaged."""

    OURS = "ours"
    ROCKETMQ = "rocketmq"
    UNKNOWN = "unknown"


class TimerCheckpoint(NamedTuple):
    """The contents of the file. Big-endian; the file has 4096 bytes, of which RocketMQ uses 56.

    ==  ==  =========================  ================================================================
     0  i8  last_read_time_ms          the first slot that is not completely released
     8  i8  last_timer_log_flush_pos   end of the timer log on disk; the wheel on disk agrees with it
    16  i8  last_timer_queue_offset    next unit of the timer topic's queue to put on the wheel
    24  i8  master_timer_queue_offset  `NO_MASTER`, or RocketMQ's number
    32  i8  state_version
    40  i8  timestamp                  ms, of this version
    48  i8  counter                    versions so far
    56  i8  (free)
    64  i8  precision_ms               ours: the length of a slot; 0 in a file that RocketMQ created
    72  i8  wheel_checksum             ours: see `TimerWheel.checksum`
    ==  ==  =========================  ================================================================

    Also ours: a copy of these ten numbers at 80, and their CRC-32 as i8 at 160. RocketMQ changes only its own fields.
    So if the numbers and their copy differ, RocketMQ wrote last. If they differ in a single bit, the file is damaged.

    Source: RocketMQ ``store: TimerCheckpoint``.
    """

    last_read_time_ms: int
    last_timer_log_flush_pos: int
    last_timer_queue_offset: int
    master_timer_queue_offset: int
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0
    free: int = 0
    precision_ms: int = 0
    wheel_checksum: int = 0


NO_MASTER = (1 << 63) - 1
"""Value of ``master_timer_queue_offset``: there is no master broker that limits how far to read.

RocketMQ starts at the lower one of this number and the queue offset that its timer log shows. After a kill, a number of
ours would be lower than the log, and RocketMQ would put messages on the wheel a second time."""

_CHECKPOINT = struct.Struct(">10q")
_CRC = struct.Struct(">q")
_COPY_AT = _CHECKPOINT.size
_CRC_AT = 2 * _CHECKPOINT.size
assert (_COPY_AT, _CRC_AT) == (80, 160)


def read_timer_checkpoint(file: MappedFile) -> tuple[TimerCheckpoint, Writer]:
    """Return the checkpoint and its writer. With `Writer.UNKNOWN` the checkpoint is meaningless."""
    page = file.view[: _CRC_AT + _CRC.size]
    front, copy, crc = page[:_COPY_AT], page[_COPY_AT:_CRC_AT], _CRC.unpack(page[_CRC_AT:])[0]
    writer = Writer.ROCKETMQ
    if not any(page[:16]) and not any(page[_COPY_AT:]):
        writer = Writer.UNKNOWN  # a new file
    elif front == copy or zlib.crc32(front) == crc:
        writer = Writer.OURS
    elif zlib.crc32(copy) == crc:
        wrong_bits = (int.from_bytes(front, "big") ^ int.from_bytes(copy, "big")).bit_count()
        if wrong_bits == 1:  # damage: RocketMQ always changes several bits, its timestamp alone has some
            front, writer = copy, Writer.OURS
    elif any(page[_COPY_AT:]):
        writer = Writer.UNKNOWN  # neither the numbers nor their copy match the CRC
    return TimerCheckpoint(*_CHECKPOINT.unpack(front)), writer


def write_timer_checkpoint(file: MappedFile, checkpoint: TimerCheckpoint) -> None:
    """Write the checkpoint, and flush it."""
    data = _CHECKPOINT.pack(*checkpoint)
    file.write(0, data + data + _CRC.pack(zlib.crc32(data)))
    file.flush()


_log = get_logger("mqtemplate.delay")

TIMER_WHEEL_FILE = "timerwheel"
TIMER_LOG_FOLDER = "timerlog"
TIMER_CHECKPOINT_FILE = "config/timercheck"
_SNAPSHOT = re.compile(r"timerwheel\.\d+")
"""Files in which RocketMQ 5.5 stores the wheel if ``timerWheelSnapshotFlush`` is on. The base file is all zero then."""
_MAX_CHECKED = 32_000_000 * TIMER_UNIT_SIZE  # bytes of the log; checking them takes one or two seconds (measured)


class TimerFiles:
    """Wheel, log and checkpoint.

    - The checkpoint is written last. So the parts of wheel and log that it describes are on disk.
    - At each opening, wheel and log are taken back to the checkpoint. Then all three describe the same messages, and
      the rest is read from the timer topic again.
    - A wheel that does not match the checkpoint's sum, or that RocketMQ wrote, is rebuilt from the log.

    Attributes:
        checkpoint: The last checkpoint on disk.
        writer: Broker that wrote it.
        is_condemned: The files were found damaged while in use.

    Raises:
        StoreFormatError: The files were created with other settings.
    """

    def __init__(self, store_files: StoreFiles, settings: TimerSettings) -> None:
        self._store_files = store_files
        self.settings = settings
        self._snapshots = [name for name in store_files.file_sizes("") if _SNAPSHOT.fullmatch(name)]
        self.log = TimerLog(_open_log(store_files, log_file_size(store_files, settings)))
        self._checkpoint_file = store_files.open_mapped(TIMER_CHECKPOINT_FILE, TIMER_CHECKPOINT_SIZE)
        self.checkpoint, self.writer = read_timer_checkpoint(self._checkpoint_file)
        self._flushed_to = 0  # position in the log
        self.is_condemned = False
        try:
            self._check_precision()
            wheel_file = store_files.open_mapped(TIMER_WHEEL_FILE, wheel_file_size(settings.slots_total), sparse=True)
            is_ours = self.writer is Writer.OURS
            from_ms = self.checkpoint.last_read_time_ms if is_ours else NEVER_MS
            self.wheel = TimerWheel(wheel_file, settings.slots_total, settings.precision_ms, from_ms)
        except BaseException:
            self._checkpoint_file.close()
            self.log.close()
            raise

    def _check_precision(self) -> None:
        written = self.checkpoint.precision_ms
        if self.writer is Writer.OURS and written not in (0, self.settings.precision_ms):
            raise StoreFormatError(
                f"the timers were written with timer-precision-ms {written}, now it is {self.settings.precision_ms}; "
                "open the directory with the value it was created with"
            )

    @staticmethod
    def exist(store_files: StoreFiles) -> bool:
        """Return True if there is any file of timers."""
        names = (TIMER_CHECKPOINT_FILE, TIMER_WHEEL_FILE)
        return any(map(store_files.exists, names)) or bool(store_files.file_sizes(TIMER_LOG_FOLDER))

    @classmethod
    def create_empty(cls, store_files: StoreFiles, settings: TimerSettings) -> TimerFiles:
        """Delete existing files, and create empty ones of the same sizes."""
        settings = replace(settings, log_file_size=log_file_size(store_files, settings))
        store_files.delete(TIMER_CHECKPOINT_FILE)  # first: after a kill in between, the rest must not look valid
        for name in [TIMER_WHEEL_FILE, *(name for name in store_files.file_sizes("") if _SNAPSHOT.fullmatch(name))]:
            store_files.delete(name)
        for name in store_files.file_sizes(TIMER_LOG_FOLDER):
            store_files.delete(f"{TIMER_LOG_FOLDER}/{name}")
        return cls(store_files, settings)

    @property
    def is_unwritten(self) -> bool:
        """True if the files were created, and nothing was saved."""
        return not any(self._checkpoint_file.view[:TIMER_CHECKPOINT_SIZE])

    # --- recovery ------------------------------------------------------------------------------

    def recover(self) -> bool:
        """Bring wheel and log to the state that the checkpoint describes; after RocketMQ, to the last state on disk.

        Returns:
            False if the files contradict each other or are damaged. Then they must be rebuilt from the commit log.
        """
        end = self.checkpoint.last_timer_log_flush_pos
        if self.writer is Writer.UNKNOWN or not (end == 0 or self.log.start < end <= self.log.files_end):
            return False
        if self.writer is Writer.ROCKETMQ:
            return self._rebuild_wheel(self._end_of_units(end))
        self._flushed_to = end
        return (self._take_back(end) or self._rebuild_wheel(end)) and self._is_valid()

    def _is_valid(self) -> bool:
        """Return True if no unit is damaged that a live slot may lead to. A very long log is not checked."""
        first = self.wheel.first_position(self.checkpoint.last_read_time_ms)
        if first is None or self.log.end - first > _MAX_CHECKED:
            return True  # opening a slot detects its damaged units
        return all(are_valid(units).all() for _, units in self.log.pieces(first, self.log.end))

    def condemn(self) -> None:
        """Delete the checkpoint, so that the files are rebuilt when they are opened the next time."""
        self.is_condemned = True
        self._store_files.delete(TIMER_CHECKPOINT_FILE)

    def _take_back(self, end: int) -> bool:
        """Unlink what was linked since the checkpoint. Return False if the wheel differs from the checkpoint then."""
        if not self.cut(end):
            return False
        self.wheel.touch(self.wheel.changes())  # updates the checksum; the pages are written by the next checkpoint
        return self.wheel.checksum == self.checkpoint.wheel_checksum

    def cut(self, end: int) -> bool:
        """Take wheel and log back to the time when the log ended at *end*. Return False if they disagree."""
        log, wheel = self.log, self.wheel
        try:
            earlier_slots = [(slot, self._at_end(slot, end)) for slot in wheel.slots_from(end)]
        except TimerLogDamageError as exc:
            _log.warning("wheel.rejected", reason=str(exc))
            return False
        for slot, earlier in earlier_slots:
            wheel.clear(slot)
            if earlier.last_pos >= 0:
                wheel.put(np.array([tuple(earlier)], SLOT_DTYPE))
        log.truncate(end)
        return True

    def _at_end(self, slot: Slot, end: int) -> Slot:
        """Return *slot* as it was when the log ended at *end*; with a last position of -1 if nothing was linked yet."""
        position, count = slot.last_pos, 0
        while position >= end:
            unit = self.log.read(position)
            slot_ms = slot.time * self.settings.precision_ms
            if unit is None or unit.slot_ms != slot_ms or unit.previous_pos >= position:
                raise TimerLogDamageError(f"timerwheel: the slot of {slot_ms} contradicts the unit at {position}")
            position, count = unit.previous_pos, count + (-1 if unit.magic & Magic.DELETE else 1)
        return slot._replace(last_pos=position, num=slot.num - count)

    def _end_of_units(self, start: int) -> int:
        """Return the first position from *start* on without a unit.

        RocketMQ's checkpoint has the log's end at the flush before. Units after it are valid, too.
        """
        end = start
        for position, units in self.log.pieces(start, self.log.files_end):
            valid = are_valid(units)
            if not valid.all():
                return position + int(np.argmin(valid)) * TIMER_UNIT_SIZE
            end = position + len(units) * TIMER_UNIT_SIZE
        return end

    def _rebuild_wheel(self, end: int) -> bool:
        """Rebuild the wheel from the log. Return False if the units of the log contradict each other.

        It takes 0.1 microseconds for each unit (measured).
        """
        self.wheel.clear_all()
        self.log.truncate(end)
        from_ms = self.checkpoint.last_read_time_ms
        newest = -1
        for position, units in self.log.pieces(self.log.start, end):
            offsets = units["physical_offset"].astype(np.int64)
            # Units are in the order of their records. RocketMQ breaks that when it repeats a batch.
            if not are_valid(units).all() or offsets[0] <= newest or (np.diff(offsets) <= 0).any():
                return False
            newest = int(offsets[-1])
            if not self._relink(position, units, from_ms):
                return False
        _log.info("wheel.rebuilt", log_end=end, writer=self.writer.value)
        return True

    def _relink(self, start: int, units: np.ndarray, from_ms: int) -> bool:
        """Link adjacent units from position *start* on, unless their slots are past."""
        slots_ms = slots_of(units)
        is_live = slots_ms >= from_ms
        if not is_live.any():
            return True
        positions = np.arange(start, start + len(units) * TIMER_UNIT_SIZE, TIMER_UNIT_SIZE)[is_live]
        counts = np.where(units["magic"] & Magic.DELETE, -1, 1)[is_live]
        links = self.wheel.plan(slots_ms[is_live], positions, counts)
        previous = units["previous_pos"][is_live]
        if ((links.previous != previous) & (previous >= self.log.start)).any():
            return False  # following the stored chain would miss units
        self.wheel.put(links.slots)
        return True

    def cut_after(self, physical_end: int) -> None:
        """Remove the units of records at or after *physical_end*, which the commit log lost in a power failure.

        Raises:
            StoreError: Wheel and log disagree. The files are closed, and rebuilt at the next start.
        """
        end = self.log.end
        while (position := self.log.last_position(end)) >= 0:
            unit = self.log.read(position)
            # A unit that is done has the size 1. That suffices: its record was complete when the unit was marked.
            if unit is not None and unit.physical_offset + unit.record_size <= physical_end:
                break
            end = position
        if end != self.log.end and not self.cut(end):
            self.close()
            self.condemn()
            raise StoreError(
                "the timer log has units of records that the commit log lost, and they cannot be removed; the wheel is "
                "rebuilt from the commit log when the store directory is opened again"
            )

    # --- writing -------------------------------------------------------------------------------

    def has_state(self, checkpoint: TimerCheckpoint) -> bool:
        """Return True if the checkpoint on disk describes the same state as *checkpoint*."""
        written = self.checkpoint
        return checkpoint == written._replace(timestamp=checkpoint.timestamp, counter=checkpoint.counter)

    def save(self, checkpoint: TimerCheckpoint, changes: list[tuple[int, bytes]]) -> None:
        """Write and flush log and wheel, then the checkpoint.

        Args:
            checkpoint: It has the end up to which the log is flushed.
            changes: `TimerWheel.changes` of the same moment.
        """
        log_end = checkpoint.last_timer_log_flush_pos
        try:
            self.log.flush(min(self._flushed_to, log_end), log_end)
            self.wheel.write(changes)
            write_timer_checkpoint(self._checkpoint_file, checkpoint)
        except BaseException:
            self.wheel.touch(changes)
            raise
        self._flushed_to, self.checkpoint, self.writer = log_end, checkpoint, Writer.OURS
        while self._snapshots:  # RocketMQ would load the newest of them instead of the wheel
            self._store_files.delete(self._snapshots[-1])
            self._snapshots.pop()

    def close(self) -> None:
        """Close the files."""
        self.wheel.close()
        self.log.close()
        self._checkpoint_file.close()


def log_file_size(store_files: StoreFiles, settings: TimerSettings) -> int:
    """Return the size of the timer log's files: of the settings, else of the files, else of a new directory."""
    if settings.log_file_size is not None:
        return settings.log_file_size
    found = size_in_folder(store_files, TIMER_LOG_FOLDER)
    return found if found and found >= MIN_TIMER_LOG_SIZE else NEW_TIMER_LOG_SIZE


def _open_log(store_files: StoreFiles, size: int) -> MappedFileQueue:
    try:
        return store_files.mapped_queue(TIMER_LOG_FOLDER, size)
    except StoreFormatError as exc:
        others = {length for length in store_files.file_sizes(TIMER_LOG_FOLDER).values() if length not in (0, size)}
        if not others:
            raise
        raise StoreFormatError(
            f"the timer log's files have {max(others)} bytes, but mapped-file-size-timer-log is {size}; "
            f"leave mapped-file-size-timer-log out, or set it to {max(others)}"
        ) from exc

"""The three files of the timers, opened and brought to one state together."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import structlog

from mqtemplate.delay.timers.timer_checkpoint import (
    TIMER_CHECKPOINT_SIZE,
    TimerCheckpoint,
    Writer,
    read_timer_checkpoint,
    write_timer_checkpoint,
)
from mqtemplate.delay.timers.timer_log import TimerLog, TimerLogDamageError
from mqtemplate.delay.timers.timer_unit import MAGIC_DELETE, TIMER_UNIT_SIZE, are_sound
from mqtemplate.delay.timers.timer_wheel import DEFAULT_SLOTS_TOTAL, Slot, TimerWheel, wheel_file_size
from mqtemplate.errors import ConfigurationError, StoreFormatError
from mqtemplate.store import StoreFiles
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue

_log = structlog.stdlib.get_logger("mqtemplate.delay")

TIMER_WHEEL_FILE = "timerwheel"
TIMER_LOG_FOLDER = "timerlog"
TIMER_CHECKPOINT_FILE = "config/timercheck"
_SNAPSHOT = re.compile(r"timerwheel\.\d+")
"""Where RocketMQ 5.5 keeps the wheel if ``timerWheelSnapshotFlush`` is on; the base file is all zero, then."""
_NEVER_MS = 1 << 62
_MOST_CHECKED = 32_000_000 * TIMER_UNIT_SIZE  # bytes of the log; reading them takes a second or two

DEFAULT_ROLL_WINDOW_SLOTS = 172_800
"""Two days of seconds. Source: ``MessageStoreConfig.timerRollWindowSlot``."""
DEFAULT_LOG_FILE_SIZE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSettings:
    """How the timers lie on the disk. A folder keeps its settings for life.

    Attributes:
        precision_ms: Length of a slot. Delivery is exact to the millisecond all the same.
        slots_total: Slots in the window; the wheel has twice as many.
        roll_window_slots: A message due later than this many slots is parked in a nearer one, and set on again there.
        log_file_size: Bytes of each timer log file.
    """

    precision_ms: int = 1_000
    slots_total: int = DEFAULT_SLOTS_TOTAL
    roll_window_slots: int = DEFAULT_ROLL_WINDOW_SLOTS
    log_file_size: int = DEFAULT_LOG_FILE_SIZE

    def __post_init__(self) -> None:
        if not 1 <= self.precision_ms <= 10_000:
            raise ConfigurationError(f"timer-precision-ms must be 1..10000, got {self.precision_ms}")
        if not 2 <= self.roll_window_slots <= self.slots_total - 60:
            raise ConfigurationError(
                f"timer-roll-window-slot must be 2..{self.slots_total - 60}, got {self.roll_window_slots}"
            )
        if self.roll_window_slots * self.precision_ms >= 1 << 31:
            raise ConfigurationError(
                f"timer-roll-window-slot times timer-precision-ms must be below 2147483648 ms, got "
                f"{self.roll_window_slots} * {self.precision_ms}: the timer log keeps it in four bytes"
            )

    @property
    def window_ms(self) -> int:
        return self.roll_window_slots * self.precision_ms

    @property
    def turn_ms(self) -> int:
        """Two times this far apart share a place on the wheel."""
        return 2 * self.slots_total * self.precision_ms


class TimerFiles:
    """Wheel, log and checkpoint.

    - The checkpoint is written last, so what it says of wheel and log is on the disk.
    - What stands in wheel and log beyond the checkpoint can be taken back, and is, at each opening: then the
      three tell of the same messages, and the rest is read from the timer topic again.
    - A wheel that is not the one the checkpoint tells of, or that RocketMQ left, is made anew from the log.

    Attributes:
        checkpoint: What was written last.
        writer: Who wrote it.

    Raises:
        StoreFormatError: The files were made with other settings.
    """

    def __init__(self, store_files: StoreFiles, settings: TimerSettings) -> None:
        self._store_files = store_files
        self.settings = settings
        self._snapshots = [name for name in store_files.file_sizes("") if _SNAPSHOT.fullmatch(name)]
        self.log = TimerLog(_open_log(store_files, settings.log_file_size))
        self._checkpoint_file = store_files.open_mapped(TIMER_CHECKPOINT_FILE, TIMER_CHECKPOINT_SIZE)
        self.checkpoint, self.writer = read_timer_checkpoint(self._checkpoint_file)
        self._flushed_to = 0  # of the log
        try:
            self._check_precision()
            wheel_file = store_files.open_mapped(TIMER_WHEEL_FILE, wheel_file_size(settings.slots_total))
            is_ours = self.writer is Writer.OURS
            from_ms = self.checkpoint.last_read_time_ms if is_ours else _NEVER_MS
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
                "open the folder with the value it was made with"
            )

    @staticmethod
    def exist(store_files: StoreFiles) -> bool:
        """Whether there is a checkpoint to open by; wheel and log alone are of no use."""
        return store_files.exists(TIMER_CHECKPOINT_FILE)

    @classmethod
    def remake(cls, store_files: StoreFiles, settings: TimerSettings) -> TimerFiles:
        """Empty files, whatever was there."""
        store_files.delete(TIMER_CHECKPOINT_FILE)  # first: half of this done must not look like a state
        for name in [TIMER_WHEEL_FILE, *(name for name in store_files.file_sizes("") if _SNAPSHOT.fullmatch(name))]:
            store_files.delete(name)
        for name in store_files.file_sizes(TIMER_LOG_FOLDER):
            store_files.delete(f"{TIMER_LOG_FOLDER}/{name}")
        return cls(store_files, settings)

    # --- bringing them to one state ------------------------------------------------------------

    def recover(self) -> bool:
        """Bring wheel and log to the state that the checkpoint tells of, or, after RocketMQ, to the last there is.

        Returns:
            False if that cannot be done with certainty; then the files must be made anew.
        """
        end = self.checkpoint.last_timer_log_flush_pos
        if self.writer is Writer.NOBODY or not (end == 0 or self.log.begin < end <= self.log.files_end):
            return False
        if self.writer is Writer.ROCKETMQ:
            return self._recount(self._end_of_units(end))
        self._flushed_to = end
        return (self._repair(end) or self._recount(end)) and self._is_sound()

    def _is_sound(self) -> bool:
        """Whether no unit is damaged that a live slot may lead to, as far as that is soon told."""
        first = self.wheel.first_position(self.checkpoint.last_read_time_ms)
        if first is None or self.log.end - first > _MOST_CHECKED:
            return True  # who opens the slot will see
        return all(are_sound(units).all() for _, units in self.log.pieces(first, self.log.end))

    def condemn(self) -> None:
        """Have the files made anew when they are opened the next time."""
        self._store_files.delete(TIMER_CHECKPOINT_FILE)

    def _repair(self, end: int) -> bool:
        """Take back what was linked since the checkpoint; False if the wheel is not what it was then."""
        if not self.cut(end):
            return False
        changes = self.wheel.changes()
        self.wheel.touch(changes)
        return self.wheel.checksum == self.checkpoint.wheel_checksum

    def cut(self, end: int) -> bool:
        """Take wheel and log back to the time when the log ended at *end*; False if they do not fit each other."""
        log, wheel = self.log, self.wheel
        try:
            taken_back = [(slot, self._at_end(slot, end)) for slot in wheel.slots_from(end)]
        except TimerLogDamageError as exc:
            _log.warning("delay.wheel_unusable", reason=str(exc))
            return False
        for slot, earlier in taken_back:
            wheel.clear(slot)
            if earlier.last_pos >= 0:
                wheel.restore(earlier)
        log.truncate(end)
        return True

    def _at_end(self, slot: Slot, end: int) -> Slot:
        """What *slot* was when the log ended at *end*; its last position is -1 if it was not there yet."""
        position, count = slot.last_pos, 0
        while position >= end:
            unit = self.log.read(position)
            slot_ms = slot.time * self.settings.precision_ms
            if unit is None or unit.slot_ms != slot_ms or unit.previous_pos >= position:
                raise TimerLogDamageError(f"timerwheel: the slot of {slot_ms} does not fit the unit at {position}")
            position, count = unit.previous_pos, count + (-1 if unit.magic & MAGIC_DELETE else 1)
        return slot._replace(last_pos=position, num=slot.num - count)

    def _end_of_units(self, begin: int) -> int:
        """Where the first place is, at or behind *begin*, that holds no unit. RocketMQ writes down where it was."""
        end = begin
        for position, units in self.log.pieces(begin, self.log.files_end):
            sound = are_sound(units)
            if not sound.all():
                return position + int(np.argmin(sound)) * TIMER_UNIT_SIZE
            end = position + len(units) * TIMER_UNIT_SIZE
        return end

    def _recount(self, end: int) -> bool:
        """Make the wheel anew from the log; False if the log's units do not hang together.

        Takes a tenth of a microsecond for each unit.
        """
        self.wheel.clear_all()
        self.log.truncate(end)
        from_ms = self.checkpoint.last_read_time_ms
        newest = -1
        for position, units in self.log.pieces(self.log.begin, end):
            offsets = units["physical_offset"].astype(np.int64)
            if not are_sound(units).all() or offsets[0] <= newest or (np.diff(offsets) <= 0).any():
                return False
            newest = int(offsets[-1])
            if not self._relink(position, units, from_ms):
                return False
        _log.info("delay.wheel_recounted", log_end=end, writer=self.writer.value)
        return True

    def _relink(self, begin: int, units: np.ndarray, from_ms: int) -> bool:
        """Link units that stand behind each other from *begin* on, if their slots are not past."""
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        is_live = slots_ms >= from_ms
        if not is_live.any():
            return True
        positions = np.arange(begin, begin + len(units) * TIMER_UNIT_SIZE, TIMER_UNIT_SIZE)[is_live]
        counts = np.where(units["magic"] & MAGIC_DELETE, -1, 1)[is_live]
        links = self.wheel.plan(slots_ms[is_live], positions, counts)
        previous = units["previous_pos"][is_live]
        if ((links.previous != previous) & (previous >= self.log.begin)).any():
            return False  # a walk along the chain would miss units
        self.wheel.link(links)
        return True

    def cut_after(self, physical_end: int) -> int:
        """Where the log has to end so that no unit tells of a record at or behind *physical_end*."""
        end = self.log.end
        while (position := self.log.last_position(end)) >= 0:
            unit = self.log.read(position)
            # of a unit that is done the size is 1, and that is enough: its record was whole when it was marked
            if unit is not None and unit.physical_offset + unit.record_size <= physical_end:
                break
            end = position
        return end

    # --- writing -------------------------------------------------------------------------------

    def save(self, checkpoint: TimerCheckpoint, changes: list[tuple[int, bytes]]) -> None:
        """Return when log and wheel, and then the checkpoint, are on the disk.

        Args:
            checkpoint: It tells how far the log must be.
            changes: `TimerWheel.changes`, of the same moment.
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
        while self._snapshots:  # RocketMQ would take the newest of them for the wheel
            self._store_files.delete(self._snapshots[-1])
            self._snapshots.pop()

    def close(self) -> None:
        self.wheel.close()
        self.log.close()
        self._checkpoint_file.close()


def _open_log(store_files: StoreFiles, size: int) -> MappedFileQueue:
    try:
        return store_files.mapped_queue(TIMER_LOG_FOLDER, size)
    except StoreFormatError as exc:
        others = {length for length in store_files.file_sizes(TIMER_LOG_FOLDER).values() if length not in (0, size)}
        if not others:
            raise
        raise StoreFormatError(
            f"the timer log's files have {max(others)} bytes, but mapped-file-size-timer-log is {size}; "
            f"open the folder with mapped-file-size-timer-log: {max(others)}"
        ) from exc

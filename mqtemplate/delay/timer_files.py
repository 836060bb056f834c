"""The three files of the timers, opened and brought to one state together."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mqtemplate.delay.timer_checkpoint import (
    TIMER_CHECKPOINT_SIZE,
    TimerCheckpoint,
    read_timer_checkpoint,
    write_timer_checkpoint,
)
from mqtemplate.delay.timer_log import TimerLog
from mqtemplate.delay.timer_wheel import DEFAULT_SLOTS_TOTAL, Slot, TimerWheel, wheel_file_size
from mqtemplate.errors import ConfigurationError, StoreFormatError
from mqtemplate.store import Home

__all__ = [
    "DEFAULT_LOG_FILE_SIZE",
    "DEFAULT_ROLL_WINDOW_SLOTS",
    "TIMER_CHECKPOINT_FILE",
    "TIMER_LOG_FOLDER",
    "TIMER_WHEEL_FILE",
    "TimerFiles",
    "TimerSettings",
]

_log = structlog.stdlib.get_logger("mqtemplate.delay")

TIMER_WHEEL_FILE = "timerwheel"
TIMER_LOG_FOLDER = "timerlog"
TIMER_CHECKPOINT_FILE = "config/timercheck"

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
    """

    def __init__(self, home: Home, settings: TimerSettings) -> None:
        self._home = home
        self.settings = settings
        self.wheel = TimerWheel(
            home.open_mapped(TIMER_WHEEL_FILE, wheel_file_size(settings.slots_total)),
            settings.slots_total,
            settings.precision_ms,
        )
        self.log = TimerLog(home.mapped_queue(TIMER_LOG_FOLDER, settings.log_file_size))
        self._checkpoint_file = home.open_mapped(TIMER_CHECKPOINT_FILE, TIMER_CHECKPOINT_SIZE)
        self.checkpoint = read_timer_checkpoint(self._checkpoint_file)
        if self.checkpoint.precision_ms not in (0, settings.precision_ms):
            raise StoreFormatError(
                f"the timers were written with timer-precision-ms {self.checkpoint.precision_ms}, now it is "
                f"{settings.precision_ms}; open the folder with the value it was made with"
            )

    @staticmethod
    def exist(home: Home) -> bool:
        """Whether there is a checkpoint to open by; wheel and log alone are of no use."""
        return home.exists(TIMER_CHECKPOINT_FILE)

    @classmethod
    def remake(cls, home: Home, settings: TimerSettings) -> TimerFiles:
        """Empty files, whatever was there."""
        if home.exists(TIMER_CHECKPOINT_FILE):
            home.delete(TIMER_CHECKPOINT_FILE)  # first: half of this done must not look like a state
        if home.exists(TIMER_WHEEL_FILE):
            home.delete(TIMER_WHEEL_FILE)
        log_files = home.mapped_queue(TIMER_LOG_FOLDER, settings.log_file_size)
        log_files.truncate(log_files.begin)
        log_files.close()
        return cls(home, settings)

    def repair(self, end: int) -> bool:
        """Bring log and wheel back to the time when the log ended at *end*.

        Returns:
            False if that cannot be done with certainty; then the files must be made anew.
        """
        log, wheel = self.log, self.wheel
        if not (end == 0 or log.begin < end <= log.files_end):
            return False
        taken_back = [(slot, self._at_end(slot, end)) for slot in wheel.slots_from(end)]
        if any(earlier is None for _, earlier in taken_back):
            return False
        for slot, earlier in taken_back:
            wheel.clear(slot)
            if earlier is not None and earlier.last_pos >= 0:
                wheel.restore(earlier)
        log.truncate(end)
        return self._agree()

    def _at_end(self, slot: Slot, end: int) -> Slot | None:
        """What *slot* was when the log ended at *end*; its last position is -1 if it was not there yet."""
        position, count = slot.last_pos, 0
        while position >= end:
            unit = self.log.read(position)
            slot_ms = slot.time * self.settings.precision_ms
            if unit is None or unit.slot_ms != slot_ms or unit.previous_pos >= position:
                return None
            position, count = unit.previous_pos, count + 1
        return slot._replace(last_pos=position, num=slot.num - count)

    def _agree(self) -> bool:
        """Whether the log's last unit is the last one of its slot, as it must be: nothing came after it."""
        position = self.log.last_position()
        if position < 0:
            return self.log.end == 0
        unit = self.log.read(position)
        return unit is not None and self.wheel.last_pos(unit.slot_ms) == position

    def cut_behind(self, physical_end: int) -> int:
        """Where the log has to end so that no unit tells of a record at or behind *physical_end*."""
        end = self.log.end
        while (position := self.log.last_position(end)) >= 0:
            unit = self.log.read(position)
            if unit is not None and unit.physical_offset + unit.record_size <= physical_end:
                break
            end = position
        return end

    def save(self, checkpoint: TimerCheckpoint, log_end: int) -> None:
        """Return when log and wheel, and then the checkpoint, are on the disk.

        Args:
            log_end: How far the log must be; the checkpoint tells the same.
        """
        self.log.flush(self.checkpoint.last_timer_log_flush_pos, log_end)
        self.wheel.flush()
        self.checkpoint = checkpoint
        write_timer_checkpoint(self._checkpoint_file, checkpoint)

    def close(self) -> None:
        self.wheel.close()
        self.log.close()
        self._checkpoint_file.close()

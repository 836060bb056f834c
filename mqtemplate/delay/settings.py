"""Settings of delayed messages: the timers and which slot a time belongs to, and the shapes of topics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le

from mqtemplate.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy as np

_Times = TypeVar("_Times", int, "np.ndarray")


def slot_of(deliver_ms: _Times, precision_ms: int) -> _Times:
    """Return the slot of a deliver time, or of each: the last multiple of the precision *before* it.

    A time that is a multiple belongs to the slot before. That slot is complete when the time has come.
    """
    return (deliver_ms - 1) // precision_ms * precision_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSettings:
    """Sizes of the timer files. A store directory keeps its settings for life.

    Attributes:
        precision_ms: Length of a slot. Delivery is exact to the millisecond all the same.
        slots_total: Slots in the window; the wheel has twice as many.
        roll_window_slots: A message due more than this many slots ahead is parked in a nearer slot, and rolled there.
        log_file_size: Bytes of each timer log file; None for that of the store directory.
    """

    precision_ms: int = 1_000
    slots_total: int = 7 * 86_400  # seven days of seconds: RocketMQ's TimerMessageStore.TIMER_WHEEL_TTL_DAY
    roll_window_slots: int = 2 * 86_400  # RocketMQ's MessageStoreConfig.timerRollWindowSlot
    log_file_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.precision_ms <= 10_000:
            raise ConfigurationError(f"timer-precision-ms must be 1..10000, got {self.precision_ms}")
        if not 2 <= self.roll_window_slots <= self.slots_total - 60:
            raise ConfigurationError(
                f"timer-roll-window-slot must be 2..{self.slots_total - 60}, got {self.roll_window_slots}"
            )
        # A unit of the timer log has four signed bytes for the delay, see `TimerUnit.delay_ms`.
        if self.roll_window_slots * self.precision_ms >= 1 << 31:
            raise ConfigurationError(
                f"timer-roll-window-slot times timer-precision-ms must be below 2147483648 ms, got "
                f"{self.roll_window_slots} * {self.precision_ms}: the timer log has four bytes for it"
            )

    @property
    def window_ms(self) -> int:
        """Length of the roll window in ms."""
        return self.roll_window_slots * self.precision_ms

    @property
    def lap_ms(self) -> int:
        """Length of one lap of the wheel in ms: two times this far apart use the same slot."""
        return 2 * self.slots_total * self.precision_ms

    def slot_at(self, time_ms: int) -> int:
        """Return the slot that a clock time is in: the last multiple of the precision that is not after it."""
        return time_ms // self.precision_ms * self.precision_ms


HEAD_START_MS = 1_000
"""Lead of one step of priority."""

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicShape:
    """Release of the delayed messages of one topic. A message is never released before it is due."""

    # Read by pydantic where the shape is a part of a configuration: an unknown key is an error.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    max_rate: Annotated[float, Gt(0), Le(10_000_000)] | None = None
    """Most messages released in a second; the others follow in the order of their deliver times. Without it there is no
    limit."""

    jitter: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Each message is released up to this much later, by chance: messages for one instant arrive apart."""

    spread: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Messages for one instant are released evenly over this time."""

    priority: Annotated[int, Ge(0), Le(9)] = 0
    """While more is due than can be released: each step counts as if the messages had been due a second earlier. So a
    higher priority goes first, and a lower one waits at most nine seconds longer than its turn."""

"""Names of RocketMQ's delay levels."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["DelayLevel"]


class DelayLevel(IntEnum):
    """RocketMQ's 18 delay levels by the delay that each has: ``delay_level=DelayLevel.M1`` is level 5, one minute.

    The names are those of the default table, ``1s 5s 10s 30s 1m … 2h``. A broker with another ``message-delay-level``
    gives the numbers other delays. Source: ``MessageStoreConfig.messageDelayLevel``.
    """

    S1 = 1
    S5 = 2
    S10 = 3
    S30 = 4
    M1 = 5
    M2 = 6
    M3 = 7
    M4 = 8
    M5 = 9
    M6 = 10
    M7 = 11
    M8 = 12
    M9 = 13
    M10 = 14
    M20 = 15
    M30 = 16
    H1 = 17
    H2 = 18

    @property
    def delay(self) -> str:
        """Delay of the level in the default table, such as ``1m``."""
        return f"{self.name[1:]}{self.name[0].lower()}"

    def __str__(self) -> str:
        return f"{int(self)} ({self.delay})"

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

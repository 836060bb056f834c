"""Progress of consumer groups in time: age of the oldest message not consumed, trend of the lag, time to catch up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from mqtemplate.broker import Broker, QueueProgress
from mqtemplate.errors import BrokerError, CorruptRecordError, OffsetOutOfRangeError

_SAME = 0.01
"""A lag that changes by less than this part of it stands."""


def behind_ms(broker: Broker, progress: Iterable[QueueProgress], now_ms: int) -> int | None:
    """Return the age of the oldest message that a group has not consumed; 0 if it has consumed all.

    It reads one message of each queue with a lag.

    Returns:
        Milliseconds; None if none of these messages can be read.
    """
    lagging = [each for each in progress if each.lag]
    stored = [time_ms for each in lagging if (time_ms := _oldest_stored_ms(broker, each)) is not None]
    if not lagging:
        return 0
    return max(0, now_ms - min(stored)) if stored else None


def _oldest_stored_ms(broker: Broker, progress: QueueProgress) -> int | None:
    start = max(progress.committed or 0, progress.min_offset or 0)
    try:
        try:
            found = broker.reader.pull(progress.queue, start, 1)
        except OffsetOutOfRangeError as exc:  # retention deleted messages meanwhile
            found = broker.reader.pull(progress.queue, exc.next_offset, 1)
    except (BrokerError, CorruptRecordError):
        return None
    return found.messages[0].store_timestamp if found.messages else None


class Trend(Enum):
    """Direction of a lag."""

    GROWING = "growing"
    SHRINKING = "shrinking"
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class LagTrend:
    """Two readings of the lag of a group.

    Attributes:
        before: The earlier lag.
        now: The later lag.
        elapsed_ms: Time between them.
    """

    before: int
    now: int
    elapsed_ms: int

    @property
    def direction(self) -> Trend | None:
        """The direction; None without a lag."""
        if not self.now:
            return None
        change = self.now - self.before
        if abs(change) <= _SAME * max(self.before, self.now):
            return Trend.STANDING
        return Trend.GROWING if change > 0 else Trend.SHRINKING

    @property
    def catch_up_ms(self) -> int | None:
        """Time until all is consumed at the present rates; None unless the lag shrinks."""
        if self.direction is not Trend.SHRINKING:
            return None
        return self.now * self.elapsed_ms // (self.before - self.now)

"""Triggers: the times at which a schedule runs, by a cron expression, at an interval, or once."""

from __future__ import annotations

import json
import zlib
from collections.abc import Container
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from mqtemplate.durations import format_ms
from mqtemplate.errors import ScheduleError

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_FORMS = (
    "five fields 'minute hour day month weekday' such as '0 9 * * MON-FRI', six with the second first, or one of "
    + ", ".join(_ALIASES)
)

_SECOND = timedelta(seconds=1)


def read_cron(expression: str) -> str:
    """Return an expression in the form that `next_time` takes: aliases and ``?`` replaced, names in capitals.

    Raises:
        ValueError: It is not a cron expression, or never matches. The text is the end of the sentence "cron must be …".
    """
    from cronsim import CronSimError

    text = _ALIASES.get(expression.strip().lower(), expression)
    fields = ["*" if field == "?" else field.upper() for field in text.split()]
    normal = " ".join(fields)
    try:
        first = next_time(normal, datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise ValueError(f"{_FORMS}; got {expression!r} ({error})") from None
    if first is None:
        raise ValueError(f"an expression that matches some day; {expression!r} matches none")
    return normal


def next_time(expression: str, after: datetime) -> datetime | None:
    """Return the first time later than *after*, in its time zone; None if fifty years have no such time."""
    from cronsim import CronSim

    for found in CronSim(expression, _start(after)):
        # In the hour that repeats, cronsim counts in local time and may return the first of the two hours again.
        if found.astimezone(UTC) > after.astimezone(UTC):
            return found
    return None


def _start(after: datetime) -> datetime:
    """Return the time from which cronsim searches. It knows UTC by Python's own object only."""
    zone: tzinfo | None = after.tzinfo
    return after.astimezone(UTC) if str(zone) == "UTC" else after


NO_HOLIDAYS: frozenset[date] = frozenset()
SHORTEST_MS = 1_000
"""Shortest interval."""

LAST_MS = 253_370_764_800_000
"""Last time that triggers compute with: 9999-01-01T00:00Z, in each zone a time that `datetime` has."""

_MAX_DAYS = 3_660  # a calendar that excludes ten years excludes everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Times of a schedule: by a cron expression, at a fixed interval, or once.

    It depends on nothing but its fields: each process computes the same times. So an interval is not counted from the
    start of a process, but from 1970-01-01T00:00Z: ``10m`` is at :00, :10, :20 of each hour.

    Attributes:
        cron: Expression as `read_cron` returns it.
        every_ms: Interval.
        at_ms: The only time (epoch ms).
        zone: IANA time zone of the cron expression, and of the dates that a calendar excludes.
    """

    cron: str | None = None
    every_ms: int | None = None
    at_ms: int | None = None
    zone: str = "UTC"

    def next_after(self, after_ms: int, holidays: Container[date] = NO_HOLIDAYS) -> int | None:
        """Return the first time (epoch ms) later than *after_ms* on a day that is not excluded; None without one.

        Raises:
            ScheduleError: The calendar excludes each day of ten years.
        """
        for _ in range(_MAX_DAYS):
            found = self._next(after_ms)
            if found is None or (day := self.local(found).date()) not in holidays:
                return found
            midnight = datetime.combine(day + timedelta(days=1), time(), zone_of(self.zone))
            after_ms = max(found, epoch_ms(midnight) - 1)
        raise ScheduleError(f"{self}: the calendar excludes {_MAX_DAYS} days on which it would run; correct holidays=")

    def _next(self, after_ms: int) -> int | None:
        if self.at_ms is not None:
            return self.at_ms if self.at_ms > after_ms else None
        if self.every_ms is not None:
            return (after_ms // self.every_ms + 1) * self.every_ms
        found = next_time(str(self.cron), self.local(after_ms))
        return None if found is None else epoch_ms(found)

    def local(self, at_ms: int) -> datetime:
        """Return a time (epoch ms) as a datetime in the zone of the trigger."""
        return datetime.fromtimestamp(min(at_ms, LAST_MS) / 1_000, zone_of(self.zone))

    def check(self) -> None:
        """Check the fields of a trigger that another process sent, as a declaration is checked.

        Raises:
            ValueError: A field has a value that no declaration has.
            ScheduleError: The time zone does not exist.
        """
        given = [value for value in (self.cron, self.every_ms, self.at_ms) if value is not None]
        if len(given) != 1:
            raise ValueError(f"a trigger has one of cron, every_ms and at_ms, got {len(given)}")
        if self.cron is not None and (type(self.cron) is not str or _normal_cron(self.cron) != self.cron):
            raise ValueError(f"cron must be an expression in the form of triggers, got {self.cron!r:.64}")
        for name, value, low in (("every_ms", self.every_ms, SHORTEST_MS), ("at_ms", self.at_ms, 0)):
            if value is not None and (type(value) is not int or not low <= value <= LAST_MS):
                raise ValueError(f"{name} must be milliseconds from {low} to {LAST_MS}, got {value!r:.64}")
        if type(self.zone) is not str:
            raise ValueError(f"zone must be the name of a time zone, got {self.zone!r:.64}")
        zone_of(self.zone)

    @property
    def fingerprint(self) -> str:
        """Text that differs between triggers, in keys of messages."""
        return _fingerprint(self)

    def fields(self) -> dict[str, str | int | None]:
        """Return the fields by name, as the body of a message has them."""
        return {"cron": self.cron, "every_ms": self.every_ms, "at_ms": self.at_ms, "zone": self.zone}

    def __str__(self) -> str:
        if self.every_ms is not None:
            return f"every {format_ms(self.every_ms)}"
        if self.at_ms is not None:
            return f"at {self.local(self.at_ms).isoformat()}"
        return f"cron {self.cron!r} in {self.zone}"


@lru_cache(maxsize=1_024)  # each message of a schedule needs it several times
def _fingerprint(trigger: Trigger) -> str:
    return f"{zlib.crc32(json.dumps(trigger.fields(), sort_keys=True).encode()):08x}"


_normal_cron = lru_cache(maxsize=64)(read_cron)  # the check of an expression computes its first time


def epoch_ms(at: datetime) -> int:
    """Return an aware datetime in milliseconds since the epoch, rounded up: a run is never early."""
    return -(-round(at.timestamp() * 1_000_000) // 1_000)


@lru_cache(maxsize=64)
def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name.

    Raises:
        ScheduleError: No time zone of this machine has the name.
    """
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ScheduleError(
            f"zone must be an IANA time zone such as 'Europe/Berlin', got {name!r}; if the name is right, this machine "
            "has no time zone data: pip install tzdata"
        ) from None

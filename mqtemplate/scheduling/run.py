"""Runs: the value that a scheduled function may take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """One run of a schedule.

    Attributes:
        schedule: Name of the schedule.
        scheduled_at: Time of the run by the trigger, in its zone; for a run on request the time of the request.
        late: Time from then until now.
        attempt: 1 for the first call, one more for each retry after a failure.
        is_manual: True for a run on request: `Schedules.trigger`.
    """

    schedule: str
    scheduled_at: datetime
    late: timedelta
    attempt: int
    is_manual: bool

    @property
    def id(self) -> str:
        """Name and time: the same each time that this run is repeated, so it can be the key of its effect."""
        return f"{self.schedule}@{self.scheduled_at.astimezone(UTC).isoformat(timespec='milliseconds')}"

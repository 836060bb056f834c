"""Values: a schedule of this process, and one run of it, which a scheduled function may take."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Any

from mqtemplate.errors import ScheduleError
from mqtemplate.message import MessageExt
from mqtemplate.scheduling.trigger import Trigger


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


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class CatchUp(Enum):
    """Runs that were missed because no process was running: none of them, one for all, or each one."""

    NONE = "NONE"
    ONE = "ONE"
    ALL = "ALL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule of this process.

    Attributes:
        handler: The function or bound method, for names and reports.
        invoke: Calls it for a message and a run; the result of an ``async def`` function is a coroutine.
        attributes: Attributes for the listener that reads the runs.
    """

    name: str
    trigger: Trigger
    catch_up: CatchUp
    grace_ms: int
    holidays: Container[date]
    handler: Callable[..., object]
    invoke: Callable[[MessageExt, ScheduledRun], object]
    attributes: Mapping[str, Any]

    def next_after(self, after_ms: int) -> int | None:
        """Return the time of the first run (epoch ms) later than *after_ms*; None without a further run."""
        return self.trigger.next_after(after_ms, self.holidays)


def is_name(name: str) -> bool:
    """Return True if a schedule may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return a name of a schedule: it is part of the name of a consumer group.

    Raises:
        ScheduleError: It has other characters, or is too long.
    """
    if not is_name(name):
        raise ScheduleError(f"the name of a schedule must be 1..64 letters, digits, '_' and '-', got {name!r}")
    return name

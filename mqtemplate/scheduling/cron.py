"""Cron expressions: checked, and their next time in a time zone.

The grammar is that of cronsim, which follows Debian's cron also where the clocks change:

- A time of day that does not exist (the clocks go forward) runs at the first minute after the gap.
- A time of day that exists twice (the clocks go back) runs once, the first time.
- An expression whose minute or hour starts with ``*`` follows the elapsed time: it runs in both hours.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo

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
        ValueError: It is no cron expression, or it never matches. The text is the end of the sentence "cron must be …".
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
    """Return the first time later than *after*, in its time zone; None if there is none within fifty years."""
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

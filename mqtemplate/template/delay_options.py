"""When a message shall arrive: what a sender may say, as the properties that a broker reads.

A level and a relative delay are counted by the broker's clock from the arrival there; a deliver time is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from mqtemplate.errors import DelayError
from mqtemplate.message import DELAY_PROPERTIES, Property

_ABSOLUTE = frozenset({Property.TIMER_DELIVER_MS, Property.START_DELIVER_TIME})

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Epoch seconds stay below this until the year 5138, epoch milliseconds are above it since 1973.
_SECONDS_BELOW = 100_000_000_000


def delay_properties(
    delay_level: int, delay: timedelta | float | None, deliver_at: datetime | int | None, now_ms: int
) -> dict[str, str]:
    """The property that says it to the broker; none for a message that shall go at once.

    Args:
        delay_level: 0, or a position in the broker's level table.
        delay: How long; a number is seconds. Fractions of a millisecond are rounded up, since early is wrong.
        deliver_at: When: an aware datetime, rounded up likewise, or epoch milliseconds.
        now_ms: The time, only to tell seconds given by mistake from milliseconds.

    Raises:
        DelayError: More than one of them, or one that is not what it must be.
    """
    _check_level(delay_level)
    if delay_level and (delay is not None or deliver_at is not None):
        other = "delay" if delay is not None else "deliver_at"
        raise DelayError(f"delay_level={delay_level} and {other} are two answers to one question; pass one of them")
    if delay is not None and deliver_at is not None:
        raise DelayError("delay and deliver_at are two answers to one question; pass one of them")
    if delay_level:
        return {Property.DELAY: str(int(delay_level))}
    if delay is not None:
        delay_ms = _delay_ms(delay)
        return {Property.TIMER_DELAY_MS: str(delay_ms)} if delay_ms else {}
    if deliver_at is not None:
        return {Property.TIMER_DELIVER_MS: str(_deliver_ms(deliver_at, now_ms))}
    return {}


def deliver_time(delay: timedelta | float | None, deliver_at: datetime | int | None, now_ms: int) -> int:
    """When (epoch ms), for a message that waits already; now, if neither says it.

    Raises:
        DelayError: Both of them, or one that is not what it must be.
    """
    if delay is not None and deliver_at is not None:
        raise DelayError("delay and deliver_at are two answers to one question; pass one of them")
    if deliver_at is not None:
        return _deliver_ms(deliver_at, now_ms)
    return now_ms if delay is None else now_ms + _delay_ms(delay)


def epoch_ms(name: str, time: datetime | int | None) -> int | None:
    """A time that *name* was given, in epoch milliseconds.

    Raises:
        DelayError: It is naive, or no time.
    """
    if time is None or (isinstance(time, int) and not isinstance(time, bool)):
        return time
    if isinstance(time, datetime) and time.utcoffset() is not None:
        return (time.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
    raise DelayError(f"{name} must be an aware datetime or epoch milliseconds, got {type(time).__name__} {time!r}")


def _check_level(delay_level: object) -> None:
    if not isinstance(delay_level, int) or isinstance(delay_level, bool):
        raise DelayError(
            f"delay_level must be a whole number, a position in the level table (1 = 1s … 18 = 2h by default), "
            f"got {type(delay_level).__name__} {delay_level!r}; for other delays pass delay= or deliver_at="
        )
    if delay_level < 0:
        raise DelayError(
            f"delay_level must be 0 (at once) or a position in the level table (1 = 1s … 18 = 2h by default), "
            f"got {delay_level}; for other delays pass delay= or deliver_at="
        )


def _delay_ms(delay: object) -> int:
    if isinstance(delay, timedelta):
        negative = delay < timedelta(0)
        delay_ms = -(-delay // timedelta(milliseconds=1))
    elif isinstance(delay, int | float) and not isinstance(delay, bool):
        if not math.isfinite(delay):
            raise DelayError(f"delay must be a finite number of seconds, got {delay!r}")
        negative = delay < 0
        # Rounded first, so that the last bits of 0.1 + 0.2 do not cost a millisecond.
        delay_ms = math.ceil(round(delay * 1_000, 6))
    else:
        raise DelayError(f"delay must be a timedelta or a number of seconds, got {type(delay).__name__} {delay!r}")
    if negative:
        raise DelayError(f"delay must not be negative, got {delay!r}; to deliver at once pass no delay")
    return delay_ms


def _deliver_ms(deliver_at: object, now_ms: int) -> int:
    if isinstance(deliver_at, datetime):
        if deliver_at.utcoffset() is None:
            raise DelayError(
                f"deliver_at={deliver_at.isoformat()} is a naive datetime, which is another instant in another place; "
                "give it a time zone: datetime(..., tzinfo=UTC), or .astimezone() for this machine's own"
            )
        since_epoch = deliver_at.astimezone(UTC) - _EPOCH
        return _check_deliver_ms("deliver_at", -(-since_epoch // timedelta(milliseconds=1)), now_ms)
    if isinstance(deliver_at, int) and not isinstance(deliver_at, bool):
        return _check_deliver_ms("deliver_at", deliver_at, now_ms)
    hint = "; datetime.fromisoformat(...) reads a text" if isinstance(deliver_at, str) else ""
    hint = "; of time.time() take int(seconds * 1000)" if isinstance(deliver_at, float) else hint
    raise DelayError(
        f"deliver_at must be an aware datetime or whole epoch milliseconds, "
        f"got {type(deliver_at).__name__} {deliver_at!r}{hint}"
    )


def _check_deliver_ms(name: str, deliver_ms: int, now_ms: int) -> int:
    """Refuse what would silently be a time in 1970. Other past times are the broker's: it delivers at once."""
    if deliver_ms < 0:
        raise DelayError(f"{name} must not lie before 1970, got {deliver_ms}")
    if deliver_ms < _SECONDS_BELOW <= now_ms:
        raise DelayError(f"{name}={deliver_ms} looks like seconds; it takes epoch milliseconds: {deliver_ms * 1_000}")
    return deliver_ms


def delay_header(name: str, value: object, now_ms: int) -> dict[str, str]:
    """A delay given as a header, ``DELAY`` or ``TIMER_…``: as effective as the option of the same meaning.

    Raises:
        DelayError: The value is not a whole number, or not one that the header may have.
    """
    text = str(value).strip()
    if isinstance(value, bool) or not text.removeprefix("-").isdecimal():
        unit = {Property.DELAY: "a level", Property.TIMER_DELAY_SEC: "seconds"}.get(name, "milliseconds")
        raise DelayError(f"header {name} must be a whole number ({unit}), got {value!r}; or pass delay= or deliver_at=")
    number = int(text)
    if name == Property.DELAY:
        _check_level(number)
    elif name in _ABSOLUTE:
        _check_deliver_ms(f"header {name}", number, now_ms)
    elif number < 0:
        raise DelayError(f"header {name} must not be negative, got {number}; to deliver at once leave it out")
    return {name: str(number)} if number else {}


def check_one_delay(names: Iterable[str]) -> None:
    """Refuse a message whose options and headers ask for several delays at once."""
    delays = [name for name in names if name in DELAY_PROPERTIES]
    if len(delays) > 1:
        raise DelayError(
            f"{' and '.join(delays)} are several answers to one question, when to deliver; give one of them"
        )

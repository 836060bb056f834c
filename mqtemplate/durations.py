"""Durations as people write them: ``"3h"``, ``"250ms"``, ``"1h 30m"``, a timedelta, or a number; named delay levels.

A number has no unit, so a reader can take it for another duration. Where an application gives one, a `UnitWarning` at
the line of the call says how it is read.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from contextvars import Context, ContextVar
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from mqtemplate.errors import UnitWarning
from mqtemplate.numbers import PARSED_MAX
from mqtemplate.user_code import shown

__all__ = [
    "ALLOWED",
    "SHORT_TIMEOUT_MS",
    "DelayLevel",
    "Duration",
    "duration_ms",
    "format_ms",
    "is_bare_number",
    "is_duration_text",
    "keep_caller",
    "option_ms",
    "timeout_option_ms",
    "warn_of_unit",
    "with_unit",
]

Duration: TypeAlias = str | timedelta | float
"""A duration as text or as a timedelta; or as a number in the unit that the parameter documents."""

ALLOWED = "'3h', '1h 30m', '250ms' (units: d h m s ms) or a timedelta"
"""The forms of a duration, for errors."""

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_SUFFIXES = {unit_ms: unit for unit, unit_ms in _UNITS_MS.items()}
_UNIT_NAMES = {1: "milliseconds", 1_000: "seconds", 60_000: "minutes", 3_600_000: "hours", 86_400_000: "days"}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|[dhms])(?![a-zA-Z])", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_LONGEST_TEXT = 100  # a longer text is not a duration; the limit also bounds the time of the search
_MILLISECOND = timedelta(milliseconds=1)

SHORT_TIMEOUT_MS = 100
"""A timeout below this, given as a number, is more likely a number of seconds."""


def duration_ms(value: object, unit_ms: int = 1) -> int:
    """Return a duration in milliseconds; a fraction of a millisecond is rounded up, so nothing happens early.

    Args:
        value: A text such as ``"1h 30m"``, a timedelta, or a number, also as text, in units of *unit_ms*.

    Raises:
        ValueError: It is something else, or negative. The text is the end of the sentence "… must be".
    """
    if isinstance(value, timedelta):
        milliseconds = -1 if value < timedelta(0) else value // _MILLISECOND + bool(value % _MILLISECOND)
    elif isinstance(value, str):
        milliseconds = _text_ms(value.strip(), unit_ms)
    elif isinstance(value, int) and not isinstance(value, bool):
        milliseconds = value * unit_ms
    elif isinstance(value, float) and math.isfinite(value * unit_ms):
        # Rounded first: the binary error of 0.1 + 0.2 must not add a millisecond.
        milliseconds = math.ceil(round(value * unit_ms, 6))
    else:
        raise ValueError(_refusal(value))
    if milliseconds < 0:
        raise ValueError(f"0 or longer, got {shown(value)}")
    if milliseconds > PARSED_MAX:
        raise ValueError(f"at most {format_ms(PARSED_MAX)}, got {shown(value)}")
    return milliseconds


def is_duration_text(text: str) -> bool:
    """Return True for a text with units: ``"90s"``, but not ``"90"``."""
    return _parts_ms(text.strip()) is not None


def is_bare_number(value: object) -> bool:
    """Return True for a duration without a unit: a number above 0, also as text."""
    if isinstance(value, str):
        text = value.strip()
        # The last character first: most texts have a unit.
        return bool(text[-1:].isdigit() and len(text) <= _LONGEST_TEXT and _NUMBER.fullmatch(text) and Decimal(text))
    if type(value) is timedelta or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return bool(0 < value <= PARSED_MAX)


def option_ms(name: str, value: object, error: type[Exception], unit_ms: int = 1_000) -> int:
    """Return a duration that an application gives as an option, in milliseconds; warn if it has no unit.

    Args:
        name: Name of the option in the error and in the warning.
        unit_ms: Unit of a number.

    Raises:
        Exception: An *error*: the value is not a duration.
    """
    milliseconds = _option_ms(name, value, error, unit_ms)
    if is_bare_number(value):
        warn_of_unit(f"{name}={{}}", value, unit_ms)
    return milliseconds


def timeout_option_ms(name: str, value: object, error: type[Exception]) -> int:
    """Return a timeout that an application gives, in milliseconds. Only a short one without a unit draws a warning.

    RocketMQ's API defines milliseconds for it. So a number is expected, unless it is almost surely one of seconds.

    Raises:
        Exception: An *error*: the value is not a duration.
    """
    milliseconds = _option_ms(name, value, error, 1)
    if 0 < milliseconds < SHORT_TIMEOUT_MS and is_bare_number(value):
        number = _number_text(value)
        _warn(
            f"{name}={_quoted(value)} is {_counted(number, 1)}; "
            f'write {name}="{number}s" for seconds, or {name}="{number}ms"'
        )
    return milliseconds


def with_unit(name: str, value: Any, unit_ms: int = 1_000) -> Any:
    """Return a duration for later use: a number becomes a text with its unit, with a warning now."""
    if not is_bare_number(value):
        return value
    warn_of_unit(f"{name}={{}}", value, unit_ms)
    return f"{_number_text(value)}{_SUFFIXES[unit_ms]}"


def warn_of_unit(form: str, value: object, unit_ms: int) -> None:
    """Warn at the line of the application if a duration other than 0 has no unit.

    Args:
        form: Form of the code, with ``{}`` for the value: ``delay={}``, ``advance({})``. What is before a colon is
            only named: ``retry: {}``.
    """
    if not is_bare_number(value):
        return
    number, unit = _number_text(value), _UNIT_NAMES[unit_ms]
    code = form.rpartition(": ")[2]
    with_text = code.format(f'"{number}{_SUFFIXES[unit_ms]}"')
    _warn(
        f"{form.format(_quoted(value))} has no unit and is read as {_counted(number, unit_ms)}; "
        f"write {with_text} or timedelta({unit}={number})"
    )


def format_ms(milliseconds: int) -> str:
    """Return a duration as people write it: ``3h``, ``1h 30m``, ``250ms``; `duration_ms` reads it."""
    sign, rest = ("-" if milliseconds < 0 else ""), abs(milliseconds)
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        count, rest = divmod(rest, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return sign + (" ".join(parts) or "0s")


def _option_ms(name: str, value: object, error: type[Exception], unit_ms: int) -> int:
    try:
        return duration_ms(value, unit_ms)
    except ValueError as refusal:
        raise error(f"{name} must be {refusal}") from None


def _text_ms(text: str, unit_ms: int) -> int:
    if len(text) <= _LONGEST_TEXT and _NUMBER.fullmatch(text):
        return math.ceil(Decimal(text) * unit_ms)
    milliseconds = _parts_ms(text)
    if milliseconds is None:
        raise ValueError(_refusal(text))
    return milliseconds


def _parts_ms(text: str) -> int | None:
    """Return the sum of ``1h 30m``; None if the text has another form."""
    total, at = Decimal(0), 0
    while at < len(text) <= _LONGEST_TEXT:
        found = _PART.match(text, at)
        if found is None:
            return None
        total += Decimal(found[1]) * _UNITS_MS[found[2].lower()]
        at = found.end()
    return math.ceil(total) if at else None


def _refusal(value: object) -> str:
    return f"a duration: {ALLOWED}; got {shown(value)}"


# --- warnings of durations without a unit ------------------------------------------------------------


class _CallingLine(NamedTuple):
    """Line of code: where a warning points to."""

    file: str
    number: int
    names: dict[str, Any]

    @classmethod
    def of_frame(cls, frame: FrameType) -> _CallingLine:
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


_caller: ContextVar[_CallingLine] = ContextVar("mqtemplate_caller")
_OF_THREADS = frozenset({"threading", "concurrent.futures.thread"})


def keep_caller(context: Context) -> None:
    """Note the line of the application that calls now, for warnings of a call that runs in another thread."""
    context.run(_caller.set, _line_of_application())


def _line_of_application() -> _CallingLine:
    """Return the innermost line outside of the library."""
    # `warnings.warn` has skip_file_prefixes from Python 3.12 on.
    frame = sys._getframe(1)
    while _is_own(frame) and frame.f_back is not None:
        frame = frame.f_back
    line = _CallingLine.of_frame(frame)
    return _caller.get(line) if frame.f_globals.get("__name__") in _OF_THREADS else line


def _is_own(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == "mqtemplate" or package.startswith("mqtemplate_starter_")


def _warn(text: str) -> None:
    line = _line_of_application()
    seen = line.names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UnitWarning, line.file, line.number, line.names.get("__name__"), seen)


def _number_text(value: Any) -> str:
    """Return a number without an exponent, which no text of a duration has."""
    if isinstance(value, str):
        return value.strip()
    return str(int(value)) if value == int(value) else f"{Decimal(repr(float(value))):f}"


def _quoted(value: object) -> str:
    return f'"{value.strip()}"' if isinstance(value, str) else _number_text(value)


def _counted(number: str, unit_ms: int) -> str:
    unit = _UNIT_NAMES[unit_ms]
    return f"1 {unit[:-1]}" if number == "1" else f"{number} {unit}"


# --- delay levels ------------------------------------------------------------------------------------


class DelayLevel(IntEnum):
    """RocketMQ's 18 delay levels by the delay that each has: ``delay_level=DelayLevel.M1`` is level 5, one minute.

    The names follow the default table, ``1s 5s 10s 30s 1m … 2h``. A broker with another ``message-delay-level``
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
        is_number = format_spec[-1:] in tuple("bcdeEfFgGnoxX%")
        return format(int(self) if is_number else str(self), format_spec)

"""Retry schedules: the number of retries of a message, and the delay before each one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from mqtemplate.durations import Duration, duration_ms, format_ms
from mqtemplate.errors import ListenerError

_MAX_RETRIES = 10_000
_LONGEST_DELAY_MS = 40 * 86_400_000
SCHEDULE_FORMS = (
    "delays such as ['5s', '1m', '1h'] (text with the units d h m s ms, a timedelta, or seconds, up to 40d), or "
    "a Backoff"
)
"""End of the sentence "retry must be …"."""


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """One delay for each retry. If ``max_reconsume_times`` allows more retries, the last delay repeats."""

    delays_ms: tuple[int, ...]

    @property
    def retries(self) -> int:
        """Number of retries."""
        return len(self.delays_ms)

    def delay_ms(self, retry: int, _random: Random) -> int:
        """Return the delay before a retry; the first retry is 1."""
        return self.delays_ms[min(retry, len(self.delays_ms)) - 1]

    def __str__(self) -> str:
        return ", ".join(map(format_ms, self.delays_ms))


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential retry schedule: each delay is *factor* times the one before, up to *maximum*.

    ::

        Backoff("1s", factor=2, maximum="1h", jitter=0.1, attempts=10)  # 1s, 2s, 4s, … before 9 retries

    Args:
        first: Duration before the first retry: ``"1s"``, a timedelta, or seconds.
        factor: 1 or more.
        maximum: Longest delay.
        jitter: Random share of each delay, 0 to 1: with 0.1 a delay is 90 to 110 percent of the computed one, so that
            messages that failed together are not retried together. No delay is longer than *maximum*.
        attempts: Number of calls of the handler in total, the first one included.

    Raises:
        ListenerError: A value is not allowed.
    """

    first: Duration
    factor: float = field(default=2, kw_only=True)
    maximum: Duration = field(default="1h", kw_only=True)
    jitter: float = field(default=0.1, kw_only=True)
    attempts: int = field(default=10, kw_only=True)
    _first_ms: int = field(init=False, repr=False, compare=False)
    _maximum_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first_ms, maximum_ms = self._read("first"), self._read("maximum")
        self._check("first", 1 <= first_ms <= maximum_ms, "a delay of 1 ms or more and at most the maximum")
        self._check("factor", _is_number(self.factor) and 1 <= self.factor <= 1_000, "a number from 1 to 1000")
        self._check("jitter", _is_number(self.jitter) and 0 <= self.jitter <= 1, "a number from 0 to 1")
        is_whole = _is_number(self.attempts) and self.attempts % 1 == 0
        self._check("attempts", is_whole and 1 <= self.attempts <= _MAX_RETRIES + 1, "a whole number from 1 to 10001")
        object.__setattr__(self, "_first_ms", first_ms)
        object.__setattr__(self, "_maximum_ms", maximum_ms)

    def _read(self, name: str) -> int:
        try:
            return retry_delay_ms(getattr(self, name))
        except ValueError as error:
            raise ListenerError.of_value("Backoff", f"{name} must be {error}") from None

    def _check(self, name: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ListenerError.of_value("Backoff", f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def retries(self) -> int:
        """Number of retries: all attempts but the first."""
        return self.attempts - 1

    def delay_ms(self, retry: int, random: Random) -> int:
        """Return the delay before a retry; the first retry is 1."""
        delay = min(math.log(self._first_ms) + (retry - 1) * math.log(self.factor), math.log(self._maximum_ms))
        spread = 1 + self.jitter * (2 * random.random() - 1)
        return min(round(math.exp(delay) * spread), self._maximum_ms)

    def __str__(self) -> str:
        first, maximum = format_ms(self._first_ms), format_ms(self._maximum_ms)
        return f"{first}, then {self.factor:g} times as long each, up to {maximum}, {self.attempts} attempts"


def retry_delay_ms(delay: object) -> int:
    """Return the delay of a retry in milliseconds; a number is seconds. It is never shorter than the one given.

    Raises:
        ValueError: It is no duration, or longer than 40 days. The text is the end of the sentence "… must be".
    """
    delay_ms = duration_ms(delay, 1_000)
    if delay_ms > _LONGEST_DELAY_MS:
        raise ValueError(f"{format_ms(_LONGEST_DELAY_MS)} or shorter, got {delay!r}")
    return delay_ms


RetrySchedule: TypeAlias = RetryDelays | Backoff


def read_schedule(value: Any) -> RetrySchedule | None:
    """Return the schedule for a list of delays, a text with commas, or a `Backoff`; None for None and an empty text.

    Raises:
        ValueError: It is something else, or a delay is not allowed.
    """
    if value is None or isinstance(value, Backoff | RetryDelays):
        return value
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
        if not value:
            return None
    if not isinstance(value, Sequence) or not 1 <= len(value) <= _MAX_RETRIES:
        raise ValueError(value)
    return RetryDelays(tuple(map(retry_delay_ms, value)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

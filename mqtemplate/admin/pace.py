"""Pace and progress of work on many messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.errors import MessageError

T = TypeVar("T")

OnProgress: TypeAlias = Callable[[int], None]
"""Function that is called with the number of messages done since the last call."""


def no_progress(count: int) -> None:
    """Report nothing."""


def paced(items: Iterable[T], rate: float | None, clock: Clock) -> Iterator[T]:
    """Yield *items*, at most *rate* per second. The first one comes at once.

    Args:
        rate: None for no limit.

    Raises:
        MessageError: *rate* is not above 0.
    """
    if rate is None:
        yield from items
        return
    if rate <= 0:
        raise MessageError(f"the rate must be above 0 per second, got {rate}; leave it out for no limit")
    start_ms = clock.now_ms()
    for number, item in enumerate(items):
        left_s = clock.seconds_until(start_ms + round(number * 1_000 / rate))
        if left_s > 0:
            clock.sleep(left_s)
        yield item

"""Retry schedules as users write them: what is allowed, and the errors for the rest."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mqtemplate import Backoff
from mqtemplate.durations import format_ms
from mqtemplate.listener.declaration.settings import retry_delay_ms


@pytest.mark.parametrize("delay_ms", [0, 1, 999, 1_000, 90_000, 5_400_000, 93_784_005])
def test_a_shown_delay_can_be_read_again(delay_ms: int) -> None:
    assert retry_delay_ms(format_ms(delay_ms)) == delay_ms


@pytest.mark.parametrize(("delay", "delay_ms"), [("0.5ms", 1), (0.0001, 1), ("1h30m", 5_400_000), (" 5s ", 5_000)])
def test_a_delay_is_rounded_up_to_milliseconds(delay: Any, delay_ms: int) -> None:
    """So that a retry is never early."""
    assert retry_delay_ms(delay) == delay_ms


def test_the_delays_of_a_long_backoff_do_not_overflow() -> None:
    backoff = Backoff("1ms", factor=1_000, maximum="10d", jitter=0, attempts=10_001)

    assert backoff.delay_ms(backoff.retries, Random(1)) == 10 * 86_400_000


def test_a_backoff_is_a_value() -> None:
    assert Backoff("1s") == Backoff("1s", factor=2, maximum="1h", jitter=0.1, attempts=10)
    assert str(Backoff("1s")) == "1s, then 2 times as long each, up to 1h, 10 attempts"

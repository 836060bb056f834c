"""Retry schedules as users write them: what is allowed, and the errors for the rest."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mqtemplate import Backoff
from mqtemplate.durations import format_ms
from mqtemplate.errors import ListenerError
from mqtemplate.listener import message_listener, resolve_spec
from mqtemplate.listener.declaration.decorator import listener_specs
from mqtemplate.listener.declaration.settings import retry_delay_ms


def resolve(**attributes: Any) -> Any:
    @message_listener(topic="orders", consumer_group="billing", id="bill", **attributes)
    def bill(message: str) -> None: ...

    return resolve_spec(listener_specs(bill)[0])


@pytest.mark.parametrize("delay_ms", [0, 1, 999, 1_000, 90_000, 5_400_000, 93_784_005])
def test_a_shown_delay_can_be_read_again(delay_ms: int) -> None:
    assert retry_delay_ms(format_ms(delay_ms)) == delay_ms


@pytest.mark.parametrize(("delay", "delay_ms"), [("0.5ms", 1), (0.0001, 1), ("1h30m", 5_400_000), (" 5s ", 5_000)])
def test_a_delay_is_rounded_up_to_milliseconds(delay: Any, delay_ms: int) -> None:
    """So that a retry is never early."""
    assert retry_delay_ms(delay) == delay_ms


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"first": "soon"}, "Backoff: first must be a duration: '3h', '1h 30m', '250ms'"),
        ({"first": 0}, "Backoff: first must be a delay of 1 ms or more and at most the maximum, got 0"),
        ({"first": "2h"}, "Backoff: first must be a delay of 1 ms or more and at most the maximum, got '2h'"),
        ({"maximum": -1}, "Backoff: maximum must be 0 or longer, got -1"),
        ({"maximum": "41d"}, "Backoff: maximum must be 40d or shorter, got '41d'"),
        ({"factor": 0.5}, "Backoff: factor must be a number from 1 to 1000, got 0.5"),
        ({"jitter": 2}, "Backoff: jitter must be a number from 0 to 1, got 2"),
        ({"attempts": 0}, "Backoff: attempts must be a whole number from 1 to 10001, got 0"),
        ({"attempts": 2.5}, "Backoff: attempts must be a whole number from 1 to 10001, got 2.5"),
        ({"attempts": True}, "Backoff: attempts must be a whole number from 1 to 10001, got True"),
    ],
)
def test_a_backoff_with_a_wrong_value_says_what_is_allowed(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ListenerError) as refused:
        Backoff(**{"first": "1s", **arguments})

    assert str(refused.value).startswith(expected)


def test_the_delays_of_a_long_backoff_do_not_overflow() -> None:
    backoff = Backoff("1ms", factor=1_000, maximum="10d", jitter=0, attempts=10_001)

    assert backoff.delay_ms(backoff.retries, Random(1)) == 10 * 86_400_000


def test_a_backoff_is_a_value() -> None:
    assert Backoff("1s") == Backoff("1s", factor=2, maximum="1h", jitter=0.1, attempts=10)
    assert str(Backoff("1s")) == "1s, then 2 times as long each, up to 1h, 10 attempts"


@pytest.mark.parametrize("retry", [[], ["5s", "soon"], 5, ["5s", None], {"5s": 1}])
def test_a_schedule_that_is_none_is_refused_with_the_allowed_forms(retry: Any) -> None:
    with pytest.raises(ListenerError) as refused:
        resolve(retry=retry)

    assert str(refused.value).startswith("listener bill: retry must be delays such as ['5s', '1m', '1h'] ")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"retry": ["5s"], "delay_level_when_next_consume": 2}, "delay_level_when_next_consume=2 gives each retry an"),
        ({"retry": ["5s"], "message_model": "BROADCASTING"}, "messages of a BROADCASTING group are not retried"),
        ({"retry": ["5s", "6s"], "max_reconsume_times": 1}, "max_reconsume_times=1 gives another number of retries"),
        ({"retry": Backoff("5s"), "max_reconsume_times": 20}, "max_reconsume_times=20 gives another number of retries"),
    ],
)
def test_a_schedule_beside_an_attribute_that_contradicts_it_is_refused(attributes: Any, reason: str) -> None:
    with pytest.raises(ListenerError) as refused:
        resolve(**attributes)

    assert str(refused.value).startswith("listener bill: retry is given (5s")
    assert reason in str(refused.value)
    assert str(refused.value).endswith("keep one of the two")


@pytest.mark.parametrize("value", ["shop.Missing", "NoSuchError", print, "print", (ValueError, 7)])
def test_a_value_that_names_no_exception_is_refused(value: Any) -> None:
    with pytest.raises(ListenerError, match=r"listener bill: not_retry_for must be classes of exceptions, such as "):
        resolve(not_retry_for=value)

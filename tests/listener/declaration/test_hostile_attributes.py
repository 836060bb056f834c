"""Hostile values for each attribute of the decorators and each argument of middlewares: taken, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqtemplate import CircuitBreaker, Deduplication, RateLimit, TimeLimit, load_settings, message_listener, scheduled
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.listener import resolve_spec
from mqtemplate.listener.declaration.decorator import ListenerAttributes, listener_specs
from tests.hostile import HOSTILE, takes_or_refuses

_ATTRIBUTES = ("topic", "consumer_group", "id", *ListenerAttributes.__annotations__)


def _listener(attribute: str) -> Callable[[Any], object]:
    def declare(value: Any) -> object:
        def handle(message: str) -> None: ...

        given = {"topic": "orders", "consumer_group": "billing", attribute: value}
        message_listener(**given)(handle)
        return resolve_spec(listener_specs(handle)[0])

    return declare


@pytest.mark.parametrize("attribute", _ATTRIBUTES)
def test_each_attribute_of_a_listener_is_taken_or_refused(attribute: str) -> None:
    declare = _listener(attribute)
    for value in HOSTILE:
        takes_or_refuses(lambda v=value: declare(v))  # type: ignore[misc]


def _run() -> None: ...


_CALLS: dict[str, Callable[[Any], object]] = {
    "RateLimit count": RateLimit,
    "RateLimit per": lambda value: RateLimit(1, value),
    "RateLimit burst": lambda value: RateLimit(1, burst=value),
    "TimeLimit": TimeLimit,
    "Deduplication": lambda value: Deduplication(max_keys=value),
    "Deduplication keep": lambda value: Deduplication(keep=value),
    "CircuitBreaker": CircuitBreaker,
    "scheduled cron": lambda value: scheduled(cron=value)(_run),
    "setting": lambda value: load_settings(environment={}, arguments={"rocketmq.producer.group": value}),
    "duration": lambda value: load_settings(environment={}, arguments={"mqtemplate.server.max-connections": value}),
}


@pytest.mark.parametrize("name", _CALLS)
def test_each_argument_of_middlewares_and_settings_is_taken_or_refused(name: str) -> None:
    for value in HOSTILE:
        takes_or_refuses(lambda v=value: _CALLS[name](v))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("topic", 12, "topic must be a name or a list of names, got 12"),
        ("topic", None, "topic must be a name or a list of names, got None"),
        ("consumer_group", 12, "consumer_group must be a text, got 12"),
        ("consumer_group", b"billing", "consumer_group must be a text, got b'billing'"),
        ("consume_thread_number", 10**5_000, "got a number of 16,610 bits"),
    ],
    ids=["topic", "no topic", "group", "bytes", "digits"],
)
def test_the_error_for_a_value_of_another_type_names_the_attribute(attribute: str, value: Any, text: str) -> None:
    with pytest.raises(ListenerError) as refused:
        _listener(attribute)(value)

    assert text in str(refused.value)


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="argument settings: a key must be text, got int 1"):
        load_settings(environment={}, arguments={"shop": {1: "x"}})

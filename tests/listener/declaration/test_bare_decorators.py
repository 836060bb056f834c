"""A decorator without parentheses, or without its group: the error shows how to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqtemplate import message_listener, scheduled, transaction_listener
from mqtemplate.context.templates import ext_consumer, ext_template
from mqtemplate.errors import DependencyError, ListenerError, MQTemplateError, ScheduleError
from mqtemplate.listener import on_tag, publishes
from mqtemplate.listener.declaration.hooks import listener_enhancer
from mqtemplate.spark.listening.listener import spark_listener


def bill(message: str) -> None: ...


class Billing:
    def on_message(self, message: str) -> None: ...


LISTENER = "(topic='orders', consumer_group='billing')"
DECORATORS: tuple[tuple[Callable[..., Any], type[MQTemplateError], str], ...] = (
    (message_listener, ListenerError, f"@message_listener{LISTENER}"),
    (spark_listener, ListenerError, f"@spark_listener{LISTENER}"),
    (scheduled, ScheduleError, "@scheduled(every='10m')"),
    (on_tag, ListenerError, "@on_tag('paid')"),
    (publishes, ListenerError, "@publishes('invoices')"),
    (listener_enhancer, ListenerError, "@listener_enhancer()"),
    (transaction_listener, ListenerError, "@transaction_listener()"),
    (ext_template, DependencyError, "@ext_template()"),
    (ext_consumer, DependencyError, "@ext_consumer()"),
)


@pytest.mark.parametrize("target", [bill, Billing], ids=lambda target: target.__name__)
@pytest.mark.parametrize(("decorator", "error", "form"), DECORATORS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_decorator_without_parentheses_shows_its_form(
    decorator: Callable[..., Any], error: type[MQTemplateError], form: str, target: object
) -> None:
    name = getattr(target, "__name__", "")

    with pytest.raises(error) as caught:
        decorator(target)

    assert str(caught.value) == f"@{decorator.__name__} above {name} has no arguments; write {form}"


@pytest.mark.parametrize("decorator", [message_listener, spark_listener], ids=lambda each: each.__name__)
def test_a_listener_without_a_group_shows_its_form(decorator: Callable[..., Any]) -> None:
    with pytest.raises(ListenerError) as caught:
        decorator("orders")

    assert str(caught.value) == (
        f"@{decorator.__name__} needs the group whose members share the messages of 'orders'; "
        f"write @{decorator.__name__}{LISTENER}"
    )

"""Discovery: the endpoints of a decorated function or object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import ConsumeStatus, make_endpoints, message_listener


def test_an_object_of_a_listener_class_is_called_at_on_message() -> None:
    @message_listener(topic="orders", consumer_group="billing")
    class Bill:
        def on_message(self, message: str) -> None: ...

    bill = Bill()
    [endpoint] = make_endpoints(bill)

    assert endpoint.plan.handler == bill.on_message
    assert endpoint.id.endswith(".Bill")


def test_each_decorator_creates_an_endpoint_with_its_own_name() -> None:
    @message_listener(topic="first", consumer_group="a")
    @message_listener(topic="second", consumer_group="b")
    def handle(message: str) -> None: ...

    first, second = make_endpoints(handle)

    assert first.settings.topics + second.settings.topics == ("first", "second")
    assert second.id == f"{first.id}#2"


def test_each_decorated_method_is_a_listener() -> None:
    class Desk:
        @message_listener(topic="orders", consumer_group="billing", selector_expression="paid")
        def paid(self, message: str) -> None: ...

        @message_listener(topic="orders", consumer_group="refunds", selector_expression="refunded")
        def refunded(self, message: str) -> None: ...

    endpoints = make_endpoints(Desk())

    assert [endpoint.settings.group for endpoint in endpoints] == ["billing", "refunds"]


def test_a_batch_handler_takes_one_fetch_unless_a_size_is_given() -> None:
    """With the default of 1 each batch would have one message."""

    @message_listener(topic="orders", consumer_group="a", pull_batch_size=50)
    def by_default(messages: list[str]) -> None: ...

    @message_listener(topic="orders", consumer_group="a", consume_message_batch_max_size=10)
    def by_size(messages: list[str]) -> None: ...

    assert [make_endpoints(handler)[0].take_size for handler in (by_default, by_size)] == [50, 10]


def test_a_class_is_refused_and_an_object_of_it_is_required() -> None:
    @message_listener(topic="orders", consumer_group="billing")
    class Bill:
        def on_message(self, message: str) -> None: ...

    with pytest.raises(ListenerError, match="Bill is a class; register an object of it"):
        make_endpoints(Bill)


def test_an_undecorated_function_is_refused() -> None:
    with pytest.raises(ListenerError, match=r"is not a listener; decorate it with @message_listener"):
        make_endpoints(print)


# --- return types ------------------------------------------------------------------------------------


def nothing(message: str) -> None: ...
def status(message: str) -> ConsumeStatus | None: ...
def anything(message: str) -> Any: ...
def indices(messages: list[str]) -> list[int] | None: ...
def a_set(messages: list[str]) -> set[int] | ConsumeStatus: ...  # type: ignore[empty-body]
async def later(message: str) -> None: ...
def reply(message: str) -> str: ...  # type: ignore[empty-body]
def replies(message: str) -> list[int] | None: ...
async def reply_later(message: str) -> dict[str, int]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("handler", [nothing, status, anything, indices, a_set, later, reply, replies, reply_later])
def test_these_return_types_are_allowed(handler: Callable[..., Any]) -> None:
    assert make_endpoints(message_listener(topic="orders", consumer_group="billing")(handler))


def truth(message: str) -> bool: ...  # type: ignore[empty-body]
def truth_or_nothing(message: str) -> bool | None: ...
def truth_of_many(messages: list[str]) -> bool: ...  # type: ignore[empty-body]
def text_of_many(messages: list[str]) -> str: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("handler", [truth, truth_or_nothing, truth_of_many, text_of_many])
def test_these_return_types_are_refused(handler: Callable[..., Any]) -> None:
    """``return False`` must not count as success."""
    with pytest.raises(ListenerError, match=r"the handler returns .*, which has no meaning here; return None"):
        make_endpoints(message_listener(topic="orders", consumer_group="billing")(handler))

"""Signatures of handlers: the values that the parameters take from a message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from dependency_injector import containers, providers
from dependency_injector.wiring import Provide, inject
from pydantic import BaseModel

from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener import message_headers
from mqtemplate.listener.handler.plan import HandlerPlan
from mqtemplate.listener.handler.signature import plan_handler
from mqtemplate.message import Message, MessageExt, MessageQueue
from tests.golden import check_script
from tests.sessions import Session

if TYPE_CHECKING:
    from decimal import Decimal

    from tests.listener.conftest import MakeMessage

CONVERTER = JsonMessageConverter()


@dataclass
class Order:
    id: int


class Invoice(BaseModel):
    id: int


def called(handler: Callable[..., Any], message: MessageExt, **options: Any) -> Any:
    """Call a handler with one message and return its result, which is the values that it got."""
    return plan(handler, **options).single_call(CONVERTER)(message)


def called_with_batch(handler: Callable[..., Any], messages: list[MessageExt], **options: Any) -> Any:
    found = plan(handler, **options)
    return found.batch_call()(list(map(found.payload_reader(CONVERTER), messages)), messages)


# --- handlers: each returns the values that it got ---------------------------------------------------


def text(message: str) -> Any:
    return message


def raw(message: bytes) -> Any:
    return message


def mapping(order: dict[str, int]) -> Any:
    return order


def data(order: Order) -> Any:
    return order


def model(order: Invoice) -> Any:
    return order


def whole(message: MessageExt) -> Any:
    return message


def as_sent(message: Message) -> Any:
    return message


def with_extras(order: Order, message: MessageExt, *, queue: MessageQueue, headers: dict[str, str]) -> Any:
    return order, message.topic, queue, headers["rocketmq_TOPIC"]


def typed_headers(body: str, values: Mapping[str, str]) -> Any:
    return values["rocketmq_QUEUE_ID"]


def named_headers(body: str, headers) -> Any:  # type: ignore[no-untyped-def]
    return headers["rocketmq_QUEUE_ID"]


def with_default(body: str, limit: int = 5) -> Any:
    return body, limit


def after_limit(limit: int, body: str) -> Any:
    return body


class Listener:
    def on_message(self, body: str) -> Any:
        return body

    __call__ = on_message


def orders(orders: list[Order]) -> Any:
    return orders


def messages(messages: Sequence[MessageExt], headers: list[dict[str, str]]) -> Any:
    return [each.queue_offset for each in messages], [values["rocketmq_TOPIC"] for values in headers]


def numbers(numbers: list[int]) -> Any:
    return numbers


def with_queue(bodies: list[str], queue: MessageQueue) -> Any:
    return queue.queue_id


def annotated(bodies: Annotated[list[str], "a note"]) -> Any:
    return bodies


@pytest.mark.feature("U13", "U19", "X8")
def test_a_handler_gets_the_values_of_the_script(make_message: MakeMessage) -> None:
    own = (text, raw, mapping, data, model, whole, as_sent, with_extras, typed_headers, named_headers, with_default)
    own += (
        after_limit,
        message_headers,
        Listener,
        orders,
        messages,
        numbers,
        with_queue,
        annotated,
        called,
        called_with_batch,
    )
    names = {each.__name__: each for each in own} | {"message": make_message, "partial": functools.partial}

    check_script(Path(__file__).parent / "signatures.script", Session(names | {"plan": plan}))


def plan(handler: Callable[..., Any], **options: Any) -> HandlerPlan:
    return plan_handler(handler, "listener test", **options)


class Services(containers.DeclarativeContainer):
    limit = providers.Object(5)


@inject
def injected(body: str, limit: int = Provide["limit"]) -> Any:
    return body, limit


@pytest.mark.feature("C6")
def test_a_function_with_inject_gets_its_services(make_message: MakeMessage) -> None:
    """For applications that use dependency-injector directly."""
    services = Services()
    services.wire(modules=[__name__])
    try:
        assert called(injected, make_message()) == ("hello", 5)
    finally:
        services.unwire()


# --- errors ------------------------------------------------------------------------------------------


def no_parameter() -> None: ...
def no_type(message) -> None: ...  # type: ignore[no-untyped-def]
def bare_list(messages: list) -> None: ...  # type: ignore[type-arg]
def queue_first(queue: MessageQueue) -> None: ...
def unknown_service(message: str, audit: Order) -> None: ...
def untyped_extra(message: str, more) -> None: ...  # type: ignore[no-untyped-def]
def unseen_name(price: Decimal) -> None: ...
def extra_of_a_batch(orders: list[Order], message: MessageExt) -> None: ...
def positional_only(order: str, message: MessageExt, /) -> None: ...


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (no_parameter, r"has no parameter for the payload; write it first, such as \(message: str\)"),
        (no_type, "parameter 'message' has no type; annotate it with the type to convert the body to"),
        (bare_list, r"a bare list may mean two things; write list\[Order\]"),
        (queue_first, "the first parameter is the payload; put the MessageQueue after it"),
        (unknown_service, "parameter 'audit' has the type .*Order; .*objects of the application by their types"),
        (untyped_extra, "parameter 'more' has no type"),
        (unseen_name, "an annotation cannot be read: name 'Decimal' is not defined; import or define the name"),
        (extra_of_a_batch, r"parameter 'message' has the type .*; after the payload a handler may take list\[Message"),
        (positional_only, "parameter 'message' has the type"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(handler: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ListenerError, match=f"^listener test: {sentence}|^listener test: .*{sentence}"):
        plan_handler(handler, "listener test")

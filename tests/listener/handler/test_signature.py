"""Signatures of handlers: the values that the parameters take from a message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from dependency_injector import containers, providers
from dependency_injector.wiring import Provide, inject
from pydantic import BaseModel

from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ConversionError, ListenerError
from mqtemplate.listener.handler.signature import plan_handler
from mqtemplate.message import Message, MessageExt, MessageQueue

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
    return plan_handler(handler, "listener test", **options).single_call(CONVERTER)(message)


def called_with_batch(handler: Callable[..., Any], messages: list[MessageExt], **options: Any) -> Any:
    plan = plan_handler(handler, "listener test", **options)
    return plan.batch_call()(list(map(plan.payload_reader(CONVERTER), messages)), messages)


def test_a_payload_can_be_text_or_bytes(make_message: MakeMessage) -> None:
    def text(message: str) -> Any:
        return message

    def raw(message: bytes) -> Any:
        return message

    assert called(text, make_message("grüß".encode())) == "grüß"
    assert called(raw, make_message(b"\xff")) == b"\xff"


@pytest.mark.feature("U19")
def test_a_json_body_is_converted_to_the_annotated_type(make_message: MakeMessage) -> None:
    """The annotation decides, not the producer's type."""

    def mapping(order: dict[str, int]) -> Any:
        return order

    def data(order: Order) -> Any:
        return order

    def model(order: Invoice) -> Any:
        return order

    message = make_message(b'{"id": 7}')

    assert called(mapping, message) == {"id": 7}
    assert called(data, message) == Order(7)
    assert called(model, message) == Invoice(id=7)


def test_a_body_that_cannot_be_converted_is_a_conversion_error(make_message: MakeMessage) -> None:
    def handle(order: Order) -> Any:
        return order

    with pytest.raises(ConversionError):
        called(handle, make_message(b"no json"))


@pytest.mark.parametrize("kind", [Message, MessageExt])
def test_the_message_itself_can_be_the_payload(kind: type, make_message: MakeMessage) -> None:
    def handle(message: Any) -> Any:
        return message

    handle.__annotations__["message"] = kind
    message = make_message()

    assert called(handle, message) is message


def test_a_handler_can_take_the_message_its_queue_and_its_headers_after_the_payload(make_message: MakeMessage) -> None:
    def handle(order: Order, message: MessageExt, *, queue: MessageQueue, headers: dict[str, str]) -> Any:
        return order, message, queue, headers["rocketmq_TOPIC"]

    message = make_message(b'{"id": 7}')

    assert called(handle, message) == (Order(7), message, MessageQueue("orders", "broker-a", 0), "orders")


def test_a_headers_parameter_is_recognised_by_type_or_by_name(make_message: MakeMessage) -> None:
    def typed(body: str, values: Mapping[str, str]) -> Any:
        return values["rocketmq_QUEUE_ID"]

    def named(body, headers) -> Any:  # type: ignore[no-untyped-def]
        return headers["rocketmq_QUEUE_ID"]

    named.__annotations__["body"] = str

    assert called(typed, make_message()) == called(named, make_message()) == "0"


def test_parameters_with_defaults_keep_them(make_message: MakeMessage) -> None:
    """So dependency-injector can give services to a function with @inject."""

    def handle(body: str, limit: int = 5) -> Any:
        return body, limit

    assert called(handle, make_message()) == ("hello", 5)


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


def test_a_handler_can_be_a_method_a_partial_or_a_callable_object(make_message: MakeMessage) -> None:
    class Listener:
        def on_message(self, body: str) -> Any:
            return body

        def __call__(self, body: str) -> Any:
            return body

    def handle(limit: int, body: str) -> Any:
        return body

    assert called(Listener().on_message, make_message()) == "hello"
    assert called(Listener(), make_message()) == "hello"
    assert called(functools.partial(handle, 5), make_message()) == "hello"


# --- batches ------------------------------------------------------------------------------------------


@pytest.mark.feature("U13", "X8")
def test_a_list_of_a_type_is_a_batch_of_messages(make_message: MakeMessage) -> None:
    """``list[Order]`` gets many messages in one call, each converted."""

    def handle(orders: list[Order]) -> Any:
        return orders

    messages = [make_message(b'{"id": 1}'), make_message(b'{"id": 2}', offset=1)]

    assert plan_handler(handle, "listener test").is_batch
    assert called_with_batch(handle, messages) == [Order(1), Order(2)]


def test_a_batch_handler_can_take_messages_and_their_headers(make_message: MakeMessage) -> None:
    def handle(messages: Sequence[MessageExt], headers: list[dict[str, str]]) -> Any:
        return messages, [values["rocketmq_TOPIC"] for values in headers]

    messages = [make_message(), make_message(offset=1)]

    assert called_with_batch(handle, messages) == (messages, ["orders", "orders"])


def test_with_batch_false_a_list_payload_is_one_body_with_a_json_list(make_message: MakeMessage) -> None:
    def handle(numbers: list[int]) -> Any:
        return numbers

    assert not plan_handler(handle, "listener test", batch=False).is_batch
    assert called(handle, make_message(b"[1, 2]"), batch=False) == [1, 2]


def test_only_an_orderly_batch_handler_can_take_the_queue(make_message: MakeMessage) -> None:
    def handle(bodies: list[str], queue: MessageQueue) -> Any:
        return queue.queue_id

    assert called_with_batch(handle, [make_message(queue_id=3)], is_orderly=True) == 3
    with pytest.raises(ListenerError, match="a concurrent batch mixes queues"):
        plan_handler(handle, "listener test")


def test_annotated_metadata_is_ignored(make_message: MakeMessage) -> None:
    def handle(bodies: Annotated[list[str], "a note"]) -> Any:
        return bodies

    assert plan_handler(handle, "listener test").is_batch


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


def test_batch_true_needs_a_list_payload() -> None:
    def handle(order: dict[str, int]) -> None: ...

    with pytest.raises(ListenerError, match="batch=True needs a list"):
        plan_handler(handle, "listener test", batch=True)

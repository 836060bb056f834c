"""Handlers that are not plain functions: generic bases, partials, callable objects, bound, static and class methods."""

from __future__ import annotations

import functools
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Protocol, TypeVar

import pytest

from mqtemplate import Depends, MessageExt, message_listener, scheduled
from mqtemplate.errors import DependencyError, ListenerError, MQTemplateError
from mqtemplate.testing import Harness
from tests.kit import application
from tests.listener.generic_base import Listener

pytestmark = pytest.mark.feature("listeners")

T = TypeVar("T")
K = TypeVar("K")
Text = TypeVar("Text", bound=str)
Number = TypeVar("Number", int, float)


@dataclass
class Order:
    id: int


RECEIVED: list[object] = []


@pytest.fixture(autouse=True)
def nothing_received() -> None:
    RECEIVED.clear()


def received(component: object, *payloads: object) -> list[object]:
    """Return what the handler of a component got of some payloads."""
    with application(component) as app:
        for payload in payloads:
            app.template.sync_send("orders", payload)
        Harness(app).run_until_idle()
    return RECEIVED


# --- type variables ----------------------------------------------------------------------------------------


class Base(Generic[T]):
    def on_message(self, message: T) -> None:
        RECEIVED.append(message)


class Optionally(Generic[T]):
    def on_message(self, message: T | None) -> None:
        RECEIVED.append(message)


class Batches(Generic[T]):
    def on_message(self, messages: list[T], raw: list[MessageExt]) -> None:
        RECEIVED.extend(messages)


class Abstract(ABC, Generic[T]):
    @abstractmethod
    def handle(self, message: T) -> None: ...

    def on_message(self, message: T) -> None:
        self.handle(message)


class Proto(Protocol[T]):
    def on_message(self, message: T) -> None:
        RECEIVED.append(message)


class Pair(Generic[K, T]):
    def on_message(self, message: dict[K, T]) -> None:
        RECEIVED.append(message)


class Half(Pair[int, T]): ...


class Renamed(Base[list[K]], Generic[K]): ...


class Bounded(Generic[Text]):
    def on_message(self, message: Text) -> None:
        RECEIVED.append(message)


class Constrained(Generic[Number]):
    def on_message(self, message: Number) -> None:
        RECEIVED.append(message)


class Orders(Base[Order]): ...


class QuotedOrders(Base["Order"]): ...


class Deep(Orders): ...


class MaybeOrders(Optionally[Order]): ...


class OrderBatches(Batches[Order]): ...


class AbstractOrders(Abstract[Order]):
    def handle(self, message: Order) -> None:
        RECEIVED.append(message)


class ProtoOrders(Proto[Order]): ...


class OrdersById(Half[Order]): ...


class Lists(Renamed[Order]): ...


class FromAnotherModule(Listener[Order]):
    received = RECEIVED


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Orders, Order(1)),
        (QuotedOrders, Order(1)),
        (Deep, Order(1)),
        (MaybeOrders, Order(1)),
        (OrderBatches, Order(1)),
        (AbstractOrders, Order(1)),
        (ProtoOrders, Order(1)),
        (OrdersById, {1: Order(1)}),
        (FromAnotherModule, Order(1)),
        (Bounded, "text"),
        (Constrained, 2.5),
    ],
)
def test_a_type_variable_of_a_base_class_is_the_type_of_the_class(kind: type, payload: object) -> None:
    """Through several levels, bound in parts, of abstract classes and protocols, and from another module."""
    decorated = message_listener("orders", "billing")(type(kind.__name__, (kind,), {}))

    assert received(decorated, payload) == [payload]


def test_a_variable_has_another_value_in_each_base() -> None:
    """``Renamed[Order]`` is ``Base[list[Order]]``."""
    assert received(message_listener("orders", "billing", batch=False)(type("L", (Lists,), {})), (Order(1),)) == [
        [Order(1)]
    ]


def test_an_object_knows_the_argument_with_which_it_was_made() -> None:
    kind: Any = message_listener("orders", "billing")(types.new_class("Own", (Base[T],), {}))

    assert received(kind[Order](), Order(1)) == [Order(1)]


def test_a_variable_that_nothing_binds_is_an_error() -> None:
    kind = message_listener("orders", "billing")(type("Unbound", (Base,), {}))

    with pytest.raises(ListenerError, match=r"'message' has the type variable ~T, and nothing says which type it is"):
        application(kind).start()


def test_a_class_with_arguments_is_no_component() -> None:
    kind: Any = message_listener("orders", "billing")(types.new_class("Own", (Base[T],), {}))

    with pytest.raises(DependencyError, match="a class with arguments; give a class of your own"):
        application(kind[Order]).start()


# --- callables ---------------------------------------------------------------------------------------------


class Till:
    def __init__(self, name: str = "till") -> None:
        self.name = name

    def take(self, message: Order) -> None:
        RECEIVED.append((self.name, message))

    def __call__(self, message: Order) -> None:
        RECEIVED.append(("called", message))

    async def take_async(self, message: Order) -> None:
        RECEIVED.append(("async", message))


def take_with(name: str, message: Order, factor: int = 1) -> None:
    RECEIVED.append((name, message))


def take_after(message: Order, *, name: str) -> None:
    RECEIVED.append((name, message))


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (functools.partial(take_with, "partial"), "partial"),
        (functools.partial(take_after, name="named"), "named"),
        (functools.partial(functools.partial(take_with, factor=2), "nested"), "nested"),
        (functools.partial(Till("bound").take), "bound"),
        (functools.partial(Till().take_async), "async"),
        (Till(), "called"),
        (logged(functools.partial(take_with, "logged")), "logged"),
    ],
)
def test_a_partial_or_an_object_is_called(target: Any, name: str) -> None:
    """Given to the application itself; it has no ``on_message``."""
    assert received(message_listener("orders", "billing")(target), Order(1)) == [(name, Order(1))]


def test_a_partial_of_a_module_is_found() -> None:
    module = types.ModuleType("shop_with_partials")
    module.bill = message_listener("orders", "billing")(functools.partial(take_with, "found"))  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module

    assert received(module, Order(1)) == [("found", Order(1))]


def test_two_partials_of_different_functions_have_different_names() -> None:
    first = message_listener("orders", "billing")(functools.partial(take_with, "first"))
    second = message_listener("orders", "audit")(functools.partial(take_after, name="second"))

    with application(first, second) as app:
        app.template.sync_send("orders", Order(1))
        Harness(app).run_until_idle()

        assert [container.endpoint.id.rpartition(".")[2] for container in app.listeners] == ["take_with", "take_after"]
    assert sorted(map(str, RECEIVED)) == sorted(map(str, [("first", Order(1)), ("second", Order(1))]))


class Slotted:
    __slots__ = ()

    def __call__(self, message: Order) -> None: ...


@pytest.mark.parametrize(
    "target", [Till().take, print, Slotted()], ids=["bound method", "built-in", "object with slots"]
)
def test_what_no_decorator_can_mark_is_refused(target: Any) -> None:
    with pytest.raises(ListenerError, match=r"which no decorator can mark; decorate the method inside of its class"):
        message_listener("orders", "billing")(target)
    with pytest.raises(MQTemplateError, match=r"which no decorator can mark"):
        scheduled(every="1m")(target)


def test_each_kind_of_method_is_called() -> None:
    class Methods:
        @message_listener("orders", "static")
        @staticmethod
        def static(message: Order) -> None:
            RECEIVED.append("static")

        @staticmethod
        @message_listener("orders", "inner-static")
        def inner_static(message: Order) -> None:
            RECEIVED.append("inner static")

        @message_listener("orders", "class")
        @classmethod
        def of_class(cls, message: Order) -> None:
            RECEIVED.append(f"of {cls.__name__}")

        @classmethod
        @message_listener("orders", "inner-class")
        def inner_of_class(cls, message: Order) -> None:
            RECEIVED.append(f"inner of {cls.__name__}")

        def _take(self, name: str, message: Order) -> None:
            RECEIVED.append(name)

        partial = message_listener("orders", "partial")(functools.partialmethod(_take, "partial method"))

    names = sorted(map(str, received(Methods, Order(1))))

    assert names == ["inner of Methods", "inner static", "of Methods", "partial method", "static"]


def test_a_lambda_without_a_type_is_an_error() -> None:
    with pytest.raises(ListenerError, match="parameter 'message' has no type; annotate it"):
        application(message_listener("orders", "billing")(lambda message: None)).start()


def test_a_partial_with_a_provider() -> None:
    def provide(message: MessageExt) -> str:
        return message.topic

    def take(name: str, message: Order, topic: Annotated[str, Depends(provide)]) -> None:
        RECEIVED.append((name, topic))

    take.__annotations__ = {"name": str, "message": Order, "topic": Annotated[str, Depends(provide)]}
    assert received(message_listener("orders", "billing")(functools.partial(take, "x")), Order(1)) == [("x", "orders")]


def test_a_partial_can_be_scheduled() -> None:
    def tidy(name: str) -> None:
        RECEIVED.append(name)

    with application(scheduled(every="1m")(functools.partial(tidy, "cellar"))) as app:
        Harness(app).advance("1m")

    assert RECEIVED == ["cellar"]

"""Contexts around handlers, and the listeners that run in a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import pytest

from mqtemplate import Delivery, Depends, middleware
from mqtemplate.context import ApplicationContext, AutoConfiguration
from mqtemplate.errors import ListenerError
from mqtemplate.listener import message_listener
from mqtemplate.testing.harness import StartApp
from tests.kit import Kit

events: list[str] = []


@contextmanager
def scope(name: str) -> Iterator[None]:
    events.append(f"enter {name}")
    try:
        yield
    except ValueError as error:
        events.append(f"{name} sees {error}")
        raise
    finally:
        events.append(f"leave {name}")


@asynccontextmanager
async def async_scope() -> AsyncIterator[None]:
    with scope("async"):
        yield


class OuterAutoConfiguration(AutoConfiguration):
    def contribute(self, context: ApplicationContext) -> None:
        context.add_handler_scope(lambda: scope("outer"))


class SecondAutoConfiguration(AutoConfiguration):
    after = ("outer",)

    def contribute(self, context: ApplicationContext) -> None:
        context.add_handler_scope(lambda: scope("sync"), async_scope)


STARTERS = [OuterAutoConfiguration, SecondAutoConfiguration]


@pytest.fixture(autouse=True)
def no_events() -> None:
    events.clear()


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    events.append(order)
    if order == "bad":
        raise ValueError("no customer")


@message_listener(topic="orders", consumer_group="shipping")
async def ship(order: str) -> None:
    events.append(order)


def test_a_test_names_the_handler_and_not_what_is_around_it(kit: Kit) -> None:
    class Packing:
        @message_listener(topic="orders", consumer_group="packing")
        def pack(self, order: str) -> None: ...

    kit.start(bill, Packing, starters=STARTERS)
    kit.handle("A1")

    kit.harness.assert_received(bill, times=1)
    kit.harness.assert_received(Packing, times=1)


@middleware
class Noting:
    def consume(self, delivery: Delivery) -> Generator[Any, Any, None]:
        events.append("enter middleware")
        yield delivery
        events.append("leave middleware")


def session() -> Iterator[str]:
    events.append("open session")
    yield "session"
    events.append("close session")


@message_listener(topic="orders", consumer_group="storing")
def store(order: str, session: Annotated[str, Depends(session)]) -> None:
    events.append(order)


OUTER, SYNC, ASYNC = ("enter outer", "leave outer"), ("enter sync", "leave sync"), ("enter async", "leave async")
AROUND = ("enter middleware", "leave middleware")
# The contexts are outside of middlewares and of providers, so these may use what the framework has in its context.
CALLS: list[tuple[list[object], str, list[str]]] = [
    ([bill], "A1", [OUTER[0], SYNC[0], "A1", SYNC[1], OUTER[1]]),
    ([ship], "A1", [OUTER[0], ASYNC[0], "A1", ASYNC[1], OUTER[1]]),
    ([bill], "bad", [OUTER[0], SYNC[0], "bad", "sync sees no customer", SYNC[1], "outer sees no customer", OUTER[1]]),
    (
        [store, Noting],
        "A1",
        [OUTER[0], SYNC[0], AROUND[0], "open session", "A1", "close session", AROUND[1], SYNC[1], OUTER[1]],
    ),
    ([ship, Noting], "A1", [OUTER[0], ASYNC[0], AROUND[0], "A1", AROUND[1], ASYNC[1], OUTER[1]]),
]


@pytest.mark.parametrize(("components", "order", "expected"), CALLS)
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_handler_runs_inside_of_the_contexts_of_starters(
    kit: Kit, components: list[object], order: str, expected: list[str]
) -> None:
    kit.start(*components, starters=STARTERS)
    kit.handle(order)

    assert events == expected


def test_without_a_context_the_handler_is_called_directly(mqtemplate_app: StartApp) -> None:
    app = mqtemplate_app(bill, starters=[])

    assert app.containers[0].endpoint.plan.handler is bill
    assert app.containers[0].endpoint.middlewares == ()


# --- the listeners of a process -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bill", "test_handler_scope.bill", f"{__name__}.bill"])
def test_a_process_may_run_some_of_the_listeners(mqtemplate_app: StartApp, name: str) -> None:
    app = mqtemplate_app(bill, ship, settings={"mqtemplate.listener.only": name})

    assert [container.endpoint.plan.handler for container in app.containers] == [bill]


def test_a_name_that_no_listener_has_is_an_error(mqtemplate_app: StartApp) -> None:
    with pytest.raises(ListenerError, match="mqtemplate.listener.only selects 'ill', and no listener is called that"):
        mqtemplate_app(bill, settings={"mqtemplate.listener.only": "ill"})


def test_a_process_may_run_no_listeners(mqtemplate_app: StartApp) -> None:
    app = mqtemplate_app(bill, ship, settings={"mqtemplate.listener.enabled": False})

    assert list(app.containers) == []

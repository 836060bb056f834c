"""Context variables of handlers: structlog's fields of the message, and those that the program set before the start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from structlog.contextvars import get_contextvars

from mqtemplate.listener import current_message, message_listener
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.listener.conftest import App

TENANT: ContextVar[str] = ContextVar("tenant", default="none")


@pytest.fixture(autouse=True)
def _clean_context() -> Iterator[None]:
    structlog.contextvars.clear_contextvars()
    yield
    structlog.contextvars.clear_contextvars()


def test_structlogs_context_has_the_fields_of_the_message(app: App) -> None:
    """Any logger below the handler that merges structlog's context has them."""
    seen: list[dict[str, Any]] = []

    @message_listener(topic=["orders", "refunds"], consumer_group="billing", retry=["5s"])
    def bill(message: str) -> None:
        seen.append(structlog.contextvars.merge_contextvars(None, "info", {"event": "billed"}))
        if len(seen) == 1:
            raise RuntimeError("once")

    app.listen(bill)
    [order] = app.send("orders", "1")
    app.advance("5s")
    [refund] = app.send("refunds", "2")
    app.run_until_idle()

    common = {"event": "billed", "group": "billing"}
    assert seen == [
        common | {"topic": "orders", "msg_id": order.msg_id, "attempt": 1},
        common | {"topic": "orders", "msg_id": order.msg_id, "attempt": 2},
        common | {"topic": "refunds", "msg_id": refund.msg_id, "attempt": 1},
    ]
    assert get_contextvars() == {}, "outside of the call nothing is bound"
    assert current_message() is None


def test_coroutines_and_their_tasks_see_them_too(app: App) -> None:
    seen: list[object] = []

    async def below() -> None:
        seen.append(get_contextvars()["msg_id"])

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(message: str) -> None:
        await asyncio.gather(below(), asyncio.create_task(below()))

    app.listen(bill)
    [sent] = app.send("orders", "1")
    app.run_until_idle()

    assert seen == [sent.msg_id, sent.msg_id]


def test_a_batch_has_its_size_and_no_single_message(app: App) -> None:
    seen: list[dict[str, Any]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(messages: list[str]) -> None:
        seen.append(get_contextvars())

    app.listen(bill)
    app.send("orders", "1", "2")
    app.run_until_idle()

    assert seen == [{"group": "billing", "topic": "orders", "batch_size": 2}]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_variables_that_were_set_before_the_start_reach_handlers_on_threads(threaded_app: App, is_async: bool) -> None:
    received: SimpleQueue[tuple[str, object]] = SimpleQueue()

    def note() -> None:
        received.put((TENANT.get(), get_contextvars().get("service")))

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        note()

    @message_listener(topic="orders", consumer_group="billing")
    async def bill_async(message: str) -> None:
        note()

    token = TENANT.set("acme")
    structlog.contextvars.bind_contextvars(service="shop")
    threaded_app.listen(bill_async if is_async else bill)
    TENANT.reset(token)
    threaded_app.send("orders", "1")

    assert received.get(timeout=PATIENCE_S) == ("acme", "shop")


def test_what_a_handler_binds_ends_with_its_call(app: App) -> None:
    """The next message on the same thread does not have the customer of the one before."""
    seen: list[object] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        seen.append(get_contextvars().get("customer"))
        structlog.contextvars.bind_contextvars(customer=message)

    app.listen(bill)
    app.send("orders", "7", "8")
    app.run_until_idle()

    assert seen == [None, None]

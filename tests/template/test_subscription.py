"""``async for message in template.subscribe(...)``: a consumer group as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, assert_type

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerClosedError, DestinationError, SelectorError, UnsupportedError
from mqtemplate.message import MessageExt
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import messages_in
from tests.kit import Kit
from tests.waiting import PATIENCE_S, eventually


@pytest.fixture
def template() -> Iterator[RocketMQTemplate]:
    """On the real clock."""
    with EmbeddedBroker(None, clock=SystemClock()) as broker, RocketMQTemplate(broker) as template:
        yield template


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def take(template: RocketMQTemplate, count: int, **options: Any) -> list[str]:
    """Return this many messages of a group."""
    taken: list[str] = []
    async with template.subscribe("orders", str, "billing", **options) as orders:
        async for order in orders:
            taken.append(order)
            if len(taken) == count:
                return taken
    return taken


def test_messages_are_taken_by_async_for(template: RocketMQTemplate) -> None:
    """Those that are there, and those that arrive while the loop waits."""

    async def main() -> list[int]:
        taken: list[int] = []
        await template.async_send("orders", 1)
        async for number in template.subscribe("orders", int, "billing"):
            taken.append(assert_type(number, int))
            if number == 3:
                break
            await template.async_send("orders", number + 1)
        return taken

    assert run(main) == [1, 2, 3]


def test_messages_are_committed_when_the_block_ends_without_an_error(template: RocketMQTemplate) -> None:
    template.sync_send("orders", ["a", "b", "c", "d"])

    assert run(lambda: take(template, 2)) == ["a", "b"]
    assert run(lambda: take(template, 2)) == ["c", "d"]


def test_a_message_is_committed_when_the_loop_takes_the_next_one(template: RocketMQTemplate) -> None:
    """Without ``async with`` the loop does not know whether the last message was handled."""
    template.sync_send("orders", ["a", "b", "c"])

    async def take_two() -> None:
        orders = template.subscribe("orders", str, "billing")
        assert [await anext(orders), await anext(orders)] == ["a", "b"]
        await orders.aclose()

    run(take_two)

    assert run(lambda: take(template, 2)) == ["b", "c"]


def test_the_message_of_a_failed_loop_is_received_again(template: RocketMQTemplate) -> None:
    template.sync_send("orders", ["a", "b"])

    async def fail() -> None:
        async with template.subscribe("orders", str, "billing") as orders:
            async for _ in orders:
                raise KeyError("no database")

    with pytest.raises(KeyError):
        run(fail)

    assert run(lambda: take(template, 2)) == ["a", "b"]


def test_a_selector_is_applied(template: RocketMQTemplate) -> None:
    for tag in ("open", "paid", "refunded"):
        template.sync_send(f"orders:{tag}", tag)

    assert sorted(run(lambda: take(template, 2, selector_expression="paid || refunded"))) == ["paid", "refunded"]


def test_a_timeout_of_the_loop_loses_no_message(template: RocketMQTemplate) -> None:
    """The fetch that was waited for goes on, and its messages are taken next."""

    async def main() -> str:
        async with template.subscribe("orders", str, "billing") as orders:
            waiting = asyncio.ensure_future(anext(orders))
            await asyncio.to_thread(eventually, lambda: template.broker.queues("orders"), "the topic exists")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await template.async_send("orders", "a")
            return await anext(orders)

    assert run(main) == "a"


def test_a_body_that_cannot_be_converted_goes_to_the_dead_letters(template: RocketMQTemplate) -> None:
    template.sync_send("orders", ["x", "1"])

    async def main() -> int:
        async with template.subscribe("orders", int, "billing") as numbers:
            return await anext(numbers)

    with capture_logs() as logs:
        assert run(main) == 1
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["receive.conversion_failed"]
    [dead] = messages_in(template.broker, "%DLQ%billing")
    assert (dead.body, dead.user_properties["dead_letter_listener"]) == (b"x", "subscribe")


def test_a_closed_template_ends_the_loop(template: RocketMQTemplate) -> None:
    async def main() -> list[str]:
        async with template.subscribe("orders", str, "billing") as orders:
            waiting = asyncio.ensure_future(collect(orders))
            await asyncio.to_thread(eventually, lambda: template.broker.queues("orders"), "the topic exists")
            template.close()
            return await waiting

    async def collect(orders: Any) -> list[str]:
        return [order async for order in orders]

    assert run(main) == []


def test_a_closed_broker_is_an_error(template: RocketMQTemplate) -> None:
    template.broker.close()

    with pytest.raises(BrokerClosedError):
        run(lambda: take(template, 1))


def test_an_invalid_subscription_is_refused_by_the_call(template: RocketMQTemplate) -> None:
    with pytest.raises(DestinationError):
        template.subscribe("no topic", str, "billing")
    with pytest.raises(SelectorError):
        template.subscribe("orders", str, "billing", selector_type=SelectorType.SQL92, selector_expression="a >")


def test_time_passes_while_an_async_test_takes_messages(kit: Kit) -> None:
    async def main() -> MessageExt:
        await kit.template.async_send("orders", "a", delay="1h")
        async with kit.template.subscribe("orders", MessageExt, "billing") as orders:
            return await anext(orders)

    started_ms = kit.harness.clock.now_ms()

    assert run(main).body == b"a"
    assert kit.harness.clock.now_ms() == started_ms + 3_600_000


def test_on_a_virtual_clock_a_loop_without_messages_is_an_error(kit: Kit) -> None:
    with pytest.raises(UnsupportedError, match="messages of 'orders', and on the virtual clock none is due within"):
        run(lambda: take(kit.template, 1))

"""Types as users see them. ``make lint`` checks this file with mypy; pytest runs it, so the types are also true."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import pytest

from mqtemplate import (
    AwaitableFuture,
    DelayLevel,
    EmbeddedBroker,
    MessageExt,
    MQApplication,
    PendingCounts,
    PendingPage,
    RocketMQTemplate,
    ScheduleChange,
    SendResult,
    SendStatus,
    SystemClock,
    TransactionSendResult,
    TransactionState,
    VirtualClock,
    message_listener,
    service,
    spark_listener,
    transaction_listener,
)
from mqtemplate.errors import MessageError
from mqtemplate.template import SendOptions
from mqtemplate.testing import Harness


@dataclass
class Order:
    id: int


@pytest.fixture
def template(mqtemplate_broker: EmbeddedBroker) -> Iterator[RocketMQTemplate]:
    with RocketMQTemplate(mqtemplate_broker, consumer_group="readers", consumer_topic="orders") as template:
        yield template


def test_a_send_returns_a_result_or_its_future(template: RocketMQTemplate, mqtemplate_harness: Harness) -> None:
    result = assert_type(template.sync_send("orders:paid", Order(1)), SendResult)
    spring = assert_type(template.syncSend("orders:paid", Order(1), 3_000, 3), SendResult)
    future = assert_type(template.async_send("orders:paid", Order(1)), AwaitableFuture[SendResult])
    mqtemplate_harness.run_until_idle()

    assert assert_type(result.send_status, SendStatus) is spring.send_status is future.result().send_status


def test_each_option_of_a_send_verb_has_a_name_and_a_type(template: RocketMQTemplate) -> None:
    """Mypy reports an unknown option and a wrong type, on every verb, as if the options were parameters."""
    options: SendOptions = {"keys": ["4466", "4467"], "headers": {"region": "EU"}}

    template.sync_send("orders", b"body", **options)
    template.sync_send("orders", b"body", delay=timedelta(seconds=1), hash_key="customer-1")
    template.sync_send("orders", b"body", "3s", DelayLevel.M1, hash_key=7, keys=4466)
    template.async_send("orders", b"body", 3_000, 3, keys="4466", on_success=print)
    template.send_one_way(
        "orders", b"body", deliver_at=datetime.fromtimestamp(template.broker.clock.now_ms() / 1_000, UTC)
    )
    template.sync_send("orders", b"body", queue=template.broker.queues("orders")[0])
    with pytest.raises(TypeError):
        template.sync_send("orders", b"body", delya=1)  # type: ignore[call-arg]
    with pytest.raises(MessageError):
        template.sync_send("orders", b"body", hash_key=b"4466")  # type: ignore[arg-type]
    with pytest.raises(MessageError):
        template.async_send("orders", b"body", delay=[1])  # type: ignore[arg-type]
    with pytest.raises(MessageError):
        template.send_one_way("orders", b"body", keys=b"4466")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        template.pending("orders", befor=0)  # type: ignore[call-arg]


@transaction_listener()
class Ledger:
    def execute_local_transaction(self, order: Order, arg: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, order: Order) -> TransactionState:
        return TransactionState.COMMIT


def test_a_transaction_returns_a_result_with_a_state(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker, producer_group="shop")
    template.add_transaction_listener(assert_type(Ledger(), Ledger))

    result = assert_type(template.send_in_transaction("orders", Order(1), 4466), TransactionSendResult)
    spring = assert_type(template.sendMessageInTransaction("orders", Order(1), 4466), TransactionSendResult)

    assert assert_type(result.local_transaction_state, TransactionState) is spring.local_transaction_state


def test_a_request_returns_the_type_of_the_reply(template: RocketMQTemplate, mqtemplate_harness: Harness) -> None:
    future = assert_type(template.async_send_and_receive("unread", b"?", Order, timeout="1ms"), AwaitableFuture[Order])

    with pytest.raises(TimeoutError):
        assert_type(template.send_and_receive("unread", b"?", Order, timeout="1ms"), Order)
    assert future.done()


def test_receive_returns_the_type_of_the_payload(template: RocketMQTemplate) -> None:
    template.sync_send("orders", Order(1))

    orders = assert_type(template.receive(Order, timeout=0), list[Order])
    whole = assert_type(template.receive(MessageExt, timeout=0), list[MessageExt])

    assert orders == [Order(1)]
    assert whole == []


async def await_each_verb(template: RocketMQTemplate) -> None:
    """An editor knows what each ``await`` returns, and mypy reports an unknown option and a wrong type."""
    sent = assert_type(await template.async_send("orders", Order(1), delay="60s"), SendResult)
    assert_type(await template.async_convert_and_send("orders", Order(1)), SendResult)
    assert_type(await template.async_send_in_transaction("orders", Order(1), 4466, keys="1"), TransactionSendResult)
    assert_type(await template.async_receive(Order, timeout=0), list[Order])
    assert_type(await template.async_cancel(sent.handle), ScheduleChange)
    assert_type(await template.async_reschedule(key="1", delay=timedelta(hours=1)), ScheduleChange)
    assert_type(await template.async_pending("orders", tag="paid"), PendingPage)
    assert_type(await template.async_count_pending(by=timedelta(hours=1)), PendingCounts)
    with pytest.raises(TypeError):
        await template.async_pending("orders", tga="paid")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        await template.async_send_in_transaction("orders", Order(1), delya=1)  # type: ignore[call-arg]
    with pytest.raises(MessageError):
        await template.async_send_in_transaction("orders", Order(1), keys=b"1")  # type: ignore[arg-type]


def test_an_awaited_verb_returns_the_type_of_the_verb(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(
        mqtemplate_broker, producer_group="shop", consumer_group="readers", consumer_topic="orders"
    )
    template.add_transaction_listener(Ledger())

    asyncio.run(await_each_verb(template))


def test_an_application_awaits_an_async_main_and_returns_the_type_of_its_result() -> None:
    async def main(template: RocketMQTemplate) -> int:
        async with template.subscribe("orders", Order, consumer_group="billing") as orders:
            await template.async_send("orders", Order(1))
            async for order in orders:
                return assert_type(order, Order).id
        return 0

    async def start() -> None:
        async with MQApplication(settings={"rocketmq.name-server": "embedded:memory"}) as app:
            assert_type(app, MQApplication)
            assert_type(app.template, RocketMQTemplate)

    def plain_main() -> str:
        return "done"

    assert assert_type(MQApplication(settings={"rocketmq.name-server": "embedded:memory"}).run(main), int | None) == 1
    assert (
        assert_type(MQApplication(settings={"rocketmq.name-server": "embedded:memory"}).run(plain_main), str | None)
        == "done"
    )
    asyncio.run(start())


def test_decorators_do_not_change_the_type() -> None:
    """A decorated function is still that function, and a test calls it like any other."""

    @message_listener(topic="orders", consumer_group="billing")
    def double(order: Order) -> int:
        return 2 * order.id

    @service
    @message_listener(topic="orders", consumer_group="audit")
    class Audit:
        def on_message(self, order: Order) -> None: ...

    @spark_listener(topic="orders", consumer_group="statistics")
    def count(rows: list[int], batch: str) -> int:
        return len(rows)

    assert_type(double(Order(2)), int)
    assert_type(Audit(), Audit)
    handler: Callable[[list[int], str], int] = count
    assert handler([1], "") == 1
    assert inspect.isfunction(double)
    assert inspect.isclass(Audit)


def test_an_application_returns_the_type_of_the_object() -> None:
    with MQApplication(settings={"rocketmq.name-server": "embedded:memory"}, clock=VirtualClock()) as app:
        template = assert_type(app.template, RocketMQTemplate)
        clock = assert_type(app.get(VirtualClock), VirtualClock)

    assert isinstance(template, RocketMQTemplate)
    assert not isinstance(clock, SystemClock)


class SendCallback:
    def onSuccess(self, result: SendResult) -> None: ...

    def onException(self, error: BaseException) -> None: ...


class ReplyCallback:
    def onSuccess(self, message: MessageExt) -> None: ...

    def onException(self, error: BaseException) -> None: ...


def use_names_of_spring(template: RocketMQTemplate) -> None:
    """Only type checkers read this; `tests/template` and `tests/spring` run the methods."""
    assert_type(template.syncSend("orders", Order(1), 3_000, 3), SendResult)
    assert_type(template.syncSendOrderly("orders", Order(1), "4466"), SendResult)
    assert_type(template.syncSendDelayTimeSeconds("orders", Order(1), 3), SendResult)
    assert_type(template.asyncSend("orders", Order(1), SendCallback(), 3_000, 3), AwaitableFuture[SendResult])
    assert_type(template.convertAndSend("orders", Order(1)), SendResult)
    assert_type(template.sendMessageInTransaction("orders", Order(1), 4466), TransactionSendResult)
    assert_type(template.sendAndReceive("orders", b"?", Order), Order)
    assert_type(template.sendAndReceive("orders", b"?", Order, "4466", 3_000, 3), Order)
    assert_type(template.sendAndReceive("orders", b"?", ReplyCallback()), AwaitableFuture[Any])
    assert_type(template.syncSendDelayMessage("orders", Order(1), "3s"), SendResult)
    assert_type(template.asyncSendWithStringPayload("orders", "tea", "3s"), AwaitableFuture[SendResult])
    assert_type(template.getCharset(), str)
    template.sendOneWay("orders", Order(1))
    template.setCharset("utf-8")
    template.syncSend("orders", Order(1), delayLevel="3")  # type: ignore[arg-type]

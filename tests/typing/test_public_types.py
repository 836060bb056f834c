"""What a type checker tells users. ``make lint`` checks this file; pytest runs it, so that the types are also true."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import assert_type

import pytest

from mqtemplate import (
    EmbeddedBroker,
    MessageExt,
    MQApplication,
    RocketMQTemplate,
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
from mqtemplate.testing import Harness


@dataclass
class Order:
    id: int


@pytest.fixture
def template(mqtemplate_broker: EmbeddedBroker) -> Iterator[RocketMQTemplate]:
    with RocketMQTemplate(mqtemplate_broker, consumer_group="readers", consumer_topic="orders") as template:
        yield template


def test_sending_gives_a_result_or_a_future_of_one(template: RocketMQTemplate, mqtemplate_harness: Harness) -> None:
    result = assert_type(template.sync_send("orders:paid", Order(1)), SendResult)
    spring = assert_type(template.syncSend("orders:paid", Order(1), 3_000, 3), SendResult)
    future = assert_type(template.async_send("orders:paid", Order(1)), Future[SendResult])
    mqtemplate_harness.run_until_idle()

    assert assert_type(result.send_status, SendStatus) is spring.send_status is future.result().send_status


@transaction_listener()
class Ledger:
    def execute_local_transaction(self, order: Order, arg: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, order: Order) -> TransactionState:
        return TransactionState.COMMIT


def test_a_transaction_gives_a_result_with_a_state(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker, producer_group="shop")
    template.add_transaction_listener(assert_type(Ledger(), Ledger))

    result = assert_type(template.send_in_transaction("orders", Order(1), 4466), TransactionSendResult)
    spring = assert_type(template.sendMessageInTransaction("orders", Order(1), 4466), TransactionSendResult)

    assert assert_type(result.local_transaction_state, TransactionState) is spring.local_transaction_state


def test_a_request_gives_what_was_asked_for(template: RocketMQTemplate, mqtemplate_harness: Harness) -> None:
    future = assert_type(template.async_send_and_receive("nobody", b"?", Order, timeout=1), Future[Order])

    with pytest.raises(TimeoutError):
        assert_type(template.send_and_receive("nobody", b"?", Order, timeout=1), Order)
    assert future.done()


def test_receiving_gives_what_was_asked_for(template: RocketMQTemplate) -> None:
    template.sync_send("orders", Order(1))

    orders = assert_type(template.receive(Order, timeout=0), list[Order])
    whole = assert_type(template.receive(MessageExt, timeout=0), list[MessageExt])

    assert orders == [Order(1)]
    assert whole == []


def test_decorators_keep_what_they_decorate() -> None:
    """A decorated function is still that function, to the checker as well, and a test calls it like any other."""

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


def test_an_application_hands_out_what_it_is_asked_for() -> None:
    with MQApplication(settings={"rocketmq.name-server": "embedded:memory"}, clock=VirtualClock()) as app:
        template = assert_type(app.template, RocketMQTemplate)
        clock = assert_type(app.get(VirtualClock), VirtualClock)

    assert isinstance(template, RocketMQTemplate)
    assert not isinstance(clock, SystemClock)

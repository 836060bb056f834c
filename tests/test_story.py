"""The typical use of delayed messages: they replace a scheduled job that polls a table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from mqtemplate import MQApplication, RocketMQTemplate, message_listener
from mqtemplate.testing import Harness


class Orders:
    """A shop that closes each order that is not paid within half an hour, without a search through its orders."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self.template = template
        self.state: dict[str, str] = {}

    def place(self, order: str) -> None:
        self.state[order] = "open"
        self.template.sync_send("orders:placed", order, delay=timedelta(minutes=30), keys=order)

    def pay(self, order: str) -> None:
        self.state[order] = "paid"


@message_listener(topic="orders", consumer_group="closing", selector_expression="placed")
class Closing:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.checked: list[str] = []

    def on_message(self, order: str) -> None:
        self.checked.append(order)
        if self.orders.state[order] == "open":
            self.orders.state[order] = "closed"


@pytest.mark.feature("E1", "E2")
def test_an_unpaid_order_is_closed_on_time_without_a_polling_job(
    mqtemplate_app: Callable[..., MQApplication], mqtemplate_harness: Harness
) -> None:
    """The listener does not see the message before its deliver time."""
    app = mqtemplate_app(Orders, Closing)
    orders, closing = app.get(Orders), app.get(Closing)
    orders.place("4466")
    orders.place("4467")

    mqtemplate_harness.advance("29m 59s")
    orders.pay("4467")
    assert closing.checked == []
    mqtemplate_harness.advance("1s")

    assert orders.state == {"4466": "closed", "4467": "paid"}
    assert sorted(closing.checked) == ["4466", "4467"]

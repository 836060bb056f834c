"""Why anybody wants this: what a scheduled job that polls a table was there for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from mqtemplate import MQApplication, RocketMQTemplate, message_listener
from mqtemplate.testing import Harness


class Orders:
    """A shop that closes what nobody paid within half an hour; nothing ever looks through all its orders."""

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
        self.looked_at: list[str] = []

    def on_message(self, order: str) -> None:
        self.looked_at.append(order)
        if self.orders.state[order] == "open":
            self.orders.state[order] = "closed"


@pytest.mark.feature("E1", "E2")
def test_an_unpaid_order_is_closed_in_time_without_a_job_that_polls(
    mqtemplate_app: Callable[..., MQApplication], mqtemplate_harness: Harness
) -> None:
    """Until its time has come nobody sees the message, and nobody looks for it."""
    app = mqtemplate_app(Orders, Closing)
    orders, closing = app.get(Orders), app.get(Closing)
    orders.place("4466")
    orders.place("4467")

    mqtemplate_harness.advance("29m 59s")
    orders.pay("4467")
    assert closing.looked_at == []
    mqtemplate_harness.advance("1s")

    assert orders.state == {"4466": "closed", "4467": "paid"}
    assert sorted(closing.looked_at) == ["4466", "4467"]

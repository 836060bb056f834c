"""Types of what is around handlers. ``make lint`` checks this file with mypy; pytest runs it."""

from __future__ import annotations

from collections.abc import Generator
from typing import assert_type

import pytest

from mqtemplate import Delivery, MessageExt, Outgoing, PauseListener, Send, message_listener, middleware, publishes


@middleware(order=1)
class Audit:
    def __init__(self, name: str = "audit") -> None:
        self.name = name

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        assert_type(delivery.message, MessageExt)
        assert_type(delivery.filter(lambda message: message.queue_id == 0), Delivery)
        yield delivery

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object, object]:
        return (yield outgoing)


@message_listener("orders", "billing", middlewares=[Audit, Audit("other"), "shop.audit.Audit"])
@publishes("receipts", delay="5s", keys=["1"])
def bill(order: str) -> str:
    return order


def test_decorators_keep_the_type() -> None:
    assert assert_type(Audit("audit"), Audit).name == "audit"
    assert assert_type(bill("tea"), str) == "tea"


def test_a_type_checker_knows_the_options_of_what_is_sent() -> None:
    """An unused ``type: ignore`` is an error, so each one below proves that mypy reports the line."""
    Send("receipts", {"order": 1}, 3, hash_key="a", headers={"tenant": "acme"})
    PauseListener("30s", "the bank is down")

    with pytest.raises(TypeError, match="has no option 'key'"):
        Send("receipts", "tea", key="1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'key'"):
        publishes("receipts", key="1")  # type: ignore[call-arg]
    publishes("receipts", delay=[])  # type: ignore[arg-type]

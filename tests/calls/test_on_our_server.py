"""Middlewares, injection and results over the wire: an application on our server, with plain and async handlers."""

from asyncio import sleep as real_pause
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import pytest

from mqtemplate import (
    Delivery,
    Depends,
    MQApplication,
    Outgoing,
    PauseListener,
    message_listener,
    middleware,
    publishes,
    service,
)
from tests.server.process import BrokerProcess
from tests.waiting import PATIENCE_S

EVENTS: SimpleQueue[str] = SimpleQueue()
RECEIPTS: SimpleQueue[tuple[str, str | None]] = SimpleQueue()


@service
class Bank:
    is_down = True


@middleware
class Stamp:
    """Stamps what is sent; pauses listeners while the bank is down."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object, None]:
        outgoing.message.properties.setdefault("stamp", "shop")
        yield outgoing

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        if delivery.message.topic == "orders" and self.bank.is_down:
            self.bank.is_down = False
            raise PauseListener("50ms")
        EVENTS.put(f"attempt {delivery.attempt} of {delivery.message.body.decode()}")
        yield delivery


def account(bank: Bank) -> Iterator[str]:
    EVENTS.put("open")
    yield f"account of {type(bank).__name__}"
    EVENTS.put("close")


@message_listener("orders", "plain")
@publishes("receipts")
def plain(order: str, owner: Annotated[str, Depends(account)]) -> str:
    return f"{order} from {owner}"


@message_listener("orders", "async")
@publishes("receipts")
async def with_await(order: str, owner: Annotated[str, Depends(account)]) -> str:
    await real_pause(0)
    return f"{order} from {owner}"


@message_listener("receipts", "receipts")
def keep(receipt: str, headers: dict[str, str]) -> None:
    RECEIPTS.put((receipt, headers.get("stamp")))


@pytest.mark.slow
@pytest.mark.parametrize("handler", [plain, with_await])
def test_all_of_it_works_over_the_wire(handler: object, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as server:
        settings = {"rocketmq.name-server": str(server.name_server)}
        with MQApplication(handler, keep, Stamp, Bank, settings=settings, environment={}) as app:
            app.template.sync_send("orders", "tea")

            assert RECEIPTS.get(timeout=PATIENCE_S) == ("tea from account of Bank", "shop")

    events = [EVENTS.get(timeout=PATIENCE_S) for _ in range(4)]
    assert events == [
        "attempt 1 of tea",
        "open",
        "close",
        "attempt 1 of tea from account of Bank",
    ]

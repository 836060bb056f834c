"""Asynchronous and one-way sends."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate
from tests.kit import Kit
from tests.listener.hostile import KINDS

TOO_LARGE = bytes(4 * 1024 * 1024 + 1)


def test_a_future_can_be_awaited(kit: Kit) -> None:
    async def send() -> SendResult:
        future = kit.template.async_send("orders", b"body")
        kit.harness.run_until_idle()
        return await asyncio.wrap_future(future)

    assert asyncio.run(send()).send_status is SendStatus.SEND_OK


@pytest.mark.parametrize("kind", ["panic", "exit", "interrupt", "without anything"])
def test_whatever_a_callback_raises_the_thread_of_the_results_goes_on(kind: str) -> None:
    """The thread that flushes sets the results of all sends."""
    done: SimpleQueue[str] = SimpleQueue()

    def broken(_: object) -> None:
        done.put("called")
        KINDS[kind]()

    with EmbeddedBroker(None) as broker:
        template = RocketMQTemplate(broker)
        template.async_send("orders", b"first", on_success=broken)
        template.async_send("orders", TOO_LARGE, on_error=broken)
        template.async_send("orders", b"second").add_done_callback(broken)
        assert [done.get(timeout=30) for _ in range(3)] == ["called"] * 3
        last = template.async_send("orders", b"last")

        assert last.result(30).send_status is SendStatus.SEND_OK
        assert template.sync_send("orders", b"one more").send_status is SendStatus.SEND_OK

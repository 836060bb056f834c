"""Asynchronous and one-way sends."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import BrokerClosedError, DelayError, DestinationError, MessageError
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit
from tests.listener.hostile import KINDS

TOO_LARGE = bytes(4 * 1024 * 1024 + 1)


def test_the_future_has_the_result(kit: Kit) -> None:
    future = kit.template.async_send("orders:paid", {"id": 1}, keys="4466")
    kit.harness.run_until_idle()

    [message] = messages_in(kit.broker, "orders")
    assert (future.result().send_status, future.result().msg_id) == (SendStatus.SEND_OK, message.msg_id)


def test_a_future_can_be_awaited(kit: Kit) -> None:
    async def send() -> SendResult:
        future = kit.template.async_send("orders", b"body")
        kit.harness.run_until_idle()
        return await asyncio.wrap_future(future)

    assert asyncio.run(send()).send_status is SendStatus.SEND_OK


def test_callbacks_get_the_result_or_the_error(kit: Kit) -> None:
    good: list[SendResult] = []
    bad: list[BaseException] = []

    first = kit.template.async_send("orders", b"body", on_success=good.append, on_error=bad.append)
    kit.harness.run_until_idle()
    kit.template.async_send("orders", TOO_LARGE, on_success=good.append, on_error=bad.append)

    assert good == [first.result()]
    assert [type(error) for error in bad] == [MessageError]


def test_an_error_in_a_callback_is_logged(kit: Kit) -> None:
    def broken(result: SendResult) -> None:
        raise RuntimeError("no room for results")

    with capture_logs() as logs:
        kit.template.async_send("orders:paid", b"body", on_success=broken)
        kit.harness.run_until_idle()

    [line] = [line for line in logs if line["log_level"] == "error"]
    assert (line["event"], line["log_level"], line["destination"]) == ("send.callback_failed", "error", "orders:paid")
    assert line["exc_info"]


def test_a_failure_without_on_error_is_logged(mqtemplate_template: RecordingTemplate) -> None:
    """A caller that passes on_success alone does not read the future."""
    with capture_logs() as logs:
        mqtemplate_template.async_send("orders", TOO_LARGE, on_success=print)

    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["send.failed"]


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        (("", b"body"), {}, DestinationError),
        (("orders", b"body"), {"delay_level": -1}, DelayError),
        (("orders", []), {}, MessageError),
        (("orders", b"body", 0), {}, MessageError),
    ],
)
def test_an_invalid_call_raises_at_once(
    mqtemplate_template: RecordingTemplate, arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        mqtemplate_template.async_send(*arguments, **options)


def test_the_error_of_a_closed_broker_is_in_the_future(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    mqtemplate_broker.close()

    future = mqtemplate_template.async_send("orders", b"body")

    assert isinstance(future.exception(), BrokerClosedError)


def test_one_way_messages_are_delivered(kit: Kit) -> None:
    kit.template.send_one_way("orders:paid", b"one", keys="4466")
    kit.template.send_one_way("orders", [b"two", b"three"])
    kit.harness.run_until_idle()

    assert sorted(message.body for message in messages_in(kit.broker, "orders")) == [b"one", b"three", b"two"]


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

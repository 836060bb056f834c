"""Replies: the result of a handler, if the message is a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ConsumeMode, ConsumeStatus, ListenerRegistry, message_listener
from mqtemplate.message import Message
from mqtemplate.template import RocketMQTemplate
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.listener.conftest import App
from tests.listener.hostile import KINDS


def request(app: App, handler: Any, **attributes: Any) -> Any:
    """Return the body of the handler's reply to one request; None without a reply."""
    app.listen(message_listener(topic="orders", consumer_group="answers", **attributes)(handler))
    template = RocketMQTemplate(app.broker)
    future = template.async_send_and_receive("orders", "question", bytes, timeout="1s")
    app.advance("500ms")
    return future.result(0) if future.done() else None


async def async_answer(question: str) -> str:
    await asyncio.gather()
    return f"{question} answered"


@pytest.mark.parametrize("mode", ConsumeMode)
def test_a_returned_value_is_the_reply(app: App, mode: ConsumeMode) -> None:
    def answer(question: str) -> str:
        return f"{question} answered"

    assert request(app, answer, consume_mode=mode) == b"question answered"


def test_the_result_of_a_coroutine_is_the_reply(app: App) -> None:
    assert request(app, async_answer) == b"question answered"


@pytest.mark.parametrize("result", [None, ConsumeStatus.CONSUME_SUCCESS])
def test_none_and_a_status_are_no_reply(app: App, result: object) -> None:
    def answer(question: str) -> object:
        return result

    assert request(app, answer) is None


def test_a_handler_that_failed_replies_when_the_message_is_redelivered(app: App) -> None:
    """As with rocketmq-spring. The timeout of the request must allow for it."""
    attempts: list[str] = []

    def answer(question: str) -> str:
        attempts.append(question)
        if len(attempts) == 1:
            raise ValueError("not now")
        return "at last"

    app.listen(message_listener(topic="orders", consumer_group="answers")(answer))
    future = RocketMQTemplate(app.broker).async_send_and_receive("orders", "question", str, timeout="60s")
    app.advance("30s")

    assert future.result(0) == "at last"


def test_a_result_for_a_message_that_is_no_request_is_logged_once(app: App) -> None:
    def answer(question: str) -> str:
        return "no request"

    app.listen(message_listener(topic="orders", consumer_group="answers")(answer))
    app.broker.sends.send(Message("orders", b"statement"))
    app.broker.sends.send(Message("orders", b"statement"))
    with capture_logs() as logs:
        app.run_until_idle()

    [entry] = [entry for entry in logs if entry["event"] == "listener.result_ignored"]
    assert "it was not a request" in entry["hint"]


def test_a_reply_that_is_too_late_is_logged_and_the_message_is_done(app: App) -> None:
    def answer(question: str) -> str:
        return "late"

    app.listen(message_listener(topic="orders", consumer_group="answers")(answer))
    future = RocketMQTemplate(app.broker).async_send_and_receive("orders", "question", str, timeout="1s", delay="5s")
    with capture_logs() as logs:
        app.advance("10s")

    [entry] = [entry for entry in logs if entry["event"] == "listener.reply_failed"]
    assert future.done()
    assert "no longer waits" in entry["reason"]
    assert entry["topic"] == "orders"
    assert app.committed("answers", queue_id=0) is not None or app.committed("answers", queue_id=1) is not None


def test_a_result_that_cannot_be_converted_is_logged_and_the_message_is_done(app: App) -> None:
    def answer(question: str) -> object:
        return object()

    with capture_logs() as logs:
        assert request(app, answer) is None

    [entry] = [entry for entry in logs if entry["event"] == "listener.reply_failed"]
    assert "allowed are bytes, str" in entry["reason"]


@pytest.mark.parametrize("kind", ["panic", "exit", "interrupt", "without anything"])
def test_whatever_the_conversion_of_a_reply_raises_the_message_is_handled(app: App, kind: str) -> None:
    """As for a reply that cannot be sent: it is logged, and the client gets a timeout."""
    handled: list[str] = []

    class Hostile(JsonMessageConverter):
        def to_body(self, payload: Any) -> Any:
            return KINDS[kind]()

    app.registry = ListenerRegistry(app.broker, Hostile())

    @message_listener("orders", "billing", max_reconsume_times=0)
    def bill(order: str) -> str:
        handled.append(order)
        return f"receipt of {order}"

    app.listen(bill)
    with capture_logs() as events:
        app.broker.requests.request(Message("orders", b"tea"))
        app.advance("1s")

    assert handled == ["tea"]
    assert [event["event"] for event in events if event["log_level"] == "error"] == ["listener.reply_failed"]
    assert app.bodies(f"{DLQ_TOPIC_PREFIX}billing") == []

"""What a handler returns is a reply, if somebody asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.listener import ConsumeMode, ConsumeStatus, message_listener
from mqtemplate.message import Message
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness
from tests.listener.conftest import World


def ask(world: World, handler: Any, **attributes: Any) -> Any:
    """The body of what *handler* replies to one request; None without a reply."""
    registry_target = message_listener(topic="orders", consumer_group="answers", **attributes)(handler)
    world.listen(registry_target)
    template = RocketMQTemplate(world.broker)
    harness = Harness(world.broker, *world.registry.containers)
    future = template.async_send_and_receive("orders", "question", bytes, timeout=1_000)
    harness.advance("500ms")
    return future.result(0) if future.done() else None


async def answer_later(question: str) -> str:
    await asyncio.gather()
    return f"{question} answered"


@pytest.mark.parametrize("mode", ConsumeMode)
def test_a_returned_value_is_the_reply(world: World, mode: ConsumeMode) -> None:
    def answer(question: str) -> str:
        return f"{question} answered"

    assert ask(world, answer, consume_mode=mode) == b"question answered"


def test_a_coroutine_may_reply(world: World) -> None:
    assert ask(world, answer_later) == b"question answered"


@pytest.mark.parametrize("nothing", [None, ConsumeStatus.CONSUME_SUCCESS])
def test_nothing_and_a_status_are_no_reply(world: World, nothing: object) -> None:
    def answer(question: str) -> object:
        return nothing

    assert ask(world, answer) is None


def test_a_handler_that_fails_replies_when_the_message_comes_again(world: World) -> None:
    """As with rocketmq-spring; who asked must have patience."""
    attempts: list[str] = []

    def answer(question: str) -> str:
        attempts.append(question)
        if len(attempts) == 1:
            raise ValueError("not now")
        return "at last"

    world.listen(message_listener(topic="orders", consumer_group="answers")(answer))
    future = RocketMQTemplate(world.broker).async_send_and_receive("orders", "question", str, timeout=60_000)
    Harness(world.broker, *world.registry.containers).advance("30s")

    assert future.result(0) == "at last"


def test_a_value_for_a_message_that_is_no_request_is_logged_once(world: World) -> None:
    def answer(question: str) -> str:
        return "to whom?"

    world.listen(message_listener(topic="orders", consumer_group="answers")(answer))
    world.broker.send(Message("orders", b"statement"))
    world.broker.send(Message("orders", b"statement"))
    with capture_logs() as logs:
        world.confirm()

    [entry] = [entry for entry in logs if entry["event"] == "listener.result_ignored"]
    assert "it was no request" in entry["hint"]


def test_a_reply_that_comes_too_late_is_logged_and_the_message_is_done(world: World) -> None:
    world.listen(message_listener(topic="orders", consumer_group="answers")(lambda_like))
    future = RocketMQTemplate(world.broker).async_send_and_receive("orders", "question", str, timeout=1_000, delay=5)
    with capture_logs() as logs:
        Harness(world.broker, *world.registry.containers).advance("10s")

    [entry] = [entry for entry in logs if entry["event"] == "listener.reply_failed"]
    assert future.done()
    assert "no longer waits" in entry["reason"]
    assert entry["topic"] == "orders"
    assert world.committed("answers", queue_id=0) is not None or world.committed("answers", queue_id=1) is not None


def lambda_like(question: str) -> str:
    return "late"


def test_a_value_that_has_no_body_is_logged_and_the_message_is_done(world: World) -> None:
    def answer(question: str) -> object:
        return object()

    with capture_logs() as logs:
        assert ask(world, answer) is None

    [entry] = [entry for entry in logs if entry["event"] == "listener.reply_failed"]
    assert "allowed are bytes, str" in entry["reason"]

"""Requests, and listeners that reply by returning a value."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from pydantic import BaseModel

from mqtemplate import VirtualClock, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ConversionError, MessageError, RequestTimeoutError, UnsupportedError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness, RecordingTemplate
from tests.kit import Kit


class Price(BaseModel):
    article: str
    cents: int


@message_listener(topic="prices", consumer_group="pricing")
def price_of(article: str) -> Price:
    return Price(article=article, cents=320)


@pytest.fixture
def template(mqtemplate_app: Any, mqtemplate_template: RecordingTemplate) -> RecordingTemplate:
    mqtemplate_app(price_of)
    return mqtemplate_template


def test_the_reply_is_converted_to_the_type(template: RecordingTemplate) -> None:
    assert template.send_and_receive("prices:now", "tea", Price) == Price(article="tea", cents=320)
    assert template.send_and_receive("prices", "tea", dict) == {"article": "tea", "cents": 320}
    assert [sent.verb for sent in template.sent] == ["async_send_and_receive"] * 2


def test_message_ext_returns_the_whole_reply(template: RecordingTemplate) -> None:
    reply = template.send_and_receive("prices", "tea", MessageExt)

    assert reply.body == b'{"article":"tea","cents":320}'


def test_a_reply_of_another_type_is_an_error(template: RecordingTemplate) -> None:
    with pytest.raises(ConversionError):
        template.send_and_receive("prices", "tea", int)


def test_without_a_reply_the_request_ends_at_its_timeout(kit: Kit) -> None:
    started_ms = kit.harness.clock.now_ms()

    with pytest.raises(RequestTimeoutError, match="within 2s"):
        kit.template.send_and_receive("unread", "tea", str, timeout=2_000)

    assert kit.harness.clock.now_ms() == started_ms + 2_000


def test_a_request_may_be_delayed(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    started_ms = mqtemplate_harness.clock.now_ms()

    price = template.send_and_receive("prices", "tea", Price, 30_000, 3)

    assert price.cents == 320
    assert mqtemplate_harness.clock.now_ms() == started_ms + 10_000


def test_a_handler_may_send_a_request(mqtemplate_app: Any, mqtemplate_template: RecordingTemplate) -> None:
    """The harness steps the other listeners while the handler waits."""

    @message_listener(topic="offers", consumer_group="offering")
    def make_offer(article: str) -> str:
        price = mqtemplate_template.send_and_receive("prices", article, Price)
        return f"{article} for {price.cents}"

    mqtemplate_app(price_of, make_offer)

    assert mqtemplate_template.send_and_receive("offers", "tea", str) == "tea for 320"


def test_a_request_on_a_virtual_clock_needs_a_harness() -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker, pytest.raises(UnsupportedError, match="make a Harness"):
        RocketMQTemplate(broker).send_and_receive("prices", "tea", str)


def test_an_asynchronous_request_calls_the_callbacks(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    prices: list[Price] = []
    errors: list[BaseException] = []

    good: Future[Price] = template.async_send_and_receive("prices", "tea", Price, on_success=prices.append)
    template.async_send_and_receive("unread", "tea", Price, on_success=prices.append, on_error=errors.append)
    was_done = good.done()
    mqtemplate_harness.advance("3s")

    assert not was_done
    assert prices == [good.result(0)]
    assert [type(error) for error in errors] == [RequestTimeoutError]


def test_a_list_is_refused(template: RecordingTemplate) -> None:
    with pytest.raises(MessageError, match="a request is one message, got a list"):
        template.send_and_receive("prices", ["tea"], Price)


@pytest.mark.parametrize(
    ("rest", "options"),
    [
        ((), {}),
        (("key-1",), {"hash_key": "key-1"}),
        (("key-1", 2_000), {"hash_key": "key-1", "timeout": 2_000}),
        (("key-1", 30_000, 1), {"hash_key": "key-1", "timeout": 30_000, "delay_level": 1}),
        ((2_000,), {"timeout": 2_000}),
        ((30_000, 1), {"timeout": 30_000, "delay_level": 1}),
    ],
)
def test_the_overloads_of_spring_work(
    template: RecordingTemplate, rest: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """The overloads of ``RocketMQTemplate.sendAndReceive``."""
    price = template.sendAndReceive("prices", "tea", Price, *rest)

    given = {name: value for name, value in template.sent[0].options.items() if value not in (None, 0, ())}
    assert price == Price(article="tea", cents=320)
    assert given == {"reply_type": Price, **options}


def test_the_overload_of_spring_with_a_callback_works(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    calls: list[object] = []

    class Callback:
        def onSuccess(self, message: Price) -> None:
            calls.append(message)

        def onException(self, error: BaseException) -> None:
            calls.append(type(error))

    template.sendAndReceive("prices", "tea", Callback())
    template.sendAndReceive("unread", "tea", Callback(), 1_000)
    mqtemplate_harness.advance("1s")

    assert calls == [Price(article="tea", cents=320), RequestTimeoutError]


def test_on_a_real_clock_the_caller_waits() -> None:
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(price_of)
        registry.start()
        try:
            price = RocketMQTemplate(broker).send_and_receive("prices", "tea", Price, timeout=10_000)
            with pytest.raises(RequestTimeoutError):
                RocketMQTemplate(broker).send_and_receive("unread", "tea", Price, timeout=50)
        finally:
            registry.stop()

    assert price.cents == 320

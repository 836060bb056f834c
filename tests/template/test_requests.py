"""Requests as a user sends them, and listeners that reply by returning a value."""

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


class Price(BaseModel):
    article: str
    cents: int


@message_listener(topic="prices", consumer_group="pricing")
def tell_price(article: str) -> Price:
    return Price(article=article, cents=320)


@pytest.fixture
def template(mqtemplate_app: Any, mqtemplate_template: RecordingTemplate) -> RecordingTemplate:
    mqtemplate_app(tell_price)
    return mqtemplate_template


def test_the_reply_comes_as_the_type_asked_for(template: RecordingTemplate) -> None:
    assert template.send_and_receive("prices:now", "tea", Price) == Price(article="tea", cents=320)
    assert template.send_and_receive("prices", "tea", dict) == {"article": "tea", "cents": 320}
    assert [sent.verb for sent in template.sent] == ["async_send_and_receive"] * 2


def test_the_whole_reply_can_be_had(template: RecordingTemplate) -> None:
    reply = template.send_and_receive("prices", "tea", MessageExt)

    assert reply.body == b'{"article":"tea","cents":320}'


def test_a_reply_of_another_type_is_told(template: RecordingTemplate) -> None:
    with pytest.raises(ConversionError):
        template.send_and_receive("prices", "tea", int)


def test_no_reply_is_a_time_out_and_no_time_passes_beyond_it(
    mqtemplate_template: RecordingTemplate, mqtemplate_harness: Harness
) -> None:
    began_ms = mqtemplate_harness.clock.now_ms()

    with pytest.raises(RequestTimeoutError, match="within 2000 ms"):
        mqtemplate_template.send_and_receive("nobody", "tea", str, timeout=2_000)

    assert mqtemplate_harness.clock.now_ms() == began_ms + 2_000


def test_a_request_may_be_delayed(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    began_ms = mqtemplate_harness.clock.now_ms()

    price = template.send_and_receive("prices", "tea", Price, 30_000, 3)

    assert price.cents == 320
    assert mqtemplate_harness.clock.now_ms() == began_ms + 10_000


def test_a_handler_may_ask_another_one(mqtemplate_app: Any, mqtemplate_template: RecordingTemplate) -> None:
    """On a virtual clock, too: the one that waits stands still, the others are stepped."""

    @message_listener(topic="offers", consumer_group="offering")
    def make_offer(article: str) -> str:
        price = mqtemplate_template.send_and_receive("prices", article, Price)
        return f"{article} for {price.cents}"

    mqtemplate_app(tell_price, make_offer)

    assert mqtemplate_template.send_and_receive("offers", "tea", str) == "tea for 320"


def test_without_a_harness_a_virtual_clock_cannot_wait() -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker, pytest.raises(UnsupportedError, match="make a Harness"):
        RocketMQTemplate(broker).send_and_receive("prices", "tea", str)


def test_the_asynchronous_form_calls_back(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    prices: list[Price] = []
    errors: list[BaseException] = []

    good: Future[Price] = template.async_send_and_receive("prices", "tea", Price, on_success=prices.append)
    template.async_send_and_receive("nobody", "tea", Price, on_success=prices.append, on_error=errors.append)
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
def test_springs_forms_work(template: RecordingTemplate, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
    """The overloads of ``RocketMQTemplate.sendAndReceive``."""
    price = template.sendAndReceive("prices", "tea", Price, *rest)

    given = {name: value for name, value in template.sent[0].options.items() if value not in (None, 0, ())}
    assert price == Price(article="tea", cents=320)
    assert given == {"reply_type": Price, **options}


def test_springs_callback_form_works(template: RecordingTemplate, mqtemplate_harness: Harness) -> None:
    heard: list[object] = []

    class Callback:
        def onSuccess(self, message: Price) -> None:
            heard.append(message)

        def onException(self, error: BaseException) -> None:
            heard.append(type(error))

    template.sendAndReceive("prices", "tea", Callback())
    template.sendAndReceive("nobody", "tea", Callback(), 1_000)
    mqtemplate_harness.advance("1s")

    assert heard == [Price(article="tea", cents=320), RequestTimeoutError]


def test_on_a_real_clock_the_caller_waits() -> None:
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(tell_price)
        registry.start()
        try:
            price = RocketMQTemplate(broker).send_and_receive("prices", "tea", Price, timeout=10_000)
            with pytest.raises(RequestTimeoutError):
                RocketMQTemplate(broker).send_and_receive("nobody", "tea", Price, timeout=50)
        finally:
            registry.stop()

    assert price.cents == 320

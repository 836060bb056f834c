"""Requests, and listeners that reply by returning a value."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from mqtemplate import VirtualClock, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import RequestTimeoutError, UnsupportedError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.template import RocketMQTemplate


class Price(BaseModel):
    article: str
    cents: int


@message_listener(topic="prices", consumer_group="pricing")
def price_of(article: str) -> Price:
    return Price(article=article, cents=320)


def test_a_request_on_a_virtual_clock_needs_a_harness() -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker, pytest.raises(UnsupportedError, match="make a Harness"):
        RocketMQTemplate(broker).send_and_receive("prices", "tea", str)


def test_on_a_real_clock_the_caller_waits() -> None:
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(price_of)
        registry.start()
        try:
            price = RocketMQTemplate(broker).send_and_receive("prices", "tea", Price, timeout="10s")
            with pytest.raises(RequestTimeoutError):
                RocketMQTemplate(broker).send_and_receive("unread", "tea", Price, timeout="50ms")
        finally:
            registry.stop()

    assert price.cents == 320

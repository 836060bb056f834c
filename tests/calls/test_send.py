"""Middlewares around sends: every verb, and what they see, change and drop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import (
    Delivery,
    EmbeddedBroker,
    Message,
    Outgoing,
    RocketMQTemplate,
    SendResult,
    message_listener,
    middleware,
)
from mqtemplate.calls.middlewares import middleware_sends
from mqtemplate.calls.send import SendPipeline
from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    DependencyError,
)
from mqtemplate.results import SendStatus
from mqtemplate.testing import messages_in
from tests.golden import check_script
from tests.kit import application, harnessed
from tests.template.ledger import Ledger
from tests.template.session import TemplateSession

Sending = Generator[Outgoing, object, object]


class Noting:
    """Notes verbs, topics and results."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, outgoing: Outgoing) -> Sending:
        self.events.append((outgoing.verb, [message.body for message in outgoing.messages]))
        try:
            result = yield outgoing
        except Exception as error:
            self.events.append(type(error).__name__)
            raise
        self.events.append(type(result).__name__)
        return result


class Stamp:
    """Adds a property to each message."""

    def send(self, outgoing: Outgoing) -> Sending:
        def stamped(message: Message) -> Message:
            message.properties["stamp"] = "paid"
            return message

        return (yield outgoing.map(stamped))


class Drop:
    """Drops messages with a body."""

    def __init__(self, body: bytes, result: SendResult | None = None) -> None:
        self.body = body
        self.result = result

    def send(self, outgoing: Outgoing) -> Sending:
        if outgoing.message.body == self.body:
            return self.result
        return (yield outgoing)


class WithoutSalt:
    def send(self, outgoing: Outgoing) -> Sending:
        return (yield outgoing.filter(lambda message: message.body != b"salt"))


class Sends(TemplateSession):
    """Sessions with middlewares around the sends."""

    def __init__(self, undo: contextlib.ExitStack, logs: list[Any]) -> None:
        middlewares = {each.__name__: each for each in (Drop, Ledger, Noting, Stamp, WithoutSalt)}
        super().__init__(undo, logs, {**middlewares, "stamps": self._stamps})

    def _stamps(self, topic: str) -> list[str | None]:
        return [message.user_properties.get("stamp") for message in messages_in(self._broker, topic)]


def test_a_middleware_is_around_sends_as_the_script_says() -> None:
    with contextlib.ExitStack() as undo:
        check_script(Path(__file__).parent / "sends.script", Sends(undo, []))


def test_the_part_before_an_asynchronous_send_runs_in_the_callers_thread() -> None:
    """So the order of sends stays. The part after it runs where the result arrives."""
    threads: list[int] = []

    class Threads:
        def send(self, outgoing: Outgoing) -> Sending:
            threads.append(threading.get_ident())
            return (yield outgoing)

    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        template = RocketMQTemplate(broker, middlewares=[Threads()])
        results = [template.async_send("orders", str(number), hash_key="one") for number in range(20)]
        for result in results:
            result.result(30)

        assert set(threads) == {threading.get_ident()}
        assert [message.body for message in messages_in(broker, "orders")] == [b"%d" % number for number in range(20)]


def test_a_template_without_middlewares_uses_the_broker_itself(
    mqtemplate_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its sends cost nothing more: no `SendCall` is created."""

    class ConsumeOnly:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
            yield delivery

    pipeline = SendPipeline(mqtemplate_broker, [middleware_sends([ConsumeOnly()])])

    monkeypatch.setattr("mqtemplate.calls.send.SendCall", None)
    assert pipeline.send(Message("orders", b"1"), None, 3_000).send_status is SendStatus.SEND_OK


SENT: list[bytes] = []


@middleware
class Global:
    """Acts on the template and on the listeners of its application."""

    def send(self, outgoing: Outgoing) -> Sending:
        SENT.append(outgoing.message.body)
        return (yield outgoing)

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        SENT.append(delivery.message.body + b" received")
        yield delivery


def test_a_global_middleware_acts_on_the_template_of_the_application() -> None:
    @message_listener("orders", "billing")
    def bill(order: str) -> None: ...

    SENT.clear()
    with harnessed(bill, Global) as (app, harness):
        app.template.sync_send("orders", "tea")
        harness.run_until_idle()

    assert SENT == [b"tea", b"tea received"]


def test_a_send_middleware_that_needs_the_template_is_a_circle(mqtemplate_broker: EmbeddedBroker) -> None:
    """The error names the middleware and the parameter."""
    from mqtemplate import service

    @middleware
    class Copying:
        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        def send(self, outgoing: Outgoing) -> Sending:
            return (yield outgoing)

    @service
    class Shop: ...

    with pytest.raises(DependencyError, match=r"these need each other to be built: .*Copying\(template\)"):
        application(Copying, Shop).start()

"""Middlewares around sends: every verb, and what they see, change and drop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from mqtemplate import (
    Delivery,
    EmbeddedBroker,
    Message,
    Outgoing,
    RocketMQTemplate,
    SendResult,
    TransactionState,
    message_listener,
    middleware,
    transaction_listener,
)
from mqtemplate.calls.middlewares import middleware_sends
from mqtemplate.calls.send import SendPipeline
from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    ConfigurationError,
    DependencyError,
    MessageDroppedError,
    MessageError,
    RequestTimeoutError,
)
from mqtemplate.results import SendStatus
from mqtemplate.testing import Harness, messages_in
from tests.kit import Kit

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


@pytest.fixture
def noting() -> Noting:
    return Noting()


@pytest.fixture
def template(noting: Noting, mqtemplate_broker: EmbeddedBroker) -> Iterator[RocketMQTemplate]:
    with RocketMQTemplate(mqtemplate_broker, producer_group="shop", middlewares=[noting, Stamp()]) as template:
        yield template


def stamps(broker: EmbeddedBroker, topic: str = "orders") -> list[str | None]:
    return [message.user_properties.get("stamp") for message in messages_in(broker, topic)]


@pytest.mark.parametrize(
    ("send", "event"),
    [
        (lambda template: template.sync_send("orders", b"tea"), ("send", [b"tea"])),
        (lambda template: template.sync_send("orders", b"tea", hash_key="a"), ("send", [b"tea"])),
        (lambda template: template.async_send("orders", b"tea").result(), ("send", [b"tea"])),
        (lambda template: template.async_send("orders", b"tea", hash_key="a").result(), ("send", [b"tea"])),
        (lambda template: template.convert_and_send("orders", b"tea"), ("send", [b"tea"])),
        (lambda template: template.syncSend("orders", b"tea"), ("send", [b"tea"])),
    ],
)
def test_a_middleware_is_around_each_verb(
    send: Callable[[RocketMQTemplate], SendResult],
    event: Any,
    template: RocketMQTemplate,
    noting: Noting,
    mqtemplate_broker: EmbeddedBroker,
) -> None:
    """It sees the message as the broker gets it, and the result."""
    result = send(template)

    assert noting.events == [event, "SendResult"]
    assert result.msg_id
    assert stamps(mqtemplate_broker) == ["paid"]


def test_a_batch_passes_once(template: RocketMQTemplate, noting: Noting, mqtemplate_broker: EmbeddedBroker) -> None:
    template.sync_send("orders", [b"tea", b"cup"])
    template.async_send("orders", [b"tea", b"cup"]).result()

    assert noting.events == [("send", [b"tea", b"cup"]), "SendResult"] * 2
    assert stamps(mqtemplate_broker) == ["paid"] * 4


def test_a_one_way_send_has_no_result(kit: Kit, template: RocketMQTemplate, noting: Noting) -> None:
    template.send_one_way("orders", b"tea")
    kit.harness.run_until_idle()

    assert noting.events == [("one_way", [b"tea"]), "NoneType"]
    assert stamps(kit.broker) == ["paid"]


def test_the_result_of_a_request_is_the_reply(kit: Kit, template: RocketMQTemplate, noting: Noting) -> None:
    @message_listener("prices", "prices")
    def price(article: str) -> str:
        return f"{article} is 320"

    kit.start(price)

    assert template.send_and_receive("prices", "tea", str) == "tea is 320"
    assert noting.events == [("request", [b"tea"]), "MessageExt"]
    with pytest.raises(RequestTimeoutError):
        template.send_and_receive("nobody", "tea", str, 100)
    assert noting.events[2:] == [("request", [b"tea"]), "RequestTimeoutError"]


def test_the_message_of_a_transaction_passes(kit: Kit, template: RocketMQTemplate, noting: Noting) -> None:
    @transaction_listener("orders")
    class Orders:
        def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
            return TransactionState.COMMIT

        def check_local_transaction(self, message: Message) -> TransactionState:
            return TransactionState.COMMIT

    template.add_transaction_listener(Orders())
    template.send_in_transaction("orders", b"tea")
    kit.harness.run_until_idle()

    assert noting.events == [("transaction", [b"tea"]), "HalfMessage"]
    assert stamps(kit.broker) == ["paid"]


def test_a_dropped_message_is_not_sent(mqtemplate_broker: EmbeddedBroker, noting: Noting) -> None:
    """The call fails, unless the middleware returns a result; a one-way send does not."""
    template = RocketMQTemplate(mqtemplate_broker, middlewares=[noting, Drop(b"salt")])
    earlier = template.sync_send("orders", b"tea")

    with pytest.raises(MessageDroppedError, match="a middleware dropped the message for 'orders'; nothing was sent"):
        template.sync_send("orders", b"salt")
    assert isinstance(template.async_send("orders", b"salt").exception(), MessageDroppedError)
    template.send_one_way("orders", b"salt")
    assert noting.events[2:] == [
        ("send", [b"salt"]),
        "NoneType",
        ("send", [b"salt"]),
        "NoneType",
        ("one_way", [b"salt"]),
        "NoneType",
    ]

    lenient = RocketMQTemplate(mqtemplate_broker, middlewares=[Drop(b"salt", earlier)])
    assert lenient.sync_send("orders", b"salt") is earlier
    assert lenient.async_send("orders", b"salt").result() is earlier
    assert [message.body for message in messages_in(mqtemplate_broker, "orders")] == [b"tea"]


def test_a_batch_may_lose_messages(mqtemplate_broker: EmbeddedBroker) -> None:
    class WithoutSalt:
        def send(self, outgoing: Outgoing) -> Sending:
            return (yield outgoing.filter(lambda message: message.body != b"salt"))

    template = RocketMQTemplate(mqtemplate_broker, middlewares=[WithoutSalt()])
    template.sync_send("orders", [b"tea", b"salt", b"cup"])
    with pytest.raises(MessageDroppedError):
        template.sync_send("orders", [b"salt"])

    assert [message.body for message in messages_in(mqtemplate_broker, "orders")] == [b"tea", b"cup"]


def test_a_middleware_sees_the_error_of_a_send(
    noting: Noting, mqtemplate_broker: EmbeddedBroker, template: RocketMQTemplate
) -> None:
    too_large = b"x" * (5 * 1024 * 1024)

    with pytest.raises(MessageError):
        template.sync_send("orders", too_large)
    error = None
    try:
        error = template.async_send("orders", too_large).exception()
    except MessageError as raised:
        error = raised

    assert isinstance(error, MessageError)
    assert noting.events[1::2] == ["MessageError", "MessageError"]


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


def test_what_is_no_middleware_is_refused(mqtemplate_broker: EmbeddedBroker) -> None:
    with pytest.raises(ConfigurationError, match="middleware object has neither consume nor send"):
        RocketMQTemplate(mqtemplate_broker, middlewares=[object()])


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
    from mqtemplate import MQApplication, VirtualClock

    @message_listener("orders", "billing")
    def bill(order: str) -> None: ...

    SENT.clear()
    with MQApplication(
        bill, Global, settings={"rocketmq.name-server": "embedded:memory"}, environment={}, clock=VirtualClock()
    ) as app:
        harness = Harness(app)
        app.template.sync_send("orders", "tea")
        harness.run_until_idle()

    assert SENT == [b"tea", b"tea received"]


def test_a_send_middleware_that_needs_the_template_is_a_circle(mqtemplate_broker: EmbeddedBroker) -> None:
    """The error names the middleware and the parameter."""
    from mqtemplate import MQApplication, service

    @middleware
    class Copying:
        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        def send(self, outgoing: Outgoing) -> Sending:
            return (yield outgoing)

    @service
    class Shop: ...

    app = MQApplication(Copying, Shop, settings={"rocketmq.name-server": "embedded:memory"}, environment={})
    with pytest.raises(DependencyError, match=r"these need each other to be built: .*Copying\(template\)"):
        app.start()

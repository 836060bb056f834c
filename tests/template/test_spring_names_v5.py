"""The names of the v5 client's template, and what rocketmq-spring's template sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue

import pytest

from mqtemplate import EmbeddedBroker, RocketMQTemplate, SendResult, VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.testing import messages_in

pytestmark = pytest.mark.feature("spring-v5")


@pytest.fixture
def template() -> Iterator[RocketMQTemplate]:
    with EmbeddedBroker(clock=VirtualClock()) as broker, RocketMQTemplate(broker) as template:
        yield template


def test_asynchronous_names_also_complete_a_given_future(template: RocketMQTemplate) -> None:
    given: list[Future[SendResult]] = [Future() for _ in range(4)]
    hour = timedelta(hours=1)

    sent = [
        template.asyncSendNormalMessage("orders", "a", given[0]),
        template.asyncSendFifoMessage("orders", "b", "customer-7", given[1]),
        template.asyncSendDelayMessage("orders", "c", hour, given[2]),
        template.asyncSendWithObjectPayload("orders", {"id": 7}, None, "customer-7", given[3]),
    ]

    assert [each.result(0) for each in sent] == [each.result(0) for each in given]
    assert sent[1].result(0).message_queue == sent[3].result(0).message_queue, "one message group, one queue"
    assert sent[2].result(0).handle is not None, "it is delayed"


def test_a_failed_send_fails_the_given_future_too(template: RocketMQTemplate) -> None:
    template.broker.close()
    given: Future[SendResult] = Future()

    sent = template.asyncSendNormalMessage("orders", "a", given)

    assert sent.exception(0) is given.exception(0) is not None


@pytest.mark.parametrize("kind", ["String", "Byte", "Message", "Object"])
def test_the_payload_names_are_one_method(template: RocketMQTemplate, kind: str) -> None:
    getattr(template, f"asyncSendWith{kind}Payload")("orders", "a").result(0)

    assert len(messages_in(template.broker, "orders")) == 1


def test_a_grpc_message_takes_a_delay_and_a_group(template: RocketMQTemplate) -> None:
    assert template.syncSendGrpcMessage("orders", "a", "1h").handle is not None
    assert template.syncSendGrpcMessage("orders", "b", None, "customer-7").handle is None
    assert template.send("orders", "c").send_status.name == "SEND_OK"


def test_the_executor_runs_the_callbacks(template: RocketMQTemplate) -> None:
    threads: SimpleQueue[str] = SimpleQueue()
    with ThreadPoolExecutor(1, "shop-callbacks") as executor:
        template.setAsyncSenderExecutor(executor)
        template.async_send("orders", "a", on_success=lambda result: threads.put(threading.current_thread().name))

        assert threads.get(timeout=60).startswith("shop-callbacks")


def test_the_charset_is_that_of_sent_text(template: RocketMQTemplate) -> None:
    template.setCharset("gbk")

    template.syncSend("news", "消息")

    assert template.getCharset() == "gbk"
    assert messages_in(template.broker, "news")[0].body == "消息".encode("gbk")


def test_a_converter_without_charsets_refuses_another_one() -> None:
    class Plain:
        def to_body(self, payload: object) -> tuple[bytes, str | None]:
            return b"x", None

        def from_body(self, body: bytes, target_type: object, properties: object) -> object:
            return body

    with EmbeddedBroker(clock=VirtualClock()) as broker:
        template = RocketMQTemplate(broker, converter=Plain())
        with pytest.raises(ConfigurationError, match="Plain.* writes text in one encoding only; give the template a"):
            template.charset = "gbk"


def test_the_default_destination_has_springs_names(template: RocketMQTemplate) -> None:
    template.setDefaultDestination("orders")

    template.convert_and_send("a")

    assert template.getDefaultDestination() == "orders"
    assert len(messages_in(template.broker, "orders")) == 1

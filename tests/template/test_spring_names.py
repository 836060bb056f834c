"""The method names of rocketmq-spring."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.results import SendResult
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate
from tests.kit import Kit

NOW_MS = VirtualClock().now_ms()

CALLS: list[tuple[Callable[[Any], object], str, dict[str, Any]]] = [
    (lambda t: t.syncSend("orders:paid", b"body"), "sync_send", {}),
    (lambda t: t.syncSend("orders:paid", b"body", 3000), "sync_send", {"timeout": 3000}),
    (lambda t: t.syncSend("orders:paid", b"body", 3000, 3), "sync_send", {"timeout": 3000, "delay_level": 3}),
    (lambda t: t.syncSend("orders:paid", b"body", delayLevel=3), "sync_send", {"delay_level": 3}),
    (lambda t: t.syncSendOrderly("orders:paid", b"body", "k"), "sync_send", {"hash_key": "k"}),
    (
        lambda t: t.syncSendOrderly("orders:paid", b"body", "k", 3000, 3),
        "sync_send",
        {"hash_key": "k", "timeout": 3000, "delay_level": 3},
    ),
    (
        lambda t: t.syncSendDelayTimeSeconds("orders:paid", b"body", 10),
        "sync_send",
        {"delay": timedelta(seconds=10)},
    ),
    (
        lambda t: t.syncSendDelayTimeMills("orders:paid", b"body", 10),
        "sync_send",
        {"delay": timedelta(milliseconds=10)},
    ),
    (
        lambda t: t.syncSendDeliverTimeMills("orders:paid", b"body", NOW_MS + 10),
        "sync_send",
        {"deliver_at": NOW_MS + 10},
    ),
    (lambda t: t.asyncSend("orders:paid", b"body", None, 3000, 3), "async_send", {"timeout": 3000, "delay_level": 3}),
    (
        lambda t: t.asyncSendOrderly("orders:paid", b"body", "k", None, 3000),
        "async_send",
        {"hash_key": "k", "timeout": 3000},
    ),
    (lambda t: t.sendOneWay("orders:paid", b"body"), "send_one_way", {}),
    (lambda t: t.sendOneWayOrderly("orders:paid", b"body", "k"), "send_one_way", {"hash_key": "k"}),
    (lambda t: t.convertAndSend("orders:paid", b"body", {"region": "EU"}), "sync_send", {"headers": {"region": "EU"}}),
    (lambda t: t.syncSendNormalMessage("orders:paid", b"body"), "sync_send", {}),
    (lambda t: t.syncSendFifoMessage("orders:paid", b"body", "k"), "sync_send", {"hash_key": "k"}),
    (
        lambda t: t.syncSendDelayMessage("orders:paid", b"body", timedelta(hours=3)),
        "sync_send",
        {"delay": timedelta(hours=3)},
    ),
]


@pytest.mark.feature("C1")
@pytest.mark.parametrize(("call", "verb", "options"), CALLS)
def test_a_spring_name_calls_one_of_our_verbs(
    mqtemplate_template: RecordingTemplate, call: Callable[[Any], object], verb: str, options: dict[str, Any]
) -> None:
    call(mqtemplate_template)

    [sent] = mqtemplate_template.sent
    given = {name: value for name, value in sent.options.items() if value is not None and value != 0}
    assert (sent.verb, sent.destination, sent.payload) == (verb, "orders:paid", b"body")
    assert given == options


def test_a_callback_object_of_spring_is_called(kit: Kit) -> None:
    class Callback:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def onSuccess(self, result: SendResult) -> None:
            self.calls.append(result)

        def onException(self, error: BaseException) -> None:
            self.calls.append(type(error).__name__)

    callback = Callback()

    future = kit.template.asyncSend("orders", b"body", callback)
    kit.harness.run_until_idle()
    kit.template.asyncSendOrderly("orders", bytes(4 * 1024 * 1024 + 1), "k", callback)

    assert callback.calls == [future.result(), "MessageError"]


def test_the_message_queue_selector_has_getter_and_setter(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker)
    first = template.getMessageQueueSelector()

    template.setMessageQueueSelector(lambda queues, message, key: queues[-1])

    assert template.getMessageQueueSelector() is not first
    assert template.syncSendOrderly("orders", b"body", "k").message_queue.queue_id == 3

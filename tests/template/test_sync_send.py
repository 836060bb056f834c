"""Synchronous sends of one message."""

from __future__ import annotations

import itertools
import logging
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DestinationError, MessageError, SendTimeoutError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit


def only_message(broker: Broker, topic: str) -> Any:
    [message] = messages_in(broker, topic)
    return message


@pytest.mark.feature("C1")
def test_timeout_and_delay_level_work_by_position_and_by_name(kit: Kit) -> None:
    """(destination, payload, timeout, delay level), in this order."""
    by_position = kit.template.sync_send("orders:paid", b"one", 3000, 3)
    by_name = kit.template.sync_send("orders:paid", b"two", timeout=3000, delay_level=3)
    as_in_java = kit.template.syncSend("orders:paid", b"three", 3000, 3)

    assert {result.send_status for result in (by_position, by_name, as_in_java)} == {SendStatus.SEND_OK}
    kit.harness.advance("9999ms")
    assert messages_in(kit.broker, "orders") == []
    kit.harness.advance("1ms")
    assert sorted(message.body for message in messages_in(kit.broker, "orders")) == [b"one", b"three", b"two"]


@pytest.mark.feature("B10", "B11", "B12", "B14", "B16")
def test_a_service_sends_checks_the_status_and_logs_the_id(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A service as in a Spring application, with a timeout of 100 ms."""

    class ScheduleMessageService:
        log = logging.getLogger("ScheduleMessageService")

        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        def send_sync_schedule_message(self, key: str, message: str, timeout: int, delay_level: int) -> SendResult:
            result = self.template.sync_send(
                "schedule-message-topic:sync-tags", message, timeout, delay_level, headers={"KEYS": key}
            )
            if result.send_status is SendStatus.SEND_OK:
                self.log.info("sent %s at %s", result.msg_id, datetime.now().astimezone())
            else:
                self.log.warning("not safe: %s at %s", result.msg_id, datetime.now().astimezone())
            return result

    key = str(uuid4())
    with caplog.at_level(logging.INFO):
        result = ScheduleMessageService(kit.template).send_sync_schedule_message(key, "hello" + key, 100, 3)

    assert f"sent {result.msg_id}" in caplog.text
    kit.harness.advance("10s")
    message = only_message(kit.broker, "schedule-message-topic")
    assert (message.body, message.tags, message.keys) == (f"hello{key}".encode(), "sync-tags", key)
    assert message.msg_id == result.msg_id


def test_the_result_contains_ids_queue_and_offset(kit: Kit) -> None:
    result = kit.template.sync_send("orders:paid", b"body")

    message = only_message(kit.broker, "orders")
    assert (result.msg_id, result.offset_msg_id) == (message.msg_id, message.offset_msg_id)
    assert (result.message_queue, result.queue_offset) == (message.message_queue, message.queue_offset)


@pytest.mark.feature("A6")
def test_keys_are_stored_with_the_message(kit: Kit) -> None:
    kit.template.sync_send("orders", b"body", keys=["4466", "4467"])

    assert only_message(kit.broker, "orders").keys == "4466 4467"


@pytest.mark.feature("G1")
def test_a_message_object_can_be_sent(kit: Kit) -> None:
    """Topic, flag, properties and body are used; the object is not changed."""
    message = Message("orders", b"body", {"KEYS": "4466", "region": "EU"}, flag=7)

    kit.template.sync_send("orders:paid", message)

    stored = only_message(kit.broker, "orders")
    assert (stored.body, stored.flag, stored.tags, stored.keys) == (b"body", 7, "paid", "4466")
    assert stored.user_properties == {"region": "EU"}
    assert message == Message("orders", b"body", {"KEYS": "4466", "region": "EU"}, flag=7)


def test_a_message_for_another_topic_is_refused(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(DestinationError, match="names the topic 'bills' and the destination 'orders'"):
        mqtemplate_template.sync_send("orders", Message("bills", b"body"))


def test_a_received_message_cannot_be_sent_unchanged(kit: Kit) -> None:
    """The broker has set its id and times. Body and user properties can be sent."""
    kit.template.sync_send("orders", b"body", headers={"region": "EU"})
    received = only_message(kit.broker, "orders")

    with pytest.raises(MessageError, match=r"send message\.body with headers=message\.user_properties"):
        kit.template.sync_send("orders", received)

    kit.template.sync_send("copies", received.body, headers=received.user_properties)
    assert only_message(kit.broker, "copies").properties["region"] == "EU"


# --- queues ----------------------------------------------------------------------------------------


def test_equal_keys_go_to_one_queue_in_the_order_sent(kit: Kit) -> None:
    queues = {kit.template.sync_send("orders", str(number), hash_key="customer-1").message_queue for number in range(9)}

    assert len(queues) == 1
    assert [message.body for message in messages_in(kit.broker, "orders")] == [b"%d" % n for n in range(9)]


def test_the_message_queue_selector_can_be_replaced(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker, message_queue_selector=lambda queues, message, key: queues[int(key)])

    assert template.sync_send("orders", b"body", hash_key="3").message_queue.queue_id == 3

    template.message_queue_selector = lambda queues, message, key: queues[0]
    assert template.sync_send("orders", b"body", hash_key="3").message_queue.queue_id == 0


def test_a_message_goes_to_the_given_queue(kit: Kit) -> None:
    queue = kit.broker.queues("orders")[2]

    assert kit.template.sync_send("orders", b"body", queue=queue).message_queue == queue


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hash_key": ["a"]}, "hash_key must be text, a number or a UUID, got list"),
        ({"hash_key": b"a"}, "hash_key must be text, a number or a UUID, got bytes"),
        ({"hash_key": ""}, "hash_key is empty"),
        (
            {"queue": MessageQueue("bills", "broker-a", 0)},
            "the queue belongs to topic 'bills', the destination to topic 'orders'",
        ),
        ({"queue": MessageQueue("orders", "broker-a", 0), "hash_key": "k"}, "both choose the queue"),
    ],
)
def test_a_contradictory_queue_is_refused(
    mqtemplate_template: RecordingTemplate, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(MessageError, match=error):
        mqtemplate_template.sync_send("orders", b"body", **options)


def test_a_number_is_a_key_as_its_text_is(mqtemplate_template: RecordingTemplate) -> None:
    """``keys=4466`` and ``hash_key=7`` are treated alike."""
    numbers = mqtemplate_template.sync_send("orders", "x", keys=4466, hash_key=7)
    texts = mqtemplate_template.sync_send("orders", "x", keys="4466", hash_key="7")

    assert numbers.message_queue == texts.message_queue
    assert len(mqtemplate_template.broker.reader.messages_by_key("orders", "4466")) == 2


# --- timeouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, "soon", True, "0s"])
def test_an_invalid_timeout_is_refused(mqtemplate_template: RecordingTemplate, timeout: Any) -> None:
    with pytest.raises(
        MessageError, match="timeout must be (a duration: .* of milliseconds|1 ms or longer|0 or longer)"
    ):
        mqtemplate_template.sync_send("orders", b"body", timeout)


def test_the_timeout_includes_the_choice_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker gets the rest of the timeout; with nothing left, nothing is sent."""
    before_and_after = iter([10.000, 10.003])
    monkeypatch.setattr("mqtemplate.template.rocketmq_template.monotonic", lambda: next(before_and_after))

    with EmbeddedBroker() as broker, RocketMQTemplate(broker) as template:
        with pytest.raises(SendTimeoutError, match="timeout of 2ms was over before the message reached the broker"):
            template.sync_send("orders", b"body", timeout=2, hash_key="k")

        assert messages_in(broker, "orders") == []


def test_on_the_virtual_clock_a_slow_machine_uses_up_no_timeout(
    mqtemplate_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("mqtemplate.template.rocketmq_template.monotonic", lambda: float(next(seconds)))

    with RocketMQTemplate(mqtemplate_broker) as template:
        assert template.sync_send("orders", b"body", timeout=1).send_status is SendStatus.SEND_OK


@pytest.mark.parametrize("payload", [b"four", "four", Message("orders", b"four"), [b"one", b"four"]])
def test_a_template_may_have_a_smaller_limit_for_bodies(mqtemplate_broker: EmbeddedBroker, payload: object) -> None:
    template = RocketMQTemplate(mqtemplate_broker, max_message_size=3)

    with pytest.raises(MessageError, match="has 4 bytes, allowed are 3; send less"):
        template.sync_send("orders", payload)

    assert template.sync_send("orders", b"one").queue_offset == 0


def test_the_error_for_a_large_body_contains_its_size_and_the_limit(mqtemplate_template: RecordingTemplate) -> None:
    size = 4 * 1024 * 1024 + 1

    with pytest.raises(MessageError, match=f"{size} bytes, allowed are {size - 1}"):
        mqtemplate_template.sync_send("orders", bytes(size))

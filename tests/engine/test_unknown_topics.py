"""Messages to a topic that nothing knows: a typing error would create a topic that no listener reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate import MQApplication, RocketMQTemplate, VirtualClock, message_listener, service
from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import ConfigurationError, DestinationError
from mqtemplate.message import Message
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing import Harness

STRICT = EmbeddedSettings(auto_create_topic_enable=False, topics=("audit",))


@contextmanager
def broker_with_listener(settings: EmbeddedSettings | None = None) -> Iterator[EmbeddedBroker]:
    """Broker with one listener, of the topic ``orders``."""
    with EmbeddedBroker(None, settings, VirtualClock()) as broker:
        broker.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
        yield broker


def created(logs: object) -> list[tuple[str, str, str | None]]:
    assert isinstance(logs, list)
    events = [event for event in logs if event["event"] == "topic.created"]
    return [(event["log_level"], event["topic"], event.get("nearest")) for event in events]


def test_the_first_message_to_an_unknown_topic_is_logged_once_with_the_nearest_topic() -> None:
    with capture_logs() as logs, broker_with_listener() as broker:
        broker.sends.send(Message("ordres", b"1"))
        broker.sends.send(Message("ordres", b"2"))
        broker.sends.send(Message("zzz", b"3"))

    assert created(logs) == [("info", "ordres", "orders"), ("info", "zzz", None)]


def test_a_topic_of_a_listener_or_of_the_settings_is_known() -> None:
    with capture_logs() as logs, broker_with_listener(EmbeddedSettings(topics=("audit",))) as broker:
        broker.sends.send(Message("orders", b"1"))
        broker.sends.send(Message("audit", b"2"))

    assert created(logs) == []


def test_a_stored_topic_is_known_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        broker.sends.send(Message("orders", b"1"))

    with capture_logs() as logs, EmbeddedBroker(tmp_path) as broker:
        broker.sends.send(Message("orders", b"2"))

    assert created(logs) == []


def test_without_automatic_creation_an_unknown_topic_is_refused_with_the_nearest() -> None:
    with broker_with_listener(STRICT) as broker:
        with pytest.raises(DestinationError) as refused:
            broker.sends.send(Message("ordres", b"1"))
        with pytest.raises(DestinationError, match="topic 'zzz' does not exist"):
            broker.queues("zzz")

        assert broker.topics.queue_count("ordres") == 0

    assert str(refused.value) == (
        "topic 'ordres' does not exist, no listener of the application reads it, and "
        "mqtemplate.broker.auto-create-topic-enable is false; did you mean 'orders'? Add it to "
        "mqtemplate.broker.topics, or create it by Broker.create_topic"
    )


def test_without_automatic_creation_known_topics_and_retries_work() -> None:
    with broker_with_listener(STRICT) as broker:
        broker.create_topic("reports", 1)
        for topic in ("orders", "audit", "reports"):
            broker.sends.send(Message(topic, b"1"))
        member = broker.groups.subscribe(ConsumerSpec(group="audit", subscriptions={"audit": TagSelector()}))
        [message] = member.poll(1)

        member.send_back(message, -1)

        assert broker.topics.queue_count("%DLQ%audit") == 1


def test_a_service_may_send_to_the_topic_of_a_listener_before_the_listeners_start() -> None:
    received: list[str] = []

    @service
    class Opening:
        def __init__(self, template: RocketMQTemplate) -> None:
            self._template = template

        def on_start(self) -> None:
            self._template.sync_send("orders", "first")

    @message_listener(topic="${shop.topic:orders}", consumer_group="billing")
    class Billing:
        def on_message(self, message: str) -> None:
            received.append(message)

    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.broker.auto-create-topic-enable": False}
    with MQApplication(Opening, Billing, settings=settings, clock=VirtualClock()) as app:
        Harness(app).run_until_idle()

    assert received == ["first"]


def test_a_topic_of_the_settings_with_an_illegal_name_is_refused_with_its_key() -> None:
    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.broker.topics": ["orders", "no topic"]}

    with pytest.raises(ConfigurationError, match=r"mqtemplate\.broker\.topics: topic 'no topic' has characters"):
        MQApplication(settings=settings).start()

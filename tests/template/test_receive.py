"""Receiving on request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from mqtemplate.broker import MessageModel
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import BrokerClosedError, ConfigurationError, MessageError, SelectorError
from mqtemplate.message import MessageExt
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness, messages_in


class Order(BaseModel):
    id: int


def make_template(broker: EmbeddedBroker, **settings: Any) -> RocketMQTemplate:
    return RocketMQTemplate(broker, **{"consumer_group": "billing", "consumer_topic": "orders", **settings})


def test_messages_come_as_the_type_asked_for(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", [Order(id=1), Order(id=2)])

    assert template.receive(Order, max_count=32, timeout=3000) == [Order(id=1), Order(id=2)]
    assert template.receive(Order) == []


def test_the_whole_message_can_be_had(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    sent = template.sync_send("orders:paid", b"body", keys="4466")

    [message] = template.receive(MessageExt)

    assert (message.msg_id, message.tags, message.keys, message.body) == (sent.msg_id, "paid", "4466", b"body")


def test_no_more_come_than_asked_for(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", [b"1", b"2", b"3"])

    assert (template.receive(bytes, 2), template.receive(bytes, 2)) == ([b"1", b"2"], [b"3"])


def test_a_selector_leaves_other_tags_out(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker, selector_expression="paid")
    template.sync_send("orders:open", b"1")
    template.sync_send("orders:paid", b"2")

    assert template.receive(bytes) == [b"2"]


def test_a_selector_may_be_sql92(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(
        mqtemplate_broker, selector_type=SelectorType.SQL92, selector_expression="price > 5 AND TAGS = 'paid'"
    )
    for destination, price in (("orders:paid", 3), ("orders:open", 7), ("orders:paid", 9)):
        template.sync_send(destination, str(price), headers={"price": price})

    assert template.receive(str) == ["9"]


def test_a_mistake_in_a_selector_is_told_with_its_column(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker, selector_type=SelectorType.SQL92, selector_expression="price >> 5")

    with pytest.raises(SelectorError, match="column 8: found '>'"):
        template.receive(str)


def test_a_delayed_message_is_received_when_it_is_due(
    mqtemplate_broker: EmbeddedBroker, mqtemplate_harness: Harness
) -> None:
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", b"later", delay_level=3)

    assert template.receive(bytes) == []
    mqtemplate_harness.advance("10s")
    assert template.receive(bytes) == [b"later"]


# --- what is confirmed, and when -------------------------------------------------------------------


def test_what_was_returned_is_not_confirmed_yet(mqtemplate_broker: EmbeddedBroker) -> None:
    """At least once: the program may die while it works on it."""
    template = make_template(mqtemplate_broker)
    queue = template.sync_send("orders", b"1").message_queue

    template.receive(bytes)

    assert mqtemplate_broker.committed_offset("billing", queue) is None


def test_the_next_call_confirms_what_the_one_before_returned(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    queue = template.sync_send("orders", b"1").message_queue
    template.receive(bytes)

    template.receive(bytes)

    assert mqtemplate_broker.committed_offset("billing", queue) == 1


def test_closing_confirms_what_was_returned(mqtemplate_broker: EmbeddedBroker) -> None:
    with make_template(mqtemplate_broker) as template:
        template.sync_send("orders", b"1")
        template.receive(bytes)

    with make_template(mqtemplate_broker) as again:
        assert again.receive(bytes) == []


def test_a_group_is_joined_with_the_first_question(mqtemplate_broker: EmbeddedBroker) -> None:
    """A template that only sends is no member of anything."""
    template = make_template(mqtemplate_broker)
    other = make_template(mqtemplate_broker)
    template.sync_send("orders", b"1")

    assert other.receive(bytes) == [b"1"]


def test_a_broadcasting_group_gives_all_to_each(mqtemplate_broker: EmbeddedBroker) -> None:
    templates = [make_template(mqtemplate_broker, message_model=MessageModel.BROADCASTING) for _ in range(2)]
    templates[0].sync_send("orders", b"1")

    assert [template.receive(bytes) for template in templates] == [[b"1"], [b"1"]]


# --- what cannot be received -----------------------------------------------------------------------


def test_a_body_of_another_type_goes_to_the_dead_letters(mqtemplate_broker: EmbeddedBroker) -> None:
    """It stands in nobody's way, and is not lost."""
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", ['{"id":1}', "no order", '{"id":2}'])

    with capture_logs() as logs:
        received = template.receive(Order)

    assert received == [Order(id=1), Order(id=2)]
    assert [message.body for message in messages_in(mqtemplate_broker, "%DLQ%billing")] == [b"no order"]
    [line] = logs
    assert (line["event"], line["topic"], line["group"]) == ("receive.conversion_failed", "orders", "billing")


def test_a_broadcast_body_of_another_type_is_only_logged(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker, message_model=MessageModel.BROADCASTING)
    template.sync_send("orders", "no order")

    with capture_logs() as logs:
        assert template.receive(Order) == []

    assert [line["event"] for line in logs] == ["receive.conversion_failed"]


@pytest.mark.parametrize("settings", [{"consumer_group": None}, {"consumer_topic": None}])
def test_without_group_or_topic_there_is_nothing_to_receive(
    mqtemplate_broker: EmbeddedBroker, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"rocketmq\.pull-consumer\.group and rocketmq\.pull-consumer\.topic"):
        make_template(mqtemplate_broker, **settings).receive(bytes)


@pytest.mark.parametrize("arguments", [(0,), (-1,), ("all",), (32, -1), (32, 1.5)])
def test_counts_and_timeouts_are_checked(mqtemplate_broker: EmbeddedBroker, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MessageError, match="must be a whole number"):
        make_template(mqtemplate_broker).receive(bytes, *arguments)


def test_a_closed_template_receives_no_more(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.close()
    template.close()

    with pytest.raises(BrokerClosedError, match="the template was closed"):
        template.receive(bytes)

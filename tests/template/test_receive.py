"""Receiving on request: ``template.receive``."""

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
from mqtemplate.testing import messages_in
from tests.kit import Kit


class Order(BaseModel):
    id: int


def make_template(broker: EmbeddedBroker, **settings: Any) -> RocketMQTemplate:
    return RocketMQTemplate(broker, **{"consumer_group": "billing", "consumer_topic": "orders", **settings})


def test_messages_are_converted_to_the_type(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", [Order(id=1), Order(id=2)])

    assert template.receive(Order, max_count=32, timeout=3000) == [Order(id=1), Order(id=2)]
    assert template.receive(Order) == []


def test_message_ext_returns_the_whole_message(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    sent = template.sync_send("orders:paid", b"body", keys="4466")

    [message] = template.receive(MessageExt)

    assert (message.msg_id, message.tags, message.keys, message.body) == (sent.msg_id, "paid", "4466", b"body")


def test_receive_returns_at_most_max_count_messages(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", [b"1", b"2", b"3"])

    assert (template.receive(bytes, 2), template.receive(bytes, 2)) == ([b"1", b"2"], [b"3"])


def test_a_selector_excludes_other_tags(mqtemplate_broker: EmbeddedBroker) -> None:
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


def test_the_error_for_an_invalid_selector_contains_the_column(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker, selector_type=SelectorType.SQL92, selector_expression="price >> 5")

    with pytest.raises(SelectorError, match="column 8: found '>'"):
        template.receive(str)


def test_a_delayed_message_is_received_when_it_is_due(kit: Kit) -> None:
    template = make_template(kit.broker)
    template.sync_send("orders", b"later", delay_level=3)

    assert template.receive(bytes) == []
    kit.harness.advance("10s")
    assert template.receive(bytes) == [b"later"]


# --- commits ---------------------------------------------------------------------------------------


def test_returned_messages_are_not_committed_yet(mqtemplate_broker: EmbeddedBroker) -> None:
    """At least once: the process may die while it handles them."""
    template = make_template(mqtemplate_broker)
    queue = template.sync_send("orders", b"1").message_queue

    template.receive(bytes)

    assert mqtemplate_broker.groups.committed_offset("billing", queue) is None


def test_the_next_call_commits_the_messages_of_the_last_one(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    queue = template.sync_send("orders", b"1").message_queue
    template.receive(bytes)

    template.receive(bytes)

    assert mqtemplate_broker.groups.committed_offset("billing", queue) == 1


def test_close_commits_the_returned_messages(mqtemplate_broker: EmbeddedBroker) -> None:
    with make_template(mqtemplate_broker) as template:
        template.sync_send("orders", b"1")
        template.receive(bytes)

    with make_template(mqtemplate_broker) as again:
        assert again.receive(bytes) == []


def test_the_first_receive_joins_the_group(mqtemplate_broker: EmbeddedBroker) -> None:
    """A template that only sends is not a member."""
    template = make_template(mqtemplate_broker)
    other = make_template(mqtemplate_broker)
    template.sync_send("orders", b"1")

    assert other.receive(bytes) == [b"1"]


def test_each_member_of_a_broadcasting_group_receives_all_messages(mqtemplate_broker: EmbeddedBroker) -> None:
    templates = [make_template(mqtemplate_broker, message_model=MessageModel.BROADCASTING) for _ in range(2)]
    templates[0].sync_send("orders", b"1")

    assert [template.receive(bytes) for template in templates] == [[b"1"], [b"1"]]


# --- errors ----------------------------------------------------------------------------------------


def test_a_body_of_another_type_goes_to_the_dead_letter_topic(mqtemplate_broker: EmbeddedBroker) -> None:
    """It does not block the other messages, and is not lost."""
    template = make_template(mqtemplate_broker)
    template.sync_send("orders", ['{"id":1}', "no order", '{"id":2}'])

    with capture_logs() as logs:
        received = template.receive(Order)

    assert received == [Order(id=1), Order(id=2)]
    [dead] = messages_in(mqtemplate_broker, "%DLQ%billing")
    why = dead.user_properties
    assert (dead.body, why["dead_letter_listener"], why["dead_letter_attempts"]) == (b"no order", "receive", "1")
    assert why["dead_letter_exception"] == "mqtemplate.errors.ConversionError"
    assert "Order" in why["dead_letter_message"]
    assert why["dead_letter_failed_at"] == "2026-01-01T00:00:00.000Z"
    assert "dead_letter_stack" not in why
    [line] = logs
    assert (line["event"], line["topic"], line["group"]) == ("receive.conversion_failed", "orders", "billing")


def test_a_broadcast_body_of_another_type_is_only_logged(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker, message_model=MessageModel.BROADCASTING)
    template.sync_send("orders", "no order")

    with capture_logs() as logs:
        assert template.receive(Order) == []

    assert [line["event"] for line in logs] == ["receive.conversion_failed"]


@pytest.mark.parametrize("settings", [{"consumer_group": None}, {"consumer_topic": None}])
def test_receive_without_group_or_topic_is_an_error(
    mqtemplate_broker: EmbeddedBroker, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"rocketmq\.pull-consumer\.group and rocketmq\.pull-consumer\.topic"):
        make_template(mqtemplate_broker, **settings).receive(bytes)


@pytest.mark.parametrize("arguments", [(0,), (-1,), ("all",), (32, -1), (32, "soon")])
def test_counts_and_timeouts_are_checked(mqtemplate_broker: EmbeddedBroker, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MessageError, match="must be (a whole number|0 or longer|a duration)"):
        make_template(mqtemplate_broker).receive(bytes, *arguments)


def test_receive_after_close_is_an_error(mqtemplate_broker: EmbeddedBroker) -> None:
    template = make_template(mqtemplate_broker)
    template.close()
    template.close()

    with pytest.raises(BrokerClosedError, match="the template was closed"):
        template.receive(bytes)

"""Batches: lists of payloads."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import ConversionError, DelayError, DestinationError, MessageError
from mqtemplate.message import Message
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit


def test_the_messages_of_a_list_are_stored_together_and_in_order(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    result = mqtemplate_template.sync_send("orders:paid", [b"bytes", "text", {"id": 1}])

    stored = messages_in(mqtemplate_broker, "orders")
    assert [message.body for message in stored] == [b"bytes", b"text", b'{"id":1}']
    assert {message.message_queue for message in stored} == {result.message_queue}
    assert result.msg_id.split(",") == [message.msg_id for message in stored]


def test_all_messages_of_a_list_get_the_options_of_the_call(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    mqtemplate_template.sync_send("orders:paid", [b"a", b"b"], keys="4466", headers={"region": "EU"})

    stored = messages_in(mqtemplate_broker, "orders")
    assert [(message.tags, message.keys, message.properties["region"]) for message in stored] == [
        ("paid", "4466", "EU")
    ] * 2


def test_messages_of_a_list_may_have_properties_of_their_own(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    batch = [Message("orders", b"a", {"KEYS": "1"}), Message("orders", b"b", {"KEYS": "2"}, flag=7)]

    mqtemplate_template.sync_send("orders:paid", batch, headers={"region": "EU"})

    stored = messages_in(mqtemplate_broker, "orders")
    assert [(message.keys, message.flag, message.tags) for message in stored] == [("1", 0, "paid"), ("2", 7, "paid")]


def test_a_tuple_is_one_message(mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker) -> None:
    mqtemplate_template.sync_send("numbers", (1, 2, 3))

    assert [message.body for message in messages_in(mqtemplate_broker, "numbers")] == [b"[1,2,3]"]


@pytest.mark.parametrize("verb", ["sync_send", "async_send", "send_one_way"])
def test_an_ordered_list_goes_to_the_queue_of_its_key(kit: Kit, verb: str) -> None:
    single = kit.template.sync_send("orders", b"0", hash_key="customer-1")

    getattr(kit.template, verb)("orders", [b"1", b"2"], hash_key="customer-1")
    kit.harness.run_until_idle()

    stored = messages_in(kit.broker, "orders")
    assert [message.body for message in stored] == [b"0", b"1", b"2"]
    assert {message.message_queue for message in stored} == {single.message_queue}


@pytest.mark.parametrize(
    ("payload", "kind", "error"),
    [
        ([], MessageError, "the list for 'orders' is empty; a batch has at least one message"),
        ([b"a", None], ConversionError, "item 1 of the list: the payload is None"),
        ([b"a", "b", b""], ConversionError, "item 2 of the list: the payload is empty"),
        ([Message("bills", b"a")], DestinationError, "item 0 of the list: the message names the topic 'bills'"),
        ([Message("orders", b"")], ConversionError, "item 0 of the list: the message has an empty body"),
        ([Message("orders", b"a", {"DELAY": "-1"})], DelayError, "item 0 of the list: delay_level must be 0"),
    ],
)
def test_a_list_with_an_invalid_item_is_refused_completely(
    mqtemplate_template: RecordingTemplate,
    mqtemplate_broker: EmbeddedBroker,
    payload: list[Any],
    kind: type[MessageError],
    error: str,
) -> None:
    with pytest.raises(kind) as refusal:
        mqtemplate_template.sync_send("orders", payload)

    assert error in str(refusal.value)
    assert messages_in(mqtemplate_broker, "orders") == []

"""Keys, headers, and reserved names."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.message import RESERVED_PROPERTIES, Message
from mqtemplate.testing import RecordingTemplate, messages_in


def sent(template: RecordingTemplate, broker: EmbeddedBroker, **options: Any) -> Any:
    template.sync_send("orders", "body", **options)
    return messages_in(broker, "orders")[0]


@pytest.mark.feature("B12")
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"keys": "4466"}, "4466"),
        ({"keys": "4466 4467"}, "4466 4467"),
        ({"keys": ("4466", "4467")}, "4466 4467"),
        ({"headers": {"KEYS": "4466"}}, "4466"),
        ({"headers": {"rocketmq_KEYS": "4466"}}, "4466"),
        ({"headers": {"KEYS": ["4466", "4467"]}}, "4466 4467"),
        ({"headers": {"KEYS": 4466}}, "4466"),
        ({"keys": "4466", "headers": {"KEYS": "4466"}}, "4466"),
    ],
)
def test_keys_may_be_an_option_or_a_header(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, options: dict[str, Any], keys: str
) -> None:
    assert sent(mqtemplate_template, mqtemplate_broker, **options).keys == keys


def test_headers_with_a_meaning_take_effect(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    headers = {"rocketmq_TAGS": "paid", "rocketmq_FLAG": "7", "WAIT_STORE_MSG_OK": False}

    message = sent(mqtemplate_template, mqtemplate_broker, headers=headers)

    assert (message.tags, message.flag, message.properties["WAIT"]) == ("paid", 7, "false")
    assert message.user_properties == {}


def test_every_other_header_is_a_user_property(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    headers = {"region": "EU", "amount": 12.5, "vip": True, "rocketmq_mine": "kept"}

    message = sent(mqtemplate_template, mqtemplate_broker, headers=headers)

    assert message.user_properties == {"region": "EU", "amount": "12.5", "vip": "true", "rocketmq_mine": "kept"}


def test_two_equal_tags_do_not_contradict_each_other(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    mqtemplate_template.sync_send("orders:paid", b"body", headers={"TAGS": "paid"})

    assert messages_in(mqtemplate_broker, "orders")[0].tags == "paid"


MEANINGFUL = {
    "KEYS", "TAGS", "WAIT", "DELAY",
    "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME",
}  # fmt: skip


@pytest.mark.feature("G9")
@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES - MEANINGFUL))
@pytest.mark.parametrize("prefix", ["", "rocketmq_"])
def test_reserved_names_are_refused(mqtemplate_template: RecordingTemplate, prefix: str, name: str) -> None:
    """Rocketmq-spring drops them silently."""
    with pytest.raises(MessageError, match=f"header '{prefix}{name}' is reserved: {name} belongs to the broker"):
        mqtemplate_template.sync_send("orders", b"body", headers={prefix + name: "1"})


@pytest.mark.feature("G9")
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("UNIQ_KEY", "pass keys="),
        ("REAL_TOPIC", "the destination names the topic"),
        ("REAL_QID", "hash_key= or queue="),
        ("__SHARDINGKEY", "hash_key="),
        ("TIMER_OUT_MS", "delay_level=, delay= or deliver_at="),
        ("TRAN_MSG", "choose another name"),
    ],
)
def test_the_error_for_a_reserved_name_names_the_right_argument(
    mqtemplate_template: RecordingTemplate, name: str, advice: str
) -> None:
    with pytest.raises(MessageError) as refusal:
        mqtemplate_template.sync_send("orders", b"body", headers={name: "1"})

    assert advice in str(refusal.value)


@pytest.mark.feature("G9")
def test_reserved_names_are_refused_in_the_properties_of_a_message(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(MessageError, match="REAL_TOPIC belongs to the broker"):
        mqtemplate_template.sync_send("orders", Message("orders", b"body", {"REAL_TOPIC": "bills"}))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"headers": {"rocketmq_MESSAGE_ID": "7F00"}}, "describes a received message and cannot be sent"),
        ({"headers": {"FLAG": "red"}}, "header FLAG must be a whole number of 32 bits, got 'red'"),
        ({"headers": {"FLAG": 2**31}}, "header FLAG must be a whole number of 32 bits"),
        ({"headers": {"WAIT_STORE_MSG_OK": "perhaps"}}, "must be true or false, got 'perhaps'"),
        ({"headers": {"region": "a\x01b"}}, "header 'region' contains \\x01 or \\x02"),
        ({"headers": {"re\x02gion": "EU"}}, "the name of a header contains \\x01 or \\x02"),
        ({"headers": {"": "EU"}}, "the name of a header is empty"),
        ({"headers": {7: "EU"}}, "header names must be text, got int 7"),
        ({"headers": {"region": ""}}, "header 'region' is empty, and RocketMQ drops empty properties"),
        ({"headers": {"region": None}}, "header 'region' must be text, a number or a boolean, got NoneType"),
        ({"headers": {"region": b"EU"}}, "got bytes"),
        ({"headers": ["region"]}, "headers must be a mapping of names to values, got list"),
        ({"headers": {"FLAG": 1, "rocketmq_FLAG": 2}}, "header FLAG is given twice, plain and as rocketmq_FLAG"),
        ({"headers": {"KEYS": "1", "rocketmq_KEYS": "2"}}, "header KEYS is given twice, plain and as rocketmq_KEYS"),
        ({"headers": {"KEYS": "1"}, "keys": "2"}, "KEYS is given twice: '2' and '1'; give it once"),
        ({"headers": {"KEYS": None}}, "a key must be text, a number or a UUID, got NoneType"),
        ({"keys": ["44 66"]}, "key '44 66' is empty or contains a blank, which separates keys"),
        ({"keys": [""]}, "key '' is empty or contains a blank"),
        ({"keys": "a\x01b"}, "a key contains \\x01 or \\x02"),
        ({"keys": b"4466"}, "a key must be text, a number or a UUID, got bytes"),
    ],
)
def test_an_invalid_header_is_refused(
    mqtemplate_template: RecordingTemplate, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(MessageError) as refusal:
        mqtemplate_template.sync_send("orders", b"body", **options)

    assert error in str(refusal.value)
    assert not isinstance(refusal.value, DelayError)


def test_a_tag_in_destination_and_header_must_agree(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(MessageError, match="the tag is given twice: 'paid' in the destination and 'open' as a header"):
        mqtemplate_template.sync_send("orders:paid", b"body", headers={"TAGS": "open"})

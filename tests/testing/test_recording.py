"""Recorded calls, and the content of a topic."""

from __future__ import annotations

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DelayError
from mqtemplate.testing import Harness, RecordingTemplate, messages_in


def test_a_recording_template_records_each_call(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    order = {"id": 1}

    result = mqtemplate_template.sync_send("orders:paid", order, 3000, delay_level=3)
    future = mqtemplate_template.async_send("orders", [order])
    mqtemplate_template.send_one_way("bills:open", b"body", keys="4466")

    first, second, third = mqtemplate_template.sent
    assert (first.verb, first.topic, first.tag, first.payload) == ("sync_send", "orders", "paid", order)
    assert (first.options, first.result) == ({"timeout": 3000, "delay_level": 3}, result)
    assert (second.verb, second.payload, second.result) == ("async_send", [order], future)
    assert (third.verb, third.topic, third.options, third.result) == ("send_one_way", "bills", {"keys": "4466"}, None)


def test_a_refused_call_is_not_recorded(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(DelayError):
        mqtemplate_template.sync_send("orders", b"body", delay_level=-1)

    assert mqtemplate_template.sent == []


def test_messages_in_returns_all_messages_of_a_topic(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, mqtemplate_harness: Harness
) -> None:
    """Also more than one pull returns; a delayed message only when it is due."""
    mqtemplate_template.sync_send("orders", [str(number) for number in range(100)])
    mqtemplate_template.sync_send("orders", "later", delay_level=1)

    assert len(messages_in(mqtemplate_broker, "orders")) == 100
    mqtemplate_harness.advance("1s")
    assert len(messages_in(mqtemplate_broker, "orders")) == 101

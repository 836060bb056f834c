"""Contract for messages that are sent back, and for dead letters."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability, Consumer
from mqtemplate.errors import UnsupportedError
from mqtemplate.message import MessageExt, Property
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_EXACT_MS = 1_234
_LEVEL_MS = {1: 1_000, 3: 10_000, 4: 30_000, 5: 60_000}


def _send_and_take(under_test: BrokerUnderTest, body: str, **settings: int) -> tuple[Consumer, MessageExt]:
    """Send a message and take it. Skip the test if the broker has no delay levels."""
    under_test.needs(Capability.DELAY_LEVEL)
    topic = under_test.topic()
    under_test.send(topic, body, properties={Property.KEYS: "4466"}, tag="paid")
    member = under_test.join("billing", topic, "paid", **settings)
    return member, under_test.take_one(member)


def _dead_letter(under_test: BrokerUnderTest, member: Consumer) -> MessageExt:
    return under_test.take_one(under_test.join("audit", f"{DLQ_TOPIC_PREFIX}{member.spec.group}"))


class RetryContract:
    """Redelivery of messages that are sent back, with a limit."""

    def test_a_message_that_is_sent_back_is_redelivered(self, under_test: BrokerUnderTest) -> None:
        member, first = _send_and_take(under_test, "hard")

        member.send_back(first, delay_level=1)
        again = under_test.take_one(member)

        assert (first.reconsume_times, again.reconsume_times) == (0, 1)
        assert (again.topic, again.body, again.tags, again.keys) == (first.topic, b"hard", "paid", "4466")
        assert again.msg_id == first.msg_id
        assert again.store_timestamp >= first.store_timestamp + _LEVEL_MS[1]

    def test_the_delay_increases_with_each_retry(self, under_test: BrokerUnderTest) -> None:
        """As in RocketMQ: 10 s, 30 s, 1 m, …"""
        under_test.needs_virtual_time()
        member, message = _send_and_take(under_test, "hard")

        for level in (3, 4, 5):
            member.send_back(message)
            message = under_test.take_one_after(member, _LEVEL_MS[level])

        assert message.reconsume_times == 3

    def test_the_delay_of_a_retry_is_exact(self, under_test: BrokerUnderTest) -> None:
        """On a broker with the capability: a delay that is no level, to the millisecond where time is virtual."""
        under_test.needs(Capability.RETRY_DELAY)
        member, first = _send_and_take(under_test, "hard")
        sent_back_ms = under_test.now_ms()

        member.send_back(first, delay_ms=_EXACT_MS, properties={"first_failed_at": "now"})
        under_test.pass_time(_EXACT_MS - 1 if under_test.broker.clock.is_virtual else _EXACT_MS // 2)
        assert under_test.takes_nothing(member), "before the delay has passed"
        again = under_test.take_one(member)

        assert (again.body, again.tags, again.msg_id) == (b"hard", "paid", first.msg_id)
        assert (again.reconsume_times, again.properties["first_failed_at"]) == (1, "now")
        assert again.store_timestamp >= sent_back_ms + _EXACT_MS - under_test.early_ms
        if under_test.broker.clock.is_virtual:
            assert again.store_timestamp == sent_back_ms + _EXACT_MS

    def test_a_broker_without_exact_delays_refuses_them(self, under_test: BrokerUnderTest) -> None:
        if Capability.RETRY_DELAY in under_test.broker.capabilities:
            pytest.skip("this broker has exact retry delays")
        member, first = _send_and_take(under_test, "hard")

        with pytest.raises(UnsupportedError, match="use a delay level"):
            member.send_back(first, delay_ms=_EXACT_MS)

    def test_a_dead_letter_has_the_properties_that_it_was_sent_back_with(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "poison")

        member.send_back(message, delay_level=-1, properties={"dead_letter_message": "no such customer"})
        dead = _dead_letter(under_test, member)

        assert (dead.body, dead.msg_id, dead.keys) == (b"poison", message.msg_id, "4466")
        assert dead.properties["dead_letter_message"] == "no such customer"
        assert dead.properties[Property.DLQ_ORIGIN_TOPIC].endswith(message.topic)

    def test_after_the_last_retry_a_message_is_a_dead_letter(self, under_test: BrokerUnderTest) -> None:
        member, first = _send_and_take(under_test, "hopeless", max_reconsume_times=1)

        member.send_back(first, delay_level=1)
        member.send_back(under_test.take_one(member), delay_level=1)
        under_test.pass_time(_LEVEL_MS[1])

        assert under_test.takes_nothing(member)
        dead = _dead_letter(under_test, member)
        assert (dead.body, dead.msg_id) == (b"hopeless", first.msg_id)

    def test_with_a_negative_level_a_message_is_a_dead_letter_at_once(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "poison")

        member.send_back(message, delay_level=-1)

        assert _dead_letter(under_test, member).body == b"poison"
        assert under_test.takes_nothing(member)

    def test_a_message_is_redelivered_only_to_the_group_that_sent_it_back(self, under_test: BrokerUnderTest) -> None:
        billing, message = _send_and_take(under_test, "hard")
        audit = under_test.join("audit", message.topic)
        under_test.take(audit, 1)

        billing.send_back(message, delay_level=1)

        assert len(under_test.take(billing, 1)) == 1
        assert under_test.takes_nothing(audit)

    def test_the_retry_topic_is_assigned_without_a_subscription(self, under_test: BrokerUnderTest) -> None:
        member = under_test.join("billing", under_test.topic())
        retry_topic = f"{RETRY_TOPIC_PREFIX}{member.spec.group}"

        under_test.until(
            lambda: retry_topic in {queue.topic for queue in member.assignment()}, "the retry topic is assigned"
        )

    def test_a_message_that_was_sent_back_is_redelivered_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "hard")
        member.send_back(message, delay_level=1)
        under_test.commit_all(member)

        under_test.reopen()
        again = under_test.take(under_test.join("billing", message.topic, "paid"), 1)

        assert bodies(again) == ["hard"]
        assert again[0].reconsume_times == 1

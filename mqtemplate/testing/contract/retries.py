"""The contract, chapter four: giving messages back, and dead letters."""

from __future__ import annotations

from mqtemplate.broker import Capability
from mqtemplate.message import Property
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_LEVEL_MS = {1: 1_000, 2: 5_000, 3: 10_000, 4: 30_000, 5: 60_000}


class RetryContract:
    def test_a_message_given_back_comes_again_one_higher(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        under_test.send(topic, "hard", properties={Property.KEYS: "4466"}, tag="paid")
        member = under_test.join("billing", topic, "paid")
        first = under_test.take_one(member)

        member.send_back(first, delay_level=1)
        assert under_test.takes_nothing(member)
        under_test.pass_time(_LEVEL_MS[1])
        again = under_test.take_one(member)

        assert (first.reconsume_times, again.reconsume_times) == (0, 1)
        assert (again.topic, again.body, again.tags, again.keys) == (topic, b"hard", "paid", "4466")
        assert again.msg_id == first.msg_id
        assert again.store_timestamp >= first.store_timestamp + _LEVEL_MS[1]

    def test_the_broker_waits_longer_each_time(self, under_test: BrokerUnderTest) -> None:
        """RocketMQ's ladder: level 3 + the times it came back before, so 10 s, 30 s, 1 m, …"""
        under_test.needs(Capability.DELAY_LEVEL)
        under_test.needs_virtual_time()
        topic = under_test.topic()
        under_test.send(topic, "hard")
        member = under_test.join("billing", topic)
        message = under_test.take_one(member)

        for level in (3, 4, 5):
            member.send_back(message)
            under_test.pass_time(_LEVEL_MS[level] - 1)
            assert under_test.takes_nothing(member), f"before level {level} is over"
            under_test.pass_time(1)
            message = under_test.take_one(member)

        assert message.reconsume_times == 3

    def test_after_the_last_retry_a_message_is_a_dead_letter(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        sent = under_test.send(topic, "hopeless")
        member = under_test.join("billing", topic, max_reconsume_times=2)

        for _ in range(2):
            member.send_back(under_test.take_one(member), delay_level=1)
            under_test.pass_time(_LEVEL_MS[1])
        member.send_back(under_test.take_one(member), delay_level=1)
        under_test.pass_time(_LEVEL_MS[1])

        assert under_test.takes_nothing(member)
        undertaker = under_test.join("undertaker", f"{DLQ_TOPIC_PREFIX}{member.spec.group}")
        dead = under_test.take_one(undertaker)
        assert (dead.body, dead.msg_id) == (b"hopeless", sent.msg_id)

    def test_a_level_below_nought_goes_straight_to_the_dead_letters(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        under_test.send(topic, "poison")
        member = under_test.join("billing", topic)

        member.send_back(under_test.take_one(member), delay_level=-1)

        undertaker = under_test.join("undertaker", f"{DLQ_TOPIC_PREFIX}{member.spec.group}")
        assert [message.body for message in under_test.take(undertaker, 1)] == [b"poison"]
        assert under_test.takes_nothing(member)

    def test_only_the_group_that_gave_it_back_gets_it_again(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        under_test.send(topic, "hard")
        billing, audit = under_test.join("billing", topic), under_test.join("audit", topic)
        under_test.take(audit, 1)

        billing.send_back(under_test.take_one(billing), delay_level=1)
        under_test.pass_time(_LEVEL_MS[1])

        assert len(under_test.take(billing, 1)) == 1
        assert under_test.takes_nothing(audit)

    def test_the_retry_topic_comes_by_itself(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        member = under_test.join("billing", topic)
        retry_topic = f"{RETRY_TOPIC_PREFIX}{member.spec.group}"

        under_test.until(
            lambda: retry_topic in {queue.topic for queue in member.assignment()}, "the retry topic is assigned"
        )

    def test_what_was_given_back_outlives_a_restart(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        under_test.send(topic, "hard")
        member = under_test.join("billing", topic)
        member.send_back(under_test.take_one(member), delay_level=1)
        under_test.commit_all(member)

        under_test.reopen()
        member = under_test.join("billing", topic)
        under_test.pass_time(_LEVEL_MS[1])

        assert [message.reconsume_times for message in under_test.take(member, 1)] == [1]

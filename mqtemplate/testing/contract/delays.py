"""The contract, chapter five: messages that wait."""

from __future__ import annotations

import random

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import DelayError
from mqtemplate.message import Message, Property
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_LEVEL_1_MS = 1_000
_TWO_HOURS_MS = 7_200_000


class DelayContract:
    def test_a_level_keeps_a_message_back(self, under_test: BrokerUnderTest) -> None:
        """Levels are counted from 1; the message enters its queue when it is due, and not before."""
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic(queue_count=1)
        [queue] = under_test.broker.queues(topic)
        sent_ms = under_test.now_ms()

        under_test.send(topic, "later", properties={Property.DELAY: "1"}, tag="paid")
        assert under_test.broker.max_offset(queue) == 0, "G5: it does not enter the topic first"
        under_test.pass_time(_LEVEL_1_MS)
        message = under_test.take_one(under_test.join("billing", topic, "paid"))

        assert message.store_timestamp >= sent_ms + _LEVEL_1_MS
        assert (message.topic, message.body, message.tags, message.delay_level) == (topic, b"later", "paid", 1)

    def test_a_level_beyond_the_table_is_its_last(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        under_test.needs_virtual_time()
        topic = under_test.topic()
        member = under_test.join("billing", topic)

        under_test.send(topic, "later", properties={Property.DELAY: "99"})
        under_test.pass_time(_TWO_HOURS_MS - 1)
        assert under_test.takes_nothing(member)
        under_test.pass_time(1)

        assert len(under_test.take(member, 1)) == 1

    def test_equal_levels_keep_the_order_of_a_queue(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        queue = under_test.broker.queues(topic)[2]
        for number in range(10):
            under_test.send(topic, str(number), queue, properties={Property.DELAY: "1"})

        under_test.pass_time(_LEVEL_1_MS)
        messages = under_test.take(under_test.join("billing", topic), 10)

        assert [message.body for message in messages] == [b"%d" % number for number in range(10)]
        assert {message.message_queue for message in messages} == {queue}

    @pytest.mark.parametrize("level", ["-1", "soon"])
    def test_a_level_that_is_none_is_refused(self, under_test: BrokerUnderTest, level: str) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()

        with pytest.raises(DelayError, match=level):
            under_test.send(topic, "when?", properties={Property.DELAY: level})

    # --- timers --------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "name",
        [Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS, Property.START_DELIVER_TIME],
    )
    def test_every_way_to_say_it_means_the_same_instant(self, under_test: BrokerUnderTest, name: str) -> None:
        """Two seconds from now, however it is said."""
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()
        member = under_test.join("billing", topic)
        due_ms = under_test.now_ms() + 2_000
        value = {Property.TIMER_DELAY_SEC: 2, Property.TIMER_DELAY_MS: 2_000}.get(name, due_ms)

        under_test.send(topic, "later", properties={name: str(value)})
        under_test.pass_time(1_000)
        assert under_test.takes_nothing(member)
        under_test.pass_time(1_000)
        message = under_test.take_one(member)

        assert message.store_timestamp >= due_ms - under_test.early_ms

    def test_a_timer_is_due_to_the_millisecond(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        under_test.needs_virtual_time()
        topic = under_test.topic()
        member = under_test.join("billing", topic)
        due_ms = under_test.now_ms() + 90_061_234

        under_test.send(topic, "later", properties={Property.TIMER_DELAY_MS: "90061234"})
        under_test.pass_time(90_061_233)
        assert under_test.takes_nothing(member)
        under_test.pass_time(1)

        message = under_test.take_one(member)
        assert message.store_timestamp == message.deliver_timestamp == due_ms

    def test_a_time_that_has_passed_means_at_once(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()
        member = under_test.join("billing", topic)

        under_test.send(topic, "late already", properties={Property.TIMER_DELIVER_MS: str(under_test.now_ms() - 1)})

        assert len(under_test.take(member, 1)) == 1

    def test_a_level_wins_over_a_timer(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.DELAY_LEVEL)
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()
        member = under_test.join("billing", topic)

        under_test.send(topic, "both", properties={Property.DELAY: "1", Property.TIMER_DELAY_SEC: "3600"})
        under_test.pass_time(_LEVEL_1_MS)

        assert len(under_test.take(member, 1)) == 1

    def test_the_longest_delay_is_taken_and_a_longer_one_refused(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()
        longest = under_test.longest_delay_ms

        under_test.send(topic, "in forty days", properties={Property.TIMER_DELAY_MS: str(longest)})
        with pytest.raises(DelayError, match=r"days|limit|longest|max"):
            under_test.send(topic, "too far", properties={Property.TIMER_DELAY_MS: str(longest + 60_000)})

    @pytest.mark.parametrize("value", ["tomorrow", "1.5", ""])
    def test_a_time_that_does_not_parse_is_refused(self, under_test: BrokerUnderTest, value: str) -> None:
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()

        with pytest.raises(DelayError, match="TIMER_DELIVER_MS"):
            under_test.send(topic, "when?", properties={Property.TIMER_DELIVER_MS: value})

    def test_tag_keys_properties_and_queue_survive_the_wait(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        topic = under_test.topic()
        queue = under_test.broker.queues(topic)[3]
        member = under_test.join("billing", topic, "paid")

        own = {Property.KEYS: "4466", "region": "EU"}
        sent = under_test.send(topic, "later", queue, own | {Property.TIMER_DELAY_MS: "1500"}, tag="paid")
        under_test.pass_time(1_500)
        message = under_test.take_one(member)

        assert (message.message_queue, message.tags, message.keys) == (queue, "paid", "4466")
        assert (message.properties["region"], message.msg_id, message.reconsume_times) == ("EU", sent.msg_id, 0)

    def test_a_whole_batch_can_wait(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.BATCH_DELAY)
        topic = under_test.topic()
        member = under_test.join("billing", topic)
        batch = [
            Message(topic, b"level", {Property.DELAY: "1"}),
            Message(topic, b"timer", {Property.TIMER_DELAY_MS: "1000"}),
            Message(topic, b"at once"),
        ]

        under_test.broker.send_batch(batch)
        first = under_test.take(member, 1)
        under_test.pass_time(_LEVEL_1_MS)
        rest = under_test.take(member, 2)

        assert [message.body for message in first] == [b"at once"]
        assert {message.body for message in rest} == {b"level", b"timer"}

    def test_a_storm_of_delays_is_delivered_once_each_and_never_early(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        member = under_test.join("billing", topic)
        chance = random.Random(4466)
        due_ms: dict[bytes, int] = {}
        for number in range(60):
            delay_ms = chance.choice([1_000, chance.randrange(1, 3_000)])
            wish = {Property.DELAY: "1"} if delay_ms == 1_000 else {Property.TIMER_DELAY_MS: str(delay_ms)}
            due_ms[b"%d" % number] = under_test.now_ms() + delay_ms
            under_test.send(topic, str(number), properties=wish)

        under_test.pass_time(3_000)
        messages = under_test.take(member, 60)

        assert {message.body for message in messages} == due_ms.keys()
        early = [
            message for message in messages if message.store_timestamp < due_ms[message.body] - under_test.early_ms
        ]
        assert early == []

    def test_what_waits_outlives_a_restart(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        under_test.needs(Capability.DELAY_LEVEL)
        topic = under_test.topic()
        under_test.send(topic, "level", properties={Property.DELAY: "1"})
        under_test.send(topic, "timer", properties={Property.TIMER_DELAY_MS: "1500"})

        under_test.reopen()
        member = under_test.join("billing", topic)
        assert under_test.takes_nothing(member)
        under_test.pass_time(1_500)

        assert {message.body for message in under_test.take(member, 2)} == {b"level", b"timer"}

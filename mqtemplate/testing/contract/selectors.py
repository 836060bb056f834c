"""Contract for selectors: tags, and SQL92 conditions over the properties of messages."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.results import PullStatus
from mqtemplate.selectors.sql92 import Sql92Selector, make_selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.testing.contract.under_test import BrokerUnderTest


class SelectorContract:
    """Groups and pulls with SQL92 selectors, and selectors that match few messages."""

    def test_an_sql92_group_gets_the_messages_that_match(self, under_test: BrokerUnderTest) -> None:
        queue = _priced(under_test)

        messages = under_test.take(under_test.join("expensive", queue.topic, Sql92Selector("price > 6")), 3)

        assert [message.properties["price"] for message in messages] == ["7", "12", "20"]

    def test_sql92_can_use_the_tag_and_missing_properties(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "paid", tag="paid", properties={"region": "EU"})
        under_test.send(topic, "open", tag="open", properties={"region": "EU"})
        under_test.send(topic, "nowhere", tag="paid")

        selector = Sql92Selector("TAGS = 'paid' AND region IS NOT NULL")

        assert under_test.take_one(under_test.join("european", topic, selector)).body == b"paid"

    def test_a_pull_with_sql92_skips_messages_that_do_not_match(self, under_test: BrokerUnderTest) -> None:
        queue = _priced(under_test)

        found = _pull_all(under_test, queue, Sql92Selector("price BETWEEN 5 AND 15"))
        none = under_test.broker.pull(queue, 0, selector=Sql92Selector("price > 100"))

        assert [message.queue_offset for message in found] == [1, 2]
        assert none.messages == []
        assert none.pull_status is PullStatus.NO_MATCHED_MSG
        assert none.next_begin_offset > 0

    @pytest.mark.parametrize("selector", [TagSelector("paid"), Sql92Selector("price > 5")], ids=repr)
    def test_a_match_after_many_others_is_found_at_once(self, under_test: BrokerUnderTest, selector: Selector) -> None:
        """A thousand messages before it do not match. One poll is enough, or a few."""
        if isinstance(selector, Sql92Selector):
            under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        other = Message(topic, b"open", {Property.TAGS: "open", "price": "1"})
        for _ in range(10):
            under_test.broker.send_batch([other] * 100)
        under_test.send(topic, "paid", tag="paid", properties={"price": "9"})

        assert under_test.take_one(under_test.join("rare", topic, selector)).body == b"paid"

    def test_a_message_that_an_sql92_group_sends_back_is_redelivered(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("expensive", topic, Sql92Selector("price > 6"))
        under_test.send(topic, "tea", properties={"price": "9"})

        consumer.send_back(under_test.take_one(consumer), delay_level=1)
        again = under_test.take_one(consumer)

        assert (again.body, again.reconsume_times) == (b"tea", 1)

    def test_a_member_with_another_sql92_selector_is_refused(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic()
        under_test.join("expensive", topic, Sql92Selector("price > 6"))

        with pytest.raises(ListenerError, match="price > 7"):
            under_test.join("expensive", topic, Sql92Selector("price > 7"))

    def test_the_error_for_wrong_sql92_has_the_column(self) -> None:
        with pytest.raises(SelectorError, match=r"column 8: found '>'"):
            make_selector(SelectorType.SQL92, "price >> 6")


def _priced(under_test: BrokerUnderTest) -> MessageQueue:
    """Return a queue with five messages, each with a price, which may be no number. Skip the test without SQL92."""
    under_test.needs(Capability.SQL92)
    queue = under_test.queue()
    for price in ("3", "7", "12", "cheap", "20"):
        under_test.send(queue.topic, price, properties={"price": price, Property.KEYS: price})
    return queue


def _pull_all(under_test: BrokerUnderTest, queue: MessageQueue, selector: Sql92Selector) -> list[MessageExt]:
    found: list[MessageExt] = []
    offset = 0
    while offset < under_test.broker.max_offset(queue):
        page = under_test.broker.pull(queue, offset, selector=selector)
        found += page.messages
        offset = page.next_begin_offset
    return found

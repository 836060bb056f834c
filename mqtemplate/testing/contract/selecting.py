"""The contract: SQL92 selectors choose by the messages' properties."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.results import PullStatus
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import SelectorType, TagSelector, make_selector
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_PRICES = ("3", "7", "12", "cheap", "20")


class SelectContract:
    def test_an_sql92_group_gets_what_it_selects(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = _priced(under_test)

        messages = under_test.take(under_test.join("dear", topic, Sql92Selector("price > 6")), 3)

        assert [message.properties["price"] for message in messages] == ["7", "12", "20"]

    def test_sql92_sees_the_tag_and_absent_properties(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "paid", tag="paid", properties={"region": "EU"})
        under_test.send(topic, "open", tag="open", properties={"region": "EU"})
        under_test.send(topic, "nowhere", tag="paid")

        selector = Sql92Selector("TAGS = 'paid' AND region IS NOT NULL")

        assert under_test.take_one(under_test.join("european", topic, selector)).body == b"paid"

    def test_a_pull_by_sql92_passes_what_it_leaves_out(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = _priced(under_test)
        [queue] = under_test.broker.queues(topic)

        found = _pull_all(under_test, queue, Sql92Selector("price BETWEEN 5 AND 15"))
        none = under_test.broker.pull(queue, 0, selector=Sql92Selector("price > 100"))

        assert [message.queue_offset for message in found] == [1, 2]
        assert none.messages == []
        assert none.pull_status is PullStatus.NO_MATCHED_MSG
        assert none.next_begin_offset > 0

    @pytest.mark.parametrize("selector", [TagSelector("paid"), Sql92Selector("price > 5")], ids=repr)
    def test_a_rare_message_is_found_at_once(
        self, under_test: BrokerUnderTest, selector: TagSelector | Sql92Selector
    ) -> None:
        """However many messages lie before it that the group does not want: one poll is enough, or a few."""
        if isinstance(selector, Sql92Selector):
            under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        unwanted = Message(topic, b"open", {Property.TAGS: "open", "price": "1"})
        for _ in range(10):
            under_test.broker.send_batch([unwanted] * 100)
        under_test.send(topic, "paid", tag="paid", properties={"price": "9"})

        assert under_test.take_one(under_test.join("rare", topic, selector)).body == b"paid"

    def test_what_an_sql92_group_gives_back_comes_again(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("dear", topic, Sql92Selector("price > 6"))
        under_test.send(topic, "tea", properties={"price": "9"})

        consumer.send_back(under_test.take_one(consumer), delay_level=1)
        under_test.pass_time(1_000)
        again = under_test.take_one(consumer)

        assert (again.body, again.reconsume_times) == (b"tea", 1)

    def test_members_of_a_group_select_alike(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SQL92)
        topic = under_test.topic()
        under_test.join("dear", topic, Sql92Selector("price > 6"))

        with pytest.raises(ListenerError, match="price > 7"):
            under_test.join("dear", topic, Sql92Selector("price > 7"))

    def test_a_mistake_in_sql92_is_told_with_its_column(self, under_test: BrokerUnderTest) -> None:
        with pytest.raises(SelectorError, match=r"column 8: found '>'"):
            make_selector(SelectorType.SQL92, "price >> 6")


def _priced(under_test: BrokerUnderTest) -> str:
    """A topic of one queue with five messages, each with a price that may be none."""
    topic = under_test.topic(queue_count=1)
    for price in _PRICES:
        under_test.send(topic, price, properties={"price": price, Property.KEYS: price})
    return topic


def _pull_all(under_test: BrokerUnderTest, queue: MessageQueue, selector: Sql92Selector) -> list[MessageExt]:
    found: list[MessageExt] = []
    at = 0
    while at < under_test.broker.max_offset(queue):
        page = under_test.broker.pull(queue, at, selector=selector)
        found += page.messages
        at = page.next_begin_offset
    return found

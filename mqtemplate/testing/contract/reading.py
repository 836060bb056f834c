"""Contract for reading a queue by its offsets, for queries by id and by key, and for selectors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import ListenerError, MessageError, OffsetOutOfRangeError, SelectorError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property, offset_msg_id
from mqtemplate.results import PullStatus, SendResult
from mqtemplate.selectors.sql92 import Sql92Selector, make_selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies

_HANG_S = 30.0


class PullContract:
    """Pulling, searching by time, and offsets of groups."""

    def test_a_pull_starts_at_the_given_offset(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.reader.pull(under_test.filled("a", "b", "c"), 1)

        assert page.pull_status is PullStatus.FOUND
        assert [(message.body, message.queue_offset) for message in page.messages] == [(b"b", 1), (b"c", 2)]
        assert (page.next_begin_offset, page.min_offset, page.max_offset) == (3, 0, 3)

    def test_a_pull_returns_at_most_the_given_number_of_messages(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.reader.pull(under_test.filled("a", "b", "c"), 0, max_count=2)

        assert bodies(page.messages) == ["a", "b"]
        assert page.next_begin_offset == 2

    def test_a_pull_at_the_end_of_a_queue_returns_no_message(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.reader.pull(under_test.filled("a"), 1)

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_NEW_MSG, [], 1)

    def test_the_error_for_an_offset_out_of_range_has_the_next_valid_one(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("a", "b")

        with pytest.raises(OffsetOutOfRangeError) as refusal:
            under_test.broker.reader.pull(queue, 7)

        assert refusal.value.next_offset == 2

    def test_a_selector_skips_messages_with_other_tags(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("1#paid", "2#open", "3", "4#refunded", "5#open")

        page = under_test.broker.reader.pull(queue, 0, selector=TagSelector("paid || refunded"))

        assert bodies(page.messages) == ["1", "4"]
        assert page.next_begin_offset == 5

    def test_a_selector_that_matches_no_message_returns_the_next_offset(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.reader.pull(under_test.filled("1#open", "2#open"), 0, selector=TagSelector("paid"))

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_MATCHED_MSG, [], 2)

    def test_tags_with_equal_hashes_are_distinguished(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have the same hash in Java, and the consume queue stores only hashes."""
        page = under_test.broker.reader.pull(under_test.filled("1#Aa", "2#BB"), 0, selector=TagSelector("BB"))

        assert bodies(page.messages) == ["2"]

    def test_a_waiting_pull_returns_a_message_that_arrives(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        queue = under_test.queue()

        with ThreadPoolExecutor(1) as other:
            future = other.submit(under_test.broker.reader.pull, queue, 0, wait_ms=int(_HANG_S * 1_000))
            under_test.send(queue.topic, "at last")
            page = future.result(_HANG_S)

        assert bodies(page.messages) == ["at last"]

    def test_a_waiting_pull_without_a_message_ends_after_its_wait_time(self, under_test: BrokerUnderTest) -> None:
        """On a virtual clock it ends at once, since no other thread could send a message."""
        page = under_test.broker.reader.pull(under_test.queue(), 0, wait_ms=50)

        assert page.pull_status is PullStatus.NO_NEW_MSG

    def test_offsets_can_be_searched_by_time(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("early")
        under_test.pass_time(50)
        between = under_test.now_ms()
        under_test.send(queue.topic, "late")
        under_test.pass_time(50)

        found = [under_test.broker.reader.search_offset(queue, at_ms) for at_ms in (0, between, under_test.now_ms())]

        assert found == [0, 1, 2]

    def test_an_empty_queue_starts_and_ends_at_0(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue()

        assert (under_test.broker.reader.min_offset(queue), under_test.broker.reader.max_offset(queue)) == (0, 0)

    def test_the_offset_of_a_group_is_stored(self, under_test: BrokerUnderTest) -> None:
        queue, group = under_test.filled("a", "b"), under_test.name("billing")

        assert under_test.broker.groups.committed_offset(group, queue) is None
        under_test.broker.groups.commit_offset(group, queue, 1)

        assert under_test.broker.groups.committed_offset(group, queue) == 1

    def test_messages_and_offsets_are_kept_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        queue, group = under_test.filled("a", "b"), under_test.name("billing")
        under_test.broker.groups.commit_offset(group, queue, 1)

        under_test.reopen()

        assert under_test.broker.groups.committed_offset(group, queue) == 1
        assert bodies(under_test.broker.reader.pull(queue, 0).messages) == ["a", "b"]


def _send_with_keys(under_test: BrokerUnderTest, topic: str, body: str, keys: str, **properties: str) -> SendResult:
    """Send a message with keys. Skip the test if the broker has no queries."""
    under_test.needs(Capability.QUERY)
    return under_test.send(topic, body, properties={Property.KEYS: keys, **properties})


class QueryContract:
    """Queries by the broker's id, by key, by the producer's id, and by time."""

    # --- by the broker's id ----------------------------------------------------------------------

    def test_a_message_is_found_by_the_brokers_id(self, under_test: BrokerUnderTest) -> None:
        """It has the position and content that a pull returns."""
        queue = under_test.queue()
        sent = _send_with_keys(under_test, queue.topic, "found", "4466")
        _send_with_keys(under_test, queue.topic, "another", "4467")

        message = under_test.broker.reader.message_by_id(sent.offset_msg_id)

        assert message == under_test.stored(queue, 2)[0]
        assert message is not None
        assert (message.body, message.msg_id, message.offset_msg_id) == (b"found", sent.msg_id, sent.offset_msg_id)

    def test_each_message_of_a_batch_is_found_by_its_own_id(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.QUERY)
        topic = under_test.topic()

        ids = under_test.broker.sends.send_batch([Message(topic, b"one"), Message(topic, b"two")]).offset_msg_id.split(
            ","
        )
        found = [under_test.broker.reader.message_by_id(each) for each in ids]

        assert [message and message.body for message in found] == [b"one", b"two"]

    def test_an_id_without_a_message_finds_none(self, under_test: BrokerUnderTest) -> None:
        sent = _send_with_keys(under_test, under_test.topic(), "stored", "4466")
        host, offset = sent.offset_msg_id[:-16], int(sent.offset_msg_id[-16:], 16)

        assert under_test.broker.reader.message_by_id(f"{host}{offset + (1 << 40):016X}") is None, "after the end"
        assert under_test.broker.reader.message_by_id(f"{host}{offset + 5:016X}") is None, "inside a record"

    def test_the_error_for_an_id_of_another_broker_has_its_address(self, under_test: BrokerUnderTest) -> None:
        _send_with_keys(under_test, under_test.topic(), "here", "4466")

        with pytest.raises(MessageError, match=r"203\.0\.113\.7:10911"):
            under_test.broker.reader.message_by_id(offset_msg_id(HostAddress("203.0.113.7", 10911), 0))

    @pytest.mark.parametrize("text", ["", "4466", "x" * 32, "7F000001" * 3])
    def test_a_malformed_id_is_refused(self, under_test: BrokerUnderTest, text: str) -> None:
        under_test.needs(Capability.QUERY)

        with pytest.raises(MessageError, match=r"32 hex digits"):
            under_test.broker.reader.message_by_id(text)

    # --- by key ----------------------------------------------------------------------------------

    def test_a_key_finds_its_messages_with_the_newest_first(self, under_test: BrokerUnderTest) -> None:
        """In all queues. A message with several keys is found by each of them."""
        topic, broker = under_test.topic(), under_test.broker
        _send_with_keys(under_test, topic, "first", "4466 eu")
        _send_with_keys(under_test, topic, "other", "4467 eu")
        _send_with_keys(under_test, topic, "second", "paid 4466")

        assert bodies(broker.reader.messages_by_key(topic, "4466")) == ["second", "first"]
        assert bodies(broker.reader.messages_by_key(topic, "eu")) == ["other", "first"]
        assert broker.reader.messages_by_key(topic, "446") == []

    def test_a_query_returns_at_most_the_given_number_of_messages(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        for number in range(5):
            _send_with_keys(under_test, topic, str(number), "4466")

        assert bodies(under_test.broker.reader.messages_by_key(topic, "4466", 3)) == ["4", "3", "2"]

    def test_a_query_finds_only_messages_of_its_topic(self, under_test: BrokerUnderTest) -> None:
        orders, invoices = under_test.topic(), under_test.topic(stem="invoices")
        _send_with_keys(under_test, orders, "order", "4466")
        _send_with_keys(under_test, invoices, "invoice", "4466")

        assert bodies(under_test.broker.reader.messages_by_key(invoices, "4466")) == ["invoice"]

    def test_keys_with_equal_hashes_are_distinguished(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have the same hash in Java, and the index stores only hashes."""
        topic = under_test.topic()
        _send_with_keys(under_test, topic, "right", "BB")
        _send_with_keys(under_test, topic, "wrong", "Aa")

        assert bodies(under_test.broker.reader.messages_by_key(topic, "BB")) == ["right"]

    def test_a_message_is_found_by_the_producers_id(self, under_test: BrokerUnderTest) -> None:
        """A key with the text of an id is not the id."""
        topic, broker = under_test.topic(), under_test.broker
        sent = _send_with_keys(under_test, topic, "found", "4466")
        _send_with_keys(under_test, topic, "has the id as its key", sent.msg_id)

        assert bodies(broker.reader.messages_by_key(topic, sent.msg_id, unique=True)) == ["found"]
        assert bodies(broker.reader.messages_by_key(topic, sent.msg_id)) == ["has the id as its key"]
        assert broker.reader.messages_by_key(topic, "4466", unique=True) == []

    def test_a_query_can_be_limited_by_store_time(self, under_test: BrokerUnderTest) -> None:
        """To the millisecond, both ends included."""
        topic = under_test.topic()
        stored = []
        for number in range(3):
            _send_with_keys(under_test, topic, str(number), "4466")
            [newest] = under_test.broker.reader.messages_by_key(topic, "4466", 1)
            stored.append(newest.store_timestamp)
            under_test.pass_time(20)

        def between(begin_ms: int, end_ms: int | None) -> list[str]:
            return bodies(under_test.broker.reader.messages_by_key(topic, "4466", begin_ms=begin_ms, end_ms=end_ms))

        assert between(stored[1], None) == ["2", "1"]
        assert between(stored[1] + 1, stored[2]) == ["2"]
        assert between(stored[0], stored[1]) == ["1", "0"]
        assert between(0, stored[0] - 1) == []

    @pytest.mark.parametrize(("key", "count"), [("", 1), ("two words", 1), ("4466", 0)])
    def test_a_query_with_wrong_arguments_is_refused(self, under_test: BrokerUnderTest, key: str, count: int) -> None:
        under_test.needs(Capability.QUERY)

        with pytest.raises(MessageError, match=r"one word|1 or more"):
            under_test.broker.reader.messages_by_key(under_test.topic(), key, count)

    @pytest.mark.parametrize("delay", [{Property.DELAY: "1"}, {Property.TIMER_DELAY_MS: "1000"}])
    def test_a_delayed_message_is_found_once_after_its_delivery(
        self, under_test: BrokerUnderTest, delay: dict[str, str]
    ) -> None:
        topic = under_test.topic()
        sent = _send_with_keys(under_test, topic, "later", "4466", **delay)

        def found() -> list[str]:
            by_key = under_test.broker.reader.messages_by_key(topic, "4466")
            assert by_key == under_test.broker.reader.messages_by_key(topic, sent.msg_id, unique=True)
            return bodies(by_key)

        assert found() == []
        under_test.pass_time(1_000)
        under_test.take_one(under_test.join("billing", topic))

        assert found() == ["later"]

    # --- by offset and time ----------------------------------------------------------------------

    def test_all_queries_return_the_same_message(self, under_test: BrokerUnderTest) -> None:
        """By id, by key, by queue offset, and by time."""
        queue, broker = under_test.queue(), under_test.broker
        _send_with_keys(under_test, queue.topic, "early", "4465")
        under_test.pass_time(50)
        sent = _send_with_keys(under_test, queue.topic, "found", "4466")
        under_test.pass_time(50)
        _send_with_keys(under_test, queue.topic, "late", "4467")

        [found] = broker.reader.messages_by_key(queue.topic, "4466")

        assert broker.reader.message_by_id(sent.offset_msg_id) == found
        assert broker.reader.pull(queue, sent.queue_offset, 1).messages == [found]
        assert broker.reader.pull(queue, broker.reader.search_offset(queue, found.store_timestamp), 1).messages == [
            found
        ]
        assert found.message_queue == MessageQueue(queue.topic, broker.name, 0)

    def test_messages_are_found_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _send_with_keys(under_test, topic, "stored", "4466")
        before = under_test.broker.reader.messages_by_key(topic, "4466")

        under_test.reopen()
        _send_with_keys(under_test, topic, "new", "4466")

        assert under_test.broker.reader.messages_by_key(topic, "4466")[1:] == before
        assert under_test.broker.reader.message_by_id(sent.offset_msg_id) == before[0]


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
        none = under_test.broker.reader.pull(queue, 0, selector=Sql92Selector("price > 100"))

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
            under_test.broker.sends.send_batch([other] * 100)
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
    """Return a queue with five messages, each with a price, which need not be a number. Skip the test without SQL92."""
    under_test.needs(Capability.SQL92)
    queue = under_test.queue()
    for price in ("3", "7", "12", "cheap", "20"):
        under_test.send(queue.topic, price, properties={"price": price, Property.KEYS: price})
    return queue


def _pull_all(under_test: BrokerUnderTest, queue: MessageQueue, selector: Sql92Selector) -> list[MessageExt]:
    found: list[MessageExt] = []
    offset = 0
    while offset < under_test.broker.reader.max_offset(queue):
        page = under_test.broker.reader.pull(queue, offset, selector=selector)
        found += page.messages
        offset = page.next_begin_offset
    return found

"""Contract for queries of stored messages, by id and by key."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress, Message, MessageQueue, Property, offset_msg_id
from mqtemplate.results import SendResult
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies


def _send(under_test: BrokerUnderTest, topic: str, body: str, keys: str, **properties: str) -> SendResult:
    """Send a message with keys. Skip the test if the broker has no queries."""
    under_test.needs(Capability.QUERY)
    return under_test.send(topic, body, properties={Property.KEYS: keys, **properties})


class QueryContract:
    """Queries by the broker's id, by key, by the producer's id, and by time."""

    # --- by the broker's id ----------------------------------------------------------------------

    def test_a_message_is_found_by_the_brokers_id(self, under_test: BrokerUnderTest) -> None:
        """It has the position and content that a pull returns."""
        queue = under_test.queue()
        sent = _send(under_test, queue.topic, "found", "4466")
        _send(under_test, queue.topic, "another", "4467")

        message = under_test.broker.message_by_id(sent.offset_msg_id)

        assert message == under_test.broker.pull(queue, 0).messages[0]
        assert message is not None
        assert (message.body, message.msg_id, message.offset_msg_id) == (b"found", sent.msg_id, sent.offset_msg_id)

    def test_each_message_of_a_batch_is_found_by_its_own_id(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.QUERY)
        topic = under_test.topic()

        ids = under_test.broker.send_batch([Message(topic, b"one"), Message(topic, b"two")]).offset_msg_id.split(",")
        found = [under_test.broker.message_by_id(each) for each in ids]

        assert [message and message.body for message in found] == [b"one", b"two"]

    def test_an_id_without_a_message_finds_none(self, under_test: BrokerUnderTest) -> None:
        sent = _send(under_test, under_test.topic(), "stored", "4466")
        host, offset = sent.offset_msg_id[:-16], int(sent.offset_msg_id[-16:], 16)

        assert under_test.broker.message_by_id(f"{host}{offset + (1 << 40):016X}") is None, "after the end"
        assert under_test.broker.message_by_id(f"{host}{offset + 5:016X}") is None, "inside a record"

    def test_the_error_for_an_id_of_another_broker_has_its_address(self, under_test: BrokerUnderTest) -> None:
        _send(under_test, under_test.topic(), "here", "4466")

        with pytest.raises(MessageError, match=r"203\.0\.113\.7:10911"):
            under_test.broker.message_by_id(offset_msg_id(HostAddress("203.0.113.7", 10911), 0))

    @pytest.mark.parametrize("text", ["", "4466", "x" * 32, "7F000001" * 3])
    def test_a_malformed_id_is_refused(self, under_test: BrokerUnderTest, text: str) -> None:
        under_test.needs(Capability.QUERY)

        with pytest.raises(MessageError, match=r"32 hex digits"):
            under_test.broker.message_by_id(text)

    # --- by key ----------------------------------------------------------------------------------

    def test_a_key_finds_its_messages_with_the_newest_first(self, under_test: BrokerUnderTest) -> None:
        """In all queues. A message with several keys is found by each of them."""
        topic, broker = under_test.topic(), under_test.broker
        _send(under_test, topic, "first", "4466 eu")
        _send(under_test, topic, "other", "4467 eu")
        _send(under_test, topic, "second", "paid 4466")

        assert bodies(broker.messages_by_key(topic, "4466")) == ["second", "first"]
        assert bodies(broker.messages_by_key(topic, "eu")) == ["other", "first"]
        assert broker.messages_by_key(topic, "446") == []

    def test_a_query_returns_at_most_the_given_number_of_messages(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        for number in range(5):
            _send(under_test, topic, str(number), "4466")

        assert bodies(under_test.broker.messages_by_key(topic, "4466", 3)) == ["4", "3", "2"]

    def test_a_query_finds_only_messages_of_its_topic(self, under_test: BrokerUnderTest) -> None:
        orders, invoices = under_test.topic(), under_test.topic(stem="invoices")
        _send(under_test, orders, "order", "4466")
        _send(under_test, invoices, "invoice", "4466")

        assert bodies(under_test.broker.messages_by_key(invoices, "4466")) == ["invoice"]

    def test_keys_with_equal_hashes_are_distinguished(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have the same hash in Java, and the index stores only hashes."""
        topic = under_test.topic()
        _send(under_test, topic, "right", "BB")
        _send(under_test, topic, "wrong", "Aa")

        assert bodies(under_test.broker.messages_by_key(topic, "BB")) == ["right"]

    def test_a_message_is_found_by_the_producers_id(self, under_test: BrokerUnderTest) -> None:
        """A key with the text of an id is not the id."""
        topic, broker = under_test.topic(), under_test.broker
        sent = _send(under_test, topic, "found", "4466")
        _send(under_test, topic, "has the id as its key", sent.msg_id)

        assert bodies(broker.messages_by_key(topic, sent.msg_id, unique=True)) == ["found"]
        assert bodies(broker.messages_by_key(topic, sent.msg_id)) == ["has the id as its key"]
        assert broker.messages_by_key(topic, "4466", unique=True) == []

    def test_a_query_can_be_limited_by_store_time(self, under_test: BrokerUnderTest) -> None:
        """To the millisecond, both ends included."""
        topic = under_test.topic()
        stored = []
        for number in range(3):
            _send(under_test, topic, str(number), "4466")
            [newest] = under_test.broker.messages_by_key(topic, "4466", 1)
            stored.append(newest.store_timestamp)
            under_test.pass_time(20)

        def between(begin_ms: int, end_ms: int | None) -> list[str]:
            return bodies(under_test.broker.messages_by_key(topic, "4466", begin_ms=begin_ms, end_ms=end_ms))

        assert between(stored[1], None) == ["2", "1"]
        assert between(stored[1] + 1, stored[2]) == ["2"]
        assert between(stored[0], stored[1]) == ["1", "0"]
        assert between(0, stored[0] - 1) == []

    @pytest.mark.parametrize(("key", "count"), [("", 1), ("two words", 1), ("4466", 0)])
    def test_a_query_with_wrong_arguments_is_refused(self, under_test: BrokerUnderTest, key: str, count: int) -> None:
        under_test.needs(Capability.QUERY)

        with pytest.raises(MessageError, match=r"one word|1 or more"):
            under_test.broker.messages_by_key(under_test.topic(), key, count)

    @pytest.mark.parametrize("delay", [{Property.DELAY: "1"}, {Property.TIMER_DELAY_MS: "1000"}])
    def test_a_delayed_message_is_found_once_after_its_delivery(
        self, under_test: BrokerUnderTest, delay: dict[str, str]
    ) -> None:
        topic = under_test.topic()
        sent = _send(under_test, topic, "later", "4466", **delay)

        def found() -> list[str]:
            by_key = under_test.broker.messages_by_key(topic, "4466")
            assert by_key == under_test.broker.messages_by_key(topic, sent.msg_id, unique=True)
            return bodies(by_key)

        assert found() == []
        under_test.pass_time(1_000)
        under_test.take_one(under_test.join("billing", topic))

        assert found() == ["later"]

    # --- by offset and time ----------------------------------------------------------------------

    def test_all_queries_return_the_same_message(self, under_test: BrokerUnderTest) -> None:
        """By id, by key, by queue offset, and by time."""
        queue, broker = under_test.queue(), under_test.broker
        _send(under_test, queue.topic, "early", "4465")
        under_test.pass_time(50)
        sent = _send(under_test, queue.topic, "found", "4466")
        under_test.pass_time(50)
        _send(under_test, queue.topic, "late", "4467")

        [found] = broker.messages_by_key(queue.topic, "4466")

        assert broker.message_by_id(sent.offset_msg_id) == found
        assert broker.pull(queue, sent.queue_offset, 1).messages == [found]
        assert broker.pull(queue, broker.search_offset(queue, found.store_timestamp), 1).messages == [found]
        assert found.message_queue == MessageQueue(queue.topic, broker.name, 0)

    def test_messages_are_found_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _send(under_test, topic, "stored", "4466")
        before = under_test.broker.messages_by_key(topic, "4466")

        under_test.reopen()
        _send(under_test, topic, "new", "4466")

        assert under_test.broker.messages_by_key(topic, "4466")[1:] == before
        assert under_test.broker.message_by_id(sent.offset_msg_id) == before[0]

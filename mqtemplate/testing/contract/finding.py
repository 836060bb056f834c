"""The contract, chapter seven: finding messages by what names them."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property, offset_msg_id
from mqtemplate.results import SendResult
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_LEVEL_1_MS = 1_000
_AN_HOUR_MS = 3_600_000


def _send(under_test: BrokerUnderTest, topic: str, body: str, keys: str, **properties: str) -> SendResult:
    under_test.needs(Capability.QUERY)
    return under_test.send(topic, body, properties={Property.KEYS: keys, **properties})


def _bodies(messages: list[MessageExt]) -> list[str]:
    return [message.body.decode() for message in messages]


class FindingContract:
    # --- by the broker's id ----------------------------------------------------------------------

    def test_a_message_is_found_by_the_id_the_broker_gave(self, under_test: BrokerUnderTest) -> None:
        """As the queue has it: same place, same content."""
        topic = under_test.topic(queue_count=1)
        sent = _send(under_test, topic, "found", "4466")
        _send(under_test, topic, "another", "4467")
        [queue] = under_test.broker.queues(topic)

        message = under_test.broker.message_by_id(sent.offset_msg_id)

        assert message == under_test.broker.pull(queue, 0).messages[0]
        assert message is not None
        assert (message.body, message.msg_id, message.offset_msg_id) == (b"found", sent.msg_id, sent.offset_msg_id)

    def test_each_message_of_a_batch_is_found_by_its_own_id(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.QUERY)
        topic = under_test.topic()
        batch = [Message(topic, b"one"), Message(topic, b"two")]

        ids = under_test.broker.send_batch(batch).offset_msg_id.split(",")
        found = [under_test.broker.message_by_id(each) for each in ids]

        assert [message and message.body for message in found] == [b"one", b"two"]

    def test_an_id_that_names_no_message_finds_none(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _send(under_test, topic, "there", "4466")
        host, offset = sent.offset_msg_id[:-16], int(sent.offset_msg_id[-16:], 16)

        assert under_test.broker.message_by_id(f"{host}{offset + (1 << 40):016X}") is None, "behind the end"
        assert under_test.broker.message_by_id(f"{host}{offset + 5:016X}") is None, "amid a message"

    def test_an_id_of_another_broker_is_refused_with_both_addresses(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        _send(under_test, topic, "here", "4466")
        foreign = offset_msg_id(HostAddress("203.0.113.7", 10911), 0)

        with pytest.raises(MessageError, match=r"203\.0\.113\.7:10911"):
            under_test.broker.message_by_id(foreign)

    @pytest.mark.parametrize("text", ["", "4466", "x" * 32, "7F000001" * 3])
    def test_what_is_no_id_is_refused(self, under_test: BrokerUnderTest, text: str) -> None:
        under_test.needs(Capability.QUERY)

        with pytest.raises(MessageError, match=r"32 hex digits"):
            under_test.broker.message_by_id(text)

    # --- by key ----------------------------------------------------------------------------------

    def test_a_key_finds_its_messages_the_newest_first(self, under_test: BrokerUnderTest) -> None:
        """In whichever queues they are; one of several keys is enough."""
        topic = under_test.topic()
        _send(under_test, topic, "first", "4466 eu")
        _send(under_test, topic, "other", "4467 eu")
        _send(under_test, topic, "second", "paid 4466")

        broker = under_test.broker

        assert _bodies(broker.messages_by_key(topic, "4466")) == ["second", "first"]
        assert _bodies(broker.messages_by_key(topic, "eu")) == ["other", "first"]
        assert broker.messages_by_key(topic, "446") == []

    def test_no_more_are_found_than_asked_for(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        for number in range(5):
            _send(under_test, topic, str(number), "4466")

        found = under_test.broker.messages_by_key(topic, "4466", 3)

        assert _bodies(found) == ["4", "3", "2"]

    def test_a_key_belongs_to_its_topic(self, under_test: BrokerUnderTest) -> None:
        orders, invoices = under_test.topic(), under_test.topic(stem="invoices")
        _send(under_test, orders, "order", "4466")
        _send(under_test, invoices, "invoice", "4466")

        assert _bodies(under_test.broker.messages_by_key(invoices, "4466")) == ["invoice"]

    def test_keys_with_equal_hashes_are_told_apart(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have one hash in Java, and an index keeps only hashes."""
        topic = under_test.topic()
        _send(under_test, topic, "right", "BB")
        _send(under_test, topic, "wrong", "Aa")

        assert _bodies(under_test.broker.messages_by_key(topic, "BB")) == ["right"]

    def test_a_senders_id_finds_its_message(self, under_test: BrokerUnderTest) -> None:
        """And a key that looks like an id is not taken for one."""
        topic = under_test.topic()
        sent = _send(under_test, topic, "meant", "4466")
        _send(under_test, topic, "has the id as its key", sent.msg_id)

        broker = under_test.broker

        assert _bodies(broker.messages_by_key(topic, sent.msg_id, unique=True)) == ["meant"]
        assert _bodies(broker.messages_by_key(topic, sent.msg_id)) == ["has the id as its key"]
        assert broker.messages_by_key(topic, "4466", unique=True) == []

    def test_a_span_of_time_narrows_the_search(self, under_test: BrokerUnderTest) -> None:
        """To the millisecond, both ends included."""
        topic = under_test.topic()
        stored = []
        for number in range(3):
            _send(under_test, topic, str(number), "4466")
            [newest] = under_test.broker.messages_by_key(topic, "4466", 1)
            stored.append(newest.store_timestamp)
            under_test.pass_time(1_500)

        def between(begin_ms: int, end_ms: int | None) -> list[str]:
            return _bodies(under_test.broker.messages_by_key(topic, "4466", begin_ms=begin_ms, end_ms=end_ms))

        assert between(stored[1], None) == ["2", "1"]
        assert between(stored[1] + 1, stored[2]) == ["2"]
        assert between(stored[0], stored[1]) == ["1", "0"]
        assert between(0, stored[0] - 1) == []

    @pytest.mark.parametrize(("key", "max_count"), [("", 1), ("two words", 1), ("4466", 0)])
    def test_a_question_that_makes_no_sense_is_refused(
        self, under_test: BrokerUnderTest, key: str, max_count: int
    ) -> None:
        under_test.needs(Capability.QUERY)
        topic = under_test.topic()

        with pytest.raises(MessageError, match=r"one word|1 or more"):
            under_test.broker.messages_by_key(topic, key, max_count)

    @pytest.mark.parametrize("wish", [{Property.DELAY: "1"}, {Property.TIMER_DELAY_MS: "1000"}])
    def test_what_waits_is_found_when_it_is_delivered_and_then_once(
        self, under_test: BrokerUnderTest, wish: dict[str, str]
    ) -> None:
        under_test.needs(Capability.DELAY_LEVEL if Property.DELAY in wish else Capability.TIMER)
        topic = under_test.topic()
        sent = _send(under_test, topic, "later", "4466", **wish)

        def found() -> list[str]:
            by_key = under_test.broker.messages_by_key(topic, "4466")
            by_id = under_test.broker.messages_by_key(topic, sent.msg_id, unique=True)
            assert by_key == by_id
            return _bodies(by_key)

        assert found() == []
        under_test.pass_time(_LEVEL_1_MS)
        under_test.take_one(under_test.join("billing", topic))

        assert found() == ["later"]

    # --- by place and time -----------------------------------------------------------------------

    def test_the_four_ways_lead_to_one_message(self, under_test: BrokerUnderTest) -> None:
        """By id, by key, by queue offset, and by time."""
        topic = under_test.topic(queue_count=1)
        [queue] = under_test.broker.queues(topic)
        _send(under_test, topic, "early", "4465")
        under_test.pass_time(50)
        sent = _send(under_test, topic, "meant", "4466")
        under_test.pass_time(50)
        _send(under_test, topic, "late", "4467")

        broker = under_test.broker
        [meant] = broker.messages_by_key(topic, "4466")
        at_its_time = broker.search_offset(queue, meant.store_timestamp)

        assert broker.message_by_id(sent.offset_msg_id) == meant
        assert broker.pull(queue, sent.queue_offset, 1).messages == [meant]
        assert broker.pull(queue, at_its_time, 1).messages == [meant]
        assert meant.message_queue == MessageQueue(topic, broker.name, 0)

    def test_what_was_found_is_found_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _send(under_test, topic, "kept", "4466")
        before = under_test.broker.messages_by_key(topic, "4466")

        under_test.reopen()
        _send(under_test, topic, "new", "4466")

        assert under_test.broker.messages_by_key(topic, "4466")[1:] == before
        assert under_test.broker.message_by_id(sent.offset_msg_id) == before[0]

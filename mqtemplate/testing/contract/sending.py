"""Contract for sending: the broker stores each message unchanged, and each numbered message once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import BrokerClosedError, DestinationError, MessageError, SendError
from mqtemplate.message import Message, MessageQueue, Property, SendSequence
from mqtemplate.results import SendResult, SendStatus, SequencedResult
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies
from mqtemplate.testing.recording import messages_in
from mqtemplate.topics import SCHEDULE_TOPIC, is_application_topic


class SendContract:
    """Sending of messages and batches, and refused messages."""

    def test_a_result_has_the_position_of_the_message(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue(2, of=4)

        first, second = (under_test.send(queue.topic, body, queue) for body in ("one", "two"))

        assert first.send_status is SendStatus.SEND_OK
        assert (first.message_queue, second.message_queue) == (queue, queue)
        assert (first.queue_offset, second.queue_offset) == (0, 1)
        assert first.msg_id != second.msg_id
        assert first.offset_msg_id != second.offset_msg_id

    def test_a_message_arrives_as_it_was_sent(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        properties = {Property.TAGS: "paid", Property.KEYS: "4466 4467", "region": "EU-ß"}

        result = under_test.broker.sends.send(Message(topic, b"\x00body\xff", properties, flag=7))
        [message] = under_test.stored(result.message_queue, 1)

        assert (message.topic, message.body, message.flag) == (topic, b"\x00body\xff", 7)
        assert (message.tags, message.keys, message.properties["region"]) == ("paid", "4466 4467", "EU-ß")
        assert (message.message_queue, message.queue_offset) == (result.message_queue, result.queue_offset)
        assert (message.msg_id, message.offset_msg_id) == (result.msg_id, result.offset_msg_id)
        assert message.reconsume_times == 0

    def test_a_message_has_the_times_of_producer_and_broker(self, under_test: BrokerUnderTest) -> None:
        before = under_test.now_ms()

        [message] = under_test.broker.reader.pull(under_test.filled("dated"), 0).messages

        assert before <= message.born_timestamp <= message.store_timestamp <= under_test.now_ms()

    def test_sending_does_not_change_the_message(self, under_test: BrokerUnderTest) -> None:
        """A message can be sent twice. The broker then has two messages."""
        message = Message(under_test.topic(), b"body", {"region": "EU"})

        first, second = under_test.broker.sends.send(message), under_test.broker.sends.send(message)

        assert message == Message(message.topic, b"body", {"region": "EU"})
        assert first.msg_id != second.msg_id

    def test_messages_are_distributed_over_all_queues(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=4)

        used = [under_test.send(topic, str(number)).message_queue.queue_id for number in range(8)]

        assert sorted(used) == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_a_queue_keeps_the_order_of_its_messages(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue(1, of=4)

        for number in range(20):
            under_test.send(queue.topic, str(number), queue)

        assert bodies(under_test.stored(queue, 20)) == [str(number) for number in range(20)]

    def test_an_unknown_topic_is_created(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.name("unknown")

        under_test.send(topic, "first")

        assert len(under_test.broker.queues(topic)) >= 1

    def test_a_topic_can_get_more_queues(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=2)

        under_test.broker.create_topic(topic, 5)

        assert [queue.queue_id for queue in under_test.broker.queues(topic)] == [0, 1, 2, 3, 4]

    def test_the_topics_of_applications_are_listed(self, under_test: BrokerUnderTest) -> None:
        """For listeners with a pattern. Topics of RocketMQ and its brokers, retries and dead letters are left out."""
        topic = under_test.topic()

        under_test.until(lambda: topic in under_test.broker.topic_names(), "the topic is listed")

        names = under_test.broker.topic_names()
        assert [name for name in names if not is_application_topic(name)] == []
        assert {queue.broker_name for queue in under_test.broker.queues(topic)}.isdisjoint(names)

    def test_a_deleted_topic_is_gone_with_its_messages(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(2)
        under_test.send(topic, "x")

        under_test.broker.delete_topic(topic)

        assert topic not in under_test.broker.topic_names()
        assert topic not in under_test.broker.admin().topic_names()

    # --- batches -------------------------------------------------------------------------------

    def test_a_batch_is_stored_in_one_queue_and_in_order(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()

        result = under_test.broker.sends.send_batch([Message(topic, b"%d" % number) for number in range(5)])

        messages = under_test.stored(result.message_queue, 5)
        assert bodies(messages) == ["0", "1", "2", "3", "4"]
        assert result.msg_id.split(",") == [message.msg_id for message in messages]
        assert result.offset_msg_id.split(",") == [message.offset_msg_id for message in messages]

    def test_the_messages_of_a_batch_keep_their_own_properties(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        batch = [Message(topic, b"a", {Property.TAGS: "x"}), Message(topic, b"b", {Property.KEYS: "4466"})]

        queue = under_test.broker.sends.send_batch(batch).message_queue

        messages = under_test.stored(queue, 2)
        assert [(message.tags, message.keys) for message in messages] == [("x", None), (None, "4466")]

    def test_a_batch_is_stored_in_the_given_queue(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue(3, of=4)

        result = under_test.broker.sends.send_batch([Message(queue.topic, b"a"), Message(queue.topic, b"b")], queue)

        assert result.message_queue == queue

    def test_an_empty_batch_is_refused(self, under_test: BrokerUnderTest) -> None:
        with pytest.raises(MessageError, match=r"empty|at least one"):
            under_test.broker.sends.send_batch([])

    def test_a_batch_of_two_topics_is_refused(self, under_test: BrokerUnderTest) -> None:
        batch = [Message(under_test.topic(), b"a"), Message(under_test.topic(stem="bills"), b"b")]

        with pytest.raises(MessageError, match="topic"):
            under_test.broker.sends.send_batch(batch)

    # --- asynchronous and one-way messages -----------------------------------------------------

    def test_an_asynchronous_send_returns_a_future(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)

        one = under_test.result(under_test.broker.sends.send_async([Message(topic, b"one")]))
        two = under_test.result(under_test.broker.sends.send_async([Message(topic, b"two"), Message(topic, b"three")]))

        assert (one.send_status, two.send_status) == (SendStatus.SEND_OK, SendStatus.SEND_OK)
        assert bodies(under_test.stored(one.message_queue, 3)) == ["one", "two", "three"]

    def test_each_of_many_messages_at_the_same_time_has_its_own_position(self, under_test: BrokerUnderTest) -> None:
        """A broker may receive them in fewer requests. Their results, and what is stored, are as of single ones."""
        broker, topic = under_test.broker, under_test.topic(queue_count=2)
        messages = [
            Message(topic, b"%d" % number, {Property.KEYS: f"key-{number}", "region": "EU-ß"}, flag=number)
            for number in range(100)
        ]

        futures = [broker.sends.send_async([message]) for message in messages]
        results = [under_test.result(future) for future in futures]

        for message, result in zip(messages, results, strict=True):
            [found] = broker.reader.pull(result.message_queue, result.queue_offset, 1).messages
            assert (found.body, found.flag, found.keys) == (message.body, message.flag, message.keys)
            assert (found.msg_id, found.offset_msg_id) == (result.msg_id, result.offset_msg_id)
            assert found.properties["region"] == "EU-ß"
        assert len({(result.message_queue, result.queue_offset) for result in results}) == len(messages)

    def test_an_asynchronous_send_can_be_awaited(self, under_test: BrokerUnderTest) -> None:
        """On any event loop, which goes on meanwhile."""
        topic = under_test.topic(queue_count=1)

        async def send() -> list[SendResult]:
            return await asyncio.gather(
                *(under_test.broker.sends.send_async([Message(topic, str(number).encode())]) for number in range(10))
            )

        results = asyncio.run(send())

        assert sorted(result.queue_offset for result in results) == list(range(10))

    def test_the_future_of_an_asynchronous_send_has_its_error(self, under_test: BrokerUnderTest) -> None:
        too_large = Message(under_test.topic(), bytes(under_test.max_message_bytes + 1))

        future = under_test.broker.sends.send_async([too_large])

        with pytest.raises(MessageError):
            under_test.result(future)

    def test_a_one_way_message_arrives(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue()

        under_test.broker.sends.send_one_way(Message(queue.topic, b"fire and forget"))

        under_test.until(lambda: under_test.broker.reader.max_offset(queue) == 1, "the message is stored")

    # --- errors --------------------------------------------------------------------------------

    def test_the_error_for_a_large_body_has_both_sizes(self, under_test: BrokerUnderTest) -> None:
        size = under_test.max_message_bytes + 1
        topic = under_test.topic()

        with pytest.raises(MessageError, match=rf"(?s){size}.*{size - 1}") as refusal:
            under_test.broker.sends.send(Message(topic, bytes(size)))

        assert not isinstance(refusal.value, DestinationError)
        assert under_test.send(topic, "the next one").send_status is SendStatus.SEND_OK

    @pytest.mark.parametrize("topic", ["", "no blanks", "a:b", "ünicode", "x" * 128, SCHEDULE_TOPIC])
    def test_an_illegal_topic_or_a_system_topic_is_refused(self, under_test: BrokerUnderTest, topic: str) -> None:
        with pytest.raises(DestinationError, match=SCHEDULE_TOPIC if topic == SCHEDULE_TOPIC else "topic"):
            under_test.broker.sends.send(Message(topic, b"body"))

    def test_a_closed_broker_raises_an_error(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        under_test.broker.close()
        under_test.broker.close()

        with pytest.raises(BrokerClosedError, match=r"closed|not running"):
            under_test.send(topic, "too late")


_APP = "a-query"


def _send_numbered(
    under_test: BrokerUnderTest, queue: MessageQueue, bodies: Sequence[str], sequence: SendSequence
) -> SequencedResult:
    messages = [(Message(queue.topic, body.encode()), queue) for body in bodies]
    return under_test.broker.sends.send_sequenced(messages, sequence)


def _bodies_in(under_test: BrokerUnderTest, topic: str) -> list[str]:
    return [message.body.decode() for message in messages_in(under_test.broker, topic)]


class SequencedSendContract:
    """Repeats, gaps, versions and delays of numbered messages."""

    @pytest.fixture
    def numbered(self, under_test: BrokerUnderTest) -> MessageQueue:
        under_test.needs(Capability.SEQUENCED_SEND)
        return under_test.queue()

    def test_a_repeated_message_is_stored_once(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """The second send repeats the first one and continues after it, as a task that is run again does."""
        first = _send_numbered(under_test, numbered, ["a", "b"], SendSequence(_APP, 0, 0))
        second = _send_numbered(under_test, numbered, ["a", "b", "c"], SendSequence(_APP, 0, 0))

        assert (first, second) == (SequencedResult(2, 0), SequencedResult(1, 2))
        assert _bodies_in(under_test, numbered.topic) == ["a", "b", "c"]

    def test_partitions_and_applications_have_numbers_of_their_own(
        self, under_test: BrokerUnderTest, numbered: MessageQueue
    ) -> None:
        for app_id, partition in ((_APP, 0), (_APP, 1), ("other", 0)):
            result = _send_numbered(under_test, numbered, [f"{app_id}/{partition}"], SendSequence(app_id, 0, partition))
            assert result == SequencedResult(1, 0)

        assert len(_bodies_in(under_test, numbered.topic)) == 3

    def test_an_older_version_is_dropped(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """A version starts when the one before is complete, so its messages are repeats."""
        _send_numbered(under_test, numbered, ["batch 7"], SendSequence(_APP, 7, 0))
        _send_numbered(under_test, numbered, ["batch 8"], SendSequence(_APP, 8, 0))

        assert _send_numbered(under_test, numbered, ["batch 7"], SendSequence(_APP, 7, 0)) == SequencedResult(0, 1)
        assert _bodies_in(under_test, numbered.topic) == ["batch 7", "batch 8"]

    def test_a_gap_is_refused(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """A lost part must not be taken for stored when it is sent later."""
        _send_numbered(under_test, numbered, ["a"], SendSequence(_APP, 0, 0))

        with pytest.raises(SendError, match=r"the next number is 1, got 2; send the partition again from number 0"):
            _send_numbered(under_test, numbered, ["c"], SendSequence(_APP, 0, 0, 2))

        assert _bodies_in(under_test, numbered.topic) == ["a"]

    def test_messages_of_several_topics_are_one_sequence(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SEQUENCED_SEND)
        topics = [under_test.topic(1, stem) for stem in ("orders", "invoices")]
        queues = [under_test.broker.queues(topic)[0] for topic in topics]
        messages = [(Message(queue.topic, str(n).encode()), queue) for n in range(2) for queue in queues]

        results = [under_test.broker.sends.send_sequenced(messages, SendSequence(_APP, 0, 0)) for _ in range(2)]

        assert results == [SequencedResult(4, 0), SequencedResult(0, 4)]
        assert [_bodies_in(under_test, queue.topic) for queue in queues] == [["0", "1"], ["0", "1"]]

    def test_a_delayed_message_is_delivered_once(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        delayed = [(Message(numbered.topic, b"later", {"DELAY": "1"}), numbered)]
        for _ in range(2):
            under_test.broker.sends.send_sequenced(delayed, SendSequence(_APP, 0, 0))

        under_test.until(lambda: _bodies_in(under_test, numbered.topic) != [], "the message is delivered")

        assert _bodies_in(under_test, numbered.topic) == ["later"]

    def test_numbers_survive_a_restart(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        _send_numbered(under_test, numbered, ["a", "b"], SendSequence(_APP, 3, 1))
        under_test.reopen()

        assert _send_numbered(under_test, numbered, ["a", "b", "c"], SendSequence(_APP, 3, 1)) == SequencedResult(1, 2)
        assert _bodies_in(under_test, numbered.topic) == ["a", "b", "c"]

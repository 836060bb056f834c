"""Contract for ``template.receive``."""

from __future__ import annotations

from typing import Any

from mqtemplate.message import MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.topics import DLQ_TOPIC_PREFIX


class _Receiver:
    """Template that receives until it has enough messages, and is closed at the end of a ``with`` block."""

    def __init__(self, under_test: BrokerUnderTest, topic: str, selector_expression: str = "*") -> None:
        self._under_test = under_test
        self._wait_ms = 0 if under_test.broker.clock.is_virtual else 200
        self.template = RocketMQTemplate(
            under_test.broker,
            consumer_group=under_test.name("readers"),
            consumer_topic=topic,
            selector_expression=selector_expression,
        )

    def __enter__(self) -> _Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.template.close()

    def take(self, count: int, kind: type = str) -> list[Any]:
        taken: list[Any] = []

        def receive() -> bool:
            taken.extend(self.template.receive(kind, max_count=count - len(taken), timeout=self._wait_ms))
            return len(taken) >= count

        self._under_test.until(receive, f"{count} messages are received")
        return taken


def _topic_with(under_test: BrokerUnderTest, *payloads: str) -> str:
    """Create a topic with one queue and these messages."""
    topic = under_test.topic(queue_count=1)
    for payload in payloads:
        under_test.send(topic, payload)
    return topic


class ReceiveContract:
    """Receiving by a call, with conversion and commits."""

    def test_receive_returns_earlier_messages(self, under_test: BrokerUnderTest) -> None:
        """A new group starts at the first message, since a program may call ``receive`` only now and then."""
        topic = _topic_with(under_test, "order 0", "order 1", "order 2")

        with _Receiver(under_test, topic) as receiver:
            assert receiver.take(3) == ["order 0", "order 1", "order 2"]

    def test_receive_converts_payloads_to_the_given_type(self, under_test: BrokerUnderTest) -> None:
        topic = _topic_with(under_test, '{"id": 7}', '{"id": 8}')

        with _Receiver(under_test, topic) as receiver:
            [order], [message] = receiver.take(1, dict), receiver.take(1, MessageExt)

        assert order == {"id": 7}
        assert isinstance(message, MessageExt)
        assert message.body == b'{"id": 8}'

    def test_receive_commits_messages_with_the_next_call(self, under_test: BrokerUnderTest) -> None:
        """Another member of the group starts after the committed messages, and gets the others again."""
        topic = _topic_with(under_test, "0", "1", "2", "3")
        with _Receiver(under_test, topic) as first:
            committed = first.take(2)
            first.take(1)

        with _Receiver(under_test, topic) as second:
            rest = second.take(1)

        assert (committed, rest) == (["0", "1"], ["3"])

    def test_receive_selects_by_tag(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        for body, tag in (("paid", "paid"), ("open", "open"), ("paid too", "paid")):
            under_test.send(topic, body, tag=tag)

        with _Receiver(under_test, topic, selector_expression="paid") as receiver:
            assert receiver.take(2) == ["paid", "paid too"]

    def test_receive_without_a_message_returns_an_empty_list(self, under_test: BrokerUnderTest) -> None:
        with _Receiver(under_test, under_test.topic(queue_count=1)) as receiver:
            assert receiver.template.receive(str, timeout=100) == []

    def test_receive_sends_unreadable_messages_to_the_dead_letters(self, under_test: BrokerUnderTest) -> None:
        topic = _topic_with(under_test, "no json", '{"id": 8}')

        with _Receiver(under_test, topic) as receiver:
            assert receiver.take(1, dict) == [{"id": 8}]

        [dead_queue] = under_test.broker.queues(DLQ_TOPIC_PREFIX + under_test.name("readers"))
        under_test.until(lambda: under_test.broker.max_offset(dead_queue) == 1, "it is with the dead letters")

"""Contract for ``template.receive``."""

from __future__ import annotations

from typing import Any

from mqtemplate.message import MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.topics import DLQ_TOPIC_PREFIX


def _reader(under_test: BrokerUnderTest, topic: str, selector_expression: str = "*") -> RocketMQTemplate:
    """Return a template that receives from *topic*. It is closed at the end of a ``with`` block."""
    return RocketMQTemplate(
        under_test.broker,
        consumer_group=under_test.name("readers"),
        consumer_topic=topic,
        selector_expression=selector_expression,
    )


def _take(under_test: BrokerUnderTest, template: RocketMQTemplate, count: int, kind: type = str) -> list[Any]:
    """Receive until *count* messages have arrived."""
    wait_ms = 0 if under_test.broker.clock.is_virtual else 200
    return under_test.gather(lambda missing: template.receive(kind, max_count=missing, timeout=wait_ms), count)


class ReceiveContract:
    """Receiving by a call, with conversion and commits."""

    def test_receive_returns_earlier_messages(self, under_test: BrokerUnderTest) -> None:
        """A new group starts at the first message, since a program may call ``receive`` only now and then."""
        topic = under_test.filled("order 0", "order 1", "order 2").topic

        with _reader(under_test, topic) as template:
            assert _take(under_test, template, 3) == ["order 0", "order 1", "order 2"]

    def test_receive_converts_payloads_to_the_given_type(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled('{"id": 7}', '{"id": 8}').topic

        with _reader(under_test, topic) as template:
            [order], [message] = _take(under_test, template, 1, dict), _take(under_test, template, 1, MessageExt)

        assert order == {"id": 7}
        assert isinstance(message, MessageExt)
        assert message.body == b'{"id": 8}'

    def test_receive_commits_messages_with_the_next_call(self, under_test: BrokerUnderTest) -> None:
        """Another member of the group starts after the committed messages, and gets the others again."""
        topic = under_test.filled("0", "1", "2", "3").topic
        with _reader(under_test, topic) as first:
            committed = _take(under_test, first, 2)
            _take(under_test, first, 1)

        with _reader(under_test, topic) as second:
            rest = _take(under_test, second, 1)

        assert (committed, rest) == (["0", "1"], ["3"])

    def test_receive_selects_by_tag(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled("paid#paid", "open#open", "paid too#paid").topic

        with _reader(under_test, topic, selector_expression="paid") as template:
            assert _take(under_test, template, 2) == ["paid", "paid too"]

    def test_receive_without_a_message_returns_an_empty_list(self, under_test: BrokerUnderTest) -> None:
        with _reader(under_test, under_test.topic(queue_count=1)) as template:
            assert template.receive(str, timeout=100) == []

    def test_receive_sends_unreadable_messages_to_the_dead_letters(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled("no json", '{"id": 8}').topic

        with _reader(under_test, topic) as template:
            assert _take(under_test, template, 1, dict) == [{"id": 8}]

        [dead_queue] = under_test.broker.queues(DLQ_TOPIC_PREFIX + under_test.name("readers"))
        under_test.until(lambda: under_test.broker.max_offset(dead_queue) == 1, "it is with the dead letters")

"""The contract: ``template.receive`` works over every broker."""

from __future__ import annotations

from mqtemplate.message import MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.topics import DLQ_TOPIC_PREFIX


class _Reader:
    """A template that receives, asked until enough came."""

    def __init__(self, under_test: BrokerUnderTest, topic: str, selector_expression: str = "*") -> None:
        self.under_test = under_test
        self.template = RocketMQTemplate(
            under_test.broker,
            consumer_group=under_test.name("readers"),
            consumer_topic=topic,
            selector_expression=selector_expression,
        )

    def take(self, count: int, kind: type = str) -> list[object]:
        taken: list[object] = []

        def enough() -> bool:
            taken.extend(self.template.receive(kind, max_count=count - len(taken), timeout=self._wait_ms))
            return len(taken) >= count

        self.under_test.until(enough, f"{count} messages are received")
        return taken

    @property
    def _wait_ms(self) -> int:
        return 0 if self.under_test.broker.clock.is_virtual else 200


class ReceiveContract:
    def test_receive_gives_what_was_sent_before(self, under_test: BrokerUnderTest) -> None:
        """A new group begins at the first message, since a program that asks now and then would else miss it."""
        topic = under_test.topic(queue_count=1)
        for number in range(3):
            under_test.send(topic, f"order {number}")
        reader = _Reader(under_test, topic)

        received = reader.take(3)

        reader.template.close()
        assert received == ["order 0", "order 1", "order 2"]

    def test_receive_reads_payloads_as_the_type_asked_for(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, '{"id": 7}')
        under_test.send(topic, '{"id": 8}')
        reader = _Reader(under_test, topic)

        [order], [message] = reader.take(1, dict), reader.take(1, MessageExt)

        reader.template.close()
        assert order == {"id": 7}
        assert isinstance(message, MessageExt)
        assert message.body == b'{"id": 8}'

    def test_receive_confirms_what_it_gave_with_the_next_call(self, under_test: BrokerUnderTest) -> None:
        """Another reader of the group goes on behind what was confirmed, and gets the rest again."""
        topic = under_test.topic(queue_count=1)
        for number in range(4):
            under_test.send(topic, str(number))
        first = _Reader(under_test, topic)
        confirmed = first.take(2)
        first.take(1)
        first.template.close()

        second = _Reader(under_test, topic)
        rest = second.take(1)

        second.template.close()
        assert (confirmed, rest) == (["0", "1"], ["3"])

    def test_receive_selects_by_tag(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "paid", tag="paid")
        under_test.send(topic, "open", tag="open")
        under_test.send(topic, "paid too", tag="paid")
        reader = _Reader(under_test, topic, selector_expression="paid")

        received = reader.take(2)

        reader.template.close()
        assert received == ["paid", "paid too"]

    def test_receive_returns_empty_handed_when_nothing_comes(self, under_test: BrokerUnderTest) -> None:
        reader = _Reader(under_test, under_test.topic(queue_count=1))

        received = reader.template.receive(str, timeout=100)

        reader.template.close()
        assert received == []

    def test_receive_puts_aside_what_is_not_of_the_type(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "no json")
        under_test.send(topic, '{"id": 8}')
        reader = _Reader(under_test, topic)

        received = reader.take(1, dict)

        reader.template.close()
        assert received == [{"id": 8}]
        [dead_queue] = under_test.broker.queues(DLQ_TOPIC_PREFIX + under_test.name("readers"))
        under_test.until(lambda: under_test.broker.max_offset(dead_queue) == 1, "it is with the dead letters")

"""Contract for sequenced sends: numbered messages of which each is stored once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import SendError
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.results import SequencedResult
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.testing.recording import messages_in

_APP = "a-query"


def _send(
    under_test: BrokerUnderTest, queue: MessageQueue, bodies: Sequence[str], sequence: SendSequence
) -> SequencedResult:
    messages = [(Message(queue.topic, body.encode()), queue) for body in bodies]
    return under_test.broker.send_sequenced(messages, sequence)


def _bodies(under_test: BrokerUnderTest, topic: str) -> list[str]:
    return [message.body.decode() for message in messages_in(under_test.broker, topic)]


class SequencedSendContract:
    """Repeats, gaps, versions and delays of numbered messages."""

    @pytest.fixture
    def numbered(self, under_test: BrokerUnderTest) -> MessageQueue:
        under_test.needs(Capability.SEQUENCED_SEND)
        return under_test.queue()

    def test_a_repeated_message_is_stored_once(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """The second send repeats the first one and continues after it, as a task that is run again does."""
        first = _send(under_test, numbered, ["a", "b"], SendSequence(_APP, 0, 0))
        second = _send(under_test, numbered, ["a", "b", "c"], SendSequence(_APP, 0, 0))

        assert (first, second) == (SequencedResult(2, 0), SequencedResult(1, 2))
        assert _bodies(under_test, numbered.topic) == ["a", "b", "c"]

    def test_partitions_and_applications_have_numbers_of_their_own(
        self, under_test: BrokerUnderTest, numbered: MessageQueue
    ) -> None:
        for app_id, partition in ((_APP, 0), (_APP, 1), ("other", 0)):
            result = _send(under_test, numbered, [f"{app_id}/{partition}"], SendSequence(app_id, 0, partition))
            assert result == SequencedResult(1, 0)

        assert len(_bodies(under_test, numbered.topic)) == 3

    def test_an_older_version_is_dropped(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """A version starts when the one before is complete, so its messages are repeats."""
        _send(under_test, numbered, ["batch 7"], SendSequence(_APP, 7, 0))
        _send(under_test, numbered, ["batch 8"], SendSequence(_APP, 8, 0))

        assert _send(under_test, numbered, ["batch 7"], SendSequence(_APP, 7, 0)) == SequencedResult(0, 1)
        assert _bodies(under_test, numbered.topic) == ["batch 7", "batch 8"]

    def test_a_gap_is_refused(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        """A lost part must not be taken for stored when it is sent later."""
        _send(under_test, numbered, ["a"], SendSequence(_APP, 0, 0))

        with pytest.raises(SendError, match=r"the next number is 1, got 2; send the partition again from number 0"):
            _send(under_test, numbered, ["c"], SendSequence(_APP, 0, 0, 2))

        assert _bodies(under_test, numbered.topic) == ["a"]

    def test_messages_of_several_topics_are_one_sequence(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SEQUENCED_SEND)
        topics = [under_test.topic(1, stem) for stem in ("orders", "invoices")]
        queues = [under_test.broker.queues(topic)[0] for topic in topics]
        messages = [(Message(queue.topic, str(n).encode()), queue) for n in range(2) for queue in queues]

        results = [under_test.broker.send_sequenced(messages, SendSequence(_APP, 0, 0)) for _ in range(2)]

        assert results == [SequencedResult(4, 0), SequencedResult(0, 4)]
        assert [_bodies(under_test, queue.topic) for queue in queues] == [["0", "1"], ["0", "1"]]

    def test_a_delayed_message_is_delivered_once(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        delayed = [(Message(numbered.topic, b"later", {"DELAY": "1"}), numbered)]
        for _ in range(2):
            under_test.broker.send_sequenced(delayed, SendSequence(_APP, 0, 0))

        under_test.until(lambda: _bodies(under_test, numbered.topic) != [], "the message is delivered")

        assert _bodies(under_test, numbered.topic) == ["later"]

    def test_numbers_survive_a_restart(self, under_test: BrokerUnderTest, numbered: MessageQueue) -> None:
        _send(under_test, numbered, ["a", "b"], SendSequence(_APP, 3, 1))
        under_test.reopen()

        assert _send(under_test, numbered, ["a", "b", "c"], SendSequence(_APP, 3, 1)) == SequencedResult(1, 2)
        assert _bodies(under_test, numbered.topic) == ["a", "b", "c"]

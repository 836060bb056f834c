"""Contract for requests and replies."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import MessageError, RequestTimeoutError
from mqtemplate.message import Message, MessageExt
from mqtemplate.testing.contract.under_test import BrokerUnderTest


def _request(
    under_test: BrokerUnderTest, topic: str, body: bytes, timeout_ms: int = 10_000, **properties: str
) -> Future[MessageExt]:
    """Send a request. Skip the test if the broker has no requests."""
    under_test.needs(Capability.REQUEST_REPLY)
    return under_test.broker.request(Message(topic, body, properties), None, timeout_ms)


class ReplyContract:
    """Replies, timeouts, and delayed requests."""

    def test_a_request_gets_its_reply(self, under_test: BrokerUnderTest) -> None:
        topic, consumer = under_test.joined("answers", 1)

        future = _request(under_test, topic, b"how much?", TAGS="price")
        request = under_test.take_one(consumer)
        was_done = future.done()
        under_test.broker.reply(request, b"12.50", {"currency": "EUR"})
        reply = under_test.result(future)

        assert (request.body, request.tags) == (b"how much?", "price")
        assert not was_done
        assert (reply.body, reply.properties["currency"]) == (b"12.50", "EUR")

    def test_replies_can_be_sent_in_any_order(self, under_test: BrokerUnderTest) -> None:
        topic, consumer = under_test.joined("answers", 1)

        futures = [_request(under_test, topic, body) for body in (b"a", b"b", b"c")]
        for request in reversed(under_test.take(consumer, 3)):
            under_test.broker.reply(request, request.body.upper())

        assert [under_test.result(future).body for future in futures] == [b"A", b"B", b"C"]

    def test_a_request_without_a_reply_ends_with_a_timeout(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)

        future = _request(under_test, topic, b"no consumer", timeout_ms=300)

        with pytest.raises(RequestTimeoutError, match=rf"{topic}.*300ms"):
            under_test.result(future)

    def test_a_reply_to_a_message_that_is_no_request_is_refused(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        [message] = under_test.broker.pull(under_test.filled("a plain message"), 0).messages

        with pytest.raises(MessageError, match="no request"):
            under_test.broker.reply(message, b"no request")

    def test_a_request_can_be_delayed(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        topic, consumer = under_test.joined("answers", 1)

        future = _request(under_test, topic, b"later", TIMER_DELAY_MS="300")
        under_test.broker.reply(under_test.take_one(consumer), b"done")

        assert under_test.result(future).body == b"done"

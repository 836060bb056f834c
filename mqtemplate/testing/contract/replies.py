"""The contract: a request finds somebody, and the reply finds back."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import MessageError, RequestTimeoutError
from mqtemplate.message import Message, Property
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_TIMEOUT_MS = 10_000


class ReplyContract:
    def test_a_request_gets_its_reply(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("answers", topic)

        future = under_test.broker.request(Message(topic, b"how much?", {Property.TAGS: "price"}), None, _TIMEOUT_MS)
        request = under_test.take_one(consumer)
        was_done = future.done()
        under_test.broker.reply(request, b"12.50", {"currency": "EUR"})
        reply = under_test.answer(future)

        assert (request.body, request.tags) == (b"how much?", "price")
        assert not was_done
        assert (reply.body, reply.properties["currency"]) == (b"12.50", "EUR")

    def test_replies_find_their_requests_in_any_order(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("answers", topic)
        bodies = [b"a", b"b", b"c"]

        futures = [under_test.broker.request(Message(topic, body), None, _TIMEOUT_MS) for body in bodies]
        for request in reversed(under_test.take(consumer, 3)):
            under_test.broker.reply(request, request.body.upper())

        assert [under_test.answer(future).body for future in futures] == [b"A", b"B", b"C"]

    def test_a_request_without_a_reply_ends_with_the_time_out(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        topic = under_test.topic(queue_count=1)

        future = under_test.broker.request(Message(topic, b"anybody?"), None, 300)

        with pytest.raises(RequestTimeoutError, match=rf"{topic}.*300 ms"):
            under_test.answer(future)

    def test_only_a_request_can_be_replied_to(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        topic = under_test.topic(queue_count=1)
        queue = under_test.send(topic, "a plain message").message_queue
        [message] = under_test.broker.pull(queue, 0).messages

        with pytest.raises(MessageError, match="no request"):
            under_test.broker.reply(message, b"to whom?")

    def test_a_request_may_be_delayed(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        under_test.needs(Capability.TIMER)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("answers", topic)
        message = Message(topic, b"later", {Property.TIMER_DELAY_MS: "1500"})

        future = under_test.broker.request(message, None, _TIMEOUT_MS)
        under_test.pass_time(1_500)
        under_test.broker.reply(under_test.take_one(consumer), b"done")

        assert under_test.answer(future).body == b"done"

"""Requests and replies of the embedded broker, beyond the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.engine.clients import ConsumerGroupInfo
from mqtemplate.errors import BrokerClosedError, MessageError, RequestTimeoutError, SendError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.testing import Harness, messages_in


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        yield broker


def received(broker: EmbeddedBroker, topic: str = "prices") -> MessageExt:
    [message] = messages_in(broker, topic)
    return message


def test_a_request_and_its_reply_have_the_properties_of_rocketmq(broker: EmbeddedBroker) -> None:
    """So either of them may come from a Java client. Source: ``MessageUtil``."""
    future = broker.requests.request(Message("prices", b"tea?"), None, 5_000)
    request = received(broker)

    broker.requests.reply(request, b"3.20", {"currency": "EUR"})
    reply = future.result(0)

    correlation_id = request.properties[Property.CORRELATION_ID]
    assert request.properties[Property.REPLY_TO_CLIENT] == broker.engine.requests.client_id
    assert request.properties[Property.TTL] == "5000"
    assert reply.topic == "DefaultCluster_REPLY_TOPIC"
    assert reply.properties[Property.CORRELATION_ID] == correlation_id
    assert reply.properties[Property.MESSAGE_TYPE] == "reply"
    assert reply.user_properties == {"currency": "EUR"}


def test_a_request_does_not_change_the_message(broker: EmbeddedBroker) -> None:
    message = Message("prices", b"tea?", {"region": "EU"})

    broker.requests.request(message)

    assert message.properties == {"region": "EU"}


def test_a_request_that_cannot_be_sent_raises_at_once(broker: EmbeddedBroker) -> None:
    with pytest.raises(MessageError, match="allowed are"):
        broker.requests.request(Message("prices", bytes(5 << 20)))

    assert len(broker.engine.requests.pending) == 0


def test_the_error_of_a_timeout_names_topic_time_and_solution(broker: EmbeddedBroker) -> None:
    plain = broker.requests.request(Message("prices", b"tea?"), None, 500)
    delayed = broker.requests.request(Message("prices", b"tea?", {Property.DELAY: "3"}), None, 700)

    Harness(broker).advance("1s")

    with pytest.raises(RequestTimeoutError, match=r"to 'prices' arrived within 500ms; .*Check that a listener"):
        plain.result(0)
    with pytest.raises(RequestTimeoutError, match=r"within 700ms; the time counts from the send, .*the delay"):
        delayed.result(0)


def test_a_reply_after_the_timeout_raises(broker: EmbeddedBroker) -> None:
    broker.requests.request(Message("prices", b"tea?"), None, 500)
    request = received(broker)
    Harness(broker).advance("1s")

    with pytest.raises(SendError, match=f"{request.msg_id}.*could not be delivered.*no longer waits"):
        broker.requests.reply(request, b"3.20")


class RemoteClients:
    """The clients of a server: one that accepts replies."""

    def __init__(self) -> None:
        self.replies: list[MessageExt] = []

    def has_members(self, group: str) -> bool:
        return False

    def consumer_groups(self) -> list[ConsumerGroupInfo]:
        return []

    def deliver_reply(self, reply: MessageExt) -> bool:
        self.replies.append(reply)
        return True

    def can_check(self, group: str, topic: str) -> bool:
        return False

    def send_check(self, check: TransactionCheck) -> None:
        raise AssertionError("no check was expected")


def test_a_reply_to_a_remote_client_is_passed_to_the_server(broker: EmbeddedBroker) -> None:
    """The server sends it to the client that sent the request."""
    clients = RemoteClients()
    broker.engine.attach(clients)
    properties = {Property.CORRELATION_ID: "c-1", Property.REPLY_TO_CLIENT: "10.0.0.7@4711", Property.CLUSTER: "north"}
    broker.sends.send(Message("prices", b"tea?", properties))

    broker.requests.reply(received(broker), b"3.20")

    assert [(reply.topic, reply.body) for reply in clients.replies] == [("north_REPLY_TOPIC", b"3.20")]


def test_a_reply_to_a_client_that_is_not_connected_raises(broker: EmbeddedBroker) -> None:
    properties = {Property.CORRELATION_ID: "c-1", Property.REPLY_TO_CLIENT: "10.0.0.7@4711"}
    broker.sends.send(Message("prices", b"tea?", properties))

    with pytest.raises(SendError, match="client '10.0.0.7@4711', which sent the request, is not connected"):
        broker.requests.reply(received(broker), b"3.20")


def test_requests_are_counted(broker: EmbeddedBroker) -> None:
    broker.requests.request(Message("prices", b"tea?"))
    broker.requests.request(Message("prices", b"wine?"))
    broker.requests.request(Message("prices", b"beer?"), None, 500)
    request = next(message for message in messages_in(broker, "prices") if message.body == b"tea?")
    broker.requests.reply(request, b"3.20")
    Harness(broker).advance("1s")

    snapshot = broker.metrics.snapshot()

    assert [snapshot[f"request.{name}"] for name in ("pending", "replied", "timed_out")] == [1, 1, 1]


def test_closing_the_broker_ends_its_pending_requests() -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        future = broker.requests.request(Message("prices", b"tea?"))

    with pytest.raises(BrokerClosedError, match="closed before the reply to the request to 'prices' arrived"):
        future.result(0)

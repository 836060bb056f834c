"""Rules of RocketMQ's gRPC protocol that no single call shows, over a raw client with each server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Credentials
from tests.conformance.grpc_clients.accounts import RIGHTS_CASE, USERS, User
from tests.conformance.grpc_clients.servers import Administrator, GrpcServer
from tests.server.grpc_api.grpc_tool import GrpcTool, consumer_settings, message, producer_settings
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(900)]

_ATTEMPTS = 17
_RENEWED_S = 75
"""Longer than the minute for which the server makes a message invisible that it renews."""


def _connect(server: GrpcServer, client_id: str, account: Credentials | None = None) -> GrpcTool:
    host, _, port = server.endpoint.rpartition(":")
    keys = (account.access_key, account.secret_key) if account else None
    return GrpcTool(HostAddress(host, int(port)), client_id, keys=keys)


def _create(server: GrpcServer, name: str) -> None:
    with Administrator(server) as administrator:
        administrator.create_topic(name)
        administrator.create_group(name)


@pytest.fixture
def consumer(open_server: GrpcServer, request: pytest.FixtureRequest) -> Iterator[GrpcTool]:
    """A simple consumer that has reported its settings. Its client ID is the name of its topic and group."""
    name = f"raw-{request.node.originalname.replace('_', '-')}"
    _create(open_server, name)
    with _connect(open_server, name) as tool:
        stream = tool.telemetry()
        stream.report(consumer_settings(name, name, kind=ClientType.PUSH_CONSUMER))
        yield tool
        stream.cancel()


def test_a_message_is_delivered_seventeen_times(consumer: GrpcTool, open_server: GrpcServer) -> None:
    """The group has 16 retries. Each delivery has its number, and after the last one the message is a dead letter."""
    name = consumer.client_id
    consumer.send(message(name))
    attempts: list[int] = []

    def is_over() -> bool:
        received = consumer.receive(name, name, count=1)
        for found in received.messages:
            attempts.append(found.system_properties.delivery_attempt)
            consumer.change(name, name, found.system_properties.receipt_handle, 0)
        return len(attempts) >= _ATTEMPTS and received.code == Code.MESSAGE_NOT_FOUND

    eventually(is_over, "the message has used up its attempts", timeout_s=300)
    assert attempts == list(range(1, _ATTEMPTS + 1))
    # RocketMQ's broker creates the topic with the first dead letter, and reports it to its name server later.
    dead = f"%DLQ%{name}"
    eventually(lambda: consumer.route(dead).status.code == Code.OK, "the topic of dead letters is known", timeout_s=120)


def test_the_server_renews_the_invisible_time_while_the_client_lives(consumer: GrpcTool) -> None:
    """Nobody else receives the message meanwhile, and its ID and first handle acknowledge it."""
    name = consumer.client_id
    consumer.send(message(name))
    received = consumer.receive(name, name, count=1, auto_renew=True, invisible_s=None)
    end_s = time.monotonic() + _RENEWED_S

    def is_over() -> bool:
        consumer.heartbeat(name)
        again = consumer.receive(name, name, count=1)
        assert again.code == Code.MESSAGE_NOT_FOUND
        return time.monotonic() > end_s

    eventually(is_over, "the time is over", timeout_s=2 * _RENEWED_S)
    request = protos.AckMessageRequest(group=protos.Resource(name=name), topic=protos.Resource(name=name))
    message_id = received.messages[0].system_properties.message_id
    request.entries.add(message_id=message_id, receipt_handle=received.handle)
    assert consumer.call("AckMessage", request).status.code == Code.OK


class _Need(Enum):
    """Rights that a call needs."""

    SEND = "PUB on the topic"
    RECEIVE = "SUB on the topic and on the group"
    GROUP = "SUB on the group"
    ANY = "PUB or SUB on the topic"

    def is_met_by(self, user: User) -> bool:
        """Return True if a user may make the call for the topic of `RIGHTS_CASE`."""
        if self is _Need.GROUP:
            return user.topics is not None and user.groups == "SUB"
        topic_rights = (user.topics or "") if not user.is_denied else ""
        return {_Need.SEND: user.sends, _Need.RECEIVE: user.receives, _Need.ANY: bool(topic_rights)}[self]


def _calls(topic: str) -> dict[str, tuple[_Need, Callable[[GrpcTool], int]]]:
    """Return calls for a topic and a group of this name: name -> need, and the call, which returns its code."""

    def report(tool: GrpcTool, settings: Any) -> int:
        stream = tool.telemetry()
        code = int(stream.report(settings).status.code)
        stream.cancel()
        return code

    def assign(tool: GrpcTool) -> int:
        request = protos.QueryAssignmentRequest(topic=protos.Resource(name=topic), group=protos.Resource(name=topic))
        address = request.endpoints.addresses.add()
        address.host, address.port = "127.0.0.1", 8081
        request.endpoints.scheme = 1
        return int(tool.call("QueryAssignment", request).status.code)

    def beat(tool: GrpcTool) -> int:
        request = protos.HeartbeatRequest(group=protos.Resource(name=topic), client_type=ClientType.SIMPLE_CONSUMER)
        return int(tool.call("Heartbeat", request).status.code)

    return {
        "Telemetry of a producer": (_Need.SEND, lambda tool: report(tool, producer_settings(topic))),
        "Telemetry of a consumer": (_Need.RECEIVE, lambda tool: report(tool, consumer_settings(topic, topic))),
        "QueryRoute": (_Need.ANY, lambda tool: tool.route(topic).status.code),
        "SendMessage": (_Need.SEND, lambda tool: tool.send(message(topic)).status.code),
        "EndTransaction": (_Need.SEND, lambda tool: tool.end_transaction(topic, "unknown", 1).status.code),
        "RecallMessage": (_Need.SEND, lambda tool: tool.recall(topic, "unreadable").status.code),
        "Heartbeat of a consumer": (_Need.GROUP, beat),
        "QueryAssignment": (_Need.RECEIVE, assign),
        "ReceiveMessage": (_Need.RECEIVE, lambda tool: tool.receive(topic, topic).code),
        "AckMessage": (_Need.RECEIVE, lambda tool: tool.ack(topic, topic, "unreadable").status.code),
        "ChangeInvisibleDuration": (_Need.GROUP, lambda tool: tool.change(topic, topic, "unreadable", 10).status.code),
        "ForwardMessageToDeadLetterQueue": (_Need.RECEIVE, lambda tool: tool.forward(topic, topic, "x").status.code),
        "NotifyClientTermination": (_Need.GROUP, lambda tool: tool.terminate(topic).status.code),
    }


@pytest.mark.parametrize("user", USERS)
def test_a_call_without_its_right_is_unauthorized(guarded_server: GrpcServer, user: str) -> None:
    """And with its right it is not. The same holds for a wrong signature, and for an unknown account."""
    topic, found = f"raw-{RIGHTS_CASE}", USERS[user]
    _create(guarded_server, topic)
    numbers = itertools.count()
    codes = {}
    for name, (_, call) in _calls(topic).items():
        client_id = f"{found.credentials.access_key}-{next(numbers)}"
        with _connect(guarded_server, client_id, found.credentials) as tool:
            codes[name] = call(tool)

    refused = {name for name, code in codes.items() if code == Code.UNAUTHORIZED}
    assert refused == {name for name, (needed, _) in _calls(topic).items() if not needed.is_met_by(found)}, codes


def test_a_call_without_a_signature_is_unauthorized(guarded_server: GrpcServer) -> None:
    topic = f"raw-{RIGHTS_CASE}"
    _create(guarded_server, topic)

    with _connect(guarded_server, "unsigned") as tool:
        codes = {name: call(tool) for name, (_, call) in _calls(topic).items()}

    assert codes == dict.fromkeys(codes, Code.UNAUTHORIZED)


@pytest.mark.parametrize("user", ["a wrong secret", "an unknown user"])
def test_the_stream_of_an_unknown_client_ends(guarded_server: GrpcServer, user: str) -> None:
    """It is told why."""
    topic = f"raw-{RIGHTS_CASE}"
    _create(guarded_server, topic)
    with _connect(guarded_server, "unknown-client", USERS[user].credentials) as tool:
        stream = tool.telemetry()

        assert stream.report(producer_settings(topic)).status.code == Code.UNAUTHORIZED
        with pytest.raises(StopIteration):
            stream.next()

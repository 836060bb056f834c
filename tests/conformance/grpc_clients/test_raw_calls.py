"""Rules of RocketMQ's gRPC protocol that no single call shows, over a raw client with each server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Credentials
from tests.conformance.grpc_clients.servers import Administrator, GrpcServer
from tests.conformance.servers import ACCOUNT
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
    assert consumer.route(f"%DLQ%{name}").status.code == Code.OK


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


def test_a_call_without_a_valid_signature_is_refused(guarded_server: GrpcServer) -> None:
    """Each method answers UNAUTHORIZED. The stream of a client has this answer too, and ends."""
    _create(guarded_server, "raw-signed")
    wrong = Credentials(access_key=ACCOUNT.access_key, secret_key="another-secret")
    unknown = Credentials(access_key="nobody", secret_key="secret")
    numbers = itertools.count()
    for account, code in ((ACCOUNT, Code.OK), (wrong, Code.UNAUTHORIZED), (unknown, Code.UNAUTHORIZED), (None, None)):
        with _connect(guarded_server, f"signed-{next(numbers)}", account) as tool:
            stream = tool.telemetry()
            reported = stream.report(producer_settings("raw-signed")).status.code
            codes = {reported, tool.route("raw-signed").status.code, tool.send(message("raw-signed")).status.code}
            stream.cancel()
        assert codes == {code or Code.UNAUTHORIZED}, account

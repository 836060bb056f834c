"""Requests that the broker relays from a tool to a consumer."""

from __future__ import annotations

import queue

import pytest

from mqtemplate.message import Message, MessageQueue
from mqtemplate.record.codec import parse_record
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerRunningInfo
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    ConsumeMessageDirectlyResultRequestHeader,
)
from mqtemplate.remoting.settings import Credentials
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServer
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult
from tests.server.tool import Tool

QUEUE = MessageQueue("orders", "broker-a", 0)
WAIT_S = 10


@pytest.fixture
def server(server: BrokerServer) -> BrokerServer:
    server.engine.create_topic("orders", 1)
    return server


def send(server: BrokerServer, body: bytes = b"x", **properties: str) -> SendResult:
    return server.engine.sends.send(Message("orders", body, properties), QUEUE)


def test_the_running_information_of_a_consumer_is_relayed(server: BrokerServer, tool: Tool) -> None:
    info = ConsumerRunningInfo(properties={"PROP_CLIENT_VERSION": "V5_3_3"})

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            return request.response(body=info.encode())
        return None

    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    assert ConsumerRunningInfo.decode(response.body) == info


def test_the_signature_of_the_tool_is_not_relayed(server: BrokerServer) -> None:
    """A signature or a token is valid for the broker only."""
    received: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            received.put(request.ext_fields)
            return request.response(body=b"{}")
        return None

    credentials = Credentials(access_key="administrator", secret_key="not to be relayed", security_token="token")
    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")
    with Tool(server.address, on_request=on_request) as member, Tool(server.address, credentials) as tool:
        member.consume("billing", "orders", client_id="me@1")
        tool.request_ok(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    fields = received.get(timeout=WAIT_S)
    assert fields["clientId"] == "me@1"
    assert fields.keys() & {"AccessKey", "Signature", "SecurityToken"} == set()


def test_a_request_to_a_disconnected_consumer_fails(tool: Tool) -> None:
    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")

    response = tool.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    assert response.code == ResponseCode.SYSTEM_ERROR
    assert response.remark == "group 'billing' has no connected consumer 'me@1'"


def test_a_consumer_receives_one_message_to_handle_at_once(server: BrokerServer, tool: Tool) -> None:
    result = send(server, b"this one")
    done = ConsumeMessageDirectlyResult(consume_result="CR_SUCCESS")
    received: queue.SimpleQueue[RemotingCommand] = queue.SimpleQueue()

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            received.put(request)
            return request.response(body=done.encode())
        return None

    header = ConsumeMessageDirectlyResultRequestHeader(
        consumer_group="billing", client_id="me@1", msg_id=result.offset_msg_id, topic="orders"
    )
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)

    assert ConsumeMessageDirectlyResult.decode(response.body) == done
    request = received.get(timeout=WAIT_S)
    assert parse_record(request.body).body == b"this one"
    assert request.ext_fields["brokerName"] == "broker-a"


@pytest.mark.parametrize(
    ("msg_id", "code", "text"),
    [
        (
            "nonsense",
            ResponseCode.INVALID_PARAMETER,
            "'nonsense' is not an offset message ID (8 characters): it must have 32 hex digits",
        ),
        (
            "7F00000100002A9F000000000FFFFFFF",
            ResponseCode.SYSTEM_ERROR,
            "message 7F00000100002A9F000000000FFFFFFF does not exist",
        ),
    ],
)
def test_a_missing_message_is_not_relayed(tool: Tool, msg_id: str, code: ResponseCode, text: str) -> None:
    header = ConsumeMessageDirectlyResultRequestHeader(consumer_group="billing", client_id="me@1", msg_id=msg_id)

    response = tool.request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)

    assert response.code == code
    assert response.remark is not None
    assert response.remark.startswith(text)

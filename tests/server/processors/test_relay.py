"""Requests that the broker relays from a tool to a consumer. `clients.script` has what is relayed."""

from __future__ import annotations

import pytest

from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import ConsumeMessageDirectlyResultRequestHeader
from mqtemplate.server import BrokerServer
from tests.server.tool import Tool

MEMBER = {"consumer_group": "billing", "client_id": "me@1"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (RequestCode.GET_CONSUMER_RUNNING_INFO, GetConsumerRunningInfoRequestHeader),
        (RequestCode.CONSUME_MESSAGE_DIRECTLY, ConsumeMessageDirectlyResultRequestHeader),
    ],
)
def test_the_response_of_the_consumer_is_relayed(
    server: BrokerServer, tool: Tool, code: RequestCode, kind: type[CommandHeader]
) -> None:
    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return request.response(body=b"of the consumer") if request.code == code else None

    server.engine.create_topic("orders", 1)
    sent = server.engine.sends.send(Message("orders", b"this one"), MessageQueue("orders", "broker-a", 0))
    message = {"msg_id": sent.offset_msg_id} if code == RequestCode.CONSUME_MESSAGE_DIRECTLY else {}
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(code, kind(**MEMBER | message))

    assert response.body == b"of the consumer"

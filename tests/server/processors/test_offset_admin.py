"""Requests of administrators that members answer: what `tests/server/scripts/offsets.script` cannot say."""

from __future__ import annotations

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.bodies.group import GetConsumerStatusBody
from mqtemplate.remoting.protocol.headers.group import GetConsumerStatusRequestHeader
from mqtemplate.server import BrokerServer
from tests.server.tool import Tool

QUEUE = MessageQueue("orders", "broker-a", 0)


def test_the_read_positions_of_connected_members_are_returned(server: BrokerServer, tool: Tool) -> None:
    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code != RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
            return None
        return request.response(body=GetConsumerStatusBody(message_queue_table={QUEUE: 6}).encode())

    header = GetConsumerStatusRequestHeader(topic="orders", group="billing")
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)

    assert GetConsumerStatusBody.decode(response.body).consumer_table == {"me@1": {QUEUE: 6}}

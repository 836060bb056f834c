"""Offsets, as administration tools read and reset them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    GetConsumerStatusBody,
    SubscriptionGroupConfig,
)
from mqtemplate.remoting.protocol.headers.group import (
    GetConsumerStatusRequestHeader,
)
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.tool import ANY_PORT, Tool, make_engine

FIRST, SECOND = (MessageQueue("orders", "broker-a", queue_id) for queue_id in (0, 1))
WAIT_S = 10


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    """Two queues have ten messages each, one per second. Group billing has consumed 4 messages of the first queue."""
    clock = VirtualClock()
    engine = make_engine(clock)
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
        server.groups.put([SubscriptionGroupConfig(group_name="billing")])
        engine.create_topic("orders", 2)
        for number in range(10):
            for each in (FIRST, SECOND):
                engine.send(Message("orders", b"%d" % number), each)
            clock.move_ms(1_000)
        engine.commit_offset("billing", FIRST, 4)
        yield server
    engine.close()


def test_the_read_positions_of_connected_members_are_returned(server: BrokerServer, tool: Tool) -> None:
    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code != RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
            return None
        return request.response(body=GetConsumerStatusBody(message_queue_table={FIRST: 6}).encode())

    header = GetConsumerStatusRequestHeader(topic="orders", group="billing")
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
        other = GetConsumerStatusRequestHeader(topic="orders", group="billing", client_addr="you@2")
        refused = tool.request(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, other)

    assert GetConsumerStatusBody.decode(response.body).consumer_table == {"me@1": {FIRST: 6}}
    assert (refused.code, refused.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "group 'billing' has no connected consumer",
    )

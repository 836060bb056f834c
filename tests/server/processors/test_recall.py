"""Recalling delayed messages by their handles."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
)
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.tool import ANY_PORT, Tool, make_engine

QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def server(server: BrokerServer) -> BrokerServer:
    server.engine.create_topic("orders", 1)
    return server


def send_delayed(server: BrokerServer, delay_ms: int = 60_000) -> SendResult:
    return server.engine.send(Message("orders", b"x", {Property.TIMER_DELAY_MS: str(delay_ms)}), QUEUE)


def recall(tool: Tool, handle: str | None, topic: str = "orders") -> RemotingCommand:
    assert handle is not None
    return tool.request(RequestCode.RECALL_MESSAGE, RecallMessageRequestHeader(topic=topic, recall_handle=handle))


def test_a_delayed_message_is_recalled_by_its_handle(server: BrokerServer, tool: Tool) -> None:
    result = send_delayed(server)

    response = recall(tool, result.handle)

    assert response.code == ResponseCode.SUCCESS
    assert response.header(RecallMessageResponseHeader).msg_id == result.msg_id
    server.engine.clock.move_ms(120_000)  # type: ignore[attr-defined]  # it is virtual
    for service in server.engine.services():
        service.step()
    assert server.engine.max_offset(QUEUE) == 0


def test_a_delivered_message_cannot_be_recalled(server: BrokerServer, tool: Tool) -> None:
    """RocketMQ's broker only compares times. This broker reports that the message was delivered."""
    result = send_delayed(server, 2_000)
    server.engine.clock.move_ms(5_000)  # type: ignore[attr-defined]  # it is virtual
    for service in server.engine.services():
        service.step()

    response = recall(tool, result.handle)

    assert response.code == ResponseCode.ILLEGAL_OPERATION
    assert response.remark == f"message {result.msg_id} cannot be recalled: it was delivered already"


@pytest.mark.parametrize(
    ("topic", "code", "text"),
    [
        (
            "missing",
            ResponseCode.TOPIC_NOT_EXIST,
            "topic 'missing' does not exist; create it with mqadmin updateTopic",
        ),
        (
            "TBW102",
            ResponseCode.ILLEGAL_OPERATION,
            "the handle is for topic 'orders' of broker 'broker-a', not for 'TBW102' of 'broker-a'",
        ),
    ],
)
def test_a_handle_is_valid_for_its_topic_only(
    server: BrokerServer, tool: Tool, topic: str, code: ResponseCode, text: str
) -> None:
    response = recall(tool, send_delayed(server).handle, topic)

    assert (response.code, response.remark) == (code, text)


def test_an_invalid_handle_is_refused(tool: Tool) -> None:
    response = recall(tool, "bm8gaGFuZGxl")

    assert response.code == ResponseCode.ILLEGAL_OPERATION
    assert response.remark is not None
    assert "is not a handle of a pending message" in response.remark


def test_a_recall_is_refused_if_it_is_disabled() -> None:
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT, recall_message_enable=False)
    with BrokerServer(engine, settings) as server, Tool(server.address) as tool:
        engine.create_topic("orders", 1)
        response = recall(tool, send_delayed(server).handle)
    engine.close()

    assert response.code == ResponseCode.NO_PERMISSION
    assert response.remark == "recall is disabled; set recall-message-enable to true"

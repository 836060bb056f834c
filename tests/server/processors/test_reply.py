"""Replies are forwarded to the requesting client, which is remote or in this process."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from mqtemplate.errors import BrokerError, RemoteTimeoutError, SendError
from mqtemplate.message import Message, MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text, encode_properties_text
from mqtemplate.testing import messages_in
from tests.server.serving import RecordingConnection, Serving

REPLY = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "requester@1", "TTL": "3000"}


class RespondingConnection(RecordingConnection):
    """A connection whose client responds to the broker's requests with *respond*."""

    def __init__(self) -> None:
        super().__init__()
        self.respond: Callable[[RemotingCommand], RemotingCommand | BrokerError] = lambda request: request.response()

    def request(
        self, request: RemotingCommand, timeout_ms: int, done: Callable[[RemotingCommand | BrokerError], None]
    ) -> None:
        self.pushed.append(request)
        done(self.respond(request))


@pytest.fixture
def requester(serving: Serving) -> RespondingConnection:
    connection = RespondingConnection()
    serving.heartbeat("", producers=["CLIENT_INNER_PRODUCER"], over=connection, client_id="requester@1")
    return connection


def reply(serving: Serving, body: bytes = b"3.20", **header: int) -> RemotingCommand:
    response = serving.send("DefaultCluster_REPLY_TOPIC", body, REPLY, code=RequestCode.SEND_REPLY_MESSAGE_V2, **header)
    assert response is not None
    return response


def test_a_reply_is_pushed_to_the_requesting_client_before_the_response(
    serving: Serving, requester: RespondingConnection
) -> None:
    response = reply(serving, sys_flag=0, flag=7)

    [pushed] = requester.pushed
    header = pushed.header(ReplyMessageRequestHeader)
    properties = decode_properties_text(header.properties)
    sent = response.header(SendMessageResponseHeader)
    assert (response.code, sent.msg_id, sent.queue_id, sent.queue_offset) == (ResponseCode.SUCCESS, "0", 0, 0)
    assert (pushed.code, pushed.body) == (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, b"3.20")
    assert (header.topic, header.flag, header.producer_group) == ("DefaultCluster_REPLY_TOPIC", 7, "producers")
    assert (header.born_host, header.store_host) == ("127.0.0.1:54321", "127.0.0.1:10911")
    assert properties.items() >= REPLY.items()
    assert properties["PUSH_REPLY_TIME"] == str(serving.clock.now_ms())


def test_a_header_with_long_names_is_equivalent(serving: Serving, requester: RespondingConnection) -> None:
    header = SendMessageRequestHeader(
        producer_group="producers",
        topic="DefaultCluster_REPLY_TOPIC",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=-1,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties=encode_properties_text(REPLY),
    )

    response = serving.request(RequestCode.SEND_REPLY_MESSAGE, header, b"3.20")

    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    assert response.header(SendMessageResponseHeader).queue_id == 0
    assert requester.pushed[0].body == b"3.20"


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (lambda request: RemoteTimeoutError("no response in 10000 ms"), "no response in 10000 ms"),
        (lambda request: request.response(ResponseCode.SYSTEM_ERROR, remark="no such request"), "no such request"),
    ],
)
def test_a_reply_that_the_client_does_not_accept_fails(
    serving: Serving,
    requester: RespondingConnection,
    respond: Callable[[RemotingCommand], RemotingCommand | BrokerError],
    reason: str,
) -> None:
    requester.respond = respond

    refused = reply(serving)

    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert refused.remark == f"the reply could not be delivered to 'requester@1': {reason}"


def test_a_request_of_this_process_receives_a_remote_reply_decompressed(serving: Serving) -> None:
    future = serving.engine.requests.request(Message("prices", b"tea?"))
    [request] = messages_in(serving.engine, "prices")
    properties = {name: request.properties[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}

    response = serving.send(
        "DefaultCluster_REPLY_TOPIC",
        zlib.compress(b"3.20"),
        {**properties, "MSG_TYPE": "reply"},
        code=RequestCode.SEND_REPLY_MESSAGE_V2,
        sys_flag=1,
    )

    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    assert future.result(0).body == b"3.20"


def test_a_listener_of_this_process_replies_to_a_remote_client(
    serving: Serving, requester: RespondingConnection
) -> None:
    serving.send("prices", b"tea?", {"CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "requester@1", "TTL": "3000"})
    request = _received(serving)

    serving.engine.requests.reply(request, b"3.20", {"currency": "EUR"})

    [pushed] = requester.pushed
    header = pushed.header(ReplyMessageRequestHeader)
    properties = decode_properties_text(header.properties)
    assert (pushed.body, header.topic) == (b"3.20", "DefaultCluster_REPLY_TOPIC")
    assert (properties["CORRELATION_ID"], properties["currency"]) == ("c-1", "EUR")


def test_the_reply_of_a_listener_of_this_process_to_a_disconnected_client_fails(serving: Serving) -> None:
    serving.send("prices", b"tea?", {"CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "requester@1", "TTL": "3000"})

    with pytest.raises(SendError, match="'requester@1', which sent the request, is not connected"):
        serving.engine.requests.reply(_received(serving), b"3.20")


def _received(serving: Serving) -> MessageExt:
    [message] = messages_in(serving.engine, "prices")
    return message

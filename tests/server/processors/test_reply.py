"""Replies are forwarded to the requesting client, remote or in this process. `clients.script` has what is pushed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from mqtemplate.errors import BrokerError, RemoteTimeoutError, SendError
from mqtemplate.message import Message, MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import ReplyMessageRequestHeader, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.testing import messages_in
from tests.server.serving import RecordingConnection, Serving

REPLY = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "requester@1", "TTL": "3000"}
TOPIC = "DefaultCluster_REPLY_TOPIC"
Responder = Callable[[RemotingCommand], RemotingCommand | BrokerError]


class RespondingConnection(RecordingConnection):
    """A connection whose client responds to the broker's requests with *respond*."""

    def __init__(self) -> None:
        super().__init__()
        self.respond: Responder = lambda request: request.response()

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


def test_the_response_to_a_reply_follows_that_of_the_client(serving: Serving, requester: RespondingConnection) -> None:
    response = serving.send(TOPIC, b"3.20", REPLY, code=RequestCode.SEND_REPLY_MESSAGE_V2)

    sent = response.header(SendMessageResponseHeader)
    assert (response.code, sent.msg_id, sent.queue_id, sent.queue_offset) == (ResponseCode.SUCCESS, "0", 0, 0)


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (lambda request: RemoteTimeoutError("no response in 10000 ms"), "no response in 10000 ms"),
        (lambda request: request.response(ResponseCode.SYSTEM_ERROR, remark="no such request"), "no such request"),
    ],
)
def test_a_reply_that_the_client_does_not_accept_fails(
    serving: Serving, requester: RespondingConnection, respond: Responder, reason: str
) -> None:
    requester.respond = respond

    refused = serving.send(TOPIC, b"3.20", REPLY, code=RequestCode.SEND_REPLY_MESSAGE_V2)

    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert refused.remark == f"the reply could not be delivered to 'requester@1': {reason}"


def test_a_request_of_this_process_receives_a_remote_reply_decompressed(serving: Serving) -> None:
    future = serving.engine.requests.request(Message("prices", b"tea?"))
    [request] = messages_in(serving.engine, "prices")
    properties = {name: request.properties[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}

    response = serving.send(
        TOPIC,
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

"""Replies find the client that asked, over the wire and in this process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import pytest

from mqtemplate.errors import BrokerError, RemoteTimeoutError, SendError
from mqtemplate.message import Message, MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.properties import decode_properties_text, encode_properties_text
from mqtemplate.testing import messages_in
from tests.server.serving import RecordingConnection, Serving

REPLY = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker@1", "TTL": "3000"}


class AskedConnection(RecordingConnection):
    """One that answers what a broker asks it, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[RemotingCommand], RemotingCommand | BrokerError] = lambda request: request.response()

    def request(
        self, request: RemotingCommand, timeout_ms: int, done: Callable[[RemotingCommand | BrokerError], None]
    ) -> None:
        self.pushed.append(request)
        done(self.answer(request))


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


@pytest.fixture
def asker(serving: Serving) -> AskedConnection:
    connection = AskedConnection()
    serving.heartbeat("", producers=["CLIENT_INNER_PRODUCER"], over=connection, client_id="asker@1")
    return connection


def reply(serving: Serving, body: bytes = b"3.20", **header: int) -> RemotingCommand:
    answer = serving.send("DefaultCluster_REPLY_TOPIC", body, REPLY, code=RequestCode.SEND_REPLY_MESSAGE_V2, **header)
    assert answer is not None
    return answer


def test_a_reply_is_pushed_to_who_asked_and_then_answered(serving: Serving, asker: AskedConnection) -> None:
    answer = reply(serving, sys_flag=0, flag=7)

    [pushed] = asker.pushed
    header = pushed.header(ReplyMessageRequestHeader)
    properties = decode_properties_text(header.properties)
    said = answer.header(SendMessageResponseHeader)
    assert (answer.code, said.msg_id, said.queue_id, said.queue_offset) == (ResponseCode.SUCCESS, "0", 0, 0)
    assert (pushed.code, pushed.body) == (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, b"3.20")
    assert (header.topic, header.flag, header.producer_group) == ("DefaultCluster_REPLY_TOPIC", 7, "producers")
    assert (header.born_host, header.store_host) == ("127.0.0.1:54321", "127.0.0.1:10911")
    assert properties.items() >= REPLY.items()
    assert properties["PUSH_REPLY_TIME"] == str(serving.clock.now_ms())


def test_the_form_with_long_names_works_too(serving: Serving, asker: AskedConnection) -> None:
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

    answer = serving.ask(RequestCode.SEND_REPLY_MESSAGE, header, b"3.20")

    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS
    assert answer.header(SendMessageResponseHeader).queue_id == 0
    assert asker.pushed[0].body == b"3.20"


def test_a_client_that_is_gone_is_told_to_who_replies(serving: Serving) -> None:
    answer = reply(serving)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "'asker@1', who asked, is not connected as a producer; it may have ended"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda request: RemoteTimeoutError("no answer in 10000 ms"), "no answer in 10000 ms"),
        (lambda request: request.response(ResponseCode.SYSTEM_ERROR, remark="no such request"), "no such request"),
    ],
)
def test_a_client_that_does_not_take_it_is_told_to_who_replies(
    serving: Serving,
    asker: AskedConnection,
    answer: Callable[[RemotingCommand], RemotingCommand | BrokerError],
    reason: str,
) -> None:
    asker.answer = answer

    refused = reply(serving)

    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert refused.remark == f"the reply could not be brought to 'asker@1': {reason}"


def test_a_reply_that_does_not_say_to_whom_is_refused(serving: Serving) -> None:
    answer = serving.send("r", b"x", {"CORRELATION_ID": "c"}, code=RequestCode.SEND_REPLY_MESSAGE_V2)

    assert answer is not None
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "the reply has no REPLY_TO_CLIENT, which says who asked"


def test_a_request_of_this_process_gets_a_remote_reply_unpacked(serving: Serving) -> None:
    future = serving.engine.request(Message("prices", b"tea?"))
    [request] = messages_in(serving.engine, "prices")
    properties = {name: request.properties[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}

    answer = serving.send(
        "DefaultCluster_REPLY_TOPIC",
        zlib.compress(b"3.20"),
        {**properties, "MSG_TYPE": "reply"},
        code=RequestCode.SEND_REPLY_MESSAGE_V2,
        sys_flag=1,
    )

    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS
    assert future.result(0).body == b"3.20"


def test_a_listener_of_this_process_replies_to_a_remote_client(serving: Serving, asker: AskedConnection) -> None:
    serving.send("prices", b"tea?", {"CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker@1", "TTL": "3000"})
    request = _received(serving)

    serving.engine.reply(request, b"3.20", {"currency": "EUR"})

    [pushed] = asker.pushed
    header = pushed.header(ReplyMessageRequestHeader)
    properties = decode_properties_text(header.properties)
    assert (pushed.body, header.topic) == (b"3.20", "DefaultCluster_REPLY_TOPIC")
    assert (properties["CORRELATION_ID"], properties["currency"]) == ("c-1", "EUR")


def test_a_listener_of_this_process_hears_that_the_client_is_gone(serving: Serving) -> None:
    serving.send("prices", b"tea?", {"CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker@1", "TTL": "3000"})

    with pytest.raises(SendError, match="client 'asker@1', which sent the request, is not connected"):
        serving.engine.reply(_received(serving), b"3.20")


def _received(serving: Serving) -> MessageExt:
    [message] = messages_in(serving.engine, "prices")
    return message

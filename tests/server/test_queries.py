"""Finding messages over the wire, handing questions on to consumers, and calling messages back."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.record.codec import parse_record
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerRunningInfo
from mqtemplate.remoting.protocol.bodies.route import QueryConsumeQueueResponseBody
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    ConsumeMessageDirectlyResultRequestHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.remoting.settings import Credentials
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult
from tests.server.tool import ANY_PORT, Tool, make_engine

QUEUE = MessageQueue("orders", "broker-a", 0)
END_OF_TIME = (1 << 63) - 1
WAIT_S = 10


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    engine = make_engine(VirtualClock())
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
        engine.create_topic("orders", 1)
        yield server
    engine.close()


@pytest.fixture
def tool(server: BrokerServer) -> Iterator[Tool]:
    with Tool(server.address) as tool:
        yield tool


def send(server: BrokerServer, body: bytes = b"x", **properties: str) -> SendResult:
    return server.engine.send(Message("orders", body, properties), QUEUE)


def physical_offset(result: SendResult) -> int:
    return int(result.offset_msg_id[-16:], 16)


def by_key(key: str, *, unique: bool | None = None, max_num: int = 32, begin: int = 0) -> QueryMessageRequestHeader:
    return QueryMessageRequestHeader(
        topic="orders", key=key, max_num=max_num, begin_timestamp=begin, end_timestamp=END_OF_TIME, unique=unique
    )


# --- messages ---------------------------------------------------------------------------------------


def test_a_message_is_found_by_its_place_in_the_log(server: BrokerServer, tool: Tool) -> None:
    send(server, b"before")
    result = send(server, b"this")

    body = tool.ask_well(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset(result))).body

    record = parse_record(body)
    assert (record.body, record.queue_offset, record.physical_offset) == (b"this", 1, physical_offset(result))


@pytest.mark.parametrize("offset", [-1, 1, 1 << 40])
def test_where_no_message_begins_none_is_found(server: BrokerServer, tool: Tool, offset: int) -> None:
    send(server)

    answer = tool.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset))

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == f"no message begins at physical offset {offset}; it may have been deleted with its file"


def test_messages_are_found_by_each_of_their_keys(server: BrokerServer, tool: Tool) -> None:
    send(server, b"one", KEYS="A-1 A-2")
    send(server, b"two", KEYS="A-2")

    answer = tool.ask_well(RequestCode.QUERY_MESSAGE, by_key("A-2", unique=False))
    first = tool.ask_well(RequestCode.QUERY_MESSAGE, by_key("A-2", unique=False, max_num=1))

    assert sorted(message.body for message in decode_messages(answer.body, "broker-a")) == [b"one", b"two"]
    assert [message.body for message in decode_messages(first.body, "broker-a")] == [b"two"]
    header = answer.header(QueryMessageResponseHeader)
    assert header.index_last_update_phyoffset == server.engine.store.end_offset


def test_a_message_is_found_by_its_senders_id(server: BrokerServer, tool: Tool) -> None:
    msg_id = send(server, b"this").msg_id

    unique = tool.ask_well(RequestCode.QUERY_MESSAGE, by_key(msg_id, unique=True, max_num=0))
    either = tool.ask_well(RequestCode.QUERY_MESSAGE, by_key(msg_id))
    as_key = tool.ask(RequestCode.QUERY_MESSAGE, by_key(msg_id, unique=False))

    assert [message.body for message in decode_messages(unique.body, "broker-a")] == [b"this"]
    assert either.body == unique.body
    assert as_key.code == ResponseCode.QUERY_NOT_FOUND


def test_a_key_that_nobody_has_in_that_time_is_not_found(server: BrokerServer, tool: Tool) -> None:
    send(server, KEYS="A-1")

    answer = tool.ask(RequestCode.QUERY_MESSAGE, by_key("A-1", begin=server.engine.clock.now_ms() + 1))

    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert answer.remark == "no message of topic 'orders' has the key 'A-1' in that time"
    answer.header(QueryMessageResponseHeader)  # Java reads it from this answer too


def test_records_travel_without_the_check_that_ours_end_with(server: BrokerServer, tool: Tool) -> None:
    """An application would see a property that nobody sent."""
    result = send(server, KEYS="A-1")

    viewed = tool.ask_well(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset(result)))
    queried = tool.ask_well(RequestCode.QUERY_MESSAGE, by_key("A-1"))

    assert viewed.body == queried.body
    (message,) = decode_messages(viewed.body, "broker-a")
    assert {name for name in message.properties if name.startswith("__")} == set()


def test_units_of_a_queue_are_told_with_what_a_filter_says_of_them(server: BrokerServer, tool: Tool) -> None:
    for _ in range(3):
        send(server)
    tool.consume("billing", "orders")
    header = QueryConsumeQueueRequestHeader(topic="orders", queue_id=0, index=1, count=5, consumer_group="billing")

    found = QueryConsumeQueueResponseBody.decode(tool.ask_well(RequestCode.QUERY_CONSUME_QUEUE, header).body)

    assert (found.min_queue_index, found.max_queue_index) == (0, 3)
    assert [unit.eval for unit in found.queue_data] == [True, True]
    assert found.subscription_data is not None
    for unit in found.queue_data:
        assert server.engine.store.read(unit.physic_offset, unit.physic_size).topic == "orders"


def test_a_queue_that_there_is_not_has_no_units(tool: Tool) -> None:
    header = QueryConsumeQueueRequestHeader(topic="orders", queue_id=7, index=0, count=1)

    answer = tool.ask(RequestCode.QUERY_CONSUME_QUEUE, header)

    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "there is no queue 7 of topic 'orders'")


# --- questions for a consumer -----------------------------------------------------------------------


def test_a_consumer_is_asked_how_it_is_and_its_answer_handed_back(server: BrokerServer, tool: Tool) -> None:
    info = ConsumerRunningInfo(properties={"PROP_CLIENT_VERSION": "V5_3_3"})

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            return request.response(body=info.encode())
        return None

    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        answer = tool.ask_well(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    assert ConsumerRunningInfo.decode(answer.body) == info


def test_who_asked_is_not_handed_on(server: BrokerServer) -> None:
    """A signature, or a token, is for the one that it was made for."""
    seen: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            seen.put(request.ext_fields)
            return request.response(body=b"{}")
        return None

    credentials = Credentials(access_key="administrator", secret_key="not to be told", security_token="lent")
    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")
    with Tool(server.address, on_request=on_request) as member, Tool(server.address, credentials) as tool:
        member.consume("billing", "orders", client_id="me@1")
        tool.ask_well(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    fields = seen.get(timeout=WAIT_S)
    assert fields["clientId"] == "me@1"
    assert fields.keys() & {"AccessKey", "Signature", "SecurityToken"} == set()


def test_a_consumer_that_is_not_there_cannot_be_asked(tool: Tool) -> None:
    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id="me@1")

    answer = tool.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "client 'me@1' does not consume for group 'billing' now"


def test_a_consumer_gets_one_message_to_handle_at_once(server: BrokerServer, tool: Tool) -> None:
    result = send(server, b"this one")
    done = ConsumeMessageDirectlyResult(consume_result="CR_SUCCESS")
    given: queue.SimpleQueue[RemotingCommand] = queue.SimpleQueue()

    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            given.put(request)
            return request.response(body=done.encode())
        return None

    header = ConsumeMessageDirectlyResultRequestHeader(
        consumer_group="billing", client_id="me@1", msg_id=result.offset_msg_id, topic="orders"
    )
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        answer = tool.ask_well(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)

    assert ConsumeMessageDirectlyResult.decode(answer.body) == done
    request = given.get(timeout=WAIT_S)
    assert parse_record(request.body).body == b"this one"
    assert request.ext_fields["brokerName"] == "broker-a"


@pytest.mark.parametrize(
    ("msg_id", "code", "text"),
    [
        (
            "nonsense",
            ResponseCode.INVALID_PARAMETER,
            "'nonsense' is no offset message id (8 characters): those are 32 hex digits",
        ),
        ("7F00000100002A9F000000000FFFFFFF", ResponseCode.SYSTEM_ERROR, "there is no message 7F000001"),
    ],
)
def test_a_message_that_is_not_there_is_not_handed_on(tool: Tool, msg_id: str, code: ResponseCode, text: str) -> None:
    header = ConsumeMessageDirectlyResultRequestHeader(consumer_group="billing", client_id="me@1", msg_id=msg_id)

    answer = tool.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)

    assert answer.code == code
    assert answer.remark is not None
    assert answer.remark.startswith(text)


# --- calling back -----------------------------------------------------------------------------------


def waiting(server: BrokerServer, delay_ms: int = 60_000) -> SendResult:
    return send(server, **{Property.TIMER_DELAY_MS: str(delay_ms)})


def recall(tool: Tool, handle: str | None, topic: str = "orders") -> RemotingCommand:
    assert handle is not None
    return tool.ask(RequestCode.RECALL_MESSAGE, RecallMessageRequestHeader(topic=topic, recall_handle=handle))


def test_a_waiting_message_is_called_back_by_its_handle(server: BrokerServer, tool: Tool) -> None:
    result = waiting(server)

    answer = recall(tool, result.handle)

    assert answer.code == ResponseCode.SUCCESS
    assert answer.header(RecallMessageResponseHeader).msg_id == result.msg_id
    server.engine.clock.move_ms(120_000)  # type: ignore[attr-defined]  # it is virtual
    for service in server.engine.services():
        service.step()
    assert server.engine.max_offset(QUEUE) == 0


def test_what_was_delivered_cannot_be_called_back(server: BrokerServer, tool: Tool) -> None:
    """RocketMQ's broker looks at the time only; here the answer is what became of the message."""
    result = waiting(server, 2_000)
    server.engine.clock.move_ms(5_000)  # type: ignore[attr-defined]  # it is virtual
    for service in server.engine.services():
        service.step()

    answer = recall(tool, result.handle)

    assert answer.code == ResponseCode.ILLEGAL_OPERATION
    assert answer.remark == f"message {result.msg_id} cannot be called back: it was delivered already"


@pytest.mark.parametrize(
    ("topic", "code", "text"),
    [
        ("nobody", ResponseCode.TOPIC_NOT_EXIST, "there is no topic 'nobody'"),
        ("TBW102", ResponseCode.ILLEGAL_OPERATION, "the handle is for topic 'orders', asked was 'TBW102'"),
    ],
)
def test_a_handle_is_for_its_own_topic(
    server: BrokerServer, tool: Tool, topic: str, code: ResponseCode, text: str
) -> None:
    answer = recall(tool, waiting(server).handle, topic)

    assert (answer.code, answer.remark) == (code, text)


def test_what_is_no_handle_is_refused(tool: Tool) -> None:
    answer = recall(tool, "bm8gaGFuZGxl")

    assert answer.code == ResponseCode.ILLEGAL_OPERATION
    assert answer.remark is not None
    assert "is not a handle of a pending message" in answer.remark


def test_where_calling_back_is_switched_off_it_is_refused() -> None:
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT, recall_message_enable=False)
    with BrokerServer(engine, settings) as server, Tool(server.address) as tool:
        engine.create_topic("orders", 1)
        answer = recall(tool, waiting(server).handle)
    engine.close()

    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.remark == "calling messages back is switched off here (recall-message-enable)"

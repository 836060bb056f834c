"""Methods of producers over sockets: routes, sends, transactions, recalls; each status that they answer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import grpc
import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import (
    AddressScheme,
    Code,
    GrpcMessageType,
    Permission,
    TransactionResolution,
)
from mqtemplate.message import HostAddress, Message
from mqtemplate.pending import PendingQuery
from mqtemplate.server import BrokerServer
from mqtemplate.server.grpc_api.context import GrpcContext
from mqtemplate.topics import HALF_TOPIC
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    advance,
    create_topic,
    delayed,
    endpoint,
    message,
    producer_settings,
    serving,
)

Server = BrokerServer[EmbeddedBroker]
COMMIT, ROLLBACK = TransactionResolution.COMMIT, TransactionResolution.ROLLBACK


def end_offset(server: Server, topic: str, queues: int = 4) -> int:
    """Return the number of messages of a topic."""
    store = server.engine.engine.store
    return sum(store.consume_queue(topic, queue).max_offset for queue in range(queues))


def half(topic: str, message_id: str = "id-1") -> Any:
    return message(topic, message_id=message_id, message_type=GrpcMessageType.TRANSACTION)


# --- routes ---------------------------------------------------------------------------------------


def test_a_route_has_the_queues_and_the_endpoints(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", "FIFO", queues=3)

    route = tool.route("orders")

    address = endpoint(server).server.address
    assert [queue.id for queue in route.message_queues] == [0, 1, 2]
    for queue in route.message_queues:
        assert queue.topic.name == "orders"
        assert queue.permission == Permission.READ_WRITE
        assert list(queue.accept_message_types) == [GrpcMessageType.FIFO]
        assert (queue.broker.name, queue.broker.id) == (server.engine.name, 0)
        assert queue.broker.endpoints.scheme == AddressScheme.IPv4
        assert [(each.host, each.port) for each in queue.broker.endpoints.addresses] == [("127.0.0.1", address.port)]


def test_queues_for_reading_only_come_first(server: Server, tool: GrpcTool) -> None:
    server.topics.table.update("orders", {"readQueueNums": 3, "writeQueueNums": 1, "perm": 6})

    permissions = [queue.permission for queue in tool.route("orders").message_queues]

    assert permissions == [Permission.READ, Permission.READ, Permission.READ_WRITE]


def test_a_topic_without_rights_has_queues_without_permission(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", queues=2, perm=0)

    assert [queue.permission for queue in tool.route("orders").message_queues] == [Permission.NONE, Permission.NONE]


@pytest.mark.parametrize(("topic", "code"), [("none", Code.TOPIC_NOT_FOUND), ("a b", Code.ILLEGAL_TOPIC)])
def test_a_route_to_a_missing_topic_is_refused(tool: GrpcTool, topic: str, code: Code) -> None:
    assert tool.route(topic).status.code == code


def test_the_advertised_address_is_in_routes() -> None:
    with serving(grpc_advertise=HostAddress("broker.example", 0)) as server, GrpcTool(server) as tool:
        create_topic(server, "orders", queues=1)

        endpoints = tool.route("orders").message_queues[0].broker.endpoints

        assert endpoints.scheme == AddressScheme.DOMAIN_NAME
        assert endpoints.addresses[0].host == "broker.example"
        assert endpoints.addresses[0].port == endpoint(server).server.address.port


# --- sends ----------------------------------------------------------------------------------------


def test_a_message_is_stored(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", queues=1)

    tool.send(message("orders", message_id="id-1"))
    answer = tool.send(message("orders", message_id="id-2"))

    assert answer.status.code == Code.OK
    [entry] = answer.entries
    assert (entry.status.code, entry.message_id, entry.transaction_id) == (Code.OK, "id-2", "id-2")
    assert (entry.offset, entry.recall_handle) == (1, "")


def test_messages_without_a_group_take_the_queues_in_turn(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", queues=4)

    for _ in range(8):
        tool.send(message("orders"))

    store = server.engine.engine.store
    assert [store.consume_queue("orders", queue).max_offset for queue in range(4)] == [2, 2, 2, 2]


def test_a_message_group_has_one_queue(server: Server, tool: GrpcTool) -> None:
    """The queue that Java's proxy chooses; the one that the client names has no effect."""
    create_topic(server, "orders", "FIFO", queues=4)

    for number in range(4):
        tool.send(message("orders", message_group="customer-1", queue_id=number))

    store = server.engine.engine.store
    assert sorted(store.consume_queue("orders", queue).max_offset for queue in range(4)) == [0, 0, 0, 4]


def test_a_priority_chooses_the_queue(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "jobs", "PRIORITY", queues=3)

    for priority in (0, 1, 2, 9):
        assert tool.send(message("jobs", priority=priority)).status.code == Code.OK

    store = server.engine.engine.store
    assert [store.consume_queue("jobs", queue).max_offset for queue in range(3)] == [1, 1, 2]


def test_several_messages_have_an_entry_each(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", queues=1)

    answer = tool.send(*(message("orders", message_id=f"id-{number}") for number in range(100)))

    assert answer.status.code == Code.OK
    assert [entry.message_id for entry in answer.entries] == [f"id-{number}" for number in range(100)]
    assert [entry.offset for entry in answer.entries] == list(range(100))


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], Code.MESSAGE_CORRUPTED),
        ([message("orders"), message("others")], Code.MESSAGE_CORRUPTED),
        ([message("orders", b"")], Code.MESSAGE_BODY_EMPTY),
        ([message("orders"), message("orders", b"")], Code.MESSAGE_BODY_EMPTY),
        ([message("orders", b"x" * ((4 << 20) + 1))], Code.MESSAGE_BODY_TOO_LARGE),
        ([message("orders", message_id="")], Code.ILLEGAL_MESSAGE_ID),
        ([message("orders", tag="a|b")], Code.ILLEGAL_MESSAGE_TAG),
        ([message("orders", message_group="g")], Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ([message("none")], Code.TOPIC_NOT_FOUND),
        ([message("a b")], Code.ILLEGAL_TOPIC),
        ([message("TBW102")], Code.ILLEGAL_TOPIC),
        ([message("read_only")], Code.FORBIDDEN),
        ([message("lite", lite_topic="a")], Code.NOT_IMPLEMENTED),
    ],
    ids=range(13),
)
def test_a_send_is_refused(server: Server, tool: GrpcTool, messages: list[Any], code: Code) -> None:
    create_topic(server, "orders")
    create_topic(server, "others")
    create_topic(server, "lite", "LITE")
    create_topic(server, "read_only", perm=4)

    answer = tool.send(*messages)

    assert Code(answer.status.code) is code
    assert answer.status.message
    assert end_offset(server, "orders") == 0


def test_the_largest_body_is_accepted(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders")

    assert tool.send(message("orders", b"x" * (4 << 20))).status.code == Code.OK


def test_too_many_messages_are_refused() -> None:
    with serving(max_batch_messages=2) as server, GrpcTool(server) as tool:
        create_topic(server, "orders")

        status = tool.send(*[message("orders")] * 3).status

        assert status.code == Code.BAD_REQUEST
        assert "the request has 3 messages, allowed are 2" in status.message


def test_a_retry_topic_takes_any_type(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "%RETRY%billing", queues=1)

    assert tool.send(message("%RETRY%billing", message_group="g")).status.code == Code.OK


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_id", ["", "x" * 513])
def test_a_call_needs_a_client_id(server: Server, client_id: str) -> None:
    with GrpcTool(server, client_id) as tool:
        assert tool.route("orders").status.code == Code.CLIENT_ID_REQUIRED
        assert tool.send(message("orders")).status.code == Code.CLIENT_ID_REQUIRED
        assert tool.receive("billing", "orders").code is Code.CLIENT_ID_REQUIRED
        assert tool.telemetry().next().status.code == Code.CLIENT_ID_REQUIRED


@pytest.mark.parametrize("method", ["PullMessage", "UpdateOffset", "GetOffset", "QueryOffset"])
def test_methods_that_the_proxy_lacks_are_unimplemented(tool: GrpcTool, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        tool.call(method, getattr(protos, f"{method}Request")())

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_lite_subscriptions_are_not_implemented(tool: GrpcTool) -> None:
    assert tool.call("SyncLiteSubscription", protos.SyncLiteSubscriptionRequest()).status.code == Code.NOT_IMPLEMENTED


def test_a_message_that_cannot_be_parsed_is_an_error_of_grpc(tool: GrpcTool) -> None:
    stub = tool.channel.unary_unary(protos.method_path("SendMessage"), lambda data: data, lambda data: data)

    with pytest.raises(grpc.RpcError) as caught:
        stub(b"\xff\xff", metadata=tool.metadata(), timeout=30)

    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_only_sends_may_be_large(tool: GrpcTool) -> None:
    status = tool.route("x" * (1 << 20)).status

    assert status.code == Code.PAYLOAD_TOO_LARGE
    assert "allowed are 1048576" in status.message


# --- delays ---------------------------------------------------------------------------------------


def test_a_delayed_message_can_be_recalled(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "later", "DELAY")
    deliver_ms = server.engine.clock.now_ms() + 3_600_000

    [entry] = tool.send(delayed("later", deliver_ms)).entries

    assert entry.recall_handle
    answer = tool.recall("later", entry.recall_handle)
    assert (answer.status.code, answer.message_id) == (Code.OK, "id-1")
    assert server.engine.engine.delayed.count_pending(PendingQuery()).total == 0


def test_a_deliver_time_in_the_past_is_now(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "later", "DELAY")

    answer = tool.send(delayed("later", server.engine.clock.now_ms() - 60_000))

    assert answer.status.code == Code.OK
    assert end_offset(server, "later") == 1


def test_a_deliver_time_beyond_the_limit_of_the_broker_is_refused(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "later", "DELAY")

    answer = tool.send(delayed("later", server.engine.clock.now_ms() + 400 * 86_400_000))

    assert answer.status.code == Code.ILLEGAL_DELIVERY_TIME


@pytest.mark.parametrize(
    ("topic", "handle", "code"),
    [
        ("later", "no handle", Code.INTERNAL_SERVER_ERROR),
        ("later", "", Code.INTERNAL_SERVER_ERROR),
        ("orders", "x", Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ("none", "x", Code.TOPIC_NOT_FOUND),
    ],
)
def test_a_recall_is_refused(server: Server, tool: GrpcTool, topic: str, handle: str, code: Code) -> None:
    create_topic(server, "later", "DELAY")
    create_topic(server, "orders")

    assert tool.recall(topic, handle).status.code == code


# --- transactions ---------------------------------------------------------------------------------


def test_a_transaction_is_committed(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", "TRANSACTION")

    [entry] = tool.send(half("orders")).entries
    assert end_offset(server, "orders") == 0

    assert tool.end_transaction("orders", entry.transaction_id, COMMIT).status.code == Code.OK
    assert end_offset(server, "orders") == 1


class EndedMeanwhile(OrderedDict[Any, Any]):
    """Half messages that another thread ends after each look at their number."""

    def __len__(self) -> int:
        count = super().__len__()
        self.clear()
        return count


def test_the_memory_of_half_messages_is_full_and_other_threads_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.server.grpc_api.producing.OrderedDict", EndedMeanwhile)
    monkeypatch.setattr("mqtemplate.server.grpc_api.producing._MAX_HALVES", 0)
    with serving() as server, GrpcTool(server) as tool:
        create_topic(server, "orders", "TRANSACTION")

        [entry] = tool.send(half("orders", "id-1")).entries

        assert entry.status.code == Code.OK
        assert tool.end_transaction("orders", "id-1", COMMIT).status.code == Code.OK


def test_a_transaction_is_rolled_back(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", "TRANSACTION")

    tool.send(half("orders"))

    assert tool.end_transaction("orders", "id-1", ROLLBACK).status.code == Code.OK
    assert end_offset(server, "orders") == 0
    assert server.engine.engine.transactions.open_count == 0


def test_an_unknown_outcome_leaves_the_transaction_open(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", "TRANSACTION")
    tool.send(half("orders"))

    assert tool.end_transaction("orders", "id-1", 0).status.code == Code.OK
    assert server.engine.engine.transactions.open_count == 1


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (COMMIT, COMMIT, Code.OK),
        (ROLLBACK, ROLLBACK, Code.OK),
        (COMMIT, ROLLBACK, Code.INTERNAL_SERVER_ERROR),
        (ROLLBACK, COMMIT, Code.INTERNAL_SERVER_ERROR),
    ],
)
def test_a_second_end_is_answered_by_the_first(
    server: Server, tool: GrpcTool, first: int, second: int, code: Code
) -> None:
    """A client that got no answer sends the end again."""
    create_topic(server, "orders", "TRANSACTION")
    tool.send(half("orders"))
    tool.end_transaction("orders", "id-1", first)

    assert tool.end_transaction("orders", "id-1", second).status.code == code


def test_a_transaction_can_be_ended_after_a_restart(tmp_path: Any) -> None:
    """The proxy forgets the transaction after 30 seconds; here the log has it."""
    with serving(EmbeddedBroker(tmp_path)) as server, GrpcTool(server) as tool:
        create_topic(server, "orders", "TRANSACTION")
        assert tool.send(half("orders")).status.code == Code.OK

    with serving(EmbeddedBroker(tmp_path)) as server, GrpcTool(server) as tool:
        assert tool.end_transaction("orders", "id-1", COMMIT).status.code == Code.OK
        assert end_offset(server, "orders") == 1


@pytest.mark.parametrize(
    ("topic", "transaction_id", "code"),
    [
        ("orders", " ", Code.INVALID_TRANSACTION_ID),
        ("orders", "id-2", Code.INTERNAL_SERVER_ERROR),
        ("others", "id-1", Code.INTERNAL_SERVER_ERROR),
        ("a b", "id-1", Code.ILLEGAL_TOPIC),
    ],
)
def test_an_end_is_refused(server: Server, tool: GrpcTool, topic: str, transaction_id: str, code: Code) -> None:
    create_topic(server, "orders", "TRANSACTION")
    tool.send(half("orders"))

    assert tool.end_transaction(topic, transaction_id, COMMIT).status.code == code
    assert server.engine.engine.transactions.open_count == 1


def test_a_producer_is_asked_for_the_outcome(stepped: Server, stepped_tool: GrpcTool) -> None:
    """The command has the message as it would be delivered; the answer ends the transaction."""
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    sent = half("orders")
    sent.user_properties["colour"] = "blue"
    stepped_tool.send(sent)

    advance(stepped, 7_000)

    command = stream.next().recover_orphaned_transaction_command
    assert command.transaction_id == "id-1"
    assert (command.message.topic.name, command.message.body) == ("orders", b"body")
    assert dict(command.message.user_properties) == {"colour": "blue"}
    assert command.message.system_properties.message_type == GrpcMessageType.TRANSACTION
    assert stepped_tool.end_transaction("orders", command.transaction_id, COMMIT).status.code == Code.OK
    assert end_offset(stepped, "orders") == 1
    assert end_offset(stepped, HALF_TOPIC, 1) == 2


def test_a_producer_without_a_stream_is_not_checked(stepped: Server, stepped_tool: GrpcTool) -> None:
    """A check that nobody hears would count against the transaction."""
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    stepped_tool.send(half("orders"))
    stream.end()
    with pytest.raises(StopIteration):
        stream.next()

    advance(stepped, 60_000)
    assert end_offset(stepped, HALF_TOPIC, 1) == 1

    again = stepped_tool.telemetry()
    again.report(producer_settings("orders"))
    advance(stepped, 0)
    assert again.next().recover_orphaned_transaction_command.transaction_id == "id-1"


def checks_of(server: Server) -> int:
    """Return the number of checks that were sent: each stores the half message again."""
    return end_offset(server, HALF_TOPIC, 1) - 1


def test_a_check_is_repeated_at_its_interval_only(stepped: Server, stepped_tool: GrpcTool) -> None:
    """Further producers, settings that are sent again and an answer that says nothing do not repeat it earlier."""
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    stepped_tool.send(half("orders"))

    with GrpcTool(stepped, "client-2") as other:
        second = other.telemetry()
        second.report(producer_settings("orders"))
        advance(stepped, 6_000)
        assert checks_of(stepped) == 1
        second.report(producer_settings("orders"))
        stream.report(producer_settings("orders"))
        unspecified = TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        assert stepped_tool.end_transaction("orders", "id-1", unspecified).status.code == Code.OK
        advance(stepped, 29_000)
        assert checks_of(stepped) == 1
        advance(stepped, 1_000)
        assert checks_of(stepped) == 2


def test_a_late_check_is_sent_once(stepped: Server, stepped_tool: GrpcTool) -> None:
    """The machine slept: the checks that it missed are not sent one after the other."""
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    stepped_tool.send(half("orders"))

    clock = stepped.engine.clock
    assert isinstance(clock, VirtualClock)
    clock.move_ms(60_000)
    advance(stepped, 29_000)
    assert checks_of(stepped) == 1

    advance(stepped, 1_000)
    assert checks_of(stepped) == 2


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_an_answered_check_is_not_repeated(stepped: Server, stepped_tool: GrpcTool, outcome: int) -> None:
    """The answer names the transaction, not the check: it may be that of an earlier one."""
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    stepped_tool.send(half("orders"))

    advance(stepped, 36_000)
    assert checks_of(stepped) == 2
    assert stepped_tool.end_transaction("orders", "id-1", outcome).status.code == Code.OK
    advance(stepped, 600_000)

    assert checks_of(stepped) == 2
    assert end_offset(stepped, "orders") == (1 if outcome == COMMIT else 0)


def test_the_last_check_without_an_answer_discards_the_transaction() -> None:
    settings = EmbeddedSettings(transaction_check_max=2, transaction_check_interval_ms=1_000)
    with serving(EmbeddedBroker(None, settings, VirtualClock())) as server, GrpcTool(server) as tool:
        create_topic(server, "orders", "TRANSACTION")
        stream = tool.telemetry()
        stream.report(producer_settings("orders"))
        tool.send(half("orders"))

        advance(server, 7_000)
        assert checks_of(server) == 2
        assert server.engine.engine.transactions.open_count == 1

        advance(server, 1_000)
        assert checks_of(server) == 2
        assert server.engine.engine.transactions.open_count == 0


class RecordingCall:
    """A stream of telemetry that notes what is written to it."""

    is_open = True

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def write(self, message: bytes) -> None:
        self._events.append(message.decode())


def test_transactions_are_due_before_their_producer_gets_its_settings(stepped: Server, stepped_tool: GrpcTool) -> None:
    """A client that has the answer may rely on the check."""
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    events: list[str] = []
    stepped.engine.engine.transactions.on_wake(lambda: events.append("due"))
    call: Any = RecordingCall(events)
    caller: Any = None

    endpoint(stepped).service.clients.attach(GrpcContext(call, "client-1", "", caller), b"settings")

    assert events == ["due", "settings"]


def test_a_recovery_duration_delays_the_first_check(stepped: Server, stepped_tool: GrpcTool) -> None:
    create_topic(stepped, "orders", "TRANSACTION")
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    sent = half("orders")
    sent.system_properties.orphaned_transaction_recovery_duration.seconds = 60
    stepped_tool.send(sent)

    advance(stepped, 59_000)
    assert end_offset(stepped, HALF_TOPIC, 1) == 1

    advance(stepped, 2_000)
    assert stream.next().recover_orphaned_transaction_command.transaction_id == "id-1"


# --- durability -----------------------------------------------------------------------------------


def test_a_send_is_on_disk_when_it_is_answered(tmp_path: Any) -> None:
    with serving(EmbeddedBroker(tmp_path)) as server, GrpcTool(server) as tool:
        create_topic(server, "orders", queues=1)

        tool.send(message("orders"))

        store = server.engine.engine.store
        assert store.confirm_offset == store.end_offset


def test_the_embedded_broker_of_the_server_sees_the_messages(server: Server, tool: GrpcTool) -> None:
    create_topic(server, "orders", queues=1)

    server.engine.sends.send(Message("orders", b"from here", {}))

    assert tool.send(message("orders")).entries[0].offset == 1


def test_delays_work_with_settings_of_the_engine() -> None:
    settings = EmbeddedSettings(timer_max_delay_sec=60)
    with serving(EmbeddedBroker(None, settings, VirtualClock())) as server, GrpcTool(server) as tool:
        create_topic(server, "later", "DELAY")
        now_ms = server.engine.clock.now_ms()

        assert tool.send(delayed("later", now_ms + 59_000)).status.code == Code.OK
        assert tool.send(delayed("later", now_ms + 61_000)).status.code == Code.ILLEGAL_DELIVERY_TIME

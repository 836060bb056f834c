"""Methods of consumers over sockets: receives, acknowledgements, invisible times, dead letters; each status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.server import BrokerServer
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    Received,
    advance,
    consumer_settings,
    create_topic,
    message,
    serving,
)
from tests.waiting import eventually

Server = BrokerServer[EmbeddedBroker]
GROUP, TOPIC = "billing", "orders"


@pytest.fixture
def topic(server: Server, tool: GrpcTool) -> str:
    """A topic whose group has read it: later messages are new for it."""
    create_topic(server, TOPIC)
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    return TOPIC


@pytest.fixture
def stepped_topic(stepped: Server) -> str:
    create_topic(stepped, TOPIC)
    stepped.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    return TOPIC


def held(server: Server) -> int | None:
    """Return the number of receives that wait; None while one is not yet, or no longer, both counted and held.

    A receive is counted first. The time for which it waits starts when it is held.
    """
    count = server.engine.engine.pop.count_held(GROUP, TOPIC)
    return count if len(server.limits.pulls) == count else None


def in_thread(stream: Any) -> tuple[threading.Thread, list[Received]]:
    """Read the answer of a receive in another thread."""
    found: list[Received] = []

    def read() -> None:
        with suppress(grpc.RpcError):  # the test has failed, and closes the channel
            found.append(Received(list(stream)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, found


# --- receives -------------------------------------------------------------------------------------


def test_a_receive_is_a_status_the_messages_and_a_time(tool: GrpcTool, topic: str) -> None:
    tool.send(*(message(topic, b"%d" % number, f"id-{number}", tag="paid") for number in range(3)))

    received = tool.receive(GROUP, topic)

    assert received.code is Code.OK
    assert received.kinds == ["status", "message", "message", "message", "delivery_timestamp"]
    assert sorted(received.bodies) == [b"0", b"1", b"2"]
    system = received.messages[0].system_properties
    assert (system.tag, system.delivery_attempt) == ("paid", 1)
    assert len(system.receipt_handle.split()) == 9


def test_the_batch_size_limits_a_receive(tool: GrpcTool, topic: str) -> None:
    tool.send(*(message(topic, message_id=f"id-{number}") for number in range(50)))

    assert len(tool.receive(GROUP, topic, count=3).messages) == 3
    assert len(tool.receive(GROUP, topic, count=0).messages) == 1
    assert len(tool.receive(GROUP, topic, count=100).messages) == 32


def test_a_receive_waits_for_a_message(server: Server, tool: GrpcTool, topic: str) -> None:
    thread, found = in_thread(tool.start_receive(GROUP, topic, wait_s=20))
    eventually(lambda: held(server) == 1, "a receive waits")

    tool.send(message(topic, b"late"))

    thread.join()
    assert found[0].bodies == [b"late"]
    assert held(server) == 0


def test_a_receive_without_messages_ends_after_its_time(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    """The shortest time is 5 seconds."""
    thread, found = in_thread(stepped_tool.start_receive(GROUP, stepped_topic, wait_s=0, timeout=600))
    eventually(lambda: held(stepped) == 1, "a receive waits")

    advance(stepped, 4_000)
    assert not found
    advance(stepped, 1_000)

    thread.join()
    assert found[0].code is Code.MESSAGE_NOT_FOUND
    assert found[0].kinds == ["status", "delivery_timestamp"]


def test_a_receive_without_a_deadline_is_accepted(tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic))

    assert tool.receive(GROUP, topic, wait_s=None, timeout=None).code is Code.OK


def test_a_cancelled_receive_pops_nothing(server: Server, tool: GrpcTool, topic: str) -> None:
    """The next receiver gets the message at once, as its first delivery."""
    stream = tool.start_receive(GROUP, topic, wait_s=20)
    eventually(lambda: held(server) == 1, "a receive waits")
    stream.cancel()
    eventually(lambda: held(server) == 0, "no receive waits")

    tool.send(message(topic))

    [only] = tool.receive(GROUP, topic).messages
    assert only.system_properties.delivery_attempt == 1


def test_the_messages_of_a_client_that_is_gone_are_visible_after_a_second(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    with GrpcTool(stepped, "client-2") as other:
        stream = other.telemetry()
        stream.report(consumer_settings(GROUP, stepped_topic, kind=ClientType.PUSH_CONSUMER))
        stepped_tool.send(message(stepped_topic))
        assert len(other.receive(GROUP, stepped_topic, auto_renew=True).messages) == 1
        assert other.terminate(GROUP).status.code == Code.OK

    advance(stepped, 1_500)

    assert len(stepped_tool.receive(GROUP, stepped_topic, timeout=600).messages) == 1


def test_the_messages_of_a_silent_client_are_visible_after_its_expiry(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    stream = stepped_tool.telemetry()
    stream.report(consumer_settings(GROUP, stepped_topic, kind=ClientType.PUSH_CONSUMER))
    stepped_tool.send(message(stepped_topic))
    assert len(stepped_tool.receive(GROUP, stepped_topic, auto_renew=True).messages) == 1

    for _ in range(12):  # as long as it sends heartbeats, its delivery is renewed
        advance(stepped, 10_000)
        assert stepped_tool.heartbeat(GROUP).status.code == Code.OK
    assert len(stepped.engine.engine.pop.in_flight(GROUP, stepped_topic)) > 0
    advance(stepped, 135_000)

    with GrpcTool(stepped, "client-2") as other:
        [again] = other.receive(GROUP, stepped_topic, timeout=600).messages
        assert again.system_properties.delivery_attempt == 2


def test_two_members_share_the_messages(server: Server, tool: GrpcTool, topic: str) -> None:
    tool.send(*(message(topic, b"%d" % number, f"id-{number}") for number in range(60)))
    with GrpcTool(server, "client-2") as other:
        bodies = [
            body
            for _ in range(10)
            for member in (tool, other)
            for body in (member.receive(GROUP, topic, count=3).bodies)
        ]

    assert sorted(bodies) == sorted(b"%d" % number for number in range(60))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"topic": "none"}, Code.TOPIC_NOT_FOUND),
        ({"topic": "a b"}, Code.ILLEGAL_TOPIC),
        ({"group": "a b"}, Code.ILLEGAL_CONSUMER_GROUP),
        ({"group": "CID_RMQ_SYS_X"}, Code.ILLEGAL_CONSUMER_GROUP),
        ({"topic": "write_only"}, Code.FORBIDDEN),
        ({"invisible_s": None}, Code.ILLEGAL_INVISIBLE_TIME),
        ({"invisible_s": 9.999}, Code.ILLEGAL_INVISIBLE_TIME),
        ({"invisible_s": 12 * 3_600 + 0.001}, Code.ILLEGAL_INVISIBLE_TIME),
        ({"expression": "a = ", "sql": True}, Code.ILLEGAL_FILTER_EXPRESSION),
        ({"expression": "||||"}, Code.ILLEGAL_FILTER_EXPRESSION),
        ({"timeout": 4.0}, Code.ILLEGAL_POLLING_TIME),
        ({"group": "paused"}, Code.FORBIDDEN),
    ],
    ids=range(12),
)
def test_a_receive_is_refused(server: Server, tool: GrpcTool, topic: str, options: dict[str, Any], code: Code) -> None:
    create_topic(server, "write_only", perm=2)
    server.groups.put([SubscriptionGroupConfig(group_name="paused", consume_enable=False)])

    received = tool.receive(**{"group": GROUP, "topic": topic, **options})

    assert received.code is code
    assert received.kinds == ["status", "delivery_timestamp"]
    assert received.status.message
    assert held(server) == 0


def test_a_group_that_may_not_be_created_is_not_found() -> None:
    with serving(auto_create_subscription_group=False) as server, GrpcTool(server) as tool:
        create_topic(server, TOPIC)

        assert tool.receive("none", TOPIC).code is Code.CONSUMER_GROUP_NOT_FOUND


def test_too_many_receives_are_refused() -> None:
    with serving(max_held_pulls=1) as server, GrpcTool(server) as tool:
        create_topic(server, TOPIC)
        waiting = tool.start_receive(GROUP, TOPIC, wait_s=20)
        eventually(lambda: held(server) == 1, "a receive waits")

        assert tool.receive(GROUP, TOPIC).code is Code.TOO_MANY_REQUESTS
        waiting.cancel()


@pytest.mark.parametrize(
    ("expression", "is_sql", "bodies"),
    [
        ("paid", False, [b"a"]),
        ("paid || open", False, [b"a", b"b"]),
        ("size > 5", True, [b"b"]),
        ("", False, [b"a", b"b"]),
    ],
)
def test_a_filter_selects_messages(
    tool: GrpcTool, topic: str, expression: str, is_sql: bool, bodies: list[bytes]
) -> None:
    first, second = message(topic, b"a", "id-1", tag="paid"), message(topic, b"b", "id-2", tag="open")
    first.user_properties["size"], second.user_properties["size"] = "3", "7"
    tool.send(first, second)

    received = tool.receive(GROUP, topic, expression=expression, sql=is_sql)

    assert sorted(received.bodies) == bodies


def test_a_large_answer_arrives(tool: GrpcTool, topic: str) -> None:
    """It is built in a worker thread, and waits for the windows of the client."""
    body = bytes(range(256)) * 12_000
    tool.send(message(topic, body))

    assert tool.receive(GROUP, topic).bodies == [body]


# --- acknowledgements -----------------------------------------------------------------------------


def test_an_acknowledged_message_does_not_come_again(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    stepped_tool.send(message(stepped_topic))
    handle = stepped_tool.receive(GROUP, stepped_topic).handle

    answer = stepped_tool.ack(GROUP, stepped_topic, handle)

    assert (answer.status.code, answer.entries[0].status.code) == (Code.OK, Code.OK)
    assert answer.entries[0].receipt_handle == handle
    assert all(queue.in_flight == 0 for queue in stepped.engine.engine.pop.in_flight(GROUP, stepped_topic))


def test_a_repeated_acknowledgement_is_ok(tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic))
    handle = tool.receive(GROUP, topic).handle

    assert [tool.ack(GROUP, topic, handle).status.code for _ in range(2)] == [Code.OK, Code.OK]


def test_a_message_comes_again_after_its_invisible_time(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    stepped_tool.send(message(stepped_topic))
    first = stepped_tool.receive(GROUP, stepped_topic, invisible_s=10, timeout=600)

    advance(stepped, 11_000)
    again = stepped_tool.receive(GROUP, stepped_topic, timeout=600)

    assert again.bodies == first.bodies
    assert again.messages[0].topic.name == stepped_topic
    assert again.messages[0].system_properties.delivery_attempt == 2
    assert again.messages[0].system_properties.message_id == "id-1"


def test_an_expired_handle_of_a_simple_consumer_is_refused(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    stream = stepped_tool.telemetry()
    stream.report(consumer_settings(GROUP, stepped_topic))
    stepped_tool.send(message(stepped_topic))
    handle = stepped_tool.receive(GROUP, stepped_topic, invisible_s=10).handle

    advance(stepped, 11_000)

    assert stepped_tool.ack(GROUP, stepped_topic, handle).status.code == Code.INVALID_RECEIPT_HANDLE


def handles(tool: GrpcTool, topic: str) -> Iterator[tuple[str, Code]]:
    tool.send(message(topic))
    good = tool.receive(GROUP, topic).handle
    yield "no handle", Code.INVALID_RECEIPT_HANDLE
    yield "", Code.INVALID_RECEIPT_HANDLE
    yield good.replace("broker-a", "broker-b"), Code.BAD_REQUEST


def test_bad_handles_are_refused(tool: GrpcTool, topic: str) -> None:
    for handle, code in list(handles(tool, topic)):
        assert tool.ack(GROUP, topic, handle).status.code == code
        assert tool.change(GROUP, topic, handle, 10).status.code == code
        assert tool.forward(GROUP, topic, handle).status.code == code


def test_entries_have_statuses_of_their_own(tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic))
    handle = tool.receive(GROUP, topic).handle

    answer = tool.ack(GROUP, topic, handle, "no handle")

    assert answer.status.code == Code.MULTIPLE_RESULTS
    assert [entry.status.code for entry in answer.entries] == [Code.OK, Code.INVALID_RECEIPT_HANDLE]


@pytest.mark.parametrize(
    ("group", "topic_name", "code"),
    [("a b", TOPIC, Code.ILLEGAL_CONSUMER_GROUP), (GROUP, "", Code.ILLEGAL_TOPIC), (GROUP, TOPIC, 50001)],
)
def test_an_acknowledgement_is_refused(tool: GrpcTool, topic: str, group: str, topic_name: str, code: int) -> None:
    assert tool.ack(group, topic_name).status.code == code


# --- invisible times ------------------------------------------------------------------------------


def test_a_changed_invisible_time_has_a_new_handle(stepped: Server, stepped_tool: GrpcTool, stepped_topic: str) -> None:
    stepped_tool.send(message(stepped_topic))
    handle = stepped_tool.receive(GROUP, stepped_topic, invisible_s=10).handle
    advance(stepped, 1_000)

    answer = stepped_tool.change(GROUP, stepped_topic, handle, 60)

    assert answer.status.code == Code.OK
    assert answer.receipt_handle != handle
    assert len(answer.receipt_handle.split()) == 9
    advance(stepped, 30_000)
    assert stepped_tool.ack(GROUP, stepped_topic, answer.receipt_handle).status.code == Code.OK


def test_an_invisible_time_of_zero_returns_the_message_at_once(tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic))
    handle = tool.receive(GROUP, topic).handle

    assert tool.change(GROUP, topic, handle, 0).status.code == Code.OK

    [again] = tool.receive(GROUP, topic).messages
    assert again.system_properties.delivery_attempt == 2


def test_a_suspended_message_has_the_same_attempt_again(tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic))
    handle = tool.receive(GROUP, topic).handle

    tool.change(GROUP, topic, handle, 0, suspend=True)

    [again] = tool.receive(GROUP, topic).messages
    assert again.system_properties.delivery_attempt == 1


@pytest.mark.parametrize("seconds", [-1, 12 * 3_600 + 1])
def test_an_invisible_time_is_refused(tool: GrpcTool, topic: str, seconds: float) -> None:
    tool.send(message(topic))
    handle = tool.receive(GROUP, topic).handle

    assert tool.change(GROUP, topic, handle, seconds).status.code == Code.ILLEGAL_INVISIBLE_TIME


def test_a_replaced_handle_changes_nothing(stepped: Server, stepped_tool: GrpcTool, stepped_topic: str) -> None:
    stepped_tool.send(message(stepped_topic))
    first = stepped_tool.receive(GROUP, stepped_topic).handle
    advance(stepped, 1_000)
    stepped_tool.change(GROUP, stepped_topic, first, 60)

    assert stepped_tool.change(GROUP, stepped_topic, first, 60).status.code == Code.INVALID_RECEIPT_HANDLE


# --- dead letters ---------------------------------------------------------------------------------


def test_a_message_is_forwarded_to_the_dead_letter_topic(server: Server, tool: GrpcTool, topic: str) -> None:
    tool.send(message(topic, tag="paid"))
    handle = tool.receive(GROUP, topic).handle

    assert tool.forward(GROUP, topic, handle).status.code == Code.OK

    [dead] = tool.receive("operators", f"%DLQ%{GROUP}").messages
    assert dead.body == b"body"
    assert dead.system_properties.dead_letter_queue.topic == topic
    assert dead.system_properties.tag == "paid"
    assert all(queue.in_flight == 0 for queue in server.engine.engine.pop.in_flight(GROUP, topic))


def test_a_message_is_a_dead_letter_after_its_attempts(
    stepped: Server, stepped_tool: GrpcTool, stepped_topic: str
) -> None:
    stepped.groups.put([SubscriptionGroupConfig(group_name=GROUP, retry_max_times=1)])
    stepped_tool.send(message(stepped_topic))
    for attempt in (1, 2):
        [received] = stepped_tool.receive(GROUP, stepped_topic, invisible_s=10, timeout=600).messages
        assert received.system_properties.delivery_attempt == attempt
        advance(stepped, 11_000)

    thread, found = in_thread(stepped_tool.start_receive(GROUP, stepped_topic, timeout=600))
    eventually(lambda: held(stepped) == 1, "a receive waits")
    advance(stepped, 6_000)
    thread.join()
    assert found[0].code is Code.MESSAGE_NOT_FOUND
    assert len(stepped_tool.receive("operators", f"%DLQ%{GROUP}", timeout=600).messages) == 1


# --- assignments and order ------------------------------------------------------------------------


def assignment(tool: GrpcTool, group: str = GROUP, topic: str = TOPIC) -> Any:
    request = protos.QueryAssignmentRequest(topic=protos.Resource(name=topic), group=protos.Resource(name=group))
    return tool.call("QueryAssignment", request)


def test_every_member_is_assigned_the_whole_broker(tool: GrpcTool, topic: str) -> None:
    answer = assignment(tool)

    [only] = answer.assignments
    assert (answer.status.code, only.message_queue.id, only.message_queue.broker.name) == (Code.OK, -1, "broker-a")
    assert only.message_queue.broker.endpoints.addresses[0].host == "127.0.0.1"


def test_an_ordered_group_is_assigned_every_queue(server: Server, tool: GrpcTool, topic: str) -> None:
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP, consume_message_orderly=True)])

    assert [each.message_queue.id for each in assignment(tool).assignments] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("topic_name", "group", "code"),
    [
        ("none", GROUP, Code.TOPIC_NOT_FOUND),
        ("write_only", GROUP, Code.FORBIDDEN),
        (TOPIC, "a b", Code.ILLEGAL_CONSUMER_GROUP),
    ],
)
def test_an_assignment_is_refused(
    server: Server, tool: GrpcTool, topic: str, topic_name: str, group: str, code: Code
) -> None:
    create_topic(server, "write_only", perm=2)

    assert assignment(tool, group, topic_name).status.code == code


def test_messages_of_a_group_come_in_order(server: Server, tool: GrpcTool) -> None:
    """The next one of a message group comes after the acknowledgement of the one before it."""
    create_topic(server, "fifo", "FIFO")
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP, consume_message_orderly=True)])
    for number in range(3):
        tool.send(message("fifo", b"%d" % number, f"id-{number}", message_group="customer-1"))

    for number in range(3):
        received = tool.receive(GROUP, "fifo", count=1, attempt_id=f"attempt-{number}")
        assert received.bodies == [b"%d" % number]
        repeated = tool.receive(GROUP, "fifo", count=1, attempt_id=f"attempt-{number}")
        assert repeated.bodies == received.bodies
        assert tool.ack(GROUP, "fifo", repeated.handle).status.code == Code.OK


# --- the end of the server ------------------------------------------------------------------------


def test_a_server_that_stops_answers_the_receives_that_wait() -> None:
    with serving() as server:
        create_topic(server, TOPIC)
        with GrpcTool(server) as tool:
            thread, found = in_thread(tool.start_receive(GROUP, TOPIC, wait_s=20))
            eventually(lambda: held(server) == 1, "a receive waits")
            server.stop()
            thread.join()

    assert found[0].code is Code.MESSAGE_NOT_FOUND


def test_clients_use_a_server_that_was_restarted(tmp_path: Any) -> None:
    """An application that uses the same channel goes on: a receive works without settings, a heartbeat wants them."""
    with serving(EmbeddedBroker(tmp_path)) as server:
        create_topic(server, TOPIC)
        address = server.grpc.server.address  # type: ignore[union-attr]
        tool = GrpcTool(address)
        stream = tool.telemetry()
        stream.report(consumer_settings(GROUP, TOPIC, kind=ClientType.PUSH_CONSUMER))
        tool.send(message(TOPIC, b"before"))
    with pytest.raises((grpc.RpcError, StopIteration)):
        stream.next()

    with serving(EmbeddedBroker(tmp_path), grpc_listen=address), tool:

        def received() -> list[bytes]:
            try:
                return tool.receive(GROUP, TOPIC, auto_renew=True, invisible_s=None).bodies
            except grpc.RpcError:  # grpcio waits before it connects again
                return []

        eventually(lambda: received() == [b"before"], "the client is connected again")
        assert tool.heartbeat(GROUP).status.code == Code.UNRECOGNIZED_CLIENT_TYPE
        again = tool.telemetry()
        again.report(consumer_settings(GROUP, TOPIC, kind=ClientType.PUSH_CONSUMER))
        assert tool.heartbeat(GROUP).status.code == Code.OK

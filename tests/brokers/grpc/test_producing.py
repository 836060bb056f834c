"""Sends, transactions and recalls over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers import GrpcBroker, GrpcSettings
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.errors import (
    BrokerError,
    DelayError,
    DestinationError,
    ListenerError,
    MessageError,
    SendConnectError,
    SendError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, TransactionResolution, TransactionSource
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendStatus, TransactionState
from tests.brokers.grpc.scripted_proxy import ScriptedProxy, received, status
from tests.waiting import eventually

ORDER = Message("orders", b"order")


def refusing(*codes: Code, then: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return an answer to sends: these codes one after the other, then *then*."""
    left = list(codes)

    def answer(request: Any) -> Any:
        if left:
            return protos.SendMessageResponse(status=status(left.pop(0), "why"))
        assert then is not None
        return then(request)

    return answer


# --- sends ----------------------------------------------------------------------------------------


def test_a_result_has_what_the_proxy_tells(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    """With one queue its id is known; the id of the broker never is."""
    result = broker.sends.send(ORDER)

    [request] = proxy.requests["SendMessage"]
    assert result.send_status is SendStatus.SEND_OK
    assert result.msg_id == request.messages[0].system_properties.message_id
    assert result.message_queue == MessageQueue("orders", "broker-a", 0)
    assert (result.transaction_id, result.handle, result.offset_msg_id) == (None, None, "")


def test_of_several_queues_the_chosen_one_is_unknown(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.brokers = ["broker-a", "broker-a"]

    assert broker.sends.send(ORDER).message_queue == MessageQueue("orders", "broker-a", -1)


def test_the_settings_name_the_topics(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    """So the proxy sends checks of transactions to this client. A refused topic is not among them."""
    broker.sends.send(ORDER)
    proxy.answers["SendMessage"] = refusing(Code.FORBIDDEN, then=proxy._SendMessage)
    with pytest.raises(SendError, match="access control"):
        broker.sends.send(Message("secrets", b"x"))
    broker.sends.send(Message("invoices", b"x"))

    assert list(broker.sends._topics) == ["orders", "invoices"]


def test_a_message_is_sent_although_the_settings_are_refused(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.settings_status = status(Code.UNAUTHORIZED, "no right to topic secrets")

    assert broker.sends.send(ORDER).send_status is SendStatus.SEND_OK


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.MASTER_PERSISTENCE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (Code.SLAVE_PERSISTENCE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
        (Code.HA_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
    ],
)
def test_a_message_that_is_stored_with_a_weaker_guarantee_has_a_result(
    proxy: ScriptedProxy, broker: GrpcBroker, code: Code, expected: SendStatus
) -> None:
    def answer(request: Any) -> Any:
        found = protos.SendMessageResponse(status=status(code, "timeout"))
        found.entries.add(status=status(code, "timeout"), message_id="ID")
        return found

    proxy.answers["SendMessage"] = answer

    assert broker.sends.send(ORDER).send_status is expected


def test_an_overloaded_proxy_is_tried_again(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["SendMessage"] = refusing(
        Code.TOO_MANY_REQUESTS, Code.INTERNAL_SERVER_ERROR, Code.TOO_MANY_REQUESTS, then=proxy._SendMessage
    )

    assert broker.sends.send(ORDER).send_status is SendStatus.SEND_OK
    assert len(proxy.requests["SendMessage"]) == 4


def test_an_asynchronous_send_is_tried_again_too(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["SendMessage"] = refusing(Code.TOO_MANY_REQUESTS, then=proxy._SendMessage)

    assert broker.sends.send_async([ORDER]).result(10).send_status is SendStatus.SEND_OK


def test_the_error_after_the_last_try_lists_the_tries(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["SendMessage"] = refusing(*[Code.INTERNAL_SERVER_ERROR] * 3)

    with pytest.raises(SendError, match=r"to 'orders': tried 3 times within 3s: .*50001 INTERNAL_SERVER_ERROR: why"):
        broker.sends.send(ORDER)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, MessageError),
        (Code.ILLEGAL_DELIVERY_TIME, DelayError),
        (Code.FORBIDDEN, SendError),
    ],
)
def test_a_refused_message_is_not_tried_again(
    proxy: ScriptedProxy, broker: GrpcBroker, code: Code, kind: type[Exception]
) -> None:
    proxy.answers["SendMessage"] = refusing(code)

    with pytest.raises(kind, match=rf"send message .* to 'orders': {proxy.address} answered {code.value}"):
        broker.sends.send(ORDER)
    proxy.answers["SendMessage"] = refusing(code)
    with pytest.raises(kind, match="why"):
        broker.sends.send_async([ORDER]).result(10)


def test_no_answer_in_time_is_a_timeout(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    answered = threading.Event()
    proxy.answers["SendMessage"] = lambda request: answered.wait(10) and proxy._SendMessage(request)
    broker.queues("orders")

    with pytest.raises(SendTimeoutError, match=r"no answer from 127\.0\.0\.1:\d+ in \d+ ms"):
        broker.sends.send(ORDER, timeout_ms=300)
    answered.set()


def test_a_proxy_that_has_ended_is_a_connect_error(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    broker.sends.send(ORDER)
    proxy._server.stop(0).wait()

    with pytest.raises(SendConnectError, match=rf"tried \d+ times within 400ms: .*{proxy.address}: no connection"):
        broker.sends.send(ORDER, timeout_ms=400)
    assert broker.outage() is not None


def test_an_unknown_topic_is_named_with_what_to_do(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["QueryRoute"] = lambda _: protos.QueryRouteResponse(status=status(Code.TOPIC_NOT_FOUND, "no route"))

    with pytest.raises(
        DestinationError, match=r"topic 'orders' is not known at .*\(no route\).*mqadmin updateTopic .*-t orders"
    ):
        broker.sends.send(ORDER)


def test_a_queue_cannot_be_chosen(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.brokers = ["broker-a", "broker-a"]
    queue = broker.queues("orders")[1]

    with pytest.raises(UnsupportedError, match=r"the proxy chooses the queue, so queue 1 of 'orders' .*pass hash_key="):
        broker.sends.send(ORDER, queue)
    with pytest.raises(DestinationError, match=r"is not a queue of the topic; there are 2, from queue 0 on"):
        broker.sends.send(ORDER, MessageQueue("orders", "broker-a", 7))


def test_with_a_hash_key_the_proxy_chooses_the_queue(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.brokers = ["broker-a", "broker-a"]
    message = Message("orders", b"x", {Property.SHARDING_KEY: "customer-7"})

    broker.sends.send(message, broker.queues("orders")[1])

    [request] = proxy.requests["SendMessage"]
    assert request.messages[0].system_properties.message_group == "customer-7"


def test_a_batch_is_one_request(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    result = broker.sends.send_batch([Message("orders", b"a"), Message("orders", b"b")])

    [request] = proxy.requests["SendMessage"]
    assert [message.body for message in request.messages] == [b"a", b"b"]
    assert result.msg_id.split(",") == [message.system_properties.message_id for message in request.messages]


@pytest.mark.parametrize(
    ("messages", "kind", "text"),
    [
        ([], MessageError, "the batch is empty; give at least one message"),
        ([ORDER, Message("invoices", b"x")], MessageError, "this one names invoices, orders; send two batches"),
        ([ORDER, Message("orders", b"x", {Property.DELAY: "1"})], UnsupportedError, "send the messages one by one"),
        ([ORDER, Message("orders", b"x", {Property.SHARDING_KEY: "k"})], UnsupportedError, "one by one"),
        ([Message("orders", bytes(3 << 20))] * 2, MessageError, "has 6291456 bytes, allowed are 4194304"),
    ],
)
def test_a_batch_that_would_be_stored_wrongly_is_refused(
    broker: GrpcBroker, messages: list[Message], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        broker.sends.send_batch(messages)


def test_a_one_way_message_is_sent(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["SendMessage"] = refusing(Code.FORBIDDEN)

    broker.sends.send_one_way(ORDER)

    eventually(lambda: len(proxy.requests["SendMessage"]) == 1, "the message has arrived")


# --- what the protocol lacks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda broker: broker.create_topic("new"), r"create topic 'new': .*mqadmin updateTopic .*-t new"),
        (lambda broker: broker.admin(), r"lists of topics and groups: .*dashboard\.enabled: false"),
        (lambda broker: broker.reader.message_by_id("x"), r"queries of messages by id: .*rocketmq\.name-server"),
        (lambda broker: broker.reader.messages_by_key("orders", "k"), r"queries of messages by key"),
        (lambda broker: broker.reader.pull(MessageQueue("orders", "a", 0), 0), r"pulls: "),
        (lambda broker: broker.requests.request(ORDER), r"requests and replies: "),
        (lambda broker: broker.sends.send_sequenced([], None), r"no sends whose repeats are dropped; use send_batch"),
        (lambda broker: broker.groups.committed_offset("g", None), r"the offset of group 'g': .*no offsets of queues"),
        (lambda broker: broker.delayed.cancel(key="4466"), r"cancel by key: .*keep SendResult\.handle"),
        (lambda broker: broker.delayed.reschedule("h", 1), r"reschedule: cancel the message and send it again: "),
        (lambda broker: broker.delayed.pending(PendingQuery()), r"a list of pending messages: "),
    ],
)
def test_a_call_that_the_protocol_lacks_says_what_to_do(
    broker: GrpcBroker, call: Callable[[GrpcBroker], object], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        call(broker)


def test_the_capabilities_are_those_of_the_protocol(broker: GrpcBroker) -> None:
    assert Capability.POP in broker.capabilities
    assert not broker.capabilities & {Capability.QUERY, Capability.PENDING, Capability.REQUEST_REPLY}


# --- transactions ---------------------------------------------------------------------------------


def check_of(topic: str, transaction_id: str) -> Any:
    """The command of a proxy to check a transaction."""
    command = protos.TelemetryCommand()
    command.recover_orphaned_transaction_command.message.CopyFrom(received(b"half", "", topic=topic))
    command.recover_orphaned_transaction_command.transaction_id = transaction_id
    return command


def ends(proxy: ScriptedProxy) -> list[tuple[str, int, int]]:
    return [(each.transaction_id, each.resolution, each.source) for each in proxy.requests["EndTransaction"]]


def test_a_transaction_ends_with_its_state(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    halves = [broker.sends.send_half(ORDER, "shop") for _ in range(3)]

    for half, state in zip(halves, TransactionState, strict=True):
        broker.transactions.end_transaction(half, state)

    ids = [half.send_result.transaction_id for half in halves]
    assert ends(proxy) == [
        (ids[0], TransactionResolution.COMMIT, TransactionSource.SOURCE_CLIENT),
        (ids[1], TransactionResolution.ROLLBACK, TransactionSource.SOURCE_CLIENT),
    ]


def test_a_check_goes_to_the_checker_of_the_group_that_sent_the_message(
    proxy: ScriptedProxy, broker: GrpcBroker
) -> None:
    checked: list[tuple[str, MessageExt]] = []

    def checker(group: str) -> Callable[[MessageExt], TransactionState]:
        def check(message: MessageExt) -> TransactionState:
            checked.append((group, message))
            return TransactionState.COMMIT

        return check

    for group in ("shop", "bank"):
        broker.transactions.check_transactions(group, checker(group))
    half = broker.sends.send_half(ORDER, "bank")
    transaction_id = half.send_result.transaction_id or ""

    proxy.send_command(check_of("orders", transaction_id))

    eventually(lambda: len(ends(proxy)) == 1, "the check is answered")
    [(group, message)] = checked
    assert (group, message.topic, message.body) == ("bank", "orders", b"half")
    assert message.transaction_id == message.msg_id
    assert ends(proxy) == [(transaction_id, TransactionResolution.COMMIT, TransactionSource.SOURCE_SERVER_CHECK)]


def test_a_check_from_before_a_restart_goes_to_the_only_checker(proxy: ScriptedProxy) -> None:
    with GrpcBroker(GrpcSettings(endpoints=proxy.address, topics=("orders",))) as broker:
        broker.transactions.check_transactions("shop", lambda message: TransactionState.ROLLBACK)

        proxy.send_command(check_of("orders", "T-1"))

        eventually(lambda: len(ends(proxy)) == 1, "the check is answered")
    assert ends(proxy)[0][:2] == ("T-1", TransactionResolution.ROLLBACK)


def test_a_second_checker_of_a_group_is_refused(broker: GrpcBroker) -> None:
    broker.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT)

    with pytest.raises(ListenerError, match=r"producer group 'shop' has a transaction listener here already; give one"):
        broker.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT)


# --- recalls --------------------------------------------------------------------------------------


@pytest.fixture
def handle(broker: GrpcBroker) -> str:
    return encode_handle(RecallHandle("orders", "broker-a", broker.clock.now_ms() + 60_000, "ID-1"))


def test_a_handle_is_recalled(proxy: ScriptedProxy, broker: GrpcBroker, handle: str) -> None:
    change = broker.delayed.cancel(handle)

    [request] = proxy.requests["RecallMessage"]
    assert (request.topic.name, request.recall_handle) == ("orders", handle)
    assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 1)


def test_a_message_that_is_due_is_delivered_already(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    due = encode_handle(RecallHandle("orders", "broker-a", broker.clock.now_ms() - 1, "ID-1"))

    assert broker.delayed.cancel(due).status is ScheduleChangeStatus.ALREADY_DELIVERED
    assert proxy.requests["RecallMessage"] == []


def test_a_broker_that_recalls_nothing_is_named_with_its_setting(
    proxy: ScriptedProxy, broker: GrpcBroker, handle: str
) -> None:
    refusal = protos.RecallMessageResponse(
        status=status(Code.INTERNAL_SERVER_ERROR, "recall failed, operation is forbidden")
    )
    proxy.answers["RecallMessage"] = lambda _: refusal

    with pytest.raises(UnsupportedError, match=r"cancel message ID-1 of 'orders': .*set recallMessageEnable=true"):
        broker.delayed.cancel(handle)


def test_other_refusals_of_a_recall_are_errors(proxy: ScriptedProxy, broker: GrpcBroker, handle: str) -> None:
    proxy.answers["RecallMessage"] = lambda _: protos.RecallMessageResponse(status=status(Code.UNAUTHORIZED, "no"))

    with pytest.raises(BrokerError, match="check access-key and secret-key"):
        broker.delayed.cancel(handle)
    with pytest.raises(MessageError, match="is not a handle of a pending message"):
        broker.delayed.cancel("4466")

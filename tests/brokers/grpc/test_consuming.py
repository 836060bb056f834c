"""Consumption by POP over gRPC, and members that read by offsets on top of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.brokers import GrpcBroker
from mqtemplate.brokers.grpc import member as member_module
from mqtemplate.brokers.grpc.consuming import GrpcPop
from mqtemplate.brokers.grpc.member import PopMember
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerClosedError,
    BrokerError,
    DestinationError,
    InvalidReceiptHandleError,
    ListenerError,
    UnsupportedError,
)
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, DigestType, FilterType
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import TagSelector
from tests.brokers.grpc.scripted_proxy import ScriptedProxy, received, status
from tests.waiting import PATIENCE_S, eventually, receive_after_a_wake

SPEC = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")})
QUEUE = MessageQueue("orders", "broker-a", 0)


def handle(offset: int, *, kind: int = 0) -> str:
    """Receipt handle of a delivery; *kind* 1 is one of the retry topic."""
    return f"0 17 60000 0 {kind} broker-a 0 {offset} 4096"


def receipts(proxy: ScriptedProxy, method: str) -> list[str]:
    if method == "AckMessage":
        return [entry.receipt_handle for each in proxy.requests[method] for entry in each.entries]
    return [each.receipt_handle for each in proxy.requests[method]]


@pytest.fixture
def pop(broker: GrpcBroker) -> Iterator[GrpcPop]:
    """POP with a member of the group."""
    registration = broker.pop.join(SPEC)
    yield broker.pop
    registration.close()


def receive(pop: GrpcPop, wait_ms: int = 5_000, **options: Any) -> list[bytes]:
    return [each.message.body for each in pop.receive("billing", "orders", 32, 30_000, wait_ms, None, **options)]


# --- members --------------------------------------------------------------------------------------


def test_a_member_tells_its_subscriptions(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    spec = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("paid || open")})

    broker.pop.join(spec)

    [command] = proxy.requests["Telemetry"]
    subscription = command.settings.subscription
    [entry] = subscription.subscriptions
    assert (subscription.group.name, entry.topic.name) == ("billing", "orders")
    assert (entry.expression.type, entry.expression.expression) == (FilterType.TAG, "open || paid")


def test_a_member_leaves_with_its_last_registration(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    first, second = broker.pop.join(SPEC), broker.pop.join(SPEC)

    first.close()
    first.close()
    before = len(proxy.requests["NotifyClientTermination"])
    second.close()

    assert (before, len(proxy.requests["NotifyClientTermination"])) == (0, 1)
    with pytest.raises(BrokerClosedError, match="group 'billing' has no member here; call join first"):
        receive(broker.pop)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"message_model": MessageModel.BROADCASTING}, r"has no broadcasting groups; give each process a group of"),
        ({"consume_from_where": ConsumeFromWhere.CONSUME_FROM_TIMESTAMP}, r"chooses where a new group starts; leave"),
    ],
)
def test_what_a_proxy_does_not_have_is_refused(broker: GrpcBroker, settings: dict[str, Any], text: str) -> None:
    spec = ConsumerSpec(group="billing", subscriptions=SPEC.subscriptions, **settings)

    with pytest.raises(UnsupportedError, match=rf"group 'billing'.*{text}"):
        broker.pop.join(spec)


def test_members_of_one_group_have_one_subscription(pop: GrpcPop) -> None:
    with pytest.raises(ListenerError, match=r"other subscriptions \(orders: \*, and now orders: paid\); give all"):
        pop.join(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("paid")}))


def test_a_group_that_the_proxy_refuses_is_named(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.settings_status = status(Code.UNAUTHORIZED, "no right to group billing")

    with pytest.raises(BrokerError, match=r"settings of a member of group 'billing': .*no right to group billing"):
        broker.pop.join(SPEC)


def test_a_topic_that_does_not_exist_is_named(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["QueryRoute"] = lambda _: protos.QueryRouteResponse(status=status(Code.TOPIC_NOT_FOUND, "no route"))

    with pytest.raises(DestinationError, match=r"topic 'orders' is not known .*mqadmin updateTopic"):
        broker.pop.join(SPEC)


# --- receiving ------------------------------------------------------------------------------------


def test_messages_are_received_with_their_handles(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    proxy.to_deliver = [received(b"one", handle(1), offset=1), received(b"two", handle(2), offset=2, attempt=3)]

    found = pop.receive("billing", "orders", 7, 30_000, 5_000, Sql92Selector("a > 1"))

    [request] = proxy.requests["ReceiveMessage"]
    assert [(each.message.body, each.receipt, each.attempt) for each in found] == [
        (b"one", handle(1), 1),
        (b"two", handle(2), 3),
    ]
    assert (request.batch_size, request.invisible_duration.seconds, request.auto_renew) == (7, 30, False)
    assert (request.filter_expression.type, request.filter_expression.expression) == (FilterType.SQL, "a > 1")


def test_a_renewed_message_has_no_invisible_time(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    proxy.to_deliver = [received(b"one", handle(1))]

    receive(pop, auto_renew=True, attempt_id="A-1")

    [request] = proxy.requests["ReceiveMessage"]
    assert (request.auto_renew, request.HasField("invisible_duration"), request.attempt_id) == (True, False, "A-1")


def test_a_short_wait_lasts_as_long_as_a_proxy_waits(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    """RocketMQ's proxy waits on after its client has ended the request, and takes the messages that arrive then."""
    nothing = protos.ReceiveMessageResponse(status=status(Code.MESSAGE_NOT_FOUND, "no new message"))
    proxy.answers["ReceiveMessage"] = lambda _: iter([nothing])

    assert receive(pop, wait_ms=0) == []
    assert [each.long_polling_timeout.seconds for each in proxy.requests["ReceiveMessage"]] == [5]


def test_a_wait_can_be_ended_by_another_thread(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(receive, pop, 60_000)
        eventually(lambda: len(proxy.requests["ReceiveMessage"]) == 1, "the request has arrived")
        pop.wake("billing")

        assert waiting.result(10) == []


def test_all_brokers_are_asked_at_once(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    """The first one with messages ends the wait at the others."""
    proxy.brokers = ["broker-a", "broker-b", "broker-c"]
    asked = threading.Barrier(3)

    def answer(request: Any) -> Iterator[Any]:
        asked.wait(10)
        if request.message_queue.broker.name == "broker-b":
            yield protos.ReceiveMessageResponse(status=status())
            yield protos.ReceiveMessageResponse(message=received(b"of b", handle(1)))
        else:
            threading.Event().wait(2)

    proxy.answers["ReceiveMessage"] = answer
    broker.pop.join(SPEC)

    assert receive(broker.pop, 20_000) == [b"of b"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(Code.TOO_MANY_REQUESTS, BrokerBusyError), (Code.ILLEGAL_FILTER_EXPRESSION, BrokerError)],
)
def test_a_refused_receive_is_an_error(proxy: ScriptedProxy, pop: GrpcPop, code: Code, kind: type[BrokerError]) -> None:
    proxy.answers["ReceiveMessage"] = lambda _: iter([protos.ReceiveMessageResponse(status=status(code, "why"))])

    with pytest.raises(kind, match=rf"receive messages of 'orders': {proxy.address} answered {code.value} .*: why"):
        receive(pop)


def test_a_damaged_body_is_delivered_again_later(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    damaged = received(b"damaged", handle(1))
    damaged.system_properties.body_digest.type = DigestType.MD5
    damaged.system_properties.body_digest.checksum = "0" * 31 + "1"
    proxy.to_deliver = [damaged, received(b"good", handle(2))]

    assert receive(pop) == [b"good"]
    assert receipts(proxy, "ChangeInvisibleDuration") == [handle(1)]


def test_a_tag_with_the_same_hash_is_acknowledged_and_left_out(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    """``Aa`` and ``BB`` have the same hash in Java, and the consume queue stores only hashes."""
    other, own = received(b"other", handle(1)), received(b"own", handle(2))
    other.system_properties.tag, own.system_properties.tag = "Aa", "BB"
    proxy.to_deliver = [other, own]

    found = pop.receive("billing", "orders", 32, 30_000, 5_000, TagSelector("BB"))

    assert [each.message.body for each in found] == [b"own"]
    assert receipts(proxy, "AckMessage") == [handle(1)]


def test_order_is_a_setting_of_the_group(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    with pytest.raises(UnsupportedError, match=r"group 'billing' .*mqadmin updateSubGroup .*-g billing -o true"):
        receive(pop, is_ordered=True)


# --- fate of a message ----------------------------------------------------------------------------


def test_a_message_is_acknowledged_with_its_id(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    """The proxy finds the renewal of a message by the id."""
    proxy.to_deliver = [received(b"one", handle(1), offset=1)]
    [found] = pop.receive("billing", "orders", 32, 30_000, 5_000, None)

    pop.ack("billing", "orders", found.receipt)

    [request] = proxy.requests["AckMessage"]
    assert (request.entries[0].message_id, request.entries[0].receipt_handle) == ("ID-1", handle(1))


def test_the_new_handle_of_a_change_is_the_one_to_use(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    proxy.answers["ChangeInvisibleDuration"] = lambda _: protos.ChangeInvisibleDurationResponse(
        status=status(), receipt_handle="new"
    )

    assert pop.change_invisible("billing", "orders", handle(1), 1_500, counts=False) == "new"

    [request] = proxy.requests["ChangeInvisibleDuration"]
    assert (request.invisible_duration.ToMilliseconds(), request.suspend) == (1_500, True)


def test_several_acknowledgements_are_one_request_and_each_has_its_result(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    proxy.to_deliver = [received(b"", handle(offset), offset=offset) for offset in (1, 2, 3)]
    receive(pop)

    def answer(request: Any) -> Any:
        late = status(Code.INVALID_RECEIPT_HANDLE, "handle is expired")
        entries = [
            protos.AckMessageResultEntry(
                message_id=entry.message_id,
                receipt_handle=entry.receipt_handle,
                status=late if entry.message_id == "ID-2" else status(),
            )
            for entry in request.entries
        ]
        return protos.AckMessageResponse(status=status(Code.MULTIPLE_RESULTS), entries=entries)

    proxy.answers["AckMessage"] = answer
    results = pop.ack_all("billing", "orders", [handle(3), handle(2), handle(1)])

    [request] = proxy.requests["AckMessage"]
    assert [entry.message_id for entry in request.entries] == ["ID-3", "ID-2", "ID-1"]
    assert [type(result) for result in results] == [type(None), InvalidReceiptHandleError, type(None)]


def test_an_acknowledgement_without_an_answer_is_an_error_of_each_of_its_messages(
    proxy: ScriptedProxy, pop: GrpcPop
) -> None:
    proxy.to_deliver = [received(b"", handle(offset), offset=offset) for offset in (1, 2)]
    receive(pop)
    proxy.answers["AckMessage"] = lambda _: protos.AckMessageResponse(
        status=status(Code.INTERNAL_SERVER_ERROR, "the disk is full")
    )

    results = pop.ack_all("billing", "orders", [handle(1), handle(2)])

    assert len(results) == 2
    assert all("acknowledge 2 messages of 'orders'" in str(each) for each in results)
    assert all("the disk is full" in str(each) for each in results)


def test_a_late_acknowledgement_is_an_error_of_its_own(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    late = status(Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired")
    proxy.answers["AckMessage"] = lambda _: protos.AckMessageResponse(status=late)

    with pytest.raises(InvalidReceiptHandleError, match=r"acknowledge message .* of 'orders': .*handle is expired"):
        pop.ack("billing", "orders", handle(1))


def test_a_dead_letter_tells_its_attempts(proxy: ScriptedProxy, pop: GrpcPop) -> None:
    proxy.to_deliver = [received(b"poison", handle(1), attempt=4)]
    [found] = pop.receive("billing", "orders", 32, 30_000, 5_000, None)

    pop.dead_letter("billing", "orders", found, {"reason": "is left out"})

    [request] = proxy.requests["ForwardMessageToDeadLetterQueue"]
    assert (request.receipt_handle, request.delivery_attempt, request.max_delivery_attempts) == (handle(1), 4, 17)


# --- members that read by offsets -----------------------------------------------------------------


@pytest.fixture
def member(broker: GrpcBroker) -> Iterator[PopMember]:
    member = broker.groups.subscribe(SPEC)
    yield member
    member.close()


def take(member: PopMember, count: int) -> list[MessageExt]:
    """Poll until *count* messages have arrived."""
    found: list[MessageExt] = []

    def has_all() -> bool:
        found.extend(member.poll(32, 100))
        return len(found) >= count

    eventually(has_all, f"{count} messages")
    return found


def poll(member: PopMember, count: int) -> list[bytes]:
    return [message.body for message in take(member, count)]


def test_a_commit_acknowledges_the_messages_before_it(proxy: ScriptedProxy, member: PopMember) -> None:
    proxy.to_deliver = [received(b"%d" % offset, handle(offset), offset=offset) for offset in (3, 4, 7)]
    bodies = poll(member, 3)

    member.commit(QUEUE, 5)

    assert (bodies, member.position(QUEUE)) == ([b"3", b"4", b"7"], 8)
    assert receipts(proxy, "AckMessage") == [handle(3), handle(4)]


def test_many_messages_are_acknowledged_with_few_requests(proxy: ScriptedProxy, member: PopMember) -> None:
    """One that is refused is only logged: it is delivered again."""
    proxy.to_deliver = [received(b"x", handle(offset), offset=offset) for offset in range(40)]

    def answer(request: Any) -> Any:
        found = protos.AckMessageResponse(status=status())
        for entry in request.entries:
            late = entry.receipt_handle == handle(7)
            found.entries.add(status=status(Code.INVALID_RECEIPT_HANDLE, "late") if late else status())
        return found

    proxy.answers["AckMessage"] = answer
    take(member, 40)

    member.commit(QUEUE, 40)

    assert [len(request.entries) for request in proxy.requests["AckMessage"]] == [32, 8]


def test_without_a_call_nothing_is_requested(proxy: ScriptedProxy, member: PopMember) -> None:
    """The request of the last call waits at the proxy for some seconds; no further one follows."""
    assert member.poll(32, 50) == []
    eventually(lambda: len(proxy.requests["ReceiveMessage"]) == 1, "the request has arrived")
    proxy.to_deliver = [received(b"x", handle(1))]

    member.wake()

    assert member._wanted == 0


def test_a_message_that_is_sent_back_gets_another_invisible_time(proxy: ScriptedProxy, member: PopMember) -> None:
    proxy.to_deliver = [received(b"x", handle(offset), offset=offset) for offset in (1, 2)]
    messages = take(member, 2)

    member.send_back(messages[0])
    member.send_back(messages[1], delay_ms=1_234)
    member.commit(QUEUE, 3)

    times = [each.invisible_duration.ToMilliseconds() for each in proxy.requests["ChangeInvisibleDuration"]]
    assert times == [10_000, 1_234]
    assert receipts(proxy, "AckMessage") == []


@pytest.mark.parametrize(("attempt", "level"), [(1, -1), (17, 0)])
def test_after_the_last_attempt_or_with_a_negative_level_it_is_a_dead_letter(
    proxy: ScriptedProxy, member: PopMember, attempt: int, level: int
) -> None:
    proxy.to_deliver = [received(b"poison", handle(1), offset=1, attempt=attempt)]
    [message] = take(member, 1)

    member.send_back(message, level)

    assert receipts(proxy, "ForwardMessageToDeadLetterQueue") == [handle(1)]


def test_a_retry_has_offsets_of_its_own(proxy: ScriptedProxy, member: PopMember) -> None:
    """The third message of the queue and the third retry are two messages."""
    proxy.to_deliver = [
        received(b"first", handle(3), offset=3),
        received(b"retry", handle(3, kind=1), offset=3, attempt=2),
    ]
    poll(member, 2)

    member.commit(MessageQueue("%RETRY%billing", "broker-a", 0), 4)

    assert receipts(proxy, "AckMessage") == [handle(3, kind=1)]


def test_a_seek_returns_messages_again_that_the_member_has(proxy: ScriptedProxy, member: PopMember) -> None:
    proxy.to_deliver = [received(b"%d" % offset, handle(offset), offset=offset) for offset in (1, 2)]
    poll(member, 2)

    member.seek(QUEUE, 2)

    assert poll(member, 1) == [b"2"]
    with pytest.raises(UnsupportedError, match=r"continue at offset 99 of queue 0 of 'orders': .*no offsets of queues"):
        member.seek(QUEUE, 99)


def test_a_member_that_leaves_gives_back_what_it_has(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    """At once, and without counting an attempt."""
    member = broker.groups.subscribe(SPEC)
    proxy.to_deliver = [received(b"x", handle(1), offset=1)]
    poll(member, 1)

    member.close()

    [request] = proxy.requests["ChangeInvisibleDuration"]
    assert (request.receipt_handle, request.invisible_duration.seconds, request.suspend) == (handle(1), 0, True)
    with pytest.raises(BrokerClosedError, match="this member of group 'billing' is closed"):
        member.poll(1)


def test_the_close_of_a_member_ends_a_receive_that_begins_at_the_same_moment(
    broker: GrpcBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread was not waiting yet when the close woke it, and would wait for messages."""
    member = broker.groups.subscribe(SPEC)
    assert isinstance(member, PopMember)
    receiving = receive_after_a_wake(monkeypatch, member._pop)
    monkeypatch.setattr(member_module, "_FETCH_WAIT_MS", PATIENCE_S * 10_000)
    monkeypatch.setattr(member_module, "_JOIN_S", PATIENCE_S)
    with ThreadPoolExecutor(1) as executor:
        polled = executor.submit(member.poll, 1, PATIENCE_S * 1_000)
        assert receiving.wait(PATIENCE_S)
        member.close()
        assert isinstance(polled.exception(), BrokerClosedError)

    assert not [thread.name for thread in member._threads if thread.is_alive()]


def test_an_error_of_a_receive_is_raised_by_the_poll(proxy: ScriptedProxy, member: PopMember) -> None:
    refusal = status(Code.FORBIDDEN, "no right")
    proxy.answers["ReceiveMessage"] = lambda _: iter([protos.ReceiveMessageResponse(status=refusal)])

    with pytest.raises(BrokerError, match="no right; the permission of the topic"):
        member.poll(32, 10_000)


def test_a_listener_in_order_needs_a_group_in_order(proxy: ScriptedProxy, member: PopMember) -> None:
    with pytest.raises(UnsupportedError, match="mqadmin updateSubGroup"):
        member.lock(QUEUE)

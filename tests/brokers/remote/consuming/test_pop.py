"""Members that receive by POP over the remoting protocol: pops that brokers hold, outages, handles, and refusals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import Capability, ConsumeFromWhere, ConsumerSpec, MessageModel, ReceivedMessage
from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.consuming import pop as pop_module
from mqtemplate.brokers.remote.consuming.pop import RemotePop
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    InvalidReceiptHandleError,
    ListenerError,
    RemoteProtocolError,
    UnsupportedError,
)
from mqtemplate.message import Message, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import BatchAckMessageRequestBody, HeartbeatData
from mqtemplate.remoting.protocol.headers.pop import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
    PoppedQueue,
    msg_offset_info,
    order_count_info,
    start_offset_info,
)
from mqtemplate.selectors.tags import TagSelector
from tests.brokers.remote.clients import client, group_spec, join, message_ext, server
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.brokers.remote.test_outages import Restartable
from tests.remoting.protocol.other_side import encode_message
from tests.waiting import eventually

GROUP, TOPIC = "billing", "orders"
INVISIBLE_MS = 60_000
LONG_MS = 60_000
POP_MS = 1_700_000_000_000


class ScriptedPops:
    """The pops of one scripted broker. One that finds nothing is held until `deliver` or `answer` ends it."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.held: list[tuple[RemotingCommand, Future[RemotingCommand]]] = []
        broker.script(RequestCode.POP_MESSAGE, self._pop)
        broker.script(RequestCode.ACK_MESSAGE, RemotingCommand.response)
        broker.script(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, self._change)

    def _pop(self, request: RemotingCommand) -> RemotingCommand | Future[RemotingCommand]:
        if not request.header(PopMessageRequestHeader).poll_time:
            return request.response(ResponseCode.POLLING_TIMEOUT, header=found())
        self.held.append((request, Future()))
        return self.held[-1][1]

    @staticmethod
    def _change(request: RemotingCommand) -> RemotingCommand:
        invisible_ms = request.header(ChangeInvisibleTimeRequestHeader).invisible_time
        header = ChangeInvisibleTimeResponseHeader(pop_time=POP_MS + 1, invisible_time=invisible_ms, revive_qid=2)
        return request.response(header=header)

    def until_held(self, count: int = 1) -> None:
        eventually(lambda: len(self.held) >= count, f"the broker holds {count} pops")

    def deliver(self, *bodies: bytes, **fields: Any) -> None:
        """End the oldest held pop with these messages of queue 0."""
        request, response = self.held.pop(0)
        response.set_result(request.response(header=found(len(bodies)), body=records(*bodies, **fields)))

    def answer(self, code: int) -> None:
        """End the oldest held pop without messages."""
        request, response = self.held.pop(0)
        response.set_result(request.response(code, header=found()))

    def changes(self) -> list[ChangeInvisibleTimeRequestHeader]:
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        return [each.header(ChangeInvisibleTimeRequestHeader) for each in self.broker.seen if each.code == code]

    def acks(self) -> list[AckMessageRequestHeader]:
        code = RequestCode.ACK_MESSAGE
        return [each.header(AckMessageRequestHeader) for each in self.broker.seen if each.code == code]


def found(count: int = 0, queue: PoppedQueue | None = None) -> PopMessageResponseHeader:
    """Return the header of a response with so many messages, from offset 10 of queue 0 on."""
    queues = [queue or PoppedQueue(0, 0, 10, range(10, 10 + count))] if count else []
    return PopMessageResponseHeader(
        pop_time=POP_MS,
        invisible_time=INVISIBLE_MS,
        revive_qid=1,
        rest_num=0,
        start_offset_info=start_offset_info(queues),
        msg_offset_info=msg_offset_info(queues),
        order_count_info=order_count_info(queues),
    )


def records(*bodies: bytes, **fields: Any) -> bytes:
    given: dict[str, Any] = {"topic": TOPIC, **fields}
    return b"".join(
        encode_message(message_ext(**{"body": body, "queue_offset": 10 + index, **given}))
        for index, body in enumerate(bodies)
    )


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic(TOPIC, queues=1)
        yield broker


@pytest.fixture
def pops(cluster: ScriptedBroker) -> ScriptedPops:
    return ScriptedPops(cluster)


@pytest.fixture
def broker(cluster: ScriptedBroker, tmp_path: Path) -> Iterator[RemoteBroker]:
    with client(cluster.address, tmp_path, retry_after_error_ms=50) as broker:
        yield broker


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def receive(pop: RemotePop, wait_ms: int = LONG_MS, max_count: int = 32, **options: object) -> list[ReceivedMessage]:
    return pop.receive(GROUP, TOPIC, max_count, INVISIBLE_MS, wait_ms, None, **options)  # type: ignore[arg-type]


def bodies(received: list[ReceivedMessage]) -> list[bytes]:
    return [each.message.body for each in received]


# --- pops that a broker holds -------------------------------------------------------------------------


@pytest.fixture
def keeps_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine take its time between an arrival and the next receive."""
    monkeypatch.setattr(pop_module, "_UNCLAIMED_MS", 600_000)


@pytest.mark.usefixtures("keeps_arrivals")
def test_the_messages_of_a_woken_receive_are_for_the_next_one(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    """A broker goes on with a pop that it holds, so a second one beside it would take more than was asked for."""
    broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop)
    pops.until_held()
    broker.pop.wake(GROUP)
    assert waiting.result() == []

    waiting = threads.submit(receive, broker.pop)
    pops.deliver(b"a", b"b")

    assert bodies(waiting.result()) == [b"a", b"b"]
    assert pops.broker.count(RequestCode.POP_MESSAGE) == 1


def test_messages_that_no_receive_takes_are_released(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    """Another member has them at once, and they count no attempt."""
    broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop)
    pops.until_held()
    broker.pop.wake(GROUP)
    assert waiting.result() == []

    pops.deliver(b"a", b"b")

    eventually(lambda: len(pops.changes()) == 2, "both messages are released")
    assert {(each.offset, each.invisible_time, each.suspend) for each in pops.changes()} == {
        (10, 0, True),
        (11, 0, True),
    }


def test_what_arrives_after_a_member_has_left_is_released(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    member = broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop)
    pops.until_held()

    member.close()
    with pytest.raises(BrokerClosedError, match="has left the group"):
        waiting.result()
    pops.deliver(b"a")

    eventually(lambda: [each.offset for each in pops.changes()] == [10], "the message is released")


@pytest.mark.usefixtures("keeps_arrivals")
def test_a_receive_takes_as_many_as_it_asks_for(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop, max_count=2)
    pops.until_held()

    pops.deliver(b"a", b"b", b"c")

    assert bodies(waiting.result()) == [b"a", b"b"]
    assert bodies(receive(broker.pop)) == [b"c"]


def test_a_broker_that_holds_no_pop_is_not_asked_in_a_loop(broker: RemoteBroker, pops: ScriptedPops) -> None:
    """It answers POLLING_FULL at once. In this time a loop would send thousands of requests."""
    pops.broker.script(
        RequestCode.POP_MESSAGE, lambda request: request.response(ResponseCode.POLLING_FULL, header=found())
    )
    broker.pop.join(group_spec(GROUP, TOPIC))

    assert receive(broker.pop, wait_ms=500) == []
    assert pops.broker.count(RequestCode.POP_MESSAGE) < 20


def test_a_missing_topic_is_received_from_once_it_exists(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    del pops.broker.routes[TOPIC]
    broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop)

    pops.broker.topic(TOPIC, queues=1)
    pops.until_held()
    pops.deliver(b"a")

    assert bodies(waiting.result()) == [b"a"]


# --- several brokers, and brokers that are away -------------------------------------------------------


@contextmanager
def two_brokers() -> Iterator[tuple[ScriptedPops, ScriptedPops]]:
    with ScriptedBroker("broker-a") as one, ScriptedBroker("broker-b") as other:
        one.others = [other]
        one.topic(TOPIC, queues=1)
        yield ScriptedPops(one), ScriptedPops(other)


def test_all_brokers_of_a_topic_are_received_from(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with two_brokers() as (one, other), client(one.broker.address, tmp_path) as broker:
        broker.pop.join(group_spec(GROUP, TOPIC))
        waiting = threads.submit(receive, broker.pop)
        one.until_held()
        other.until_held()

        other.deliver(b"b")
        [received] = waiting.result()
        broker.pop.ack(GROUP, TOPIC, received.receipt)

        assert (received.message.body, received.message.broker_name) == (b"b", "broker-b")
        assert (one.acks(), len(other.acks())) == ([], 1)


def test_a_broker_with_messages_is_not_asked_for_more_than_is_wanted(tmp_path: Path) -> None:
    """The brokers are asked one after the other: what another one gave as well would wait while its time runs."""
    with two_brokers() as (one, other), client(one.broker.address, tmp_path) as broker:
        for each in (one, other):
            each.broker.script(
                RequestCode.POP_MESSAGE, lambda request: request.response(header=found(1), body=records(b"x"))
            )
        broker.pop.join(group_spec(GROUP, TOPIC))

        assert len(receive(broker.pop, max_count=1)) == 1
        assert one.broker.count(RequestCode.POP_MESSAGE) + other.broker.count(RequestCode.POP_MESSAGE) == 1


def test_a_broker_that_is_away_does_not_keep_the_others_waiting(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with two_brokers() as (one, other), client(one.broker.address, tmp_path, retry_after_error_ms=50) as broker:
        broker.pop.join(group_spec(GROUP, TOPIC))
        other.broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.SYSTEM_ERROR)
        waiting = threads.submit(receive, broker.pop)
        one.until_held()
        eventually(lambda: other.broker.count(RequestCode.POP_MESSAGE) > 2, "the other broker is asked again")

        one.deliver(b"a")

        assert bodies(waiting.result()) == [b"a"]


def test_a_receive_fails_if_every_broker_does(broker: RemoteBroker, pops: ScriptedPops) -> None:
    pops.broker.refuse(RequestCode.POP_MESSAGE, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no such group")
    broker.pop.join(group_spec(GROUP, TOPIC))

    with pytest.raises(BrokerError, match=r"group 'billing' pops from 'orders'.*no such group; create the group"):
        receive(broker.pop)


def test_a_held_pop_ends_with_its_connection_and_is_sent_again(
    broker: RemoteBroker, pops: ScriptedPops, threads: ThreadPoolExecutor
) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    waiting = threads.submit(receive, broker.pop)
    pops.until_held()

    pops.broker.lose_connections()
    with pytest.raises(BrokerError):
        waiting.result()
    pops.held.clear()
    waiting = threads.submit(receive, broker.pop)
    pops.until_held()
    pops.deliver(b"a")

    assert bodies(waiting.result()) == [b"a"]


def test_a_member_receives_after_a_restart_of_the_server(tmp_path: Path) -> None:
    """What was acknowledged stays so, and the other message keeps its receipt."""
    restartable = Restartable(tmp_path)
    with ExitStack() as stack:
        stack.callback(restartable.stop)
        broker = stack.enter_context(client(restartable.address, tmp_path, retry_after_error_ms=50))
        broker.create_topic(TOPIC, 1)
        broker.pop.join(group_spec(GROUP, TOPIC))
        for body in (b"a", b"b"):
            broker.sends.send(Message(TOPIC, body))
        first, second = gather(broker.pop, 2)
        broker.pop.ack(GROUP, TOPIC, first.receipt)

        restartable.stop()
        restartable.start()
        eventually(lambda: sends(broker, b"c"), "a send succeeds")
        broker.pop.ack(GROUP, TOPIC, second.receipt)

        assert set(bodies(gather(broker.pop, 1))) == {b"c"}


def gather(pop: RemotePop, count: int) -> list[ReceivedMessage]:
    """Receive until so many messages have arrived, in the order of their bodies."""
    taken: list[ReceivedMessage] = []

    def is_complete() -> bool:
        try:
            taken.extend(receive(pop, wait_ms=100))
        except BrokerError:
            return False
        return len(taken) >= count

    eventually(is_complete, f"{count} messages are received")
    return sorted(taken, key=lambda each: each.message.body)


def sends(broker: RemoteBroker, body: bytes) -> bool:
    try:
        broker.sends.send(Message(TOPIC, body))
    except BrokerError:
        return False
    return True


# --- messages and handles -----------------------------------------------------------------------------


def popped(
    broker: RemoteBroker, pops: ScriptedPops, header: PopMessageResponseHeader, body: bytes, **options: object
) -> list[ReceivedMessage]:
    """Return the messages of one response."""
    pops.broker.script(RequestCode.POP_MESSAGE, lambda request: request.response(header=header, body=body))
    return receive(broker.pop, **options)  # type: ignore[arg-type]


def test_an_acknowledgement_names_the_delivery(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    _, second = popped(broker, pops, found(2), records(b"a", b"b"))

    broker.pop.ack(GROUP, TOPIC, second.receipt)

    [ack] = pops.acks()
    assert (ack.consumer_group, ack.topic, ack.queue_id, ack.offset) == (GROUP, TOPIC, 0, 11)
    assert ack.extra_info == f"10 {POP_MS} {INVISIBLE_MS} 1 0 broker-a 0 11"
    assert ack.broker_name == "broker-a"


def test_a_change_gives_the_handle_for_the_next_request(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    [received] = popped(broker, pops, found(1), records(b"a"))

    receipt = broker.pop.change_invisible(GROUP, TOPIC, received.receipt, 5_000)
    broker.pop.ack(GROUP, TOPIC, receipt)

    [ack] = pops.acks()
    assert ack.extra_info == f"10 {POP_MS + 1} 5000 2 0 broker-a 0 10"


def test_a_message_of_the_retry_topic_is_acknowledged_there(cluster: ScriptedBroker, tmp_path: Path) -> None:
    """In a namespace, both names in the name of the retry topic have it."""
    cluster.topic("shop%orders", queues=1)
    pops = ScriptedPops(cluster)
    with client(cluster.address, tmp_path, namespace="shop") as broker:
        broker.pop.join(group_spec(GROUP, TOPIC))
        properties = {Property.POP_CK: f"3 {POP_MS} 60000 1 1 broker-a 0 4", Property.RETRY_TOPIC: "shop%orders"}
        body = records(b"a", topic="shop%orders", properties=properties, queue_offset=4, reconsume_times=2)
        [received] = popped(broker, pops, found(1, PoppedQueue(1, 0, 3, [4])), body)

        broker.pop.ack(GROUP, TOPIC, received.receipt)

        [ack] = pops.acks()
        assert (ack.consumer_group, ack.topic, ack.offset) == ("shop%billing", "%RETRY%shop%billing_shop%orders", 4)
        assert (received.attempt, received.message.topic) == (3, TOPIC)
        assert received.message.properties == {Property.RETRY_TOPIC: TOPIC}


def test_an_ordered_message_has_the_attempt_of_the_header(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    header = found(2, PoppedQueue(0, 0, 10, [10, 11], {10: 2, 11: 0}))

    received = popped(broker, pops, header, records(b"a", b"b"), is_ordered=True, attempt_id="4466")

    assert [(each.attempt, each.message.reconsume_times) for each in received] == [(3, 2), (1, 0)]
    sent = next(each for each in pops.broker.seen if each.code == RequestCode.POP_MESSAGE)
    request = sent.header(PopMessageRequestHeader)
    assert (request.order, request.attempt_id, request.queue_id, request.born_time) == (True, "4466", -1, 0)


def test_a_message_whose_tag_only_has_the_same_hash_is_acknowledged(broker: RemoteBroker, pops: ScriptedPops) -> None:
    """Brokers compare hashes of tags. "AaAa" and "BBBB" have the same."""
    selector = TagSelector("AaAa")
    broker.pop.join(group_spec(GROUP, TOPIC, selector))
    body = records(b"a", properties={Property.TAGS: "AaAa"}) + records(
        b"b", properties={Property.TAGS: "BBBB"}, queue_offset=11
    )
    pops.broker.script(RequestCode.POP_MESSAGE, lambda request: request.response(header=found(2), body=body))

    assert bodies(broker.pop.receive(GROUP, TOPIC, 32, INVISIBLE_MS, LONG_MS, selector)) == [b"a"]
    assert [ack.offset for ack in pops.acks()] == [11]


def test_a_response_that_cannot_be_read_is_an_error(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))

    with pytest.raises(RemoteProtocolError, match="'broker-a' sent an invalid response to a pop"):
        popped(broker, pops, found(1, PoppedQueue(0, 7, 10, [10])), records(b"a"))
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        popped(broker, pops, found(1, PoppedQueue(0, 0, "x", [10])), records(b"a"))  # type: ignore[arg-type]


def test_a_broker_of_rocketmq_gets_no_request_after_the_invisible_time(
    broker: RemoteBroker, pops: ScriptedPops
) -> None:
    """It would hide the message once more, although another member has it already."""
    broker.pop.join(group_spec(GROUP, TOPIC))
    pops.broker.script(RequestCode.POP_MESSAGE, lambda request: request.response(header=found(1), body=records(b"a")))
    [received] = broker.pop.receive(GROUP, TOPIC, 1, 0, LONG_MS, None)

    with pytest.raises(InvalidReceiptHandleError, match="its invisible time was over.*a longer invisible_duration"):
        broker.pop.ack(GROUP, TOPIC, received.receipt)
    with pytest.raises(InvalidReceiptHandleError):
        broker.pop.change_invisible(GROUP, TOPIC, received.receipt, 1_000)
    assert (pops.acks(), pops.changes()) == ([], [])


def test_an_ended_delivery_is_an_error_of_its_own(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))
    [received] = popped(broker, pops, found(1), records(b"a"))
    pops.broker.refuse(RequestCode.ACK_MESSAGE, ResponseCode.NO_MESSAGE, "it has ended")

    with pytest.raises(InvalidReceiptHandleError, match=r"acknowledge a message of 'orders'.*\(it has ended\)"):
        broker.pop.ack(GROUP, TOPIC, received.receipt)


# --- several messages at once -------------------------------------------------------------------------


def test_several_acknowledgements_are_one_request(broker: RemoteBroker, pops: ScriptedPops) -> None:
    pops.broker.script(RequestCode.BATCH_ACK_MESSAGE, RemotingCommand.response)
    broker.pop.join(group_spec(GROUP, TOPIC))
    received = popped(broker, pops, found(10), records(*(b"%d" % number for number in range(10))))

    results = broker.pop.ack_all(GROUP, TOPIC, [each.receipt for each in received if each is not received[1]])

    assert results == [None] * 9
    [request] = [each for each in pops.broker.seen if each.code == RequestCode.BATCH_ACK_MESSAGE]
    [ack] = BatchAckMessageRequestBody.decode(request.body).acks
    assert (ack.consumer_group, ack.topic, ack.retry, ack.start_offset, ack.pop_time) == (GROUP, TOPIC, "0", 10, POP_MS)
    assert int.from_bytes(base64.b64decode(ack.bit_set), "little") == 0b11_1111_1101


def test_a_refused_batch_is_repeated_one_by_one(broker: RemoteBroker, pops: ScriptedPops) -> None:
    """Its response does not tell which acknowledgement was refused."""
    pops.broker.refuse(RequestCode.BATCH_ACK_MESSAGE, ResponseCode.MESSAGE_ILLEGAL)
    broker.pop.join(group_spec(GROUP, TOPIC))
    received = popped(broker, pops, found(2), records(b"a", b"b"))
    pops.broker.script(
        RequestCode.ACK_MESSAGE,
        lambda request: request.response(
            ResponseCode.NO_MESSAGE if request.header(AckMessageRequestHeader).offset == 10 else ResponseCode.SUCCESS
        ),
    )

    first, second = broker.pop.ack_all(GROUP, TOPIC, [each.receipt for each in received])

    assert isinstance(first, InvalidReceiptHandleError)
    assert second is None


def test_our_server_ends_and_changes_several_messages(tmp_path: Path) -> None:
    with server() as ours, client(ours.address, tmp_path) as broker:
        broker.create_topic(TOPIC, 2)
        broker.pop.join(group_spec(GROUP, TOPIC))
        for number in range(6):
            broker.sends.send(Message(TOPIC, b"%d" % number))
        received = gather(broker.pop, 6)
        receipts = [each.receipt for each in received]

        assert broker.pop.ack_all(GROUP, TOPIC, receipts[:4]) == [None] * 4
        changed = broker.pop.change_all(GROUP, TOPIC, receipts[4:], 0, counts=False)

        assert all(isinstance(each, str) for each in changed)
        assert [(each.message.body, each.attempt) for each in gather(broker.pop, 2)] == [(b"4", 1), (b"5", 1)]


# --- members ------------------------------------------------------------------------------------------


def test_all_registrations_of_a_group_are_one_member(broker: RemoteBroker, pops: ScriptedPops) -> None:
    groups = ScriptedGroups(pops.broker)
    first, second = (broker.pop.join(group_spec(GROUP, TOPIC)) for _ in range(2))
    assert len(groups.members[GROUP]) == 1

    first.close()
    first.close()  # has no further effect
    assert len(groups.members[GROUP]) == 1
    second.close()

    assert groups.members[GROUP] == []
    with pytest.raises(BrokerClosedError, match="group 'billing' has no member here that receives by POP"):
        receive(broker.pop)


def test_the_heartbeat_is_that_of_javas_consumers(broker: RemoteBroker, pops: ScriptedPops) -> None:
    """Members of one group must send the same subscriptions: a broker keeps those of the last heartbeat."""
    broker.pop.join(group_spec(GROUP, TOPIC))

    beats = [HeartbeatData.decode(each.body) for each in pops.broker.seen if each.code == RequestCode.HEART_BEAT]
    [data] = beats[-1].consumer_data_set
    assert (data.group_name, data.consume_type, data.message_model) == (GROUP, "CONSUME_PASSIVELY", "CLUSTERING")
    assert {each.topic for each in data.subscription_data_set} == {TOPIC, "%RETRY%billing"}


def test_a_group_has_one_request_mode_in_a_process(broker: RemoteBroker, pops: ScriptedPops) -> None:
    ScriptedGroups(pops.broker)
    spec = group_spec(GROUP, TOPIC)
    pulls = join(broker, TOPIC)
    with pytest.raises(ListenerError, match=r"'billing' has a member in this process that pulls.*a group of its own"):
        broker.pop.join(spec)
    pulls.close()

    pop = broker.pop.join(spec)
    with pytest.raises(ListenerError, match=r"that receives by POP; the members of a group have one request mode"):
        join(broker, TOPIC)
    pop.close()
    join(broker, TOPIC).close()


def test_members_of_a_group_have_the_same_subscriptions(broker: RemoteBroker, pops: ScriptedPops) -> None:
    broker.pop.join(group_spec(GROUP, TOPIC))

    with pytest.raises(ListenerError, match="the members of a group share one subscription"):
        broker.pop.join(group_spec(GROUP, TOPIC, TagSelector("paid")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"message_model": MessageModel.BROADCASTING}, "cannot broadcast; leave request_mode out, or message_model"),
        (
            {"consume_from_where": ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, "consume_timestamp": 1},
            "cannot start at a time by POP.*mqtemplate offsets reset billing TOPIC --to TIME",
        ),
    ],
)
def test_what_pop_does_not_have_is_refused(
    broker: RemoteBroker, pops: ScriptedPops, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        broker.pop.join(ConsumerSpec(group=GROUP, subscriptions={TOPIC: TagSelector()}, **options))  # type: ignore[arg-type]


def test_an_old_broker_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with ScriptedBroker(version=Version.V4_9_7) as old, client(old.address, tmp_path) as broker:
        assert Capability.POP not in broker.capabilities
        with pytest.raises(
            UnsupportedError,
            match=rf"POP needs RocketMQ 5.0.*{old.address} is older; upgrade it, or leave request_mode",
        ):
            _ = broker.pop


def test_a_proxy_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Its remoting port does not have all requests of POP, and its gRPC port has."""
    with ScriptedBroker() as proxy:
        proxy.topic("TBW102")
        proxy.refuse(RequestCode.GET_BROKER_CLUSTER_INFO, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        with (
            client(proxy.address, tmp_path) as broker,
            pytest.raises(
                UnsupportedError, match=r"a proxy of RocketMQ has POP on its gRPC port only; set rocketmq.endp"
            ),
        ):
            _ = broker.pop

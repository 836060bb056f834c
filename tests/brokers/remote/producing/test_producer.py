"""Sends to a cluster: the attempts, their time limit, and the errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers import RemoteBroker
from mqtemplate.errors import BrokerClosedError, DestinationError, SendError, SendTimeoutError, UnsupportedError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.own_requests import HeartbeatResponseHeader
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.topics import AUTO_CREATE_TOPIC
from tests.brokers.remote.clients import remote
from tests.brokers.remote.scripted_cluster import Script, ScriptedBroker
from tests.waiting import eventually

SEND = RequestCode.SEND_MESSAGE_V2
MESSAGE = Message("orders", b"x")


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic("orders")
        yield broker


@pytest.fixture
def broker(cluster: ScriptedBroker) -> Iterator[RemoteBroker]:
    """A client with the default settings."""
    with remote(cluster) as broker:
        yield broker


QUEUE = MessageQueue("orders", "broker-a", 1)


@pytest.mark.parametrize(
    ("code", "queue", "count"),
    [
        (ResponseCode.SYSTEM_ERROR, None, 3),
        (ResponseCode.NO_PERMISSION, None, 3),
        (ResponseCode.TOPIC_NOT_EXIST, None, 3),
        (ResponseCode.FLOW_CONTROL, None, 1),
        (ResponseCode.SYSTEM_ERROR, QUEUE, 1),
    ],
)
def test_another_queue_is_tried_after_a_temporary_refusal(
    cluster: ScriptedBroker, broker: RemoteBroker, code: int, queue: MessageQueue | None, count: int
) -> None:
    """Not after a permanent one, and not for a message that is for one queue."""
    cluster.refuse(SEND, code, "not now")

    with pytest.raises(SendError, match=f"answered {int(code)} .*not now"):
        broker.sends.send(MESSAGE, queue)

    assert cluster.count(SEND) == count


@pytest.mark.parametrize(
    ("kind", "retries", "code", "count"),
    [
        ("sync", 0, ResponseCode.SYSTEM_ERROR, 1),
        ("async", 1, ResponseCode.SYSTEM_ERROR, 2),
        ("sync", 0, ResponseCode.SYSTEM_BUSY, 1),
        ("async", 0, ResponseCode.SYSTEM_BUSY, 1),
    ],
)
def test_the_numbers_of_retries_are_settings(
    cluster: ScriptedBroker, kind: str, retries: int, code: int, count: int
) -> None:
    """Without retries, one try is made whatever the reason of its failure."""
    cluster.refuse(SEND, code)
    name = f"retry_times_when_send_{'failed' if kind == 'sync' else 'async_failed'}"

    with remote(cluster, **{name: retries}) as broker, pytest.raises(SendError):
        send(broker, kind, None)

    assert cluster.count(SEND) == count


# --- tries until the timeout ------------------------------------------------------------------------

BUSY = [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE]


def send(broker: RemoteBroker, kind: str, queue: MessageQueue | None, timeout_ms: int = 3_000) -> SendResult:
    """Send the message in one of the two ways, and wait for the result."""
    if kind == "sync":
        return broker.sends.send(MESSAGE, queue, timeout_ms)
    return broker.sends.send_async([MESSAGE], queue, timeout_ms).result(60)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("queue", [None, QUEUE])
@pytest.mark.parametrize("code", BUSY)
def test_a_busy_broker_is_tried_again_until_it_accepts(
    cluster: ScriptedBroker, broker: RemoteBroker, code: int, queue: MessageQueue | None, kind: str
) -> None:
    """It has not stored the message, so a message for one queue is tried again, too."""

    def accept_the_fifth(request: RemotingCommand) -> RemotingCommand:
        return cluster.accept(request) if cluster.count(SEND) >= 5 else request.response(code, remark="not now")

    cluster.script(SEND, accept_the_fifth)

    result = send(broker, kind, queue, 60_000)

    assert result.send_status is SendStatus.SEND_OK
    assert cluster.count(SEND) == 5


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_error_lists_each_try_and_why_it_failed(cluster: ScriptedBroker, broker: RemoteBroker, kind: str) -> None:
    """Three of them are refusals that count; then the send ends, long before its timeout."""
    error, busy = ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_BUSY
    codes = iter([busy, error, busy, busy, error, error])
    cluster.script(SEND, lambda request: request.response(next(codes), remark="no"))

    with pytest.raises(SendError, match="tried 6 times within 1m") as failed:
        send(broker, kind, None, 60_000)

    first, second, third, last = failed.value.tries
    assert re.fullmatch(r"\(1\) after \d+m?s: 127.0.0.1:\d+ answered 2 SYSTEM_BUSY: no; it is overloaded.*", first)
    assert re.fullmatch(r"\(2\) after \d+m?s: .* answered 1 SYSTEM_ERROR: no", second)
    assert re.fullmatch(r"\(3-4\) after \d+m?s to \d+ms: .* SYSTEM_BUSY.*", third)
    assert re.fullmatch(r"\(5-6\) after \d+m?s to \d+ms: .* SYSTEM_ERROR: no", last)
    assert all(text in str(failed.value) for text in failed.value.tries)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_timeout_ends_the_tries(cluster: ScriptedBroker, broker: RemoteBroker, kind: str) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with pytest.raises(SendError, match=r"tried \d+ times within 300ms: .*SYSTEM_BUSY"):
        send(broker, kind, None, 300)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("queue", "count"), [(None, 3), (QUEUE, 1)])
def test_a_try_that_may_have_stored_the_message_counts(
    cluster: ScriptedBroker, broker: RemoteBroker, queue: MessageQueue | None, count: int, kind: str
) -> None:
    """The connection is lost after the request: as many tries as RocketMQ's client makes, one for a chosen queue."""
    cluster.drop(SEND)

    with pytest.raises(SendError, match="may have been carried out all the same"):
        send(broker, kind, queue, 60_000)

    assert cluster.count(SEND) == count


def test_a_send_that_waits_for_its_next_try_fails_when_the_broker_is_closed(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with remote(cluster) as broker:
        future = broker.sends.send_async([MESSAGE], None, 600_000)
        eventually(lambda: cluster.count(SEND) > 2, "it was tried some times")

    with pytest.raises(BrokerClosedError):
        future.result(60)


def test_another_broker_is_preferred_after_a_failure() -> None:
    with ScriptedBroker("broker-a") as good, ScriptedBroker("broker-b") as bad:
        good.others = [bad]
        good.topic("orders")
        bad.refuse(SEND, ResponseCode.SYSTEM_BUSY)

        with remote(good) as broker:
            brokers = [broker.sends.send(MESSAGE).message_queue.broker_name for _ in range(20)]

        assert set(brokers) == {"broker-a"}
        assert bad.count(SEND) == 1


def test_another_broker_is_preferred_when_one_is_unreachable() -> None:
    with ScriptedBroker("broker-a") as good:
        with ScriptedBroker("broker-b") as gone:
            good.others = [gone]
            good.topic("orders")

        with remote(good) as broker:
            sync = [broker.sends.send(MESSAGE).message_queue.broker_name for _ in range(10)]
            later = [broker.sends.send_async([MESSAGE]).result(10).message_queue.broker_name for _ in range(10)]

        assert set(sync + later) == {"broker-a"}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_broker_that_does_not_answer_leaves_time_for_another_one(kind: str) -> None:
    """It gets a third of the timeout. A stopped process accepts connections and requests, too."""
    with ScriptedBroker("broker-a") as answering, ScriptedBroker("broker-b") as silent:
        answering.others = [silent]
        answering.topic("orders", queues=1)
        silent.script(SEND, lambda request: None)
        with remote(answering) as broker:
            results = [send(broker, kind, None) for _ in range(4)]

        assert {result.message_queue.broker_name for result in results} == {"broker-a"}
        assert silent.count(SEND) == 1, "it is avoided afterwards"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("queue", [None, QUEUE])
def test_without_another_broker_a_try_has_the_whole_timeout(
    cluster: ScriptedBroker, broker: RemoteBroker, queue: MessageQueue | None, kind: str
) -> None:
    """The broker may have stored the message: a second try would store it twice."""
    cluster.script(SEND, lambda request: None)

    with pytest.raises(SendTimeoutError, match=r"send message \w+ to 'orders': tried once within 700ms"):
        send(broker, kind, queue, 700)

    assert cluster.count(SEND) == 1


class Two(NamedTuple):
    """A client of two brokers with one queue each.

    Attributes:
        names: The first broker, which is the name server, too.
        leaving: The second broker, which a test stops.
    """

    broker: RemoteBroker
    names: ScriptedBroker
    leaving: ScriptedBroker

    def stop(self) -> None:
        """Stop the second broker, and wait until the client has noticed it."""
        self.leaving.stop()
        eventually(lambda: not self.broker._client._lost.is_empty, "the loss is noticed")

    def leave_route(self) -> None:
        """Have the name server notice that the second broker has stopped."""
        self.names.others = []
        self.names.topic("orders", queues=1)

    def leave_after_a_try(self) -> None:
        """Do so when the first try of a send has failed."""
        eventually(lambda: "broker-b" in self.broker._client.producer._avoid_until, "the first try has failed")
        self.leave_route()


@pytest.fixture
def two() -> Iterator[Two]:
    with ScriptedBroker("broker-a") as names, ScriptedBroker("broker-b") as leaving:
        names.others = [leaving]
        names.topic("orders", queues=1)
        with remote(names) as broker:
            assert len(broker.queues("orders")) == 2
            broker.sends.send(MESSAGE, MessageQueue("orders", "broker-b", 0))
            yield Two(broker, names, leaving)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_queue_whose_broker_has_left_the_route_is_an_error_before_the_timeout(two: Two, kind: str) -> None:
    two.stop()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, two.broker, kind, MessageQueue("orders", "broker-b", 0), 600_000)
        two.leave_after_a_try()
        error = sending.exception(60)

    assert isinstance(error, SendError)
    assert error.queue_is_away
    assert "not in the route of its topic any more" in error.tries[-1]
    assert "send again to another queue, or when the broker is back" in str(error)


@pytest.mark.parametrize("kind", ["sync", "async", "batch"])
def test_a_message_with_a_hash_key_goes_to_another_queue_when_its_broker_stops(two: Two, kind: str) -> None:
    two.names.script(RequestCode.SEND_BATCH_MESSAGE, two.names.accept)
    selected: list[str] = []

    def select_last(queues: Sequence[MessageQueue], message: Message, key: str) -> MessageQueue:
        selected.append(queues[-1].broker_name)
        return queues[-1]

    template = RocketMQTemplate(two.broker, message_queue_selector=select_last)
    two.stop()
    with ThreadPoolExecutor(1) as pool:
        if kind == "async":
            sending: Future[SendResult] = template.async_send("orders", "x", "10m", hash_key="k")
        else:
            payload = ["x", "y"] if kind == "batch" else "x"
            sending = pool.submit(lambda: template.sync_send("orders", payload, "10m", hash_key="k"))
        two.leave_after_a_try()
        result = sending.result(60)

    assert (selected, result.message_queue.broker_name) == (["broker-b", "broker-a"], "broker-a")


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("error", [LookupError("no queue for k"), SystemExit(3)])
def test_an_error_of_a_queue_selector_in_a_later_try_ends_the_send(two: Two, kind: str, error: BaseException) -> None:
    """An asynchronous send is tried again in a thread of the client, where nobody else would get the error."""

    def select(queues: Sequence[MessageQueue], message: Message, key: str) -> MessageQueue:
        if len(queues) == 1:
            raise error
        return queues[-1]

    template = RocketMQTemplate(two.broker, message_queue_selector=select)
    two.stop()
    with ThreadPoolExecutor(1) as pool:
        if kind == "async":
            sending: Future[SendResult] = template.async_send("orders", "x", "10m", hash_key="k")
        else:
            sending = pool.submit(lambda: template.sync_send("orders", "x", "10m", hash_key="k"))
        two.leave_after_a_try()

        assert sending.exception(60) is error


def test_a_lost_broker_leaves_the_routes_at_once(two: Two) -> None:
    """So messages with a hash_key go to other queues, and not only after the next poll of the name server."""
    two.leave_route()
    two.stop()

    eventually(lambda: len(two.broker.queues("orders")) == 1, "the queue of the lost broker is gone", timeout_s=20)


def test_the_send_status_reports_a_message_that_was_not_flushed(cluster: ScriptedBroker) -> None:
    def not_flushed(request: Any) -> Any:
        response = cluster.accept(request)
        response.code = ResponseCode.FLUSH_DISK_TIMEOUT
        return response

    cluster.script(SEND, not_flushed)

    with remote(cluster) as broker:
        assert broker.sends.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 1
    with remote(cluster, retry_next_server=True) as broker:
        assert broker.sends.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 4


def test_the_queues_of_a_topic_are_looked_up_after_its_first_message(
    cluster: ScriptedBroker, broker: RemoteBroker
) -> None:
    cluster.topic(AUTO_CREATE_TOPIC, queues=8, perm=Perm.READ | Perm.WRITE | Perm.INHERIT)

    broker.sends.send(Message("new", b"x"))
    cluster.topic("new", queues=2)
    broker.sends.send(Message("new", b"x"))

    assert len(broker.queues("new")) == 2


@pytest.mark.parametrize(
    ("topic", "queue_id", "error", "text"),
    [
        ("archive", None, SendError, "'archive' has no queue that accepts messages"),
        ("orders", 9, DestinationError, "is not a queue of the topic; there are 4"),
        ("new", None, SendError, "no route for 'new'.*autoCreateTopicEnable=true"),
    ],
)
def test_a_message_without_a_queue_is_refused(
    cluster: ScriptedBroker, broker: RemoteBroker, topic: str, queue_id: int | None, error: type[Exception], text: str
) -> None:
    cluster.topic("archive", perm=Perm.READ)

    with pytest.raises(error, match=text):
        broker.sends.send(Message(topic, b"x"), None if queue_id is None else MessageQueue(topic, "broker-a", queue_id))


@pytest.mark.parametrize("name", [Property.TIMER_DELAY_SEC, Property.START_DELIVER_TIME])
def test_a_timer_is_refused_for_a_broker_of_4_which_would_deliver_it_at_once(name: str) -> None:
    with ScriptedBroker(version=Version.V4_9_7) as cluster:
        cluster.topic("orders")
        timer = Message("orders", b"x", {name: "1767225600000"})

        with remote(cluster) as broker:
            for call in (
                broker.sends.send,
                lambda message: broker.sends.send_async([message]).result(10),
                broker.sends.send_one_way,
            ):
                with pytest.raises(UnsupportedError, match=r"RocketMQ 5\.0 and has no timers.*timerWheelEnable"):
                    call(timer)

        assert cluster.count(SEND) == 0


# --- delays that RocketMQ does not support ----------------------------------------------------------

DELAYED = Message("orders", b"x", {Property.DELAY: "3"})


def test_delays_in_a_batch_and_in_a_transaction_are_refused_by_brokers_that_did_not_announce_them(
    cluster: ScriptedBroker,
) -> None:
    """A RocketMQ broker would store the message without an error, and deliver it at once."""
    with remote(cluster) as broker:
        with pytest.raises(UnsupportedError, match=r"does not support delays on a batch.*send the messages one by one"):
            broker.sends.send_batch([DELAYED, MESSAGE])
        with pytest.raises(UnsupportedError, match="does not support delays on a batch"):
            broker.sends.send_async([DELAYED, MESSAGE]).result(10)
        with pytest.raises(UnsupportedError, match=r"delays on a message in a transaction.*send it without a delay"):
            broker.sends.send_half(DELAYED, "shop")

    assert cluster.count(SEND) == cluster.count(RequestCode.SEND_BATCH_MESSAGE) == 0


def test_a_broker_is_asked_for_its_capabilities_before_the_first_delayed_batch(cluster: ScriptedBroker) -> None:
    """A route may have a broker that got no heartbeat yet; the periodic heartbeat comes later."""
    with ScriptedBroker("broker-b") as other, remote(cluster) as broker:
        for each in (cluster, other):
            each.script(RequestCode.HEART_BEAT, announcing("BATCH_DELAY,NEWER_THAN_THIS_CLIENT"))
            each.script(RequestCode.SEND_BATCH_MESSAGE, each.accept)
        broker.close()
        broker.start()
        cluster.others.append(other)
        cluster.topic("invoices", queues=1)

        for _ in range(2):
            broker.sends.send_batch([Message("invoices", b"x", DELAYED.properties)] * 2)

        assert cluster.count(RequestCode.SEND_BATCH_MESSAGE) == other.count(RequestCode.SEND_BATCH_MESSAGE) == 1
        assert Capability.BATCH_DELAY in broker.capabilities


def announcing(names: str) -> Script:
    header = HeartbeatResponseHeader(capabilities=names)
    return lambda request: request.response(header=header)

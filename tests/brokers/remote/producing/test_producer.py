"""Sends to a cluster: the attempts, their time limit, and the errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers import RemoteBroker
from mqtemplate.errors import (
    BrokerClosedError,
    MQTemplateError,
    SendError,
    UnsupportedError,
)
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.own_requests import HeartbeatResponseHeader
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.results import SendResult
from mqtemplate.template import RocketMQTemplate
from mqtemplate.topics import AUTO_CREATE_TOPIC
from tests.brokers.remote.clients import remote
from tests.brokers.remote.scripted_cluster import Script, ScriptedBroker
from tests.golden import check_script
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


# --- tries until the timeout ------------------------------------------------------------------------


def send(
    broker: RemoteBroker, kind: str, queue: MessageQueue | None, timeout_ms: int = 3_000, message: Message = MESSAGE
) -> SendResult:
    """Send a message in one of the two ways, and wait for the result."""
    if kind == "sync":
        return broker.sends.send(message, queue, timeout_ms)
    return broker.sends.send_async([message], queue, timeout_ms).result(60)


class Sends:
    """The commands of the script, for sends of one kind."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self._kind, self._stack = kind, stack
        self._cluster = stack.enter_context(ScriptedBroker())

    def client(self, *options: str, retries: str = "2") -> None:
        settings = {f"retry_times_when_send_{'failed' if self._kind == 'sync' else 'async_failed'}": int(retries)}
        self._broker = self._stack.enter_context(remote(self._cluster, **settings, **dict.fromkeys(options, True)))

    def topic(self, name: str, perm: str = "6") -> None:
        self._cluster.topic(name, perm=int(perm))

    def each(self, code: str) -> None:
        """Answer each send with a code."""
        self._cluster.script(SEND, lambda request: self._response(request, code))

    def answer(self, *codes: str) -> None:
        """Answer sends with these codes, and then accept them."""
        left = iter(codes)
        self._cluster.script(SEND, lambda request: self._response(request, next(left, "SUCCESS")))

    def _response(self, request: RemotingCommand, code: str) -> RemotingCommand | None:
        if code in ("SUCCESS", "FLUSH_DISK_TIMEOUT"):
            response = self._cluster.accept(request)
            response.code = ResponseCode[code]
            return response
        return None if code == "SILENT" else request.response(ResponseCode[code], remark="not now")

    def send(self, topic: str = "orders", queue: str | None = None, timeout: str = "3000") -> Iterator[str]:
        """Print the number of requests and the result."""
        before, message = self._cluster.count(SEND), Message(topic, b"x")
        chosen = None if queue is None else MessageQueue(topic, "broker-a", int(queue))
        try:
            text = send(self._broker, self._kind, chosen, int(timeout), message).send_status.name
        except MQTemplateError as exc:
            text = f"{type(exc).__name__}: {exc}"
        for pattern, shown in MASKS:
            text = re.sub(pattern, shown, text)
        yield f"{self._cluster.count(SEND) - before} sent: {text}"


MASKS = [
    (r"127\.0\.0\.1:\d+", "<broker>"),
    (r"message \w+ to", "message <id> to"),
    (r"after [\w.]+( to [\w.]+)?:", "after <time>:"),
    (r"V2 within \d+ms", "V2 within <time>"),
]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_both_kinds_of_sends_do_what_the_script_says(kind: str) -> None:
    with ExitStack() as stack:
        check_script(Path(__file__).with_name("scripts") / "sends.script", Sends(kind, stack))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_timeout_ends_the_tries(cluster: ScriptedBroker, broker: RemoteBroker, kind: str) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with pytest.raises(SendError, match=r"tried \d+ times within 300ms: .*SYSTEM_BUSY"):
        send(broker, kind, None, 300)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_topic_without_a_route_yet_is_looked_up_until_the_timeout(
    cluster: ScriptedBroker, broker: RemoteBroker, kind: str
) -> None:
    """The topic is created elsewhere after the first try."""

    def list_topics(request: RemotingCommand) -> RemotingCommand:
        cluster.topic("new")
        return request.response(body=TopicList(topic_list=["new"]).encode())

    cluster.script(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, list_topics)

    result = send(broker, kind, None, 60_000, Message("new", b"x"))

    assert (result.message_queue.topic, cluster.count(SEND)) == ("new", 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_error_for_a_topic_without_a_route_counts_the_tries(
    cluster: ScriptedBroker, broker: RemoteBroker, kind: str
) -> None:
    with pytest.raises(SendError, match=r"to 'new': tried \d+ times within 300ms: .*'new' is not in the cluster"):
        send(broker, kind, None, 300, Message("new", b"x"))

    assert cluster.count(SEND) == 0


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


def test_the_queues_of_a_topic_are_looked_up_after_its_first_message(
    cluster: ScriptedBroker, broker: RemoteBroker
) -> None:
    cluster.topic(AUTO_CREATE_TOPIC, queues=8, perm=Perm.READ | Perm.WRITE | Perm.INHERIT)

    broker.sends.send(Message("new", b"x"))
    cluster.topic("new", queues=2)
    broker.sends.send(Message("new", b"x"))

    assert len(broker.queues("new")) == 2


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

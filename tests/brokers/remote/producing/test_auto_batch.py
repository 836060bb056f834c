"""Messages that are sent while others are on the way leave in one request, and each has its own result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.brokers.remote.producing.auto_batch import AccumulatedMessage, MessageAccumulator, RoundTrip
from mqtemplate.brokers.remote.producing.send_request import JoinableMessage
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.errors import BrokerClosedError, MessageError, SendError
from mqtemplate.message import Message, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_batch
from mqtemplate.results import SendResult, SendStatus
from tests.brokers.remote.scripted_cluster import Script, ScriptedBroker
from tests.waiting import PATIENCE_S, eventually

SEND, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
BUSY = 4


class SlowBroker(ScriptedBroker):
    """A broker that responds to single messages when it is told to.

    Attributes:
        held: Requests without a response.
        batches: Bodies of the messages in each batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[RemotingCommand, Future[RemotingCommand]]] = []
        self.batches: list[list[bytes]] = []
        self.script(SEND, self._hold)
        self.script(BATCH, self.accept_batch)
        self.topic("orders", 1)

    def _hold(self, request: RemotingCommand) -> Future[RemotingCommand]:
        future: Future[RemotingCommand] = Future()
        self.held.append((request, future))
        return future

    def respond(self, later: Script | None = None) -> None:
        """Accept the messages that are held, and let *later* respond to all others; by default they are accepted."""
        self.script(SEND, later or self.accept)
        held, self.held = self.held, []
        responses = [self.accept(request) for request, _ in held]
        for (_, future), response in zip(held, responses, strict=True):
            future.set_result(response)

    def wait_for(self, count: int) -> None:
        eventually(lambda: len(self.held) == count, f"{count} requests have arrived")

    def bodies(self, request: RemotingCommand) -> list[bytes]:
        return [message.body for message in decode_batch(request.body, "orders")]

    def accept_batch(self, request: RemotingCommand) -> RemotingCommand:
        self.batches.append(self.bodies(request))
        results = [self.accept(request).ext_fields for _ in self.batches[-1]]
        return request.response(
            header=SendMessageResponseHeader(
                msg_id=",".join(each["msgId"] for each in results),
                queue_id=request.header(SendMessageRequestHeaderV2).queue_id,
                queue_offset=int(results[0]["queueOffset"]),
            )
        )


@pytest.fixture
def cluster() -> Iterator[SlowBroker]:
    with SlowBroker() as broker:
        yield broker


@contextmanager
def busy_client(cluster: SlowBroker, clock: Clock | None = None, **settings: Any) -> Iterator[RemoteBroker]:
    """Yield a client with four messages on the way, so that further ones wait: for ever on the virtual clock."""
    settings = {"name_servers": (cluster.address,), "retry_times_when_send_async_failed": 0, **settings}
    with RemoteBroker(RemoteSettings(**settings), clock or VirtualClock()) as broker:
        broker.queues("orders")  # now the client has the route
        for _ in range(BUSY):
            send(broker, b"on the way")
        cluster.wait_for(BUSY)
        yield broker


def send(broker: RemoteBroker, body: bytes, timeout_ms: int = 60_000, **properties: str) -> Future[SendResult]:
    return broker.sends.send_async([Message("orders", body, properties)], timeout_ms=timeout_ms)


def test_messages_that_wait_leave_together(cluster: SlowBroker) -> None:
    with busy_client(cluster) as broker:
        futures = [send(broker, b"%d" % number) for number in range(5)]
        cluster.respond()
        results = [future.result(PATIENCE_S) for future in futures]

    assert [body for batch in cluster.batches for body in batch] == [b"0", b"1", b"2", b"3", b"4"]
    assert cluster.count(SEND) == BUSY
    assert [result.queue_offset for result in results] == list(range(BUSY, BUSY + 5))
    assert len({result.msg_id for result in results}) == 5
    assert [result.offset_msg_id for result in results] == [f"7F00000100002A9F{n:016X}" for n in range(BUSY, BUSY + 5)]
    assert {result.send_status for result in results} == {SendStatus.SEND_OK}


def test_threads_that_send_at_the_same_time_share_requests(cluster: SlowBroker) -> None:
    with busy_client(cluster) as broker, ThreadPoolExecutor(8) as threads:
        sends = [threads.submit(broker.sends.send, Message("orders", b"%d" % number)) for number in range(8)]
        cluster.respond()
        results = [each.result(PATIENCE_S) for each in sends]

    assert sorted(result.queue_offset for result in results) == list(range(BUSY, BUSY + 8))


def test_a_message_waits_ten_milliseconds_at_most(cluster: SlowBroker) -> None:
    """The broker does not respond to those on the way; without a limit the message would wait for their timeout."""
    with busy_client(cluster, SystemClock()) as broker:
        send(broker, b"late")

        cluster.wait_for(BUSY + 1)

        assert cluster.held[-1][0].body == b"late"
        cluster.respond()


def test_a_request_has_64_messages_and_64_kib_at_most(cluster: SlowBroker) -> None:
    with busy_client(cluster) as broker:
        futures = [send(broker, b"") for _ in range(100)] + [send(broker, bytes(4_000)) for _ in range(40)]
        cluster.respond()
        for future in futures:
            future.result(PATIENCE_S)

    assert max(map(len, cluster.batches)) <= 64
    assert max(sum(map(len, batch)) for batch in cluster.batches) < 64 << 10


@pytest.mark.parametrize(
    "properties",
    [
        {Property.DELAY: "3"},
        {Property.TIMER_DELAY_MS: "1000"},
        {Property.TRANSACTION_PREPARED: "true"},
        {Property.WAIT: "false"},
        {Property.CORRELATION_ID: "a request"},
    ],
    ids=["level", "timer", "transaction", "does not wait for the disk", "request"],
)
def test_special_messages_leave_alone_and_at_once(cluster: SlowBroker, properties: dict[str, str]) -> None:
    with busy_client(cluster) as broker:
        send(broker, b"x", **properties)
        cluster.wait_for(BUSY + 1)
        cluster.respond()

    assert cluster.batches == []


def test_a_message_for_one_queue_leaves_alone(cluster: SlowBroker) -> None:
    with busy_client(cluster) as broker:
        broker.sends.send_async([Message("orders", b"x")], broker.queues("orders")[0], 60_000)
        cluster.wait_for(BUSY + 1)
        cluster.respond()

    assert cluster.batches == []


def test_without_the_setting_each_message_is_a_request(cluster: SlowBroker) -> None:
    with busy_client(cluster, auto_batch=False) as broker:
        for _ in range(3):
            send(broker, b"x")
        cluster.wait_for(BUSY + 3)
        cluster.respond()

    assert cluster.batches == []


def test_more_messages_may_be_on_the_way_to_a_slow_broker() -> None:
    """Its shortest time of the last two windows counts: a busy client reads many responses late."""
    round_trip = RoundTrip()
    assert round_trip.max_messages == BUSY

    for seconds in (0.0053, 0.0103, 0.0203):
        round_trip.add(seconds + 0.001, 50)
    assert round_trip.max_messages == BUSY + 5 * 64

    round_trip.add(0.0002, 1)
    assert round_trip.max_messages == BUSY
    for _ in range(2_000):
        round_trip.add(0.00134, 1)
    assert round_trip.max_messages == BUSY + 65


# --- errors -----------------------------------------------------------------------------------------


def test_messages_that_are_refused_together_are_sent_alone(cluster: SlowBroker) -> None:
    """A broker refuses a batch because of one of its messages. The others must not fail with it."""
    cluster.refuse(BATCH, ResponseCode.MESSAGE_ILLEGAL, "one is bad")
    with busy_client(cluster) as broker:
        good, bad = send(broker, b"good"), send(broker, b"bad")

        def refuse_bad(request: RemotingCommand) -> RemotingCommand:
            is_bad = request.body == b"bad"
            return request.response(ResponseCode.MESSAGE_ILLEGAL, remark="bad") if is_bad else cluster.accept(request)

        cluster.respond(refuse_bad)

        assert good.result(PATIENCE_S).send_status is SendStatus.SEND_OK
        with pytest.raises(MessageError, match=r"send message \w+ to 'orders'.*bad"):
            bad.result(PATIENCE_S)


def test_a_broker_without_batches_gets_single_messages_from_then_on(cluster: SlowBroker) -> None:
    cluster.refuse(BATCH, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no batches")
    with busy_client(cluster) as broker:
        futures = [send(broker, b"x") for _ in range(3)]
        cluster.respond()
        for future in futures:
            future.result(PATIENCE_S)
        refused = cluster.count(BATCH)
        for future in [send(broker, b"x") for _ in range(20)]:
            future.result(PATIENCE_S)

    assert cluster.count(BATCH) == refused


def test_the_error_names_the_message_and_not_the_batch(cluster: SlowBroker) -> None:
    cluster.refuse(BATCH, ResponseCode.SYSTEM_ERROR, "disk")
    with busy_client(cluster) as broker:
        futures = [send(broker, b"x") for _ in range(3)]
        cluster.respond()
        errors = [future.exception(PATIENCE_S) for future in futures]

    for error in errors:
        assert isinstance(error, SendError)
        assert re.match(r"send message \w+ to 'orders': .*answered 1 SYSTEM_ERROR.*disk", str(error))
        assert error.operation == str(error).partition(": ")[0]
    assert len(set(map(str, errors))) == 3


def test_a_message_that_cannot_be_sent_fails_alone(cluster: SlowBroker) -> None:
    with busy_client(cluster, max_message_size=1_000) as broker:
        good = send(broker, b"good")
        for bad, reason in (
            (send(broker, b"bad", text="x" * 40_000), "properties take 40"),
            (send(broker, b"bad", text="a\x01b"), "property 'text' has the character 0x01 or 0x02"),
            (send(broker, bytes(1_001)), "has 1001 bytes, allowed are 1000"),
        ):
            with pytest.raises(MessageError, match=reason):
                bad.result(PATIENCE_S)
        cluster.respond()
        assert good.result(PATIENCE_S).send_status is SendStatus.SEND_OK


def test_close_fails_the_messages_that_wait(cluster: SlowBroker) -> None:
    with busy_client(cluster) as broker:
        waiting = [send(broker, b"x") for _ in range(200)]  # more than one request of them
        broker.close()
        errors = [future.exception(PATIENCE_S) for future in waiting]

    assert any("the client was closed before it was sent" in str(error) for error in errors)
    assert {type(error) for error in errors} <= {BrokerClosedError, SendError}


def test_a_message_that_cannot_be_encoded_alone_fails_and_leaves_no_message_on_the_way() -> None:
    """This may happen in the I/O thread, when the response to an earlier message has arrived."""
    sends = Mock(**{"factory.joinable.side_effect": lambda message: JoinableMessage("orders", b"", {}, 0, "id", b"")})
    sends.factory.alone.side_effect = MessageError("too long")
    accumulator = MessageAccumulator(sends, 3_000)
    outcomes = [Future[SendResult]() for _ in range(2)]

    for outcome in outcomes:
        accumulator.add(Message("orders", b""), outcome)
    for call in sends.call_later.call_args_list:
        call.args[1]()

    assert [str(outcome.exception(0)) for outcome in outcomes] == ["too long"] * 2
    assert [accumulator.may_start() for _ in range(BUSY + 1)] == [True] * BUSY + [False]


def test_messages_that_are_refused_together_while_the_client_closes_fail() -> None:
    unused: Any = None  # a closed accumulator sends nothing
    accumulator = MessageAccumulator(unused, 3_000)
    accumulator.close()
    outcome: Future[SendResult] = Future()

    accumulator.refused(
        [AccumulatedMessage(JoinableMessage("orders", b"", {}, 0, "id-1", b""), 0.0, outcome)], for_good=False
    )

    with pytest.raises(BrokerClosedError, match="send message id-1 to 'orders': the client was closed before"):
        outcome.result(PATIENCE_S)

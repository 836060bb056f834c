"""Pulls that are answered without decoding each request: as if each had been processed alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from mqtemplate.message import MessageExt
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.remoting.settings import ConnectionLimits, RemotingServerSettings
from mqtemplate.server import BrokerServer
from mqtemplate.server.fast_path import pipelines
from mqtemplate.server.fast_path.pipelines import PipelinedPulls
from mqtemplate.store.settings import FlushDiskType
from tests.remoting.wire import RawPeer
from tests.server.fast_path.fast_serving import answers, in_one_turn, known_producer, pull, send, serving
from tests.server.serving import subscription
from tests.waiting import eventually

OWN = PullSysFlag.SUBSCRIPTION


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One value for each pull: it was accepted by the pipeline."""
    results: list[bool] = []
    accept = PipelinedPulls.accept

    def noted(self: PipelinedPulls, frame: Frame) -> bool:
        results.append(accept(self, frame))
        return results[-1]

    monkeypatch.setattr(PipelinedPulls, "accept", noted)
    return results


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    """A server with ten messages in queue 0, the fifth with the tag *paid*."""
    with serving(FlushDiskType.ASYNC_FLUSH) as server:
        with known_producer(server) as peer:
            tags = [{"TAGS": "paid"} if number == 4 else {} for number in range(1, 10)]
            peer.send(b"".join(send(10 + number, b"%d" % number, properties=tag) for number, tag in enumerate(tags)))
            answers(peer, 9)
        yield server


@pytest.fixture
def peer(server: BrokerServer) -> Iterator[RawPeer]:
    """A consumer whose next pulls are accepted by the pipeline."""
    with RawPeer(server.remoting.address) as peer:
        for opaque in range(3):
            assert code_of(peer.invoke_frame(pull(opaque))) == ResponseCode.SUCCESS
        yield peer


def code_of(response: RemotingCommand | None) -> int:
    assert response is not None
    return response.code


def messages_of(response: RemotingCommand) -> list[MessageExt]:
    """Return the messages of a pull, without the port of the producer."""
    found = decode_messages(response.body, "broker-a")
    return [replace(message, born_host=message.born_host._replace(port=0)) for message in found]


def join(peer: RawPeer, expression: str, sub_version: int) -> None:
    """Subscribe the group with an expression. Its members are also told of changes."""
    data = ConsumerData(
        group_name="billing", subscription_data_set=[subscription("orders", expression, sub_version=sub_version)]
    )
    heartbeat = HeartbeatData(client_id="consumer-1", consumer_data_set=[data])
    request = RemotingCommand.request(RequestCode.HEART_BEAT, body=heartbeat.encode(), opaque=1)
    peer.send(encode_command(request))
    while (response := peer.next_command()) is not None and not response.is_response:
        pass
    assert code_of(response) == ResponseCode.SUCCESS


def test_pipelined_pulls_count_as_requests(server: BrokerServer, peer: RawPeer, fast: list[bool]) -> None:
    before = server.remoting.request_count
    peer.send(b"".join(pull(opaque) for opaque in range(10, 30)))
    answers(peer, 20)

    assert fast == [True] * 20
    assert server.remoting.request_count == before + 20


def test_many_bytes_are_sent_before_all_pulls_are_read(
    peer: RawPeer, fast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many large responses would otherwise take memory, and their client would wait."""
    in_one_turn(monkeypatch)
    monkeypatch.setattr(pipelines, "_MAX_RESPONSE_BYTES", 3_000)
    counts: list[int] = []
    reply = Connection.reply_together

    def noted(self: Connection, opaques: list[int], parts: list[bytes]) -> None:
        counts.append(len(opaques))
        reply(self, opaques, parts)

    monkeypatch.setattr(Connection, "reply_together", noted)

    peer.send(b"".join(pull(opaque) for opaque in range(10, 20)))
    responses = answers(peer, 10)

    assert len({response.body for response in responses.values()}) == 1
    assert len(responses[10].body) > 1_000
    assert max(counts) <= 3
    assert sum(counts) == 10


# --- pulls that wait or end somewhere else --------------------------------------------------------------


def test_a_pull_at_the_end_waits_for_the_next_message(server: BrokerServer, peer: RawPeer, fast: list[bool]) -> None:
    peer.send(pull(10, 10, sys_flag=OWN | PullSysFlag.SUSPEND))
    eventually(lambda: len(server.hold) == 1, "the pull is held")
    with known_producer(server) as producer:
        assert producer.invoke_frame(send(20, b"new")) is not None
    server.hold.step()

    response = peer.next_command()

    assert fast == [False]
    assert response is not None
    assert (response.opaque, messages_of(response)[-1].body) == (10, b"new")


@pytest.mark.parametrize(
    ("at", "tag", "code", "next_offset"),
    [(11, "*", ResponseCode.PULL_OFFSET_MOVED, 10), (0, "none", ResponseCode.PULL_RETRY_IMMEDIATELY, 10)],
)
def test_a_pull_without_messages_has_the_next_offset(
    peer: RawPeer, fast: list[bool], at: int, tag: str, code: int, next_offset: int
) -> None:
    for opaque in range(10, 13):
        response = peer.invoke_frame(pull(opaque, at, subscription=tag))

    assert fast[-1]
    assert response is not None
    assert (response.opaque, response.code, response.body) == (12, code, b"")
    assert response.header(PullMessageResponseHeader) == PullMessageResponseHeader(
        suggest_which_broker_id=0, next_begin_offset=next_offset, min_offset=0, max_offset=10
    )


# --- changes between two pulls --------------------------------------------------------------------------


def let_read(server: BrokerServer, can_read: bool) -> None:
    perm = 6 if can_read else 2
    server.engine.topics.update("orders", {"perm": perm, "readQueueNums": 4, "writeQueueNums": 4})


def let_consume(server: BrokerServer, can_consume: bool) -> None:
    server.groups.put([SubscriptionGroupConfig(group_name="billing", consume_enable=can_consume)])


def let_join(server: BrokerServer, can_join: bool) -> None:
    local = server.engine.engine.groups.local
    local.has_members = (lambda group: False) if can_join else (lambda group: group == "billing")  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("let", "remark"),
    [
        (let_read, "topic 'orders' is not readable (perm)"),
        (let_consume, "group 'billing' may not consume (consumeEnable)"),
        (let_join, "group 'billing' has listeners in the broker's own process"),
    ],
)
def test_a_change_holds_for_the_next_pull(
    let: Callable[[BrokerServer, bool], None], remark: str, server: BrokerServer, peer: RawPeer, fast: list[bool]
) -> None:
    let(server, False)
    refused = peer.invoke_frame(pull(10))
    let(server, True)

    assert refused is not None
    assert refused.code == ResponseCode.NO_PERMISSION
    assert refused.remark.startswith(remark)
    assert code_of(peer.invoke_frame(pull(11))) == ResponseCode.SUCCESS
    assert fast == [False, True]


def test_a_group_that_may_not_broadcast_is_checked_for_each_pull(
    server: BrokerServer, peer: RawPeer, fast: list[bool]
) -> None:
    """Its members decide, and they come and go."""
    server.groups.put([SubscriptionGroupConfig(group_name="billing", consume_broadcast_enable=False)])

    assert code_of(peer.invoke_frame(pull(10))) == ResponseCode.SUCCESS
    assert fast == [False]


def test_a_new_subscription_holds_for_the_next_pull(server: BrokerServer, peer: RawPeer, fast: list[bool]) -> None:
    counts = []
    with RawPeer(server.remoting.address) as member:
        for sub_version, expression in enumerate(("*", "paid", "*"), start=1):
            join(member, expression, sub_version)
            for opaque in range(10, 13):
                response = peer.invoke_frame(pull(opaque, sys_flag=0))
                assert response is not None
                counts.append(len(messages_of(response)))

    assert counts == [10] * 3 + [1] * 3 + [10] * 3
    assert fast[-1]


def test_a_pull_after_its_group_has_left_is_refused(server: BrokerServer, peer: RawPeer, fast: list[bool]) -> None:
    with RawPeer(server.remoting.address) as member:
        join(member, "*", 1)
        codes = [code_of(peer.invoke_frame(pull(opaque, sys_flag=0))) for opaque in range(10, 13)]
    eventually(lambda: server.clients.consumers.get("billing") is None, "the member has left")

    assert codes == [ResponseCode.SUCCESS] * 3
    assert code_of(peer.invoke_frame(pull(13, sys_flag=0))) == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert fast[-2:] == [True, False]


def test_the_checks_of_many_queues_are_forgotten(
    server: BrokerServer, peer: RawPeer, fast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "_MAX_CHECKED", 2)

    for opaque in range(10, 22):
        assert code_of(peer.invoke_frame(pull(opaque, queue_id=opaque % 4))) == ResponseCode.SUCCESS

    (connection,) = [each for each in server.remoting.connections() if each.is_open][-1:]
    assert fast == [True] * 12
    assert len(connection._pipeline._pulls._checked) <= 2  # type: ignore[attr-defined]


# --- faults -----------------------------------------------------------------------------------------------


def test_a_pull_whose_read_fails_is_answered_once_and_logged(
    server: BrokerServer, peer: RawPeer, fast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*of: object) -> None:
        raise ZeroDivisionError("the reader failed")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(server.hold._raw, "pull", fail)
        failed = peer.invoke_frame(pull(10))

    assert failed is not None
    assert (failed.opaque, failed.code) == (10, ResponseCode.SYSTEM_ERROR)
    assert len([line for line in logs if line["log_level"] == "error"]) == 1
    assert code_of(peer.invoke_frame(pull(11))) == ResponseCode.SUCCESS
    assert fast == [False, True]


def test_an_opaque_in_use_is_a_command(server: BrokerServer, peer: RawPeer, fast: list[bool]) -> None:
    peer.send(pull(10, 10, sys_flag=OWN | PullSysFlag.SUSPEND))
    eventually(lambda: len(server.hold) == 1, "the pull is held")

    response = peer.invoke_frame(pull(10))

    assert response is not None
    assert (response.opaque, response.code) == (10, ResponseCode.SUCCESS)
    assert fast == [False, False]


def test_pulls_above_the_limit_of_unanswered_requests_wait(fast: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_turn(monkeypatch)
    remoting = RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3))
    with serving(FlushDiskType.ASYNC_FLUSH, remoting) as server, known_producer(server) as peer:
        for opaque in range(2):
            peer.invoke_frame(pull(opaque))
        fast.clear()
        peer.send(b"".join(pull(opaque) for opaque in (10, 11, 12, 13)))
        responses = answers(peer, 4)

    assert {opaque: response.code for opaque, response in responses.items()} == {10: 0, 11: 0, 12: 0, 13: 0}
    assert fast == [True, True, True, False]


def test_a_stopping_server_tells_a_client_to_leave(
    server: BrokerServer, peer: RawPeer, fast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a client whose pulls were pipelined until then."""
    held: list[object] = []
    with known_producer(server) as producer, monkeypatch.context() as patch:
        patch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
        producer.send(send(10))
        eventually(lambda: bool(held), "the server has an unanswered request")
        stopping = threading.Thread(target=server.remoting.stop)
        stopping.start()
        eventually(lambda: server.remoting._is_draining, "the server is stopping")
        left = peer.invoke_frame(pull(11))
        held[0](None)  # type: ignore[operator]
        stopping.join()

    assert left is not None
    assert (left.opaque, left.code) == (11, ResponseCode.GO_AWAY)
    assert fast == []

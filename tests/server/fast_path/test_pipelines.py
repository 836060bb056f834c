"""Pipelines: what is stored and answered together, and faults. `test_equivalence` compares them with commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.message import Message
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch, join_in_batch
from mqtemplate.remoting.settings import ConnectionLimits, RemotingServerSettings
from mqtemplate.server import AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.server.core.batches import read_uniform
from mqtemplate.server.fast_path import pipelines
from mqtemplate.store import index_file
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType
from tests.remoting.wire import RawPeer
from tests.server.fast_path.fast_serving import (
    LISTEN,
    MAX_OFFSET,
    NO_ID,
    answers,
    batch,
    in_one_turn,
    known_client,
    pull,
    records,
    send,
    serving,
)
from tests.server.tool import ANY_PORT
from tests.waiting import eventually

BATCH, V2 = RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2
HELD = PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The opaques of requests that a pipeline answered together. Commands are not among them."""
    in_one_turn(monkeypatch)
    found: list[list[int]] = []
    reply = Connection.reply_together

    def noted(self: Connection, opaques: Sequence[int], parts: Sequence[bytes]) -> None:
        found.append(list(opaques))
        reply(self, opaques, parts)

    monkeypatch.setattr(Connection, "reply_together", noted)
    return found


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    with serving(max_message_size=10_000) as server:
        yield server


@pytest.fixture
def peer(server: BrokerServer, together: list[list[int]]) -> Iterator[RawPeer]:
    """A client whose next sends, batches and pulls are pipelined."""
    with known_client(server) as peer:
        together.clear()
        yield peer


# --- what is processed together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "value", "frames", "most"),
    [
        ("_MAX_REQUESTS", 64, [send(opaque) for opaque in range(10, 138)], 64),
        ("_MAX_SEND_BYTES", 5_000, [send(opaque, bytes(2_000)) for opaque in range(10, 22)], 3),
        ("_MAX_RESPONSE_BYTES", 3_000, [pull(opaque) for opaque in range(10, 20)], 3),
        ("MAX_UNIFORM_BYTES", 1_500, [batch(opaque) for opaque in range(10, 20)], 3),
    ],
)
def test_a_limited_number_of_requests_is_processed_together(
    peer: RawPeer, together: list[list[int]], monkeypatch: pytest.MonkeyPatch, limit: str, value: int, frames, most: int
) -> None:
    """Many large responses would otherwise take memory, and their client would wait."""
    monkeypatch.setattr(pipelines, limit, value)

    peer.send(b"".join(frames))
    answers(peer, len(frames))

    assert sum(map(len, together)) == len(frames)
    assert 1 < max(map(len, together)) <= most


DELAYED = encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1", "DELAY": "3"})] * 3)
SAME = encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1"})] * 8)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param(
            [batch(10 + n, 4, queue_id=queue_id) for n, queue_id in enumerate((1, 0, 1, 3))],
            [[10, 11, 12, 13]],
            id="several queues, one of them twice",
        ),
        pytest.param(
            [batch(10), batch(11), batch(12, 11), batch(13, 11), batch(14, 11, code=V2)],
            [[10, 11], [12, 13], [14]],
            id="another size or template",
        ),
        pytest.param([batch(10, tag="a"), batch(11, tag="b")], [[10], [11]], id="other properties in the bodies"),
        pytest.param([batch(10, 1), batch(11, 7), batch(12, 2, tag="paid")], [[10], [11], [12]], id="few messages"),
        pytest.param([batch(10, 20, grows=True), batch(11, 3, grows=True, queue_id=1)], [[10], [11]], id="growing"),
        pytest.param([batch(10, 10, code=V2), batch(11, 3, code=V2)], [[10], [11]], id="code 310"),
        pytest.param([batch(10, 3, properties=NO_ID)], [[10]], id="few without an id of the batch, as from our client"),
        pytest.param([batch(10, 10, properties=NO_ID)], [[10]], id="without an id of the batch"),
        pytest.param([batch(10, 65)], [], id="long"),
        pytest.param([batch(10, 65, grows=True)], [], id="long and growing"),
        pytest.param([batch(10, 0)], [], id="empty"),
        pytest.param([send(10, DELAYED, batch=True)], [], id="delayed"),
        pytest.param([send(10, batch=True, code=BATCH)], [], id="invalid"),
        pytest.param([send(10, SAME, queue_id=9, batch=True)], [], id="queue that does not exist"),
        pytest.param([batch(10, 12, 1_000)], [], id="too large"),
    ],
)
def test_batches_are_stored_together_or_as_commands(
    peer: RawPeer, together: list[list[int]], frames: list[bytes], expected: list[list[int]]
) -> None:
    peer.send(b"".join(frames))
    answers(peer, len(frames))

    assert together == expected


def test_with_access_control_each_request_is_a_command() -> None:
    """The guard checks the signature of each request, so none may pass without it."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=LISTEN), VirtualClock())
    server = BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT), acl=AclSettings())
    with server, RawPeer(server.remoting.address) as peer:
        peer.send(b"".join(send(opaque) for opaque in range(5)))
        codes = {response.code for response in answers(peer, 5).values()}
    engine.close()

    assert codes == {ResponseCode.NO_PERMISSION}


def test_a_pull_at_the_end_waits_for_the_next_message(
    server: BrokerServer, peer: RawPeer, together: list[list[int]]
) -> None:
    peer.send(pull(10, 1, queue_id=3, sys_flag=HELD))
    eventually(lambda: len(server.hold) == 1, "the pull is held")
    assert together == []
    peer.invoke_frame(send(20, b"new", queue_id=3))
    server.hold.step()

    response = peer.next_command()

    bodies = [message.body for message in decode_messages(response.body, "broker-a")]
    assert (response.opaque, bodies[-1]) == (10, b"new")


def test_the_checks_of_many_queues_are_forgotten(
    server: BrokerServer, peer: RawPeer, together: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "_MAX_CHECKED", 2)

    for opaque in range(10, 22):
        assert peer.invoke_frame(pull(opaque, queue_id=opaque % 4)).code == ResponseCode.SUCCESS

    (connection,) = [each for each in server.remoting.connections() if each.is_open][-1:]
    assert together == [[opaque] for opaque in range(10, 22)]
    assert len(connection._pipeline._pulls._checked) <= 2  # type: ignore[attr-defined]


def test_the_io_thread_indexes_what_it_stored_after_its_replies(
    server: BrokerServer, peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock does not move, so the service of the index does not step."""
    monkeypatch.setattr(index_file, "_SOME_BYTES", 2_000)
    index = server.engine.store.index
    index.catch_up()
    before = index._files[-1].header.index_count
    peer.send(b"".join(send(opaque) for opaque in range(10, 50)))
    answers(peer, 40)
    peer.invoke_frame(encode_command(MAX_OFFSET))  # answered when the index has the messages

    assert index._files[-1].header.index_count - before == 40


# --- uniform batches --------------------------------------------------------------------------------

ADDED = AddedProperties({"CLUSTER": "DefaultCluster"})


def messages(count: int = 8, **properties: str) -> list[Message]:
    return [Message("orders", b"%08d" % number, {"UNIQ_KEY": f"A{number:03}", **properties}) for number in range(count)]


def test_messages_that_differ_in_body_and_id_are_uniform() -> None:
    uniform = read_uniform(encode_batch(messages(TAGS="paid")), ADDED)

    assert uniform is not None
    ids = uniform.batch("orders", 0, SendOrigin(0, 0, bytes(8), 0)).msg_ids()
    assert ids == b"A000,A001,A002,A003,A004,A005,A006,A007"
    assert [bytes(row) for row in uniform.bodies] == [b"%08d" % number for number in range(8)]
    assert uniform.properties.encoded[uniform.id_at :].startswith(b"A000\x02")


UNIFORM = encode_batch(messages())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(10),
        UNIFORM[:-1],
        UNIFORM + b"x",
        encode_batch(messages(7)),
        encode_batch([*messages(), Message("orders", b"longer than the others", {"UNIQ_KEY": "A009"})]),
        encode_batch([*messages(), Message("orders", b"12345678", {"UNIQ_KEY": "A-09"})]),
        encode_batch([*messages(), Message("orders", b"12345678", {"UNIQ_KEZ": "A009"})]),
        encode_batch([*messages(), Message("orders", b"12345678", {"UNIQ_KEY": "A009"}, flag=1)]),
        encode_batch(messages(DELAY="3")),
        encode_batch(messages(KEYS="A000")),
        encode_batch([Message("orders", b"12345678", {"TAGS": "a"})] * 8),
        join_in_batch(b"12345678", b"UNIQ_KEY\x01A000\x02", 0).replace(b"\0\x0e", b"\0\x0d") * 8,
        (b"\xff\xff\xff\xff" + bytes(40)) * 8,
        (b"\0\0\0\x16" + bytes(12) + b"\xff\xff\xff\xff" + bytes(2)) * 8,
    ],
)
def test_other_batches_are_read_message_by_message(data: bytes) -> None:
    assert read_uniform(data, ADDED) is None


def test_a_large_batch_is_read_message_by_message() -> None:
    """The interpreter lock is free between its messages, so other clients do not wait for all of it."""
    of_64 = encode_batch([Message("orders", bytes(4_000), {"UNIQ_KEY": f"A{number:03}"}) for number in range(64)])

    assert read_uniform(of_64, ADDED) is not None
    assert read_uniform(of_64 + of_64[: len(of_64) // 64 * 2], ADDED) is None


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "codes"),
    [
        ([send(opaque) for opaque in range(10, 15)], [0, 0, 14, 14, 14]),
        ([batch(10, 3)], [14]),
        ([batch(10), batch(11), send(12)], [14, 14, 0]),
    ],
)
def test_what_the_store_refuses_together_is_tried_one_by_one(
    server: BrokerServer, peer: RawPeer, monkeypatch: pytest.MonkeyPatch, frames: list[bytes], codes: list[int]
) -> None:
    """A disk with room for two more records takes two, and refuses the others with the reason."""
    put, room, end = MessageStore.put, iter(range(2)), server.engine.store.end_offset

    def put_one(store: MessageStore, records: Any) -> object:
        if not isinstance(records, RecordDraft) or next(room, None) is None:
            raise StoreFullError("no room for a record")
        return put(store, records)

    with monkeypatch.context() as patch:
        patch.setattr(MessageStore, "put", put_one)
        peer.send(b"".join(frames))
        responses = answers(peer, len(frames))

    assert [responses[10 + number].code for number in range(len(frames))] == codes
    assert {each.remark for each in responses.values() if each.code} == {"no room for a record"}
    assert (server.engine.store.end_offset > end) == (0 in codes)
    assert peer.invoke_frame(batch(20)).code == ResponseCode.SUCCESS


def test_a_batch_that_fits_into_no_file_gets_the_reason() -> None:
    with serving(mapped_file_size_commit_log=4_096) as server, known_client(server) as peer:
        refused = peer.invoke_frame(batch(10, 10, 1_000))

    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert "do not fit into a commit log file of 4096 bytes" in refused.remark


def test_sends_that_do_not_fit_into_one_file_together_are_stored_one_by_one() -> None:
    with serving(mapped_file_size_commit_log=2_560) as server, known_client(server) as peer:
        peer.send(b"".join(send(opaque, bytes(700)) for opaque in range(10, 20)))

        assert {response.code for response in answers(peer, 10).values()} == {ResponseCode.SUCCESS}
        assert [len(record.body) for record in records(server)].count(700) == 10


@pytest.mark.parametrize(
    ("frames", "ids", "unique_id"),
    [
        ([send(opaque) for opaque in range(10, 15)], 1, "7F0000000A"),
        ([batch(10, 3)], 3, "7F0000000A"),
        ([batch(10)], 10, "7F0000000A"),
        ([batch(10, 3, properties=NO_ID)], 3, None),
        ([batch(10, properties=NO_ID)], 10, None),
    ],
)
def test_a_failed_flush_is_reported_for_each_request(
    server: BrokerServer,
    peer: RawPeer,
    monkeypatch: pytest.MonkeyPatch,
    frames: list[bytes],
    ids: int,
    unique_id: str | None,
) -> None:
    """The messages are stored, but not durable. They are readable after the next flush that succeeds."""

    def refuse() -> int:
        raise StoreError("the disk refused")

    store = server.engine.store
    first = store.consume_queue("orders", 0).max_offset
    with monkeypatch.context() as patch:
        patch.setattr(store.group_commit, "_flush", refuse)
        peer.send(b"".join(frames))
        responses = answers(peer, len(frames))
    readable_before = store.confirm_offset < store.end_offset
    store.flush()

    assert {response.code for response in responses.values()} == {ResponseCode.FLUSH_DISK_TIMEOUT}
    assert all("the disk refused" in response.remark for response in responses.values())
    headers = [responses[10 + number].header(SendMessageResponseHeader) for number in range(len(frames))]
    assert [header.queue_offset - first for header in headers] == list(range(len(frames)))
    assert (headers[0].transaction_id, len(headers[0].msg_id.split(","))) == (unique_id, ids)
    assert readable_before
    assert store.confirm_offset == store.end_offset


@pytest.mark.parametrize(("frame", "count"), [(send(10) + send(11), 2), (batch(10) + batch(11), 20)])
def test_a_reply_that_fails_is_logged_and_nothing_is_stored_twice(
    server: BrokerServer, peer: RawPeer, monkeypatch: pytest.MonkeyPatch, frame: bytes, count: int
) -> None:
    """The thread that flushes replies to other producers next."""

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    queue = server.engine.store.consume_queue("orders", 0)
    first = queue.max_offset
    with RawPeer(server.remoting.address) as other:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(Connection, "reply_together", fail)
            peer.send(frame)
            eventually(lambda: bool(logs), "the error is logged")

        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.response_failed"]
        assert other.invoke(MAX_OFFSET).code == ResponseCode.SUCCESS
        assert peer.invoke_frame(send(12)).code == ResponseCode.SUCCESS
    assert queue.max_offset == first + count + 1


def test_a_pull_whose_read_fails_is_answered_once_and_logged(
    server: BrokerServer, peer: RawPeer, together: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*of: object) -> None:
        raise ZeroDivisionError("the reader failed")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(server.hold._raw, "pull", fail)
        failed = peer.invoke_frame(pull(10))

    assert (failed.opaque, failed.code) == (10, ResponseCode.SYSTEM_ERROR)
    assert len([line for line in logs if line["log_level"] == "error"]) == 1
    assert peer.invoke_frame(pull(11)).code == ResponseCode.SUCCESS
    assert together == [[11]]


# --- connections ------------------------------------------------------------------------------------


@pytest.fixture
def unconfirmed(server: BrokerServer, peer: RawPeer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The callbacks of stored messages, which are not called: the sends have no response yet."""
    held: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
        yield held


def test_sends_above_the_limit_of_unanswered_requests_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    remoting = RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3))
    with serving(remoting=remoting) as server, known_client(server) as peer:
        held: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
            peer.send(b"".join(send(opaque) for opaque in (10, 11, 12, 13)))
            busy = peer.next_command()
        for done in held:
            done(None)

        assert (busy.opaque, busy.code) == (13, ResponseCode.SYSTEM_BUSY)
        assert answers(peer, 3).keys() == {10, 11, 12}


def test_pulls_above_the_limit_of_unanswered_requests_wait(together: list[list[int]]) -> None:
    remoting = RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3))
    with serving(FlushDiskType.ASYNC_FLUSH, remoting) as server, known_client(server) as peer:
        together.clear()
        peer.send(b"".join(pull(opaque) for opaque in (10, 11, 12, 13)))
        codes = {opaque: response.code for opaque, response in answers(peer, 4).items()}

    assert codes == {10: 0, 11: 0, 12: 0, 13: 0}
    assert together == [[10, 11, 12]]


def test_responses_after_the_end_of_the_connection_are_dropped(
    server: BrokerServer, peer: RawPeer, unconfirmed: list[Any]
) -> None:
    (connection,) = server.remoting.connections()
    peer.send(send(10) + send(11))
    eventually(lambda: bool(unconfirmed), "the sends are stored")
    assert connection.unanswered == 2
    peer.socket.close()
    eventually(lambda: not connection.is_open, "the connection has ended")
    unconfirmed[0](None)

    assert connection.unanswered == 0
    with RawPeer(server.remoting.address) as other:
        assert other.invoke(MAX_OFFSET).opaque == 5


def test_an_opaque_in_use_is_a_command(server: BrokerServer, peer: RawPeer, together: list[list[int]]) -> None:
    peer.send(pull(10, 1, queue_id=3, sys_flag=HELD))
    eventually(lambda: len(server.hold) == 1, "the pull is held")

    response = peer.invoke_frame(pull(10))

    assert (response.opaque, response.code, together) == (10, ResponseCode.SUCCESS, [])


@pytest.mark.parametrize("frame", [send(11), pull(11)])
def test_a_stopping_server_tells_a_client_to_leave(
    server: BrokerServer, peer: RawPeer, unconfirmed: list[Any], frame: bytes
) -> None:
    """Also a client whose requests were pipelined until then."""
    peer.send(send(10))
    eventually(lambda: bool(unconfirmed), "the sends are stored")
    stopping = threading.Thread(target=server.remoting.stop)
    stopping.start()
    eventually(lambda: server.remoting._is_draining, "the server is stopping")
    left = peer.invoke_frame(frame)
    unconfirmed[0](None)
    stopping.join()

    assert (left.opaque, left.code) == (11, ResponseCode.GO_AWAY)
    assert peer.next_command().opaque == 10

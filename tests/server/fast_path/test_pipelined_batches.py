"""Batches with a header of a known template: stored and answered as if the request had been decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.message import Message
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch, join_in_batch
from mqtemplate.server import BrokerServer
from mqtemplate.server.fast_path import pipelines
from mqtemplate.server.fast_path.pipelines import BatchRequest, PipelinedSends, read_uniform
from mqtemplate.store.message_store import MessageStore
from tests.remoting.wire import RawPeer
from tests.server.fast_path.fast_serving import (
    MAX_OFFSET,
    answers,
    in_one_turn,
    known_producer,
    records,
    send,
    serving,
)

BATCH = RequestCode.SEND_BATCH_MESSAGE


def batch(
    opaque: int,
    count: int = 10,
    size: int = 4,
    *,
    grows: bool = False,
    tag: str = "",
    queue_id: int = 0,
    code: int = BATCH,
    **more: object,
) -> bytes:
    """Return the frame of a batch, with ids that end with their numbers. Its messages are alike, or each is longer."""
    properties = {"TAGS": tag} if tag else {}
    messages = [
        Message("orders", bytes(size + number * grows), {"UNIQ_KEY": f"B{opaque:04}{number:03}"} | properties)
        for number in range(count)
    ]
    return send(opaque, encode_batch(messages), queue_id=queue_id, batch=True, code=code, **more)


def stored_together(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list of the opaques of batches that were stored together, without decoding their headers."""
    in_one_turn(monkeypatch)
    opaques: list[list[int]] = []
    process = PipelinedSends._store_together

    def noted(self: PipelinedSends, requests: Sequence[BatchRequest]) -> bool:
        opaques.append([request.opaque for request in requests])  # first, since the response may arrive in between
        is_stored = process(self, requests)
        if not is_stored:
            opaques.pop()
        return is_stored

    monkeypatch.setattr(PipelinedSends, "_store_together", noted)
    return opaques


def know_batches(peer: RawPeer, *codes: RequestCode) -> None:
    """Send batches until the template of their header is known."""
    for code in codes or (RequestCode.SEND_BATCH_MESSAGE,):
        for opaque in (5, 6):
            assert peer.invoke_frame(batch(opaque, code=code)).code == ResponseCode.SUCCESS


def test_a_batch_is_stored_in_order_with_the_sends_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opaques = stored_together(monkeypatch)
    with serving() as server, known_producer(server) as peer:
        know_batches(peer, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2)
        first = server.engine.store.consume_queue("orders", 0).max_offset
        opaques.clear()
        frames = [send(10), batch(11), send(12), batch(13, code=RequestCode.SEND_MESSAGE_V2), send(14)]
        peer.send(b"".join(frames))
        responses = answers(peer, 5)

        headers = [responses[opaque].header(SendMessageResponseHeader) for opaque in range(10, 15)]
        assert [header.queue_offset - first for header in headers] == [0, 1, 11, 12, 22]
        assert opaques == [[11], [13]]
        assert headers[3].transaction_id == "7F0000000D", "the id of the whole batch, as with RocketMQ 5.5.0"
        offsets = [record.physical_offset for record in records(server)][-11:-1]
        assert [int(each[-16:], 16) for each in headers[3].msg_id.split(",")] == offsets


V2, NO_ID = RequestCode.SEND_MESSAGE_V2, {"UNIQ_KEY": None}
DELAYED = encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1", "DELAY": "3"})] * 3)
SAME = encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1"})] * 8)


@pytest.mark.parametrize(
    ("frames", "together"),
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
    frames: list[bytes], together: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not stored here become commands. All get the answers of commands, and leave the same records."""
    opaques = stored_together(monkeypatch)
    results = []
    for fast_path in (True, False):
        with serving(fast_path=fast_path, max_message_size=10_000) as server, known_producer(server) as peer:
            know_batches(peer, BATCH, V2)
            for opaque in (7, 8):
                assert peer.invoke_frame(batch(opaque, properties=NO_ID)).code == ResponseCode.SUCCESS
            opaques.clear()
            peer.send(b"".join(frames))
            results.append((answers(peer, len(frames)), records(server)))
            assert opaques == (together if fast_path else [])

    assert results[0] == results[1]


def test_each_of_several_batches_has_its_own_time_of_birth_and_id() -> None:
    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        peer.send(b"".join(batch(10 + number, 4, queue_id=number % 2, properties=NO_ID) for number in range(4)))
        responses = answers(peer, 4)

        born = [record.born_timestamp % 100 for record in records(server)[-16:]]
    assert born == [10] * 4 + [11] * 4 + [12] * 4 + [13] * 4
    assert all("transactionId" not in response.ext_fields for response in responses.values())


def test_batches_of_many_bytes_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_MAX_UNIFORM_BYTES", 1_500)
    opaques = stored_together(monkeypatch)
    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        opaques.clear()
        peer.send(b"".join(batch(opaque) for opaque in range(10, 15)))
        answers(peer, 5)

    assert opaques == [[10, 11, 12], [13, 14]]


def test_a_batch_counts_as_one_request() -> None:
    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        before = server.remoting.request_count
        peer.send(batch(10) + batch(11))
        answers(peer, 2)

        assert server.remoting.request_count == before + 2


# --- uniform batches --------------------------------------------------------------------------------


@pytest.fixture
def properties() -> AddedProperties:
    return AddedProperties({"CLUSTER": "DefaultCluster"})


def messages(count: int = 8, **properties: str) -> list[Message]:
    return [Message("orders", b"%08d" % number, {"UNIQ_KEY": f"A{number:03}", **properties}) for number in range(count)]


def test_messages_that_differ_in_body_and_id_are_uniform(properties: AddedProperties) -> None:
    uniform = read_uniform(encode_batch(messages(TAGS="paid")), properties)

    assert uniform is not None
    assert (
        uniform.batch("orders", 0, SendOrigin(0, 0, bytes(8), 0)).msg_ids()
        == b"A000,A001,A002,A003,A004,A005,A006,A007"
    )
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
def test_other_batches_are_read_message_by_message(properties: AddedProperties, data: bytes) -> None:
    assert read_uniform(data, properties) is None


def test_a_large_batch_is_read_message_by_message(properties: AddedProperties) -> None:
    """The interpreter lock is free between its messages, so other clients do not wait for all of it."""
    of_64 = encode_batch([Message("orders", bytes(4_000), {"UNIQ_KEY": f"A{number:03}"}) for number in range(64)])

    assert read_uniform(of_64, properties) is not None
    assert read_uniform(of_64 + of_64[: len(of_64) // 64 * 2], properties) is None


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 3])
def test_a_batch_that_the_store_refuses_gets_the_reason(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(messages: object) -> object:
        raise StoreFullError("no room for a record")

    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        end = server.engine.store.end_offset
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.store, "put", refuse)
            refused = peer.invoke_frame(batch(10, count))

        assert (refused.code, refused.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "no room for a record")
        assert server.engine.store.end_offset == end
        assert peer.invoke_frame(batch(10)).code == ResponseCode.SUCCESS


def test_a_batch_that_fits_into_no_file_gets_the_reason() -> None:
    with serving(mapped_file_size_commit_log=4_096) as server, known_producer(server) as peer:
        know_batches(peer)
        refused = peer.invoke_frame(batch(10, 10, 1_000))

        assert refused.code == ResponseCode.MESSAGE_ILLEGAL
        assert "do not fit into a commit log file of 4096 bytes" in refused.remark


def test_batches_that_fit_into_no_file_together_are_stored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opaques = stored_together(monkeypatch)
    with serving(mapped_file_size_commit_log=2_048) as server, known_producer(server) as peer:
        know_batches(peer)
        opaques.clear()
        peer.send(batch(10) + batch(11))

        assert {response.code for response in answers(peer, 2).values()} == {ResponseCode.SUCCESS}
        assert opaques == [[10], [11]]


def test_batches_that_the_store_refuses_together_get_the_reason_each(monkeypatch: pytest.MonkeyPatch) -> None:
    put = MessageStore.put

    def refuse(store: MessageStore, records: Any) -> object:
        if isinstance(records, RecordDraft):
            return put(store, records)
        raise StoreFullError("no room for a record")

    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        end = server.engine.store.end_offset
        with monkeypatch.context() as patch:
            patch.setattr(MessageStore, "put", refuse)
            peer.send(batch(10) + batch(11) + send(12))
            responses = answers(peer, 3)

        assert [responses[opaque].remark for opaque in (10, 11)] == ["no room for a record"] * 2
        assert responses[12].code == ResponseCode.SUCCESS
        assert server.engine.store.consume_queue("orders", 0).max_offset == 1 + 2 * 10 + 1
        assert server.engine.store.end_offset > end


@pytest.mark.parametrize(("properties", "unique_id"), [({}, "7F0000000A"), ({"UNIQ_KEY": None}, None)])
@pytest.mark.parametrize("count", [3, 10])
def test_a_failed_flush_is_reported_with_the_ids_of_the_batch(
    count: int, properties: dict[str, None], unique_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise StoreError("the disk refused")

    with serving() as server, known_producer(server) as peer:
        for opaque in (5, 6):
            assert peer.invoke_frame(batch(opaque, properties=properties)).code == ResponseCode.SUCCESS
        store = server.engine.store
        with monkeypatch.context() as patch:
            patch.setattr(store.group_commit, "_flush", refuse)
            response = peer.invoke_frame(batch(10, count, properties=properties))
        store.flush()

        assert response.code == ResponseCode.FLUSH_DISK_TIMEOUT
        assert "the disk refused" in response.remark
        header = response.header(SendMessageResponseHeader)
        assert (header.transaction_id, len(header.msg_id.split(","))) == (unique_id, count)
        assert store.confirm_offset == store.end_offset


def test_an_error_of_the_response_is_logged_and_nothing_is_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    with serving() as server, known_producer(server) as peer, RawPeer(server.remoting.address) as other:
        know_batches(peer)
        end = stored_batches(server)
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(PipelinedSends, "_reply_to_batches", fail)
            peer.send(batch(10) + send(11))
            assert set(answers(peer, 1)) == {11}

        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.response_failed"]
        assert stored_batches(server) == end + 11
        assert other.invoke(MAX_OFFSET).code == ResponseCode.SUCCESS


def stored_batches(server: BrokerServer) -> int:
    return server.engine.store.consume_queue("orders", 0).max_offset

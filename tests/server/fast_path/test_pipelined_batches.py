"""Batches with a header of a known form: stored and answered as if the request had been decoded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch
from mqtemplate.server import BrokerServer
from mqtemplate.server.processors.sends import batch_sends
from mqtemplate.server.processors.sends.batch_sends import BatchRequest, BatchSends
from mqtemplate.store.message_store import MessageStore
from tests.remoting.wire import RawPeer
from tests.server.processors.run_serving import (
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
    process = BatchSends._process

    def noted(self: BatchSends, requests: Sequence[BatchRequest]) -> bool:
        opaques.append([request.opaque for request in requests])  # first, since the response may arrive in between
        is_stored = process(self, requests)
        if not is_stored:
            opaques.pop()
        return is_stored

    monkeypatch.setattr(BatchSends, "_process", noted)
    return opaques


def know_batches(peer: RawPeer, *codes: RequestCode) -> None:
    """Send batches until their header has a known form."""
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


def test_batches_that_are_read_together_are_stored_and_answered_as_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be for several queues, and one of them may be for the same queue twice."""
    opaques = stored_together(monkeypatch)
    frames = b"".join(batch(10 + number, 4, queue_id=queue_id) for number, queue_id in enumerate((1, 0, 1, 3)))
    results = []
    for runs in (True, False):
        with serving(runs=runs) as server, known_producer(server) as peer:
            know_batches(peer)
            opaques.clear()
            peer.send(frames)
            results.append((answers(peer, 4), records(server)))
            assert opaques == ([[10, 11, 12, 13]] if runs else [])

    assert results[0] == results[1]
    assert [record.born_timestamp % 100 for record in results[0][1][-16:]] == [
        *[10] * 4,
        *[11] * 4,
        *[12] * 4,
        *[13] * 4,
    ]


def test_batches_of_another_size_or_form_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    opaques = stored_together(monkeypatch)
    with serving() as server, known_producer(server) as peer:
        know_batches(peer, BATCH, RequestCode.SEND_MESSAGE_V2)
        opaques.clear()
        peer.send(
            batch(10) + batch(11) + batch(12, 11) + batch(13, 11) + batch(14, 11, code=RequestCode.SEND_MESSAGE_V2)
        )
        answers(peer, 5)

    assert opaques == [[10, 11], [12, 13], [14]]


def test_batches_with_other_properties_are_stored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of their bodies tell that, not their headers."""
    opaques = stored_together(monkeypatch)
    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        opaques.clear()
        peer.send(batch(10, tag="a") + batch(11, tag="b"))
        answers(peer, 2)

        assert opaques == [[10], [11]]
        tagged = [b"TAGS\x01a" in record.properties_bytes for record in records(server)]
        assert tagged[-20:] == [True] * 10 + [False] * 10


@pytest.mark.parametrize(
    "frames",
    [
        [batch(10, 1), batch(11, 7), batch(12, 2, tag="paid")],
        [batch(10, 20, grows=True), batch(11, 3, grows=True, queue_id=1)],
        [batch(10, 10, code=RequestCode.SEND_MESSAGE_V2), batch(11, 3, code=RequestCode.SEND_MESSAGE_V2)],
    ],
    ids=["few messages", "bodies of several lengths", "code 310"],
)
def test_messages_that_are_no_rows_are_stored_and_answered_as_commands(
    frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    opaques = stored_together(monkeypatch)
    results = []
    for runs in (True, False):
        with serving(runs=runs) as server, known_producer(server) as peer:
            know_batches(peer, BATCH, RequestCode.SEND_MESSAGE_V2)
            opaques.clear()
            peer.send(b"".join(frames))
            results.append((answers(peer, len(frames)), records(server)))
            assert opaques == ([[10 + number] for number in range(len(frames))] if runs else [])

    assert results[0] == results[1]


@pytest.mark.parametrize("count", [3, 10])
def test_batches_without_an_id_of_their_own_are_stored_and_answered_as_commands(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of our client."""
    opaques = stored_together(monkeypatch)
    results = []
    for runs in (True, False):
        with serving(runs=runs) as server, known_producer(server) as peer:
            for opaque in (5, 6):
                assert peer.invoke_frame(batch(opaque, properties={"UNIQ_KEY": None})).code == ResponseCode.SUCCESS
            opaques.clear()
            response = peer.invoke_frame(batch(10, count, properties={"UNIQ_KEY": None}))
            results.append((response, records(server)))
            assert opaques == ([[10]] if runs else [])

    assert results[0] == results[1]
    assert "transactionId" not in results[0][0].ext_fields


def test_batches_of_many_bytes_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sends, "MOST_BYTES", 1_500)
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


@pytest.mark.parametrize(
    ("frame", "settings"),
    [
        (batch(10, 65), {}),
        (batch(10, 65, grows=True), {}),
        (batch(10, 0), {}),
        (send(10, encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1", "DELAY": "3"})] * 3), batch=True), {}),
        (send(10, batch=True, code=RequestCode.SEND_BATCH_MESSAGE), {}),
        (send(10, encode_batch([Message("orders", b"1", {"UNIQ_KEY": "B1"})] * 8), queue_id=9, batch=True), {}),
        (batch(10, 12, 100), {"max_message_size": 1_000}),
    ],
)
def test_other_batches_are_processed_as_commands(
    frame: bytes, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are long, empty, delayed, invalid, for a queue that does not exist, or too large."""
    responses = []
    for runs in (True, False):
        with serving(runs=runs, **settings) as server, known_producer(server) as peer:
            know_batches(peer, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2)
            with monkeypatch.context() as patch:
                opaques = stored_together(patch)
                responses.append((peer.invoke_frame(frame), server.engine.store.end_offset))
            assert opaques == []

    assert responses[0] == responses[1]


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "method"), [(10, "put_batch"), (3, "put_all")])
def test_a_batch_that_the_store_refuses_gets_the_reason(
    count: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: object) -> object:
        raise StoreFullError("no room for a record")

    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        end = server.engine.store.end_offset
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.store, method, refuse)
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
    def refuse(store: MessageStore, messages: object) -> object:
        raise StoreFullError("no room for a record")

    with serving() as server, known_producer(server) as peer:
        know_batches(peer)
        end = server.engine.store.end_offset
        with monkeypatch.context() as patch:
            patch.setattr(MessageStore, "put_batch", refuse)
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
            patch.setattr(BatchSends, "_reply", fail)
            peer.send(batch(10) + send(11))
            assert set(answers(peer, 1)) == {11}

        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.response_failed"]
        assert stored_batches(server) == end + 11
        assert other.invoke(MAX_OFFSET).code == ResponseCode.SUCCESS


def stored_batches(server: BrokerServer) -> int:
    return server.engine.store.consume_queue("orders", 0).max_offset

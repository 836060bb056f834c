"""Sends that are read together: stored and answered as if each had been processed alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.record.codec import Drafts, parse_record
from mqtemplate.remoting.protocol import ResponseCode, encode_command
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.settings import ConnectionLimits, RemotingServerSettings
from mqtemplate.server import AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.server.fast_path import pipelines
from mqtemplate.server.fast_path.pipelines import PipelinedSends
from mqtemplate.store import key_reader
from tests.remoting.wire import RawPeer
from tests.server.fast_path.fast_serving import LISTEN, MAX_OFFSET, answers, in_one_turn, known_producer, send, serving
from tests.server.tool import ANY_PORT
from tests.waiting import eventually


def lengths_of_appends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each append of sends adds their number."""
    in_one_turn(monkeypatch)
    lengths: list[int] = []
    process = PipelinedSends.process

    def noted(self: PipelinedSends) -> None:
        if self._sent:
            lengths.append(len(self._sent))
        process(self)

    monkeypatch.setattr(PipelinedSends, "process", noted)
    return lengths


def test_64_sends_or_many_bytes_are_stored_together_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lengths_of_appends(monkeypatch)
    monkeypatch.setattr(pipelines, "_MAX_SEND_BYTES", 5_000)
    with serving() as server, known_producer(server) as peer:
        lengths.clear()
        peer.send(b"".join(send(opaque) for opaque in range(10, 138)))
        answers(peer, 128)
        assert max(lengths) <= 64
        lengths.clear()
        peer.send(b"".join(send(opaque, bytes(2_000)) for opaque in range(200, 212)))
        answers(peer, 12)
        assert max(lengths) <= 3


def test_pipelined_sends_count_as_requests() -> None:
    with serving() as server, known_producer(server) as peer:
        before = server.remoting.request_count
        peer.send(b"".join(send(opaque) for opaque in range(10, 30)))
        answers(peer, 20)

        assert server.remoting.request_count == before + 20


def test_with_access_control_each_request_is_a_command() -> None:
    """The guard checks the signature of each request, so none may pass without it."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=LISTEN), VirtualClock())
    server = BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT), acl=AclSettings())
    with server, RawPeer(server.remoting.address) as peer:
        peer.send(b"".join(send(opaque) for opaque in range(5)))
        codes = {response.code for response in answers(peer, 5).values()}
    engine.close()

    assert codes == {ResponseCode.NO_PERMISSION}


# --- topics that change -----------------------------------------------------------------------------


def test_a_change_of_the_topic_holds_for_the_next_send() -> None:
    with serving() as server, known_producer(server) as peer:
        assert peer.invoke_frame(send(10)).code == ResponseCode.SUCCESS
        server.engine.topics.update("orders", {"perm": 4})
        refused = peer.invoke_frame(send(11))
        server.engine.topics.update("orders", {"perm": 6})

        assert refused.code == ResponseCode.NO_PERMISSION
        assert "not writable" in refused.remark
        assert peer.invoke_frame(send(12)).code == ResponseCode.SUCCESS


def test_a_body_above_the_limit_is_refused_and_the_others_are_stored() -> None:
    with serving(max_message_size=100) as server, known_producer(server) as peer:
        peer.send(b"".join(send(opaque, bytes(101 if opaque == 12 else 100)) for opaque in range(10, 15)))
        codes = {opaque: response.code for opaque, response in answers(peer, 5).items()}

    assert codes == {10: 0, 11: 0, 12: ResponseCode.MESSAGE_ILLEGAL, 13: 0, 14: 0}


# --- faults -----------------------------------------------------------------------------------------


def test_a_failed_flush_is_reported_for_each_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are stored, but not durable. They are readable after the next flush that succeeds."""

    def refuse() -> int:
        raise StoreError("the disk refused")

    with serving() as server, known_producer(server) as peer:
        store = server.engine.store
        with monkeypatch.context() as patch:
            patch.setattr(store.group_commit, "_flush", refuse)
            peer.send(b"".join(send(opaque) for opaque in range(10, 15)))
            responses = answers(peer, 5)
        readable_before = store.confirm_offset < store.end_offset
        store.flush()

        assert {response.code for response in responses.values()} == {ResponseCode.FLUSH_DISK_TIMEOUT}
        assert all("the disk refused" in response.remark for response in responses.values())
        offsets = [responses[opaque].header(SendMessageResponseHeader).queue_offset for opaque in range(10, 15)]
        assert offsets == [1, 2, 3, 4, 5]
        assert readable_before
        assert store.confirm_offset == store.end_offset


def test_a_reply_that_fails_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that flushes replies to other producers next."""

    def fail(sends: PipelinedSends, *more: object) -> None:
        raise ZeroDivisionError

    with serving() as server, known_producer(server) as peer, RawPeer(server.remoting.address) as other:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(PipelinedSends, "_reply", fail)
            peer.send(send(10) + send(11))
            eventually(lambda: bool(logs), "the error is logged")

        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.response_failed"]
        assert other.invoke(MAX_OFFSET).code == ResponseCode.SUCCESS
        assert peer.invoke_frame(send(12)).code == ResponseCode.SUCCESS


def test_what_the_store_refuses_together_is_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for two more records takes two, and refuses the others with the reason."""
    with serving() as server, known_producer(server) as peer:
        store, room = server.engine.store, iter(range(2))
        put = store.put

        def put_one(records: Any) -> object:
            if isinstance(records, Drafts) or next(room, None) is None:
                raise StoreFullError("no room for a record")
            return put(records)

        with monkeypatch.context() as patch:
            patch.setattr(store, "put", put_one)
            peer.send(b"".join(send(opaque) for opaque in range(10, 15)))
            responses = answers(peer, 5)

        assert [responses[opaque].code for opaque in range(10, 15)] == [0, 0, 14, 14, 14]
        assert responses[14].remark == "no room for a record"
        assert peer.invoke_frame(send(20)).code == ResponseCode.SUCCESS


def test_sends_that_do_not_fit_into_one_file_together_are_stored_one_by_one() -> None:
    with serving(mapped_file_size_commit_log=2_048) as server, known_producer(server) as peer:
        peer.send(b"".join(send(opaque, bytes(700)) for opaque in range(10, 20)))

        assert {response.code for response in answers(peer, 10).values()} == {ResponseCode.SUCCESS}
        assert len([record for record in records_of_files(server) if record == 700]) == 10


def records_of_files(server: BrokerServer) -> list[int]:
    """Return the body lengths of all records in the queue."""
    queue = server.engine.store.consume_queue("orders", 0)
    units = [queue.unit(offset) for offset in range(queue.min_offset, queue.max_offset)]
    return [len(server.engine.store.read(unit.physical_offset, unit.size).body) for unit in units]


def test_an_opaque_in_use_and_too_many_unanswered_sends_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    remoting = RemotingServerSettings(limits=ConnectionLimits(max_unanswered=3))
    with serving(remoting=remoting) as server, known_producer(server) as peer:
        held: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
            peer.send(b"".join(send(opaque) for opaque in (10, 11, 12, 13)))
            busy = peer.next_command()
        for done in held:
            done(None)  # type: ignore[operator]

        assert (busy.opaque, busy.code) == (13, ResponseCode.SYSTEM_BUSY)
        assert answers(peer, 3).keys() == {10, 11, 12}


def test_responses_after_the_end_of_the_connection_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        held: list[object] = []
        with known_producer(server) as peer:
            monkeypatch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
            (connection,) = server.remoting.connections()
            peer.send(send(10) + send(11))
            eventually(lambda: bool(held), "the sends are stored")
            assert connection.unanswered == 2
        eventually(lambda: not connection.is_open, "the connection has ended")
        held[0](None)  # type: ignore[operator]

        assert connection.unanswered == 0
        with RawPeer(server.remoting.address) as other:
            assert other.invoke(MAX_OFFSET).opaque == 5


def test_a_stopping_server_tells_a_client_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a client whose sends were pipelined until then."""
    with serving() as server, known_producer(server) as peer:
        held: list[object] = []
        monkeypatch.setattr(server.engine.store, "confirm_async", lambda end, topics, done: held.append(done))
        peer.send(send(10))
        eventually(lambda: bool(held), "the sends are stored")
        stopping = threading.Thread(target=server.remoting.stop)
        stopping.start()
        eventually(lambda: server.remoting._is_draining, "the server is stopping")
        left = peer.invoke_frame(send(11))
        held[0](None)  # type: ignore[operator]
        stopping.join()

        assert (left.opaque, left.code) == (11, ResponseCode.GO_AWAY)
        assert peer.next_command().opaque == 10


def test_a_record_of_a_pipelined_send_is_verified() -> None:
    """The bytes in the log are a valid record with its check."""
    with serving() as server, known_producer(server) as peer:
        peer.send(b"".join(send(opaque, b"body %d" % opaque) for opaque in range(10, 13)))
        answers(peer, 3)
        store = server.engine.store
        last = store.consume_queue("orders", 0).unit(3)

        record = parse_record(store.read_bytes(last.physical_offset, last.size))

    assert (record.body, record.queue_offset, record.born_timestamp) == (b"body 12", 3, 1_700_000_000_012)


# --- indexing ---------------------------------------------------------------------------------------


def test_the_io_thread_indexes_what_it_stored_after_its_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock does not move, so the service of the index does not step."""
    monkeypatch.setattr(key_reader, "_SOME_BYTES", 2_000)
    in_one_turn(monkeypatch)
    with serving() as server, known_producer(server) as peer:
        index = server.engine.store.index
        index.catch_up()
        before = index._files[-1].header.index_count
        peer.send(b"".join(send(opaque) for opaque in range(10, 50)))
        answers(peer, 40)
        peer.send(encode_command(MAX_OFFSET))  # answered when the index has the messages
        answers(peer, 1)

        assert index._files[-1].header.index_count - before == 40

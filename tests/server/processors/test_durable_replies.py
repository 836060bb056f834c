"""Storing without waiting for the disk: each producer receives its own response later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.server.requests.response import reply_when_durable
from tests.server.serving import RecordingConnection, Serving

REQUEST = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, opaque=3)


class BrokenConnection(RecordingConnection):
    """A connection on which every reply raises."""

    def reply(self, response: RemotingCommand, **more: object) -> None:
        raise ZeroDivisionError


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        serving.send("orders", b"first")
        yield serving


def test_a_reply_that_fails_does_not_affect_the_others(serving: Serving) -> None:
    """One flush makes both messages durable, and replies to both producers."""
    flushed: list[StoreError | None] = []
    engine = serving.engine
    drafts = [engine.engine.drafts.make(Message("orders", b"x"), 0, serving.clock.now_ms())[0] for _ in range(2)]
    first, second = (engine.engine.writer.put(draft, "orders", 0) for draft in drafts)

    engine.store.group_commit.call_when_flushed(second.end, flushed.append)  # waits for the flush for the first message
    with capture_logs() as logs:
        reply_when_durable(engine.store, BrokenConnection(), REQUEST, first.end, ("orders",))  # type: ignore[arg-type]
    reply_when_durable(engine.store, serving.connection, REQUEST, second.end, ("orders",))  # type: ignore[arg-type]

    assert flushed == [None]
    assert (serving.connection.replies[-1].code, serving.connection.replies[-1].opaque) == (ResponseCode.SUCCESS, 3)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.response_failed"]


def test_the_response_to_a_stored_message_that_is_not_durable_has_its_offset(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the flush: the producer receives the offset and the error."""

    def refuse() -> int:
        raise StoreError("the disk refused")

    with monkeypatch.context() as patch:
        patch.setattr(serving.engine.store.group_commit, "_flush", refuse)
        serving.send("orders", b"not durable")

    (response,) = [reply for reply in serving.connection.replies if reply.code == ResponseCode.FLUSH_DISK_TIMEOUT]
    assert "the disk refused" in response.remark
    assert response.header(SendMessageResponseHeader).queue_offset == 1
    assert [message.body for message in serving.read("orders")] == [b"first"]
    serving.engine.store.flush()
    assert [message.body for message in serving.read("orders")] == [b"first", b"not durable"]


def test_the_consume_queue_of_a_delayed_message_is_created_when_it_is_stored(
    serving: Serving,
) -> None:
    draft, _ = serving.engine.engine.drafts.make(Message("later", b"x", {"DELAY": "1"}), 0, serving.clock.now_ms())

    serving.engine.engine.writer.put(draft, "later", 0)

    assert serving.engine.store.queue_ids("later") == [0]
    assert serving.engine.reader.max_offset(MessageQueue("later", "broker-a", 0)) == 0

"""Storing without waiting: whoever stored is told later, and each for himself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.server.processors.message_writer import MessageWriter
from tests.server.serving import Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        serving.send("orders", b"first")
        yield serving


def test_one_answer_that_fails_does_not_take_the_others_along(serving: Serving) -> None:
    """They are told by the same flush."""
    store, told = serving.engine.store, []
    writer = MessageWriter(store)
    drafts = [serving.engine.drafts.make(Message("orders", b"x"), 0, serving.clock.now_ms())[0] for _ in range(2)]
    first, second = (writer.put(draft, "orders", 0) for draft in drafts)

    def fails(error: StoreError | None) -> None:
        raise ZeroDivisionError

    store.group_commit.call_when_flushed(second.end, told.append)  # waits for the flush that the first asks for
    with capture_logs() as logs:
        writer.confirm(first.end, ("orders",), fails)
    writer.confirm(second.end, ("orders",), told.append)

    assert told == [None, None]
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["server.answer_failed"]


def test_a_message_that_is_stored_and_not_safe_is_answered_so(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the flush: a producer keeps the offset, and knows."""

    def refuse() -> int:
        raise StoreError("the disk refused")

    with monkeypatch.context() as patch:
        patch.setattr(serving.engine.store.group_commit, "_flush", refuse)
        serving.send("orders", b"unsafe")

    (answer,) = [reply for reply in serving.connection.replies if reply.code == ResponseCode.FLUSH_DISK_TIMEOUT]
    assert "the disk refused" in answer.remark
    assert answer.header(SendMessageResponseHeader).queue_offset == 1
    assert [message.body for message in serving.read("orders")] == [b"first"]
    serving.engine.store.flush()
    assert [message.body for message in serving.read("orders")] == [b"first", b"unsafe"]


def test_a_place_is_made_ready_where_a_waiting_message_goes_later(serving: Serving) -> None:
    writer = MessageWriter(serving.engine.store)
    draft, _ = serving.engine.drafts.make(Message("later", b"x", {"DELAY": "1"}), 0, serving.clock.now_ms())

    writer.put(draft, "later", 0)

    assert serving.engine.store.queue_ids("later") == [0]
    assert serving.engine.max_offset(MessageQueue("later", "broker-a", 0)) == 0

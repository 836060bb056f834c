"""The store path of the processors: messages are stored without waiting for the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from mqtemplate.delay.recall_handle import handle_of
from mqtemplate.errors import StoreError
from mqtemplate.record.codec import RecordDraft
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.store.commit_log import PutResult
from mqtemplate.store.message_store import MessageStore

_log = structlog.stdlib.get_logger("mqtemplate.server")


@dataclass(frozen=True, slots=True)
class MessageWriter:
    """Stores messages, and replies to their producers when the messages are as durable as the flush mode requires.

    Raises:
        MessageError: A record or its properties are too large.
        StoreError: The store cannot take the message now.
    """

    store: MessageStore
    broker_name: str

    def put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        """Store one record. *topic* and *queue_id* are the real ones, also of a delayed message."""
        if draft.topic != topic:
            self.store.prepare(topic, queue_id)  # creates the consume queue file now, so that delivery is not late
        return self.store.put(draft)

    def put_all(self, drafts: Sequence[RecordDraft], topic: str, queue_id: int) -> list[PutResult]:
        """Store several records of one queue: all of them or none."""
        if drafts[0].topic != topic or drafts[-1].topic != topic:
            self.store.prepare(topic, queue_id)
        return self.store.put_all(drafts)

    def recall_handle(self, draft: RecordDraft, put: PutResult, topic: str) -> str:
        """Return the handle by which the producer can recall a delayed message."""
        due_ms = put.store_timestamp + draft.delay_ms
        return handle_of(topic, self.broker_name, draft.properties, due_ms, put.physical_offset)

    def flush(self, end: int, topics: Sequence[str]) -> None:
        """Flush everything before *end* in the background, then notify the readers of *topics*."""
        self.store.confirm_async(end, topics)

    def reply_when_durable(
        self,
        connection: Connection,
        request: RemotingCommand,
        end: int,
        topics: Sequence[str],
        header: CommandHeader | None = None,
        failure: ResponseCode = ResponseCode.SYSTEM_ERROR,
    ) -> None:
        """Reply to *request* when everything before *end* is durable, or with *failure* if the flush fails.

        The reply is sent in the thread that flushes, or in this thread if nothing has to be flushed.
        """

        def reply(error: StoreError | None) -> None:
            try:
                if error is None:
                    connection.reply(request.response(ResponseCode.SUCCESS, header))
                else:  # The message is stored, but not durable.
                    connection.reply(request.response(failure, header, remark=str(error)))
            except Exception as exc:
                # The flush thread replies to other producers next: they must not notice.
                _log.error("server.response_failed", exc_info=exc)

        self.store.confirm_async(end, topics, reply)

"""Responses of RocketMQ's protocol: to a request that raised an error, to a stored message when it is flushed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mqtemplate.errors import PendingKeyError, PendingKeyUnknownError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.own_requests import (
    Refusal,
    RefusalHeader,
    encode_pending_error,
)
from mqtemplate.remoting.protocol.codec import encode_command, json_frame_head
from mqtemplate.remoting.protocol.codes import FLAG_RESPONSE, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.json_header import json_header_template
from mqtemplate.server.requests.refusal import RefusedError, code_of_error
from mqtemplate.store.flush import WhenFlushed
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.server")


def problem_response(request: RemotingCommand, error: Exception) -> RemotingCommand | None:
    """Return the response to *request*, whose processor raised *error*.

    None for an unexpected error: the caller logs it and responds with ``SYSTEM_ERROR``.
    """
    code = code_of_error(error)
    header = error.header if isinstance(error, RefusedError) else None
    if isinstance(error, PendingKeyError):
        header = RefusalHeader(refusal=Refusal.PENDING_KEY, pending=encode_pending_error(error))
    elif isinstance(error, PendingKeyUnknownError):
        header = RefusalHeader(refusal=Refusal.PENDING_KEY_UNKNOWN)
    return None if code is None else request.response(code, header, remark=str(error))


def reply_when_durable(
    store: MessageStore,
    connection: Connection,
    request: RemotingCommand,
    end: int,
    topics: Sequence[str],
    header: CommandHeader | None = None,
    failure: ResponseCode = ResponseCode.SYSTEM_ERROR,
) -> None:
    """Reply to *request* when everything before *end* is durable, or with *failure* if the flush fails.

    The reply is sent in the thread that flushes, or in this thread if nothing has to be flushed. Then the readers of
    *topics* are notified.
    """

    def reply(error: StoreError | None) -> None:
        if error is None:
            connection.reply(request.response(ResponseCode.SUCCESS, header))
        else:  # The message is stored, but not durable.
            connection.reply(request.response(failure, header, remark=str(error)))

    call_when_durable(store, end, topics, reply)


def call_when_durable(store: MessageStore, end: int, topics: Collection[str], reply: WhenFlushed) -> None:
    """Call *reply* when everything before *end* is durable, or with the error of the flush. Its exception is logged."""

    def call(error: StoreError | None) -> None:
        try:
            reply(error)
        except Exception as exc:
            # The flush thread replies to other producers next: they must not notice.
            _log.error("server.response_failed", exc_info=exc)

    store.confirm_async(end, topics, call)


# --- responses to sends -----------------------------------------------------------------------------

_MSG_ID, _QUEUE_ID, _QUEUE_OFFSET, _UNIQUE_ID, _OPAQUE = "0PROBE0", 1_234_567, 2_345_678, "1PROBE1", 3_456_789
"""Values that mark the places of the values of a response in a template."""


class SendResponses:
    """Creates the responses to the sends of one server.

    Args:
        added: Properties that the server adds to each message; the response tells them to the producer.
    """

    def __init__(self, added: Mapping[str, str]) -> None:
        self._added = added
        self._template = self._template_with(_UNIQUE_ID)
        self._template_without_id = self._template_with(None)

    def _template_with(self, unique_id: str | None) -> bytes:
        values = (_MSG_ID, _QUEUE_ID, _QUEUE_OFFSET, _UNIQUE_ID, _OPAQUE)
        return json_header_template(self._success(_MSG_ID, _QUEUE_ID, _QUEUE_OFFSET, unique_id, _OPAQUE), values)

    def header(
        self,
        msg_id: str,
        queue_id: int,
        queue_offset: int,
        unique_id: str | None,
        handle: str | None = None,
        pending: str | None = None,
    ) -> SendMessageResponseHeader:
        """Return the header for messages in the commit log.

        Args:
            msg_id: Offset message ids.
            unique_id: Id that the producer gave the message or, in the header, the whole batch.
            handle: For the cancellation of delayed messages.
            pending: Outcome of a send with a pending key, as `encode_outcome` returns it.
        """
        return SendMessageResponseHeader(
            msg_id=msg_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=unique_id,
            recall_handle=handle,
            msg_region=self._added["MSG_REGION"],
            trace_on=self._added["TRACE_ON"],
            pending=pending,
        )

    def _success(
        self, msg_id: str, queue_id: int, queue_offset: int, unique_id: str | None, opaque: int
    ) -> RemotingCommand:
        fields = self.header(msg_id, queue_id, queue_offset, unique_id).to_ext_fields()
        return RemotingCommand(ResponseCode.SUCCESS, opaque, FLAG_RESPONSE, ext_fields=fields)

    def frame(
        self,
        msg_id: bytes,
        queue_id: int,
        queue_offset: int,
        unique_id: bytes,
        opaque: int,
        error: StoreError | None = None,
    ) -> bytes:
        """Return the frame of a response to messages in the commit log.

        Args:
            msg_id: Offset message ids: ASCII letters and digits, joined by commas.
            unique_id: Id of the producer; empty if it gave none.
            error: Error of the flush: the messages are stored, but not durable.
        """
        # A format costs a tenth of the JSON encoder, and it is most of the work of a response.
        if error is None and unique_id:
            return json_frame_head(self._template % (msg_id, queue_id, queue_offset, unique_id, opaque))
        if error is None:
            return json_frame_head(self._template_without_id % (msg_id, queue_id, queue_offset, opaque))
        response = self._success(msg_id.decode(), queue_id, queue_offset, unique_id.decode() or None, opaque)
        response.code, response.remark = ResponseCode.FLUSH_DISK_TIMEOUT, str(error)
        return encode_command(response)

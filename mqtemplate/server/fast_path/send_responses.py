"""Responses to sends: their headers, and whole frames for many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from mqtemplate.errors import StoreError
from mqtemplate.remoting.protocol.codec import encode_command, json_frame_head
from mqtemplate.remoting.protocol.codes import FLAG_RESPONSE, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.json_header import json_header_template
from mqtemplate.server.state.settings import BrokerServerSettings

_MSG_ID, _QUEUE_ID, _QUEUE_OFFSET, _UNIQUE_ID, _OPAQUE = "0PROBE0", 1_234_567, 2_345_678, "1PROBE1", 3_456_789
"""Values in whose places a template has those of a response."""


def added_properties(settings: BrokerServerSettings) -> dict[str, str]:
    """Return the properties that a server adds to each message that is not in a batch."""
    return {
        "MSG_REGION": settings.region_id,
        "TRACE_ON": "true" if settings.trace_on else "false",
        "CLUSTER": settings.cluster_name,
    }


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
        self, msg_id: str, queue_id: int, queue_offset: int, unique_id: str | None, handle: str | None = None
    ) -> SendMessageResponseHeader:
        """Return the header for messages in the commit log.

        Args:
            msg_id: Offset message ids.
            unique_id: Id that the producer gave the message or, in the header, the whole batch.
            handle: For the cancellation of delayed messages.
        """
        return SendMessageResponseHeader(
            msg_id=msg_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=unique_id,
            recall_handle=handle,
            msg_region=self._added["MSG_REGION"],
            trace_on=self._added["TRACE_ON"],
        )

    def _success(
        self, msg_id: str, queue_id: int, queue_offset: int, unique_id: str | None, opaque: int
    ) -> RemotingCommand:
        fields = self.header(msg_id, queue_id, queue_offset, unique_id).to_ext_fields()
        return RemotingCommand(ResponseCode.SUCCESS, opaque, FLAG_RESPONSE, ext_fields=fields)

    def encoder(self, error: StoreError | None) -> Callable[[bytes, int, int, bytes, int], bytes]:
        """Return the function that encodes the frame of a response to messages in the commit log.

        Its arguments are offset message ids, queue ID, queue offset, the producer's id and opaque. Ids are ASCII
        letters and digits, joined by commas. The producer's id is empty if it gave none.

        Args:
            error: Error of the flush: the messages are stored, but not durable.
        """
        return self._frame if error is None else partial(self._failure_frame, error)

    def _frame(self, msg_id: bytes, queue_id: int, queue_offset: int, unique_id: bytes, opaque: int) -> bytes:
        # A format costs a tenth of the JSON encoder, and it is most of the work of a response.
        if unique_id:
            return json_frame_head(self._template % (msg_id, queue_id, queue_offset, unique_id, opaque))
        return json_frame_head(self._template_without_id % (msg_id, queue_id, queue_offset, opaque))

    def _failure_frame(
        self, error: StoreError, msg_id: bytes, queue_id: int, queue_offset: int, unique_id: bytes, opaque: int
    ) -> bytes:
        response = self._success(msg_id.decode(), queue_id, queue_offset, unique_id.decode() or None, opaque)
        response.code, response.remark = ResponseCode.FLUSH_DISK_TIMEOUT, str(error)
        return encode_command(response)

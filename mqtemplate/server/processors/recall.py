"""Code 370: a producer recalls a delayed message.

Source: RocketMQ ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MessageError
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader, RecallMessageResponseHeader
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError


@dataclass(frozen=True, slots=True)
class RecallProcessor:
    """Cancels delayed messages by handle. Unlike RocketMQ's broker, it refuses the recall of a delivered message."""

    server: ServerParts

    @answers(RequestCode.RECALL_MESSAGE, slow=True)
    def _recall(self, header: RecallMessageRequestHeader) -> RecallMessageResponseHeader:
        if not self.server.settings.recall_message_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, "recall is disabled; set recall-message-enable to true")
        self.server.topics.get(header.topic)
        msg_id = self._checked_msg_id(header)
        status = self.server.engine.cancel(header.recall_handle).status
        if status is not ScheduleChangeStatus.CANCELLED:
            is_delivered = status is ScheduleChangeStatus.ALREADY_DELIVERED
            reason = "it was delivered already" if is_delivered else "this broker has no such delayed message"
            raise RefusedError(ResponseCode.ILLEGAL_OPERATION, f"message {msg_id} cannot be recalled: {reason}")
        return RecallMessageResponseHeader(msg_id=msg_id, msg_region=self.server.settings.region_id)

    def _checked_msg_id(self, header: RecallMessageRequestHeader) -> str:
        """Return the message ID in a handle that is valid for this broker and topic."""
        try:
            handle = decode_handle(header.recall_handle)
        except MessageError as exc:
            raise RefusedError(ResponseCode.ILLEGAL_OPERATION, str(exc)) from exc
        if (handle.topic, handle.broker_name) != (header.topic, self.server.engine.name):
            reason = f"the handle is for topic {handle.topic!r} of broker {handle.broker_name!r}"
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION, f"{reason}, not for {header.topic!r} of {self.server.engine.name!r}"
            )
        return handle.msg_id

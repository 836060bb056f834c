"""Calling a waiting message back.

Source: RocketMQ ``broker: RecallMessageProcessor``; section 14.3 of the specification.
"""

from __future__ import annotations

from typing import ClassVar

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MessageError
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader, RecallMessageResponseHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.topic_configs import TopicConfigs


class RecallProcessor:
    """Cancels by handle. Unlike RocketMQ's broker it says so when there was nothing to call back any more.

    Attributes:
        slow: A cancel is on the disk before it is answered.
    """

    slow: ClassVar[frozenset[int]] = frozenset({RequestCode.RECALL_MESSAGE})

    def __init__(self, engine: EmbeddedBroker, topics: TopicConfigs, settings: BrokerServerSettings) -> None:
        self._engine = engine
        self._topics = topics
        self._settings = settings

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {RequestCode.RECALL_MESSAGE: self._recall}

    def _recall(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(RecallMessageRequestHeader)
        if not self._settings.recall_message_enable:
            raise RefusedError(
                ResponseCode.NO_PERMISSION, "calling messages back is switched off here (recall-message-enable)"
            )
        if self._topics.find(asked.topic) is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"there is no topic {asked.topic!r}")
        msg_id = self._check(asked)
        status = self._engine.cancel(asked.recall_handle).status
        if status is not ScheduleChangeStatus.CANCELLED:
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION, f"message {msg_id} cannot be called back: {_why(status)}"
            )
        header = RecallMessageResponseHeader(msg_id=msg_id, msg_region=self._settings.region_id)
        return request.response(header=header)

    def _check(self, asked: RecallMessageRequestHeader) -> str:
        """The id in a handle that is for this broker and this topic."""
        try:
            handle = decode_handle(asked.recall_handle)
        except MessageError as exc:
            raise RefusedError(ResponseCode.ILLEGAL_OPERATION, str(exc)) from exc
        for what, told, known in (
            ("topic", asked.topic, handle.topic),
            ("broker", self._engine.name, handle.broker_name),
        ):
            if told != known:
                raise RefusedError(
                    ResponseCode.ILLEGAL_OPERATION, f"the handle is for {what} {known!r}, asked was {told!r}"
                )
        return handle.msg_id


def _why(status: ScheduleChangeStatus) -> str:
    if status is ScheduleChangeStatus.ALREADY_DELIVERED:
        return "it was delivered already"
    return "no such message waits here"

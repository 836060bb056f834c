"""Code 36: a consumer gives a message back that it could not handle.

Source: RocketMQ ``broker: AbstractSendMessageProcessor.consumerSendMsgBack``; section 13.1 of the specification.
"""

from __future__ import annotations

from functools import partial

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_creation import ensure_group
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.processors.message_writer import MessageWriter
from mqtemplate.server.response import RefusedError
from mqtemplate.server.topic_creation import TopicMaker
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.server")


class SendBackProcessor:
    """Stores the message again: for the group's retry topic, through the delay levels, or for its dead letters.

    The message is known by its physical offset. Its body goes on as it is, compressed or not.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        groups: SubscriptionGroupTable,
        topics: TopicMaker,
        writer: MessageWriter,
        later: DeferredWork,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._topics = topics
        self._writer = writer
        self._deferred_work = later

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self._process}

    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        asked = request.header(ConsumerSendMsgBackRequestHeader)
        settings = self._groups.find(asked.group)
        if settings is None:
            return self._deferred_work.answer(
                connection, request, partial(self._make_group, connection, request, asked)
            )
        return self._send_back(connection, request, asked, settings)

    def _make_group(
        self, connection: Connection, request: RemotingCommand, asked: ConsumerSendMsgBackRequestHeader
    ) -> RemotingCommand | None:
        return self._send_back(connection, request, asked, ensure_group(self._groups, asked.group))

    def _send_back(
        self,
        connection: Connection,
        request: RemotingCommand,
        asked: ConsumerSendMsgBackRequestHeader,
        settings: SubscriptionGroupConfig,
    ) -> RemotingCommand | None:
        if settings.retry_queue_nums <= 0:
            return request.response()  # the group wants no retries
        record = self._engine.store.read_at(asked.offset) if asked.offset >= 0 else None
        if record is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"no message begins at physical offset {asked.offset}; retention may have deleted it",
            )
        message = _message_in(record, self._engine.name)
        again = self._again(message, asked, settings, request.version)
        store = partial(self._store, connection, request, again, message, record)
        if self._topics.has(again.topic):
            store()
            return None
        return self._deferred_work.answer(
            connection, request, partial(self._make_and_store, again.topic, settings, store)
        )

    def _again(
        self,
        message: MessageExt,
        asked: ConsumerSendMsgBackRequestHeader,
        settings: SubscriptionGroupConfig,
        version: int,
    ) -> Message:
        most = settings.retry_max_times
        if asked.max_reconsume_times is not None and version >= Version.V3_4_9:
            most = asked.max_reconsume_times
        if is_exhausted(message, asked.delay_level, most):
            again = dead_letter(message, asked.group)
            _log.warning(
                "server.dead_letter", group=asked.group, topic=message.topic, msg_id=message.msg_id, times=most
            )
        else:
            again = retry(message, asked.group, asked.delay_level)
        again.properties[Property.WAIT] = "false"
        return again

    def _make_and_store(self, topic: str, settings: SubscriptionGroupConfig, store: partial[None]) -> None:
        self._topics.make(topic, 1 if topic.startswith(DLQ_TOPIC_PREFIX) else settings.retry_queue_nums)
        store()

    def _store(
        self,
        connection: Connection,
        request: RemotingCommand,
        again: Message,
        message: MessageExt,
        record: StoredRecord,
    ) -> None:
        queue_id = self._topics.queue(again.topic, -1)
        draft = self._engine.drafts.make_send_back(again, message, queue_id, self._engine.clock.now_ms())
        draft.sys_flag = record.sys_flag
        put = self._writer.put(draft, again.topic, queue_id)

        def done(error: StoreError | None) -> None:
            code = ResponseCode.SUCCESS if error is None else ResponseCode.SYSTEM_ERROR
            connection.reply(request.response(code, remark=None if error is None else str(error)))

        self._writer.confirm(put.end, (draft.topic,), done)


def _message_in(record: StoredRecord, broker_name: str) -> MessageExt:
    """The message with its body as it is stored."""
    plain = record._replace(sys_flag=record.sys_flag & ~SysFlag.COMPRESSED)
    return to_message_ext(plain, broker_name)

"""Code 36: a consumer sends a message back that it could not handle (RocketMQ: ``sendMessageBack``).

Source: RocketMQ ``broker: AbstractSendMessageProcessor.consumerSendMsgBack``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import structlog

from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.server.group_table import max_reconsume_times
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError, reply_when_durable
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.server")


@dataclass(frozen=True, slots=True)
class SendBackProcessor:
    """Stores the message again: delayed in the retry topic of the group, or in its dead letter topic.

    The physical offset identifies the message. Its body is stored as it was, compressed or not.
    """

    server: ServerParts

    @handles(RequestCode.CONSUMER_SEND_MSG_BACK)
    def _send_back(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ConsumerSendMsgBackRequestHeader)
        work = partial(self._store_again, connection, request, header)
        if self.server.groups.find(header.group) is not None:
            return work()
        return self.server.deferred_work.run(connection, request, work)

    def _store_again(
        self, connection: Connection, request: RemotingCommand, header: ConsumerSendMsgBackRequestHeader
    ) -> RemotingCommand | None:
        engine, group = self.server.engine, self.server.groups.ensure(header.group)
        if group.retry_queue_nums <= 0:
            return request.response()  # The group has no retries.
        record = engine.store.read_at(header.offset) if header.offset >= 0 else None
        if record is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"no message starts at physical offset {header.offset}; retention may have deleted it",
            )
        # Without the flag the body is not decompressed: it is stored again as it is.
        original = to_message_ext(record._replace(sys_flag=record.sys_flag & ~SysFlag.COMPRESSED), engine.name)
        max_times = max_reconsume_times(group, header.max_reconsume_times, request.version)
        message = _new_message(original, header, max_times)

        def store() -> None:
            is_dead = message.topic.startswith(DLQ_TOPIC_PREFIX)
            self.server.topic_creation.create_group_topic(message.topic, 1 if is_dead else group.retry_queue_nums)
            queue_id = self.server.topic_creation.queue(message.topic, -1)
            draft = engine.drafts.make_send_back(message, original, queue_id, engine.clock.now_ms())
            draft.sys_flag = record.sys_flag
            put = engine.writer.put(draft, message.topic, queue_id)
            reply_when_durable(engine.store, connection, request, put.end, (draft.topic,))

        if not self.server.topic_creation.has(message.topic):
            return self.server.deferred_work.run(connection, request, store)
        store()
        return None


def _new_message(original: MessageExt, header: ConsumerSendMsgBackRequestHeader, max_times: int) -> Message:
    """Return the message for the retry topic, or for the dead letter topic after the last retry."""
    if is_exhausted(original, header.delay_level, max_times):
        message = dead_letter(original, header.group)
        _log.warning(
            "server.dead_letter", group=header.group, topic=original.topic, msg_id=original.msg_id, times=max_times
        )
    else:
        message = retry(original, header.group, header.delay_level)
    message.properties[Property.WAIT] = "false"
    return message

"""Code 500,010: sequenced sends, whose repeats are dropped. RocketMQ has no such request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.engine.engine import Engine
from mqtemplate.errors import MessageError, SendError
from mqtemplate.message import Message, SendSequence, valid_time
from mqtemplate.record.codec import EncodedMessage, RecordDraft, pack_host
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.delayed import SendSequencedRequestHeader, SendSequencedResponseHeader
from mqtemplate.remoting.protocol.sequenced import decode_queue_batches, read_queue_batches
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.creations import ClientCreations
from mqtemplate.topics import AUTO_CREATE_TOPIC, DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_MAX_BODY_BYTES = 16 << 20
"""As many as a frame: one message may have megabytes. Clients send many small ones in requests of 1 MiB."""


@dataclass(frozen=True, slots=True)
class SequencedSendProcessor:
    """Stores the messages of a sequenced send that are not stored yet, and replies when all of them are durable."""

    engine: Engine
    creations: ClientCreations
    access: AccessControl
    default_topic_queue_nums: int

    @handles(RequestCode.SEND_SEQUENCED_MESSAGES, slow=True, max_body_bytes=_MAX_BODY_BYTES)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(SendSequencedRequestHeader)
        runs = list(read_queue_batches(request.body))
        self._create_topics(connection, request, {run.topic for run in runs})
        for topic, queue_id in {(run.topic, run.queue_id) for run in runs}:
            if queue_id < 0:
                raise MessageError(f"a sequenced send names the queue of each message, got {queue_id} for {topic!r}")
            self.creations.topics.queue(topic, queue_id)
        born_host = pack_host(connection.remote)

        def complete(draft: RecordDraft) -> None:
            draft.born_host, draft.born_timestamp = born_host, valid_time(header.born_timestamp)

        sequence = SendSequence(header.app_id, header.version, header.partition, header.first)
        account = self.access.key_of(request)
        messages = [(self._checked(request, message), queue_id) for message, queue_id in decode_queue_batches(runs)]
        try:
            result, end, topics = self.engine.sequences.put(messages, sequence, complete, account or "")
        except SendError as exc:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, str(exc)) from exc
        answer = SendSequencedResponseHeader(stored=result.stored, repeated=result.repeated)
        if self.engine.store.confirm(end, topics):
            return request.response(ResponseCode.SUCCESS, answer)
        return request.response(ResponseCode.FLUSH_DISK_TIMEOUT, remark="stored, but not flushed in time; send again")

    def _checked(self, request: RemotingCommand, message: Message | EncodedMessage) -> Message | EncodedMessage:
        """Return a message without a false origin; one with an origin is decoded."""
        return self.access.checked_origin(request, message) if isinstance(message, Message) else message

    def _create_topics(self, connection: Connection, request: RemotingCommand, topics: Iterable[str]) -> None:
        """Create missing topics and groups, within the limits that hold for ordinary messages."""
        for topic in topics:
            if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
                group = topic.removeprefix(RETRY_TOPIC_PREFIX).removeprefix(DLQ_TOPIC_PREFIX)
                self.creations.group(connection, request, group)
                self.creations.topics.create_group_topic(topic, 1)
            else:
                self.creations.topic(connection, request, topic, AUTO_CREATE_TOPIC, self.default_topic_queue_nums)

"""Codes 10, 310 and 320: producers send messages.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.errors import MessageError
from mqtemplate.message import (
    DELAY_PROPERTIES,
    HostAddress,
    Message,
    Property,
    copy_properties,
    offset_msg_id,
    offset_msg_ids,
)
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.layout import CHECK_NAME
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_batch
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_table import SubscriptionGroupTable, max_reconsume_times
from mqtemplate.server.processors.message_writer import MessageWriter
from mqtemplate.server.processors.queue_locks import QueueLocks
from mqtemplate.server.registration import handles
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.topic_creation import TopicCreation
from mqtemplate.store.commit_log import PutResult
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_pack_host = lru_cache(maxsize=65_536)(pack_host)
_BROKER_ONLY_PROPERTIES = ("POP_CK", CHECK_NAME)
"""Properties that describe a record inside one broker. A producer that forwards a message may send them along."""


@dataclass(slots=True)
class SendProcessor:
    """Stores the messages of producers, and replies when they are as durable as the flush mode requires.

    A stored message equals one that an embedded broker stores. In addition it has the producer's address, the cluster
    name and the fields of the request header.
    """

    engine: EmbeddedBroker
    settings: BrokerServerSettings
    groups: SubscriptionGroupTable
    locks: QueueLocks
    topics: TopicCreation
    writer: MessageWriter
    deferred_work: DeferredWork
    _added_properties: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._added_properties = {
            "MSG_REGION": self.settings.region_id,
            "TRACE_ON": "true" if self.settings.trace_on else "false",
            "CLUSTER": self.settings.cluster_name,
        }

    @handles(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_MESSAGE
        sent = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        topic: str | None = sent.topic
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            group = self.groups.find(sent.topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = None if group is None else self._retry_target(sent, group, request.version)
        if topic is None or not self.topics.has(topic):
            create = partial(self._create_and_store, connection, request, sent)
            return self.deferred_work.run(connection, request, create)
        self._store(connection, request, sent, topic)
        return None

    def _create_and_store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader
    ) -> None:
        topic = sent.topic
        if topic.startswith(RETRY_TOPIC_PREFIX):
            group = self.groups.ensure(topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = self._retry_target(sent, group, request.version)
            self.topics.create_group_topic(topic, 1)
        else:
            self.topics.create_by_first_message(topic, sent.default_topic, sent.default_topic_queue_nums)
        self._store(connection, request, sent, topic)

    def _retry_target(self, sent: SendMessageRequestHeader, group: SubscriptionGroupConfig, version: int) -> str:
        """Return the retry topic, or the dead letter topic after the last retry. RocketMQ 5: ``handleRetryAndDLQ``.

        An ordered consumer retries in its own process. It sends a message here only after its last retry, so the
        message is a dead letter: from the retry topic it would be consumed again, out of order.
        """
        max_times = max_reconsume_times(group, sent.max_reconsume_times, version)
        is_dead = (sent.reconsume_times or 0) > max_times or self.locks.is_ordered(group.group_name)
        return DLQ_TOPIC_PREFIX + group.group_name if is_dead else sent.topic

    # --- storing -------------------------------------------------------------------------------

    def _store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> None:
        if sent.batch or request.code == RequestCode.SEND_BATCH_MESSAGE:
            self._store_batch(connection, request, sent, topic)
            return
        is_dead = topic is not sent.topic
        queue_id = self.topics.queue(topic, -1 if is_dead else sent.queue_id)
        message = self._message(topic, request.body, decode_properties_text(sent.properties), sent.flag)
        if is_dead:
            message.properties = copy_properties(message.properties, *DELAY_PROPERTIES)
        now_ms, drafts = self.engine.clock.now_ms(), self.engine.drafts
        if _is_half(message, sent):
            group = message.properties.get(Property.PRODUCER_GROUP) or sent.producer_group
            draft, unique_id = drafts.make_half(message, group, queue_id, now_ms)
            self._set_origin(draft, sent, connection.remote)
            # The response has the offset in the half topic. A half message has no readers to notify.
            put = self.engine.transactions.prepare(draft)
            self._reply(connection, request, queue_id, (put,), unique_id, ())
            return
        draft, unique_id = drafts.make(message, queue_id, now_ms)
        self._set_origin(draft, sent, connection.remote)
        put = self.writer.put(draft, topic, queue_id)
        is_delayed = draft.topic != topic and not topic.startswith(RETRY_TOPIC_PREFIX)
        handle = self.writer.recall_handle(draft, put, topic) if is_delayed else None
        self._reply(connection, request, queue_id, (put,), unique_id, (draft.topic,), handle)

    def _store_batch(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> None:
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            raise MessageError(
                f"a batch cannot be sent to the retry topic {sent.topic!r}; send its messages one by one"
            )
        messages = decode_batch(request.body, topic)
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        self._check_batch_size(request.body, topic)
        queue_id = self.topics.queue(topic, sent.queue_id)
        now_ms, make = self.engine.clock.now_ms(), self.engine.drafts.make
        drafts, ids = [], []
        for message in messages:
            complete = self._message(topic, message.body, message.properties, message.flag)
            draft, unique_id = make(complete, queue_id, now_ms)
            self._set_origin(draft, sent, connection.remote)
            drafts.append(draft)
            ids.append(unique_id)
        puts = self.writer.put_all(drafts, topic, queue_id)
        delayed = [pair for pair in zip(drafts, puts, strict=True) if pair[0].topic != topic]
        recall_handles = ",".join([self.writer.recall_handle(draft, put, topic) for draft, put in delayed])
        topics = list({draft.topic for draft in drafts})
        self._reply(connection, request, queue_id, puts, ",".join(ids), topics, recall_handles or None)

    def _check_batch_size(self, body: bytes, topic: str) -> None:
        limit = self.engine.settings.max_message_size
        if len(body) > limit:
            raise MessageError(
                f"the batch for {topic!r} has {len(body)} bytes, allowed are {limit}; send fewer messages at once, or "
                "raise max-message-size"
            )

    def _message(self, topic: str, body: bytes, properties: dict[str, str], flag: int) -> Message:
        """Return the message with the properties that a broker adds, and without those that only a broker may set."""
        for name in _BROKER_ONLY_PROPERTIES:
            properties.pop(name, None)
        properties.update(self._added_properties)
        return Message(topic, body, properties, flag)

    def _set_origin(self, draft: RecordDraft, sent: SendMessageRequestHeader, remote: HostAddress) -> None:
        """Set the fields of a record that the request header and the connection determine."""
        draft.sys_flag = sent.sys_flag
        draft.born_timestamp = sent.born_timestamp
        draft.born_host = _pack_host(remote)
        draft.reconsume_times = sent.reconsume_times or 0

    def _reply(
        self,
        connection: Connection,
        request: RemotingCommand,
        queue_id: int,
        puts: Sequence[PutResult],
        unique_ids: str,
        topics: Sequence[str],
        recall_handles: str | None = None,
    ) -> None:
        """Reply with the positions of the messages when they are durable. Several IDs are separated by commas."""
        end = puts[-1].end
        if request.is_one_way:
            self.writer.flush(end, topics)
            return
        host = self.engine.settings.listen_host
        if len(puts) == 1:
            msg_ids = offset_msg_id(host, puts[0].physical_offset)
        else:
            msg_ids = ",".join(offset_msg_ids(host, [put.physical_offset for put in puts]))
        header = SendMessageResponseHeader(
            msg_id=msg_ids,
            queue_id=queue_id,
            queue_offset=puts[0].queue_offset,
            transaction_id=unique_ids,
            recall_handle=recall_handles,
            msg_region=self.settings.region_id,
            trace_on=self._added_properties["TRACE_ON"],
        )
        self.writer.reply_when_durable(connection, request, end, topics, header, ResponseCode.FLUSH_DISK_TIMEOUT)


def _is_half(message: Message, sent: SendMessageRequestHeader) -> bool:
    """Return True for a message whose transaction is open. A retry of a committed message has the same property."""
    is_retry = sent.topic.startswith(RETRY_TOPIC_PREFIX) or (sent.reconsume_times or 0) > 0
    return message.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true" and not is_retry

"""Codes 310, 10 and 320: producers send.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor``; section 8 of the specification.
"""

from __future__ import annotations

from functools import lru_cache, partial

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.delay import handle_of
from mqtemplate.errors import MessageError, StoreError
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
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.headers.message import (
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_batch
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.remoting.server import Processor
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_creation import ensure_group
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.processors.message_writer import MessageWriter
from mqtemplate.server.queue_locks import QueueLocks
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.topic_creation import TopicMaker
from mqtemplate.store import PutResult
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_pack_host = lru_cache(maxsize=65_536)(pack_host)
_ONE_BROKERS_OWN = ("POP_CK", CHECK_NAME)


class SendProcessor:
    """Stores what producers send, and answers when it is as safe as the flush mode promises.

    A message looks the same as one of an embedded sender, and has beside that what only a server can know: the peer it
    came from, the cluster's name, and what the header says.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings,
        groups: SubscriptionGroupTable,
        locks: QueueLocks,
        topics: TopicMaker,
        writer: MessageWriter,
        later: DeferredWork,
    ) -> None:
        self._engine = engine
        self._host = engine.settings.listen_host
        self._clock = engine.clock
        self._groups = groups
        self._locks = locks
        self._topics = topics
        self._writer = writer
        self._deferred_work = later
        self._region = settings.region_id
        self._trace_on = "true" if settings.trace_on else "false"
        self._added = {
            "MSG_REGION": settings.region_id,
            "TRACE_ON": self._trace_on,
            "CLUSTER": settings.cluster_name,
        }

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.SEND_MESSAGE: self._send_v1,
            RequestCode.SEND_MESSAGE_V2: self._send_v2,
            RequestCode.SEND_BATCH_MESSAGE: self._send_v2,
        }

    def _send_v1(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return self._send(connection, request, request.header(SendMessageRequestHeader))

    def _send_v2(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return self._send(connection, request, request.header(SendMessageRequestHeaderV2))

    def _send(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader
    ) -> RemotingCommand | None:
        topic: str | None = sent.topic
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            settings = self._groups.find(sent.topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = None if settings is None else self._target_of_retry(sent, settings, request.version)
        if topic is not None and self._topics.has(topic):
            return self._store(connection, request, sent, topic)
        return self._deferred_work.answer(connection, request, partial(self._make_and_store, connection, request, sent))

    def _make_and_store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader
    ) -> RemotingCommand | None:
        topic = sent.topic
        if topic.startswith(RETRY_TOPIC_PREFIX):
            settings = ensure_group(self._groups, topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = self._target_of_retry(sent, settings, request.version)
            self._topics.make(topic, 1)
        else:
            self._topics.make_by_first_message(topic, sent.default_topic, sent.default_topic_queue_nums)
        return self._store(connection, request, sent, topic)

    def _target_of_retry(self, sent: SendMessageRequestHeader, settings: SubscriptionGroupConfig, version: int) -> str:
        """The retry topic it is for, or the group's dead letters. Source: ``handleRetryAndDLQ`` of 5.x.

        Ordered consumers send here only what they gave up: their dead letters would else come back out of order.
        """
        group = settings.group_name
        most = settings.retry_max_times
        if sent.max_reconsume_times is not None and version >= Version.V3_4_9:
            most = sent.max_reconsume_times
        is_dead = (sent.reconsume_times or 0) > most or self._locks.is_ordered(group)
        return DLQ_TOPIC_PREFIX + group if is_dead else sent.topic

    # --- storing -------------------------------------------------------------------------------

    def _store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> RemotingCommand | None:
        if sent.batch or request.code == RequestCode.SEND_BATCH_MESSAGE:
            return self._store_batch(connection, request, sent, topic)
        is_dead = topic is not sent.topic
        queue_id = self._topics.queue(topic, -1 if is_dead else sent.queue_id)
        message = self._message(topic, request.body, decode_properties_text(sent.properties), sent.flag)
        if is_dead:
            message.properties = copy_properties(message.properties, *DELAY_PROPERTIES)
        if _is_half(message, sent):
            return self._store_half(connection, request, sent, message, queue_id)
        draft, unique_id = self._engine.drafts.make(message, queue_id, self._clock.now_ms())
        self._fill(draft, sent, connection.remote)
        put = self._writer.put(draft, topic, queue_id)
        if request.is_one_way:
            self._writer.confirm_one_way(put.end, (draft.topic,))
            return None
        waits = draft.topic != topic and not topic.startswith(RETRY_TOPIC_PREFIX)
        header = SendMessageResponseHeader(
            msg_id=offset_msg_id(self._host, put.physical_offset),
            queue_id=queue_id,
            queue_offset=put.queue_offset,
            transaction_id=unique_id,
            recall_handle=self._handle(draft, put, topic) if waits else None,
            msg_region=self._region,
            trace_on=self._trace_on,
        )
        self._answer_when_safe(connection, request, header, put.end, (draft.topic,))
        return None

    def _store_half(
        self,
        connection: Connection,
        request: RemotingCommand,
        sent: SendMessageRequestHeader,
        message: Message,
        queue_id: int,
    ) -> RemotingCommand | None:
        """A message in a transaction; its answer tells the place in the half queue."""
        group = message.properties.get(Property.PRODUCER_GROUP) or sent.producer_group
        draft, unique_id = self._engine.drafts.make_half(message, group, queue_id, self._clock.now_ms())
        self._fill(draft, sent, connection.remote)
        put = self._engine.transactions.prepare(draft)
        if request.is_one_way:
            self._writer.confirm_one_way(put.end, ())
            return None
        header = SendMessageResponseHeader(
            msg_id=offset_msg_id(self._host, put.physical_offset),
            queue_id=queue_id,
            queue_offset=put.queue_offset,
            transaction_id=unique_id,
            msg_region=self._region,
            trace_on=self._trace_on,
        )
        self._answer_when_safe(connection, request, header, put.end, ())
        return None

    def _store_batch(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> RemotingCommand | None:
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            raise MessageError(f"a batch cannot go to the retry topic {sent.topic!r}; send its messages one by one")
        messages = decode_batch(request.body, topic)
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        self._check_batch_size(request.body, topic)
        queue_id = self._topics.queue(topic, sent.queue_id)
        now_ms, make = self._clock.now_ms(), self._engine.drafts.make
        drafts, ids = [], []
        for message in messages:
            whole = self._message(topic, message.body, message.properties, message.flag)
            draft, unique_id = make(whole, queue_id, now_ms)
            self._fill(draft, sent, connection.remote)
            drafts.append(draft)
            ids.append(unique_id)
        puts = self._writer.put_all(drafts, topic, queue_id)
        topics = list({draft.topic for draft in drafts})
        if request.is_one_way:
            self._writer.confirm_one_way(puts[-1].end, topics)
            return None
        waiting = [pair for pair in zip(drafts, puts, strict=True) if pair[0].topic != topic]
        header = SendMessageResponseHeader(
            msg_id=",".join(offset_msg_ids(self._host, [put.physical_offset for put in puts])),
            queue_id=queue_id,
            queue_offset=puts[0].queue_offset,
            transaction_id=",".join(ids),
            recall_handle=",".join([self._handle(draft, put, topic) for draft, put in waiting]) or None,
            msg_region=self._region,
            trace_on=self._trace_on,
        )
        self._answer_when_safe(connection, request, header, puts[-1].end, topics)
        return None

    def _check_batch_size(self, body: bytes, topic: str) -> None:
        most = self._engine.settings.max_message_size
        if len(body) > most:
            raise MessageError(
                f"the batch for {topic!r} has {len(body)} bytes, allowed are {most}; send fewer messages at once, or "
                "raise max-message-size"
            )

    def _message(self, topic: str, body: bytes, properties: dict[str, str], flag: int) -> Message:
        """The message with the properties that brokers add, and without those that a sender may not give it."""
        for name in _ONE_BROKERS_OWN:
            properties.pop(name, None)
        properties.update(self._added)
        return Message(topic, body, properties, flag)

    def _fill(self, draft: RecordDraft, sent: SendMessageRequestHeader, remote: HostAddress) -> None:
        """Note in a record what the header says, and where it came from."""
        draft.sys_flag = sent.sys_flag
        draft.born_timestamp = sent.born_timestamp
        draft.born_host = _pack_host(remote)
        draft.reconsume_times = sent.reconsume_times or 0

    def _handle(self, draft: RecordDraft, put: PutResult, topic: str) -> str:
        """What a waiting message is called back by."""
        due_ms = put.store_timestamp + draft.delay_ms
        return handle_of(topic, self._engine.name, draft.properties, due_ms, put.physical_offset)

    def _answer_when_safe(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: SendMessageResponseHeader,
        end: int,
        topics: tuple[str, ...] | list[str],
    ) -> None:
        def done(error: StoreError | None) -> None:
            if error is None:
                connection.reply(request.response(ResponseCode.SUCCESS, header))
            else:  # it is stored, and not safe
                connection.reply(request.response(ResponseCode.FLUSH_DISK_TIMEOUT, header, remark=str(error)))

        self._writer.confirm(end, topics, done)


def _is_half(message: Message, sent: SendMessageRequestHeader) -> bool:
    """Whether it waits for the end of a transaction: not so what was committed, and is retried, with its properties."""
    is_again = sent.topic.startswith(RETRY_TOPIC_PREFIX) or (sent.reconsume_times or 0) > 0
    return message.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true" and not is_again

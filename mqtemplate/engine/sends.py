"""Sending in an embedded broker: queue selection, storing, and results as the flush mode guarantees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mqtemplate.engine.drafts import DraftMaker, batch_topic
from mqtemplate.engine.message_writer import MessageWriter, StoredBatch
from mqtemplate.engine.retries import SentBack
from mqtemplate.engine.topics import TopicRoutes
from mqtemplate.errors import MessageError, SendError, StoreError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import HostAddress, Message, MessageQueue, offset_msg_id
from mqtemplate.record.codec import RecordDraft
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.store.commit_log import PutResult
from mqtemplate.store.message_store import MessageStore


@dataclass(frozen=True, slots=True)
class Sender:
    """Stores the messages of producers in this process.

    Attributes:
        prepare: Stores a half message; see `TransactionService.prepare`.
    """

    store: MessageStore
    routes: TopicRoutes
    drafts: DraftMaker
    writer: MessageWriter
    prepare: Callable[[RecordDraft], PutResult]
    host: HostAddress

    def send(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """See `Broker.send`."""
        topic = message.topic
        target = self.routes.select(topic, queue)
        queue_id = target.queue_id
        draft, unique_id = self.drafts.make(message, queue_id, self.store.clock.now_ms())
        try:  # as `_put`; one call less in the most frequent kind of send
            put = self.writer.put(draft, topic, queue_id)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc
        self.store.start_flush(put)
        result = SendResult(  # complete before `confirm`: the disk writes meanwhile
            SendStatus.SEND_OK,
            unique_id,
            offset_msg_id(self.host, put.physical_offset),
            target,
            put.queue_offset,
            handle=None if draft.topic == topic else self.writer.handle(draft, put, topic),
        )
        if self.store.confirm(put.physical_offset + put.size, (draft.topic,), timeout_ms):
            return result
        return replace(result, send_status=SendStatus.FLUSH_DISK_TIMEOUT)

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """See `Broker.send_batch`."""
        target, batch = self._put_batch(messages, queue)
        return _batch_result(target, batch, is_safe=self.store.confirm(batch.end, batch.topics, timeout_ms))

    def send_async(self, messages: Sequence[Message], queue: MessageQueue | None) -> AwaitableFuture[SendResult]:
        """See `Broker.send_async`."""
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_running_or_notify_cancel()  # the messages are stored when this method returns
        try:
            target, batch = self._put_batch(messages, queue)
        except (MessageError, SendError, StoreError) as exc:
            future.set_exception(exc)
            return future
        result = _batch_result(target, batch, is_safe=True)

        def done(error: StoreError | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.store.confirm_async(batch.end, batch.topics, done)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None) -> None:
        """See `Broker.send_one_way`."""
        target = self.routes.select(message.topic, queue)
        draft, _ = self.drafts.make(message, target.queue_id, self.store.clock.now_ms())
        put = self._put(draft, message.topic, target.queue_id)
        self.store.confirm_async(put.end, (draft.topic,))

    def send_half(self, message: Message, group: str, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """See `Broker.send_half`."""
        target = self.routes.select(message.topic, queue)
        draft, unique_id = self.drafts.make_half(message, group, target.queue_id, self.store.clock.now_ms())
        try:
            put = self.prepare(draft)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc
        is_safe = self.store.confirm(put.end, (), timeout_ms)
        return SendResult(
            SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT,
            unique_id,
            offset_msg_id(self.host, put.physical_offset),
            target,
            put.queue_offset,
            transaction_id=unique_id,
        )

    def send_back(self, sent_back: SentBack) -> None:
        """Store a message for the retry topic or the dead-letter topic of a group, and wait until it is durable."""
        copy = sent_back.dead_letter() if sent_back.is_dead else self.drafts.delayed_retry(sent_back)
        self.routes.create(copy.topic, 1)
        queue_id = self.routes.select(copy.topic, None).queue_id
        draft = self.drafts.make_send_back(copy, sent_back.message, queue_id, self.store.clock.now_ms())
        self.store.confirm(self._put(draft, copy.topic, queue_id).end, (draft.topic,))

    def _put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        try:
            return self.writer.put(draft, topic, queue_id)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc

    def _put_batch(self, messages: Sequence[Message], queue: MessageQueue | None) -> tuple[MessageQueue, StoredBatch]:
        topic = batch_topic(messages)
        target = self.routes.select(topic, queue)
        now_ms = self.store.clock.now_ms()
        alike = self.drafts.make_alike(messages, target.queue_id, now_ms)
        try:
            if alike is not None:
                return target, self.writer.put_alike(alike)
            drafts, ids = self.drafts.make_batch(messages, target.queue_id, now_ms)
            return target, self.writer.put_batch(drafts, ids, topic, target.queue_id)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc


def _batch_result(target: MessageQueue, batch: StoredBatch, *, is_safe: bool) -> SendResult:
    status = SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT
    return SendResult(status, batch.msg_id, batch.offset_msg_id, target, batch.queue_offset, handle=batch.handle)

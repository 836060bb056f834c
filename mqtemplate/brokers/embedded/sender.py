"""The sending half of an embedded broker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from mqtemplate.brokers.embedded.draft import DraftMaker
from mqtemplate.brokers.embedded.routing import TopicRoutes
from mqtemplate.brokers.embedded.transactions.service import TransactionService
from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.delay import handle_of
from mqtemplate.errors import MessageError, SendError, StoreError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, offset_msg_id, offset_msg_ids
from mqtemplate.record.codec import RecordDraft
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.store import MessageStore, PutResult


class Sender:
    """Appends messages and answers as the flush mode promises."""

    def __init__(self, store: MessageStore, routes: TopicRoutes, drafts: DraftMaker, host: HostAddress) -> None:
        self._store = store
        self._routes = routes
        self._drafts = drafts
        self._host = host

    def send(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        route = self._routes.route(message.topic)
        target = route.next_queue() if queue is None else route.queue(queue)
        draft, unique_id = self._drafts.make(message, target.queue_id, self._store.clock.now_ms())
        put = self._put(draft, target)
        is_safe = self._store.confirm(put.physical_offset + put.size, (draft.topic,), timeout_ms)
        return SendResult(
            SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT,
            unique_id,
            offset_msg_id(self._host, put.physical_offset),
            target,
            put.queue_offset,
            handle=None if draft.topic == target.topic else _handle(draft, put, target),
        )

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        drafts, ids, target = self._make_batch(messages, queue)
        puts = self._put_all(drafts, target)
        is_safe = self._store.confirm(puts[-1].end, {draft.topic for draft in drafts}, timeout_ms)
        status = SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT
        return self._batch_result(drafts, puts, ids, target, status)

    def send_async(self, messages: Sequence[Message], queue: MessageQueue | None) -> Future[SendResult]:
        future: Future[SendResult] = Future()
        future.set_running_or_notify_cancel()  # there is no taking back what is written when this returns
        try:
            drafts, ids, target = self._make_batch(messages, queue)
            puts = self._put_all(drafts, target)
        except (MessageError, SendError, StoreError) as exc:
            future.set_exception(exc)
            return future
        result = self._batch_result(drafts, puts, ids, target, SendStatus.SEND_OK)

        def done(error: StoreError | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._store.confirm_async(puts[-1].end, [draft.topic for draft in drafts], done)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None) -> None:
        route = self._routes.route(message.topic)
        target = route.next_queue() if queue is None else route.queue(queue)
        draft, _ = self._drafts.make(message, target.queue_id, self._store.clock.now_ms())
        put = self._put(draft, target)
        self._store.confirm_async(put.end, (draft.topic,))

    def send_half(
        self,
        message: Message,
        group: str,
        queue: MessageQueue | None,
        timeout_ms: int,
        transactions: TransactionService,
    ) -> SendResult:
        """Store a half message; see `Broker.send_half`."""
        route = self._routes.route(message.topic)
        target = route.next_queue() if queue is None else route.queue(queue)
        draft, unique_id = self._drafts.make_half(message, group, target.queue_id, self._store.clock.now_ms())
        try:
            put = transactions.prepare(draft)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc
        is_safe = self._store.confirm(put.end, (), timeout_ms)
        return SendResult(
            SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT,
            unique_id,
            offset_msg_id(self._host, put.physical_offset),
            target,
            put.queue_offset,
            transaction_id=unique_id,
        )

    def send_back(self, message: MessageExt, group: str, delay_level: int, max_reconsume_times: int) -> None:
        """Store a message again for the group's retry topic, or for its dead letters; safe when this returns."""
        if is_exhausted(message, delay_level, max_reconsume_times):
            again = dead_letter(message, group)
        else:
            again = retry(message, group, delay_level)
        self._routes.create(again.topic, 1)
        target = self._routes.route(again.topic).next_queue()
        draft = self._drafts.make_send_back(again, message, target.queue_id, self._store.clock.now_ms())
        self._store.confirm(self._put(draft, target).end, (draft.topic,))

    def _make_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None
    ) -> tuple[list[RecordDraft], list[str], MessageQueue]:
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        topic = messages[0].topic
        route = self._routes.route(topic)
        target = route.next_queue() if queue is None else route.queue(queue)
        drafts, ids = [], []
        make, queue_id, now_ms = self._drafts.make, target.queue_id, self._store.clock.now_ms()
        for message in messages:
            if message.topic != topic:
                raise MessageError(
                    f"a batch goes to one topic, this one names {topic!r} and {message.topic!r}; send two batches"
                )
            draft, unique_id = make(message, queue_id, now_ms)
            drafts.append(draft)
            ids.append(unique_id)
        return drafts, ids, target

    def _batch_result(
        self,
        drafts: Sequence[RecordDraft],
        puts: Sequence[PutResult],
        ids: Sequence[str],
        target: MessageQueue,
        status: SendStatus,
    ) -> SendResult:
        offset_ids = ",".join(offset_msg_ids(self._host, [put[0] for put in puts]))
        waiting = [pair for pair in zip(drafts, puts, strict=True) if pair[0].topic != target.topic]
        handle = ",".join([_handle(draft, put, target) for draft, put in waiting]) if waiting else None
        return SendResult(status, ",".join(ids), offset_ids, target, puts[0].queue_offset, handle=handle)

    def _put(self, draft: RecordDraft, target: MessageQueue) -> PutResult:
        try:
            if draft.topic != target.topic:
                self._store.prepare(target.topic, target.queue_id)  # when it is due, there should be no file to make
            return self._store.put(draft)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc

    def _put_all(self, drafts: Sequence[RecordDraft], target: MessageQueue) -> list[PutResult]:
        try:
            if drafts[0].topic != target.topic or drafts[-1].topic != target.topic:
                self._store.prepare(target.topic, target.queue_id)
            return self._store.put_all(drafts)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc


def _handle(draft: RecordDraft, put: PutResult, target: MessageQueue) -> str:
    """What a waiting message is cancelled by."""
    due_ms = put.store_timestamp + draft.delay_ms
    return handle_of(target.topic, target.broker_name, draft.properties, due_ms, put.physical_offset)

"""The part of the send path that the embedded broker and its server share: storing the records of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mqtemplate.delay.recall_handle import handle_of
from mqtemplate.message import HostAddress, offset_msg_ids
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.sent_batch import SentBatch
from mqtemplate.store.commit_log import PutResult
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.record_writer import PutBatch


class StoredBatch(NamedTuple):
    """A batch in the commit log. Its ids and its handles are joined by commas.

    Attributes:
        end: Physical offset after the batch; `MessageStore.confirm` waits for it.
        topics: The topics of the records, whose readers are woken once the batch is durable.
        queue_offset: Queue offset of the first message.
        handle: Handles of the delayed messages; None if there are none.
    """

    end: int
    topics: tuple[str, ...]
    msg_id: str
    offset_msg_id: str
    queue_offset: int
    handle: str | None


class MessageWriter:
    """Stores the records of messages. It does not wait for the disk: `MessageStore.confirm` does.

    *topic* and *queue_id* are the real ones; the record of a delayed message has those of a system topic.

    Raises:
        MessageError: A record or its properties are too large.
        StoreError: The store cannot store a record now.
    """

    def __init__(self, store: MessageStore, broker_name: str, host: HostAddress) -> None:
        self._store = store
        self._broker_name = broker_name
        self._host = host

    def put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        """Store one record."""
        if draft.topic != topic:
            self._store.prepare(topic, queue_id)  # creates its file now, so that the delivery need not wait
        return self._store.put(draft)

    def put_batch(
        self, drafts: Sequence[RecordDraft], msg_ids: Sequence[str], topic: str, queue_id: int
    ) -> StoredBatch:
        """Store several records: all of them or none."""
        topics = tuple({draft.topic for draft in drafts})
        if topics != (topic,):
            self._store.prepare(topic, queue_id)
        puts = self._store.put_all(drafts)
        handle = None
        if topics != (topic,):
            handles = (self.handle(draft, put, topic) for draft, put in zip(drafts, puts, strict=True))
            handle = ",".join(handle for handle in handles if handle is not None)
        return self._stored(puts, topics, ",".join(msg_ids), handle)

    def put_alike(self, batch: SentBatch) -> StoredBatch:
        """Store the messages of a batch that are alike, and not delayed: all of them or none."""
        return self._stored(self._store.put_batch(batch), (batch.first.topic,), batch.msg_ids().decode(), None)

    def _stored(self, puts: PutBatch, topics: tuple[str, ...], msg_ids: str, handle: str | None) -> StoredBatch:
        offset_msg_id = offset_msg_ids(self._host, puts.physical_offsets)
        return StoredBatch(puts.end, topics, msg_ids, offset_msg_id, puts.queue_offsets[0], handle)

    def handle(self, draft: RecordDraft, put: PutResult, topic: str) -> str | None:
        """Return the handle for `Broker.cancel` of a delayed message; None if the message is not delayed."""
        if draft.topic == topic:
            return None
        due_ms = put.store_timestamp + draft.delay_ms
        return handle_of(topic, self._broker_name, draft.properties, due_ms, put.physical_offset)

"""Sends that were read together: stored by one append, and answered by one write to the socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.sent_batch import BatchOrigin
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.remoting.protocol.header_forms import ConnectionForms
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.sends.batch_sends import BatchRequest, BatchSends
from mqtemplate.server.processors.sends.send_forms import SendForms
from mqtemplate.server.processors.sends.send_response import SendResponses
from mqtemplate.server.response import RefusedError, call_when_durable
from mqtemplate.store.record_writer import PutBatch

_MAX_REQUESTS = 64
"""Longest run: less than a millisecond in the I/O thread."""
_MAX_BYTES = 256 << 10

_Sent = tuple[int, bytes, int]
"""Opaque, message id and queue ID of a request that was taken."""


class SendRun:
    """Run of sends of ordinary messages to queues that exist. A batch is stored after the messages before it.

    All other requests are processed as commands. So are those that the store refuses: that decides which are wrong.

    Args:
        forms: Those of all connections.
        batches: Stores the batches of this connection.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        server: ServerParts,
        forms: SendForms,
        batches: BatchSends,
        responses: SendResponses,
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._server = server
        self._topics = server.topics
        self._store = server.engine.store
        self._index = server.engine.store.index
        self._host = server.engine.settings.listen_host
        self._max_body_bytes = server.engine.settings.max_message_size
        self._forms = ConnectionForms(forms)
        self._batches = batches
        self._responses = responses
        self._on_processed = on_processed
        self._born_host = pack_host(connection.remote)
        self._drafts: list[RecordDraft] = []
        self._sent: list[_Sent] = []
        self._frames: list[Frame] = []
        self._bytes = 0
        self._queues: dict[tuple[str, bytes], int] = {}  # queues that were checked
        self._checked_state: object = None  # while the topics had this state

    def take(self, frame: Frame) -> bool:
        serialize_type, header, body = frame
        found = None if serialize_type else self._forms.match(header)
        if found is None:
            return False
        form, (queue_text, born, unique_id, opaque_text, keys) = found
        if self._checked_state is not self._topics.state:
            self._queues.clear()
            self._checked_state = self._topics.state
        queue_id = self._queues.get((form.topic, queue_text), -1)
        if queue_id < 0:
            queue_id = self._check_queue(form.topic, queue_text)
        if queue_id < 0:
            return False
        opaque = int(opaque_text)
        if form.is_batch:
            self._process_messages()
            return self._batches.take(BatchRequest(form, opaque, unique_id, BatchOrigin(queue_id, int(born)), frame))
        if len(body) > self._max_body_bytes or not self._connection.begin(opaque):
            return False
        if self._batches.requests:
            self._batches.process()
        self._drafts.append(
            RecordDraft(
                form.topic,
                queue_id,
                body,
                form.encode(unique_id, keys),
                form.tags_code,
                -1,
                form.flag,
                form.sys_flag,
                int(born),
                self._born_host,
                form.reconsume_times,
            )
        )
        self._sent.append((opaque, unique_id, queue_id))
        self._frames.append(frame)
        self._bytes += len(body)
        if len(self._sent) >= _MAX_REQUESTS or self._bytes >= _MAX_BYTES:
            self.process()
        return True

    def _check_queue(self, topic: str, text: bytes) -> int:
        """Return the queue ID; -1 if something has to be created, or the message will be refused."""
        queue_id = int(text)
        if not self._server.has_queue(topic, queue_id):
            return -1
        try:
            self._queues[topic, text] = self._topics.queue(topic, queue_id)
        except RefusedError:
            return -1
        return queue_id

    def process(self) -> None:
        self._process_messages()
        self._batches.process()
        self._index.index_recent()  # after the replies: no producer waits for it

    def _process_messages(self) -> None:
        if not self._sent:
            return
        drafts, sent, frames = self._drafts, self._sent, self._frames
        self._drafts, self._sent, self._frames, self._bytes = [], [], [], 0
        try:
            puts = self._put(drafts)
        except Exception:  # as a command each one gets its own response, and what is unexpected is logged
            for (opaque, _, _), frame in zip(sent, frames, strict=True):
                self._connection.process_as_command(opaque, frame)
            return
        self._on_processed(len(sent))
        topics = {draft.topic for draft in drafts}
        call_when_durable(self._store, puts.end, topics, partial(self._reply, sent, puts))

    def _put(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        if len(drafts) > 1:
            return self._store.put_all(drafts)
        offset, size, queue_offset, timestamp = self._store.put(drafts[0])  # for one record faster than `put_all`
        return PutBatch([offset], [size], [queue_offset], timestamp)

    def _reply(self, sent: Sequence[_Sent], puts: PutBatch, error: StoreError | None) -> None:
        ids = offset_msg_ids(self._host, puts.physical_offsets).encode().split(b",")
        frame = self._responses.encoder(error)
        frames = [
            frame(msg_id, queue_id, queue_offset, unique_id, opaque)
            for (opaque, unique_id, queue_id), queue_offset, msg_id in zip(sent, puts.queue_offsets, ids, strict=True)
        ]
        self._connection.reply_to_run([opaque for opaque, _, _ in sent], [b"".join(frames)])

"""Pipelined sends: those that were read together are stored by one append, and answered by one write to the socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mqtemplate.engine.engine import Engine
from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import Drafts, RecordDraft, pack_host
from mqtemplate.record.record_arrays import BatchOrigin
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.server.fast_path.header_templates import ConnectionTemplates, SendTemplates
from mqtemplate.server.fast_path.pipelined_batches import BatchRequest, PipelinedBatches
from mqtemplate.server.fast_path.send_responses import SendResponses
from mqtemplate.server.requests.response import RefusedError, call_when_durable
from mqtemplate.server.state.topics import TopicConfigs

_MAX_REQUESTS = 64
"""Most sends of one append: less than a millisecond in the I/O thread."""
_MAX_BYTES = 256 << 10

_Sent = tuple[int, bytes, int]
"""Opaque, message id and queue ID of a request that was accepted."""


class PipelinedSends:
    """Sends over one connection of ordinary messages to queues that exist. A batch is stored after those before it.

    All other requests are processed as commands. So are those that the store refuses together: as commands the valid
    ones among them are stored, and each of the others gets its own error.

    Args:
        templates: Templates of all connections.
        batches: Stores the batches of this connection.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        topics: TopicConfigs,
        templates: SendTemplates,
        batches: PipelinedBatches,
        responses: SendResponses,
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._store = engine.store
        self._host = engine.settings.listen_host
        self._max_body_bytes = engine.settings.max_message_size
        self._templates = ConnectionTemplates(templates)
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

    def accept(self, frame: Frame) -> bool:
        """Accept a send, to store it with the next ones; return False if it has to be processed as a command."""
        serialize_type, header, body = frame
        found = None if serialize_type else self._templates.match(header)
        if found is None:
            return False
        template, (queue_text, born, unique_id, opaque_text, keys) = found
        # The checks of a queue hold until any topic changes: the state is then another object.
        if self._checked_state is not self._topics.state:
            self._queues.clear()
            self._checked_state = self._topics.state
        queue_id = self._queues.get((template.topic, queue_text), -1)
        if queue_id < 0:
            queue_id = self._check_queue(template.topic, queue_text)
        if queue_id < 0:
            return False
        opaque = int(opaque_text)
        if template.properties is None:
            self._process_messages()  # they were sent before the batch
            origin = BatchOrigin(queue_id, int(born))
            return self._batches.accept(BatchRequest(template, opaque, unique_id, origin, frame))
        if len(body) > self._max_body_bytes or not self._connection.begin(opaque):
            return False
        if self._batches.requests:
            self._batches.process()
        self._drafts.append(
            RecordDraft(
                template.topic,
                queue_id,
                body,
                template.properties.fill(unique_id, keys),
                template.tags_code,
                -1,
                template.flag,
                template.sys_flag,
                int(born),
                self._born_host,
                template.reconsume_times,
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
        # A command creates the file of the queue in another thread: that may take a disk 100 ms.
        if not self._topics.has_queue(topic, queue_id):
            return -1
        try:
            self._queues[topic, text] = self._topics.queue(topic, queue_id)
        except RefusedError:
            return -1
        return queue_id

    def process(self) -> None:
        """Store the sends that were accepted."""
        self._process_messages()
        self._batches.process()
        self._store.index.index_recent()  # after the replies: no producer waits for it

    def _process_messages(self) -> None:
        if not self._sent:
            return
        drafts, sent, frames = self._drafts, self._sent, self._frames
        self._drafts, self._sent, self._frames, self._bytes = [], [], [], 0
        try:
            puts = self._put(drafts)
        except Exception:  # as a command each one gets its own response, and an unexpected error is logged
            for (opaque, _, _), frame in zip(sent, frames, strict=True):
                self._connection.process_as_command(opaque, frame)
            return
        self._on_processed(len(sent))
        topics = {draft.topic for draft in drafts}
        call_when_durable(self._store, puts.end, topics, partial(self._reply, sent, puts))

    def _put(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        if len(drafts) > 1:
            return self._store.put(Drafts(drafts))
        offset, size, queue_offset, timestamp = self._store.put(drafts[0])  # for one record faster than `Drafts`
        return PutBatch([offset], [size], [queue_offset], timestamp)

    def _reply(self, sent: Sequence[_Sent], puts: PutBatch, error: StoreError | None) -> None:
        """Reply to each send. This runs in the thread that flushes, or in the I/O thread if nothing is flushed."""
        ids = offset_msg_ids(self._host, puts.physical_offsets).encode().split(b",")
        frame = self._responses.encoder(error)
        frames = [
            frame(msg_id, queue_id, queue_offset, unique_id, opaque)
            for (opaque, unique_id, queue_id), queue_offset, msg_id in zip(sent, puts.queue_offsets, ids, strict=True)
        ]
        self._connection.reply_together([opaque for opaque, _, _ in sent], [b"".join(frames)])

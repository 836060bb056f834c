"""Pipelined batches, and uniform batches: messages that differ in bodies and ids only, read as rows of one array.

Batches of one header template and of one size that were read together, and whose messages are uniform together, are
stored by one append and answered by one write to the socket. `mqtemplate.server.fast_path` draws the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import Drafts, RecordDraft, pack_host
from mqtemplate.record.columns import Rows
from mqtemplate.record.properties_template import AddedProperties, CompleteProperties, PropertiesTemplate
from mqtemplate.record.record_arrays import BatchOrigin, UniformBatch
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.remoting.protocol.messages import BATCH_FRONT, count_batch, split_batch
from mqtemplate.server.fast_path.header_templates import SendTemplate
from mqtemplate.server.fast_path.send_responses import SendResponses
from mqtemplate.server.requests.response import call_when_durable

INLINE_MESSAGES = 64
"""Longest batch that is stored in the I/O thread: about a millisecond."""
_FEWEST_UNIFORM = 8
"""Fewer messages are faster one by one."""
_MAX_UNIFORM_BYTES = 256 << 10
"""Larger bodies are read message by message: one call of numpy would hold the interpreter lock for milliseconds."""


class UniformMessages(NamedTuple):
    """Messages of a batch, or of several.

    Attributes:
        bodies, ids: A row for each message.
        id_at: Start of the id in the encoded properties.
        properties: Properties of the first message.
    """

    bodies: Rows
    ids: Rows
    id_at: int
    flag: int
    properties: CompleteProperties

    def batch(self, topic: str, queue_id: int, origin: SendOrigin, batches: Sequence[BatchOrigin] = ()) -> UniformBatch:
        """Return the messages for the store.

        Args:
            origin: Of the first batch.
            batches: Queue and time of birth of each batch; empty for one batch.
        """
        encoded, code, _ = self.properties
        first = RecordDraft(topic, queue_id, self.bodies[0].tobytes(), encoded, code, -1, self.flag, *origin)
        return UniformBatch(first, self.bodies, self.ids, self.id_at, batches)


def read_uniform(data: bytes, added: AddedProperties) -> UniformMessages | None:
    """Return the messages in the body of a batch, or in the bodies of several, joined.

    None if they are few or large, not uniform, or not ordinary.
    """
    if not BATCH_FRONT.size <= len(data) <= _MAX_UNIFORM_BYTES:
        return None
    # If all messages are as the first one, they have its size. The lengths are those that the producer wrote, perhaps
    # wrong or negative: nothing is sliced before they add up.
    size, flag, body_length = BATCH_FRONT.unpack_from(data)
    body_end = BATCH_FRONT.size + body_length
    properties_at = body_end + 2  # after their length, an i2
    if body_length < 0 or not properties_at < size or len(data) % size or len(data) < _FEWEST_UNIFORM * size:
        return None
    text = data[properties_at:size]
    properties = added.complete_encoded(text)
    if properties is None or int.from_bytes(data[body_end:properties_at], "big") != len(text):
        return None
    unique_id = properties.unique_id.encode()
    template = PropertiesTemplate.around(text, unique_id)
    if template is None:
        return None
    id_at = template.id_at
    ids_at, ids_end = properties_at + id_at, properties_at + id_at + len(unique_id)
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    ids, equal = rows[:, ids_at:ids_end], (rows[:, : BATCH_FRONT.size], rows[:, body_end:ids_at], rows[:, ids_end:])
    around = np.concatenate(equal, axis=1)
    # Bytes are compared at once, which is faster than an array of booleans. An id of letters and digits has no
    # separator, so no message has a property that the first one does not have.
    if around.tobytes() != around[0].tobytes() * len(rows) or not ids.tobytes().isalnum():
        return None
    return UniformMessages(rows[:, BATCH_FRONT.size : body_end], ids, id_at, flag, properties)


class BatchRequest(NamedTuple):
    """One batch that was accepted.

    Attributes:
        unique_id: Id of the whole batch, in the header; empty if there is none.
    """

    template: SendTemplate
    opaque: int
    unique_id: bytes
    origin: BatchOrigin
    frame: Frame

    @property
    def body(self) -> bytes:
        return self.frame[2]


class PipelinedBatches:
    """Batches of one connection, to queues that exist.

    Args:
        max_messages: Longest batch that may be sent.
        on_processed: Called with the number of requests that were processed here.

    Attributes:
        requests: The batches that were accepted and are not processed yet.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        max_messages: int,
        added: AddedProperties,
        responses: SendResponses,
        on_processed: Callable[[int], None],
    ) -> None:
        self.requests: list[BatchRequest] = []
        self._connection = connection
        self._store = engine.store
        self._host = engine.settings.listen_host
        self._max_bytes = min(engine.settings.max_message_size, _MAX_UNIFORM_BYTES)
        self._max_messages = min(max_messages, INLINE_MESSAGES)
        self._added = added
        self._responses = responses
        self._on_processed = on_processed
        self._born_host = pack_host(connection.remote)

    def accept(self, request: BatchRequest) -> bool:
        """Accept a batch; return False if it has to be processed as a command."""
        size = len(request.body)
        if size > self._max_bytes or not self._connection.begin(request.opaque):
            return False
        if self.requests and not self._joins(request.template, size):
            self.process()
        self.requests.append(request)
        return True

    def _joins(self, template: SendTemplate, size: int) -> bool:
        """Return True if a batch can be stored together with those before it."""
        first = self.requests[0]
        fits = (len(self.requests) + 1) * size <= _MAX_UNIFORM_BYTES
        return template is first.template and size == len(first.body) and fits

    def process(self) -> None:
        """Store the batches that were accepted, and reply to each when it is durable."""
        requests, self.requests = self.requests, []
        if not requests or self._store_together(requests):
            return
        for request in requests:  # as a command it gets its own response, and an unexpected error is logged
            if len(requests) == 1 or not self._store_together([request]):
                self._connection.process_as_command(request.opaque, request.frame)

    def _store_together(self, requests: Sequence[BatchRequest]) -> bool:
        """Return False if nothing was stored: the batches are not uniform together, or the store refuses."""
        try:
            puts = self._put(requests)
        except Exception:  # `process` says what happens then
            return False
        if puts is None:
            return False
        self._on_processed(len(requests))
        call_when_durable(self._store, puts.end, (requests[0].template.topic,), partial(self._reply, requests, puts))
        return True

    def _put(self, requests: Sequence[BatchRequest]) -> PutBatch | None:
        batch = self._read_uniform(requests)
        if batch is not None:
            return self._store.put(batch)
        drafts = self._read_messages(requests[0]) if len(requests) == 1 else None
        return self._store.put(Drafts(drafts)) if drafts else None

    def _read_uniform(self, requests: Sequence[BatchRequest]) -> UniformBatch | None:
        """Return the messages of all batches; None if they are few, or not uniform."""
        template, (queue_id, born), count = requests[0].template, requests[0].origin, len(requests)
        found = read_uniform(b"".join(request.body for request in requests), self._added)
        # Bodies of one size may have different numbers of messages only if their messages differ in size.
        if found is None or len(found.bodies) % count or len(found.bodies) > count * self._max_messages:
            return None
        origins = [request.origin for request in requests] if count > 1 else ()
        return found.batch(template.topic, queue_id, self._origin(template, born), origins)

    def _origin(self, template: SendTemplate, born_timestamp: int) -> SendOrigin:
        return SendOrigin(template.sys_flag, born_timestamp, self._born_host, template.reconsume_times)

    def _read_messages(self, request: BatchRequest) -> list[RecordDraft] | None:
        """Return the messages of one batch; None if they are too many, or one of them is not ordinary.

        Raises:
            RemoteProtocolError: They are not a batch.
        """
        if count_batch(request.body, self._max_messages) > self._max_messages:
            return None
        template, (queue_id, born), drafts = request.template, request.origin, list[RecordDraft]()
        origin = self._origin(template, born)
        for body, encoded, flag in split_batch(request.body):
            complete = self._added.complete_encoded(encoded)
            if complete is None:
                return None
            drafts.append(
                RecordDraft(template.topic, queue_id, body, complete.encoded, complete.tags_code, -1, flag, *origin)
            )
        return drafts

    def _reply(self, requests: Sequence[BatchRequest], puts: PutBatch, error: StoreError | None) -> None:
        frame, count, frames = self._responses.encoder(error), len(puts) // len(requests), []
        for at, (_, opaque, unique_id, origin, _) in zip(range(0, len(puts), count), requests, strict=True):
            ids = offset_msg_ids(self._host, puts.physical_offsets[at : at + count]).encode()
            frames.append(frame(ids, origin.queue_id, puts.queue_offsets[at], unique_id, opaque))
        self._connection.reply_together([request.opaque for request in requests], [b"".join(frames)])

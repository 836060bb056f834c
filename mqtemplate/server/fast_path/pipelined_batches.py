"""Sends of batches that are stored without decoding their headers, because the form is known.

Batches of one form and of one size that were read together, and whose messages are alike, are stored by one append and
answered by one write to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.sent_batch import BatchOrigin, SentBatch
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.remoting.protocol.messages import count_batch, split_batch
from mqtemplate.server.processors.sends.alike_messages import MOST_BYTES, read_alike
from mqtemplate.server.processors.sends.send_forms import SendForm
from mqtemplate.server.processors.sends.send_response import SendResponses
from mqtemplate.server.processors.sends.sent_properties import SentProperties
from mqtemplate.server.response import call_when_durable
from mqtemplate.store.record_writer import PutBatch

INLINE_MESSAGES = 64
"""Longest batch that is stored in the I/O thread: about a millisecond."""


class BatchRequest(NamedTuple):
    """One batch that was taken.

    Attributes:
        unique_id: Id of the whole batch, in the header; empty if there is none.
    """

    form: SendForm
    opaque: int
    unique_id: bytes
    origin: BatchOrigin
    frame: Frame

    @property
    def body(self) -> bytes:
        return self.frame[2]


class BatchSends:
    """Batches of one connection, to queues that exist.

    Args:
        max_messages: Longest batch that may be sent.
        on_processed: Called with the number of requests that were processed here.

    Attributes:
        requests: The batches that were taken and are not processed yet.
    """

    def __init__(
        self,
        connection: Connection,
        engine: EmbeddedBroker,
        max_messages: int,
        properties: SentProperties,
        responses: SendResponses,
        on_processed: Callable[[int], None],
    ) -> None:
        self.requests: list[BatchRequest] = []
        self._connection = connection
        self._store = engine.store
        self._host = engine.settings.listen_host
        self._max_bytes = min(engine.settings.max_message_size, MOST_BYTES)
        self._max_messages = min(max_messages, INLINE_MESSAGES)
        self._properties = properties
        self._responses = responses
        self._on_processed = on_processed
        self._born_host = pack_host(connection.remote)

    def take(self, request: BatchRequest) -> bool:
        """Take a batch; return False if it has to be processed as a command."""
        size = len(request.body)
        if size > self._max_bytes or not self._connection.begin(request.opaque):
            return False
        if self.requests and not self._joins(request.form, size):
            self.process()
        self.requests.append(request)
        return True

    def _joins(self, form: SendForm, size: int) -> bool:
        """Return True if a batch can be stored together with those before it."""
        first = self.requests[0]
        return form is first.form and size == len(first.body) and (len(self.requests) + 1) * size <= MOST_BYTES

    def process(self) -> None:
        """Store the batches that were taken, and reply to each when it is durable."""
        requests, self.requests = self.requests, []
        if not requests or self._process(requests):
            return
        for request in requests:  # as a command it gets its own response, and what is unexpected is logged
            if len(requests) == 1 or not self._process([request]):
                self._connection.process_as_command(request.opaque, request.frame)

    def _process(self, requests: Sequence[BatchRequest]) -> bool:
        """Store batches together; return False if nothing was stored: they are not alike, or the store refuses."""
        try:
            puts = self._put(requests)
        except Exception:  # `process` says what happens then
            return False
        if puts is None:
            return False
        self._on_processed(len(requests))
        call_when_durable(self._store, puts.end, (requests[0].form.topic,), partial(self._reply, requests, puts))
        return True

    def _put(self, requests: Sequence[BatchRequest]) -> PutBatch | None:
        batch = self._read_alike(requests)
        if batch is not None:
            return self._store.put_batch(batch)
        drafts = self._read_messages(requests[0]) if len(requests) == 1 else None
        return self._store.put_all(drafts) if drafts else None

    def _read_alike(self, requests: Sequence[BatchRequest]) -> SentBatch | None:
        """Return the messages of all batches; None if they are few, or not alike."""
        form, (queue_id, born), count = requests[0].form, requests[0].origin, len(requests)
        alike = read_alike(b"".join(request.body for request in requests), self._properties)
        if alike is None or len(alike.bodies) % count or len(alike.bodies) > count * self._max_messages:
            return None
        origins = [request.origin for request in requests] if count > 1 else ()
        return alike.sent_batch(
            form.topic, queue_id, form.sys_flag, born, self._born_host, form.reconsume_times, origins
        )

    def _read_messages(self, request: BatchRequest) -> list[RecordDraft] | None:
        """Return the messages of one batch; None if they are too many, or one of them is not ordinary.

        Raises:
            RemoteProtocolError: They are not a batch.
        """
        if count_batch(request.body, self._max_messages) > self._max_messages:
            return None
        form, (queue_id, born), drafts = request.form, request.origin, list[RecordDraft]()
        for body, encoded, flag in split_batch(request.body):
            complete = self._properties.complete_encoded(encoded)
            if complete is None:
                return None
            origin = (form.sys_flag, born, self._born_host, form.reconsume_times)
            drafts.append(
                RecordDraft(form.topic, queue_id, body, complete.encoded, complete.tags_code, -1, flag, *origin)
            )
        return drafts

    def _reply(self, requests: Sequence[BatchRequest], puts: PutBatch, error: StoreError | None) -> None:
        frame, count, frames = self._responses.encoder(error), len(puts) // len(requests), []
        for at, (_, opaque, unique_id, origin, _) in zip(range(0, len(puts), count), requests, strict=True):
            ids = offset_msg_ids(self._host, puts.physical_offsets[at : at + count]).encode()
            frames.append(frame(ids, origin.queue_id, puts.queue_offsets[at], unique_id, opaque))
        self._connection.reply_to_run([request.opaque for request in requests], [b"".join(frames)])

"""Sends of batches that are stored without decoding their headers: the form is known, and the messages are alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.codec import pack_host
from mqtemplate.record.sent_batch import SentBatch
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame
from mqtemplate.server.processors.sends.alike_messages import read_alike
from mqtemplate.server.processors.sends.send_forms import SendForm
from mqtemplate.server.processors.sends.send_response import SendResponses
from mqtemplate.server.processors.sends.sent_properties import SentProperties
from mqtemplate.server.response import call_when_durable
from mqtemplate.store.record_writer import PutBatch

INLINE_MESSAGES = 64
"""Longest batch that is stored in the I/O thread: about a millisecond."""


class BatchSends:
    """Batches of one connection, to queues that exist.

    Args:
        max_messages: Longest batch that may be sent.
        on_processed: Called with the number of requests that were processed here.
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
        self._connection = connection
        self._store = engine.store
        self._host = engine.settings.listen_host
        self._max_bytes = engine.settings.max_message_size
        self._max_messages = min(max_messages, INLINE_MESSAGES)
        self._properties = properties
        self._responses = responses
        self._on_processed = on_processed
        self._born_host = pack_host(connection.remote)

    def read(self, form: SendForm, body: bytes, queue_id: int, born: int) -> SentBatch | None:
        """Return the batch in the body of a request; None if the request has to be processed as a command."""
        alike = read_alike(body, self._properties) if len(body) <= self._max_bytes else None
        if alike is None or len(alike.bodies) > self._max_messages:
            return None
        return alike.sent_batch(form.topic, queue_id, form.sys_flag, born, self._born_host, form.reconsume_times)

    def process(self, opaque: int, unique_id: bytes, batch: SentBatch, frame: Frame) -> None:
        """Store the batch in *frame*, and reply when it is durable.

        Args:
            unique_id: Id of the whole batch, in the header.
        """
        try:
            puts = self._store.put_batch(batch)
        except Exception:  # as a command it gets its own response, and what is unexpected is logged
            self._connection.process_as_command(opaque, frame)
            return
        self._on_processed(1)
        reply = partial(self._reply, opaque, unique_id, batch.first.queue_id, puts)
        call_when_durable(self._store, puts.end, (batch.first.topic,), reply)

    def _reply(self, opaque: int, unique_id: bytes, queue_id: int, puts: PutBatch, error: StoreError | None) -> None:
        ids = ",".join(offset_msg_ids(self._host, puts.physical_offsets)).encode()
        frame = self._responses.encoder(error)
        self._connection.reply_to_run((opaque,), (frame(ids, queue_id, puts.queue_offsets[0], unique_id, opaque),))

"""Pipelines: sends and pulls of one connection that were read together, and are processed without decoding each.

Sends are stored by one append, and answered by one write to the socket. Uniform batches are messages that differ in
bodies and ids only, read as rows of one array. Batches of one template and of one size that were read together, and
whose messages are uniform together, are stored by one append as well. `mqtemplate.server.fast_path` draws the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import StoreError
from mqtemplate.message import offset_msg_ids
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import Drafts, RecordDraft, pack_host
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.record.record_arrays import BatchOrigin, UniformBatch
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codec import Frame, json_frame_head
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import json_header_template
from mqtemplate.remoting.protocol.messages import count_batch, split_batch
from mqtemplate.server.core.batches import MAX_UNIFORM_BYTES, read_uniform
from mqtemplate.server.fast_path.header_templates import (
    ConnectionTemplates,
    HeaderTemplates,
    PullTemplate,
    SendTemplate,
    pull_templates,
    send_templates,
)
from mqtemplate.server.pulls.pull_checks import CheckedPull, PullChecks
from mqtemplate.server.pulls.pull_commands import client_pull, pull_response
from mqtemplate.server.pulls.raw_reader import RawPull, RawReader, RawStatus
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.response import SendResponses, call_when_durable
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.tables import ConsumerOffsets

INLINE_MESSAGES = 64
"""Longest batch that is stored in the I/O thread: about a millisecond."""


class BatchRequest(NamedTuple):
    """One batch that was accepted.

    Attributes:
        unique_id: Id of the whole batch, in the header; empty if it has no id.
    """

    template: SendTemplate
    opaque: int
    unique_id: bytes
    origin: BatchOrigin
    frame: Frame

    @property
    def body(self) -> bytes:
        return self.frame[2]


_MAX_REQUESTS = 64
"""Most sends of one append: less than a millisecond in the I/O thread."""
_MAX_SEND_BYTES = 256 << 10

_Sent = tuple[int, bytes, int]
"""Opaque, message id and queue ID of a request that was accepted."""


class PipelinedSends:
    """Sends over one connection of ordinary messages, and of batches, to queues that exist.

    All other requests are processed as commands. So are sends that the store refuses together: as commands the valid
    ones among them are stored, and each of the others gets its own error.

    Args:
        templates: Templates of all connections.
        max_messages: Longest batch that may be sent.
        added: Properties that the server adds to the messages of a batch.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        topics: TopicConfigs,
        templates: HeaderTemplates[SendTemplate],
        max_messages: int,
        added: AddedProperties,
        responses: SendResponses,
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._store = engine.store
        self._host = engine.settings.listen_host
        self._max_body_bytes = engine.settings.max_message_size
        self._max_batch_bytes = min(engine.settings.max_message_size, MAX_UNIFORM_BYTES)
        self._max_messages = min(max_messages, INLINE_MESSAGES)
        self._templates = ConnectionTemplates(templates)
        self._added = added
        self._responses = responses
        self._on_processed = on_processed
        self._born_host = pack_host(connection.remote)
        self._drafts: list[RecordDraft] = []
        self._sent: list[_Sent] = []
        self._frames: list[Frame] = []
        self._bytes = 0
        self._batches: list[BatchRequest] = []  # either there are messages or batches: the order is the producer's
        self._queues: dict[tuple[str, bytes], int] = {}  # queues that were checked
        self._checked_state: object = None  # while the topics had this state

    def accept(self, frame: Frame) -> bool:
        """Accept a send, to store it with the next ones; return False if it has to be processed as a command."""
        serialize_type, header, body = frame
        found = None if serialize_type else self._templates.match(header)
        if found is None:
            return False
        template, (queue_text, born, unique_id, opaque_text, keys, sharding_key) = found
        # The checks of a queue hold until any topic changes: the state is then another object.
        if self._checked_state is not self._topics.table.state:
            self._queues.clear()
            self._checked_state = self._topics.table.state
        queue_id = self._queues.get((template.topic, queue_text), -1)
        if queue_id < 0:
            queue_id = self._check_queue(template.topic, queue_text)
        if queue_id < 0:
            return False
        opaque = int(opaque_text)
        if template.properties is None:
            self._process_messages()  # they were sent before the batch
            return self._accept_batch(
                BatchRequest(template, opaque, unique_id, BatchOrigin(queue_id, int(born)), frame)
            )
        if len(body) > self._max_body_bytes or not self._connection.begin(opaque):
            return False
        if self._batches:
            self._process_batches()
        encoded = template.properties.fill(unique_id, keys, sharding_key)
        draft = RecordDraft(template.topic, queue_id, body, encoded, template.tags_code)
        # As attributes: keyword arguments would take 400 ns longer (measured).
        draft.flag, draft.sys_flag, draft.reconsume_times = template.flag, template.sys_flag, template.reconsume_times
        draft.born_timestamp, draft.born_host = int(born), self._born_host
        self._drafts.append(draft)
        self._sent.append((opaque, unique_id, queue_id))
        self._frames.append(frame)
        self._bytes += len(body)
        if len(self._sent) >= _MAX_REQUESTS or self._bytes >= _MAX_SEND_BYTES:
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
        self._process_batches()
        self._store.index.index_recent()  # after the replies: no producer waits for it

    # --- messages ------------------------------------------------------------------------------

    def _process_messages(self) -> None:
        if not self._sent:
            return
        drafts, sent, frames = self._drafts, self._sent, self._frames
        self._drafts, self._sent, self._frames, self._bytes = [], [], [], 0
        try:
            puts = self._put_messages(drafts)
        except Exception:  # as a command each one gets its own response, and an unexpected error is logged
            for (opaque, _, _), frame in zip(sent, frames, strict=True):
                self._connection.process_as_command(opaque, frame)
            return
        self._on_processed(len(sent))
        topics = {draft.topic for draft in drafts}
        call_when_durable(self._store, puts.end, topics, partial(self._reply, sent, puts))

    def _put_messages(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        if len(drafts) > 1:
            return self._store.put(Drafts(drafts))
        offset, size, queue_offset, timestamp = self._store.put(drafts[0])  # for one record faster than `Drafts`
        return PutBatch([offset], [size], [queue_offset], timestamp)

    def _reply(self, sent: Sequence[_Sent], puts: PutBatch, error: StoreError | None) -> None:
        """Reply to each send. This runs in the thread that flushes, or in the I/O thread if nothing is flushed."""
        ids = offset_msg_ids(self._host, puts.physical_offsets).encode().split(b",")
        frame = self._responses.frame
        frames = [
            frame(msg_id, queue_id, queue_offset, unique_id, opaque, error)
            for (opaque, unique_id, queue_id), queue_offset, msg_id in zip(sent, puts.queue_offsets, ids, strict=True)
        ]
        self._connection.reply_together([opaque for opaque, _, _ in sent], [b"".join(frames)])

    # --- batches -------------------------------------------------------------------------------

    def _accept_batch(self, request: BatchRequest) -> bool:
        size = len(request.body)
        if size > self._max_batch_bytes or not self._connection.begin(request.opaque):
            return False
        if self._batches and not self._joins(request.template, size):
            self._process_batches()
        self._batches.append(request)
        return True

    def _joins(self, template: SendTemplate, size: int) -> bool:
        """Return True if a batch can be stored together with the batches before it."""
        first = self._batches[0]
        fits = (len(self._batches) + 1) * size <= MAX_UNIFORM_BYTES
        return template is first.template and size == len(first.body) and fits

    def _process_batches(self) -> None:
        """Store the batches that were accepted, and reply to each when it is durable."""
        requests, self._batches = self._batches, []
        if not requests or self._store_together(requests):
            return
        for request in requests:  # as a command it gets its own response, and an unexpected error is logged
            if len(requests) == 1 or not self._store_together([request]):
                self._connection.process_as_command(request.opaque, request.frame)

    def _store_together(self, requests: Sequence[BatchRequest]) -> bool:
        """Return False if nothing was stored: the batches are not uniform together, or the store refuses."""
        try:
            batch = self._read_uniform(requests)
            if batch is not None:
                puts = self._store.put(batch)
            elif len(requests) == 1 and (drafts := self._read_messages(requests[0])):
                puts = self._store.put(Drafts(drafts))
            else:
                return False
        except Exception:  # `_process_batches` says what happens then
            return False
        self._on_processed(len(requests))
        topics = (requests[0].template.topic,)
        call_when_durable(self._store, puts.end, topics, partial(self._reply_to_batches, requests, puts))
        return True

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
            properties, code, _ = complete
            drafts.append(RecordDraft(template.topic, queue_id, body, properties, code, flag, *origin))
        return drafts

    def _reply_to_batches(self, requests: Sequence[BatchRequest], puts: PutBatch, error: StoreError | None) -> None:
        frame, count, frames = self._responses.frame, len(puts) // len(requests), []
        for at, (_, opaque, unique_id, origin, _) in zip(range(0, len(puts), count), requests, strict=True):
            ids = offset_msg_ids(self._host, puts.physical_offsets[at : at + count]).encode()
            frames.append(frame(ids, origin.queue_id, puts.queue_offsets[at], unique_id, opaque, error))
        self._connection.reply_together([request.opaque for request in requests], [b"".join(frames)])


# --- pulls ------------------------------------------------------------------------------------------

_MAX_RESPONSE_BYTES = 256 << 10
"""Responses are sent when they have so many bytes, though more pulls were read: they take memory, and clients wait."""
_MAX_CHECKED = 1_000
_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE = 1_234_567, 2_345_678, 3_456_789, 4_567_891
"""Numbers that mark the places of the numbers of a response in a template."""


class PipelinedPulls:
    """Pulls over one connection that find messages. Their common part is decoded and checked once: `PullTemplate`.

    All other pulls are processed as commands: they may have to wait, or they are refused.

    Args:
        templates: Templates of all connections.
        on_processed: Called with the number of requests that were processed here.
    """

    def __init__(
        self,
        connection: Connection,
        raw: RawReader,
        offsets: ConsumerOffsets,
        checks: PullChecks,
        templates: HeaderTemplates[PullTemplate],
        on_processed: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._raw = raw
        self._offsets = offsets
        self._checks = checks
        self._templates = ConnectionTemplates(templates)
        self._on_processed = on_processed
        self._checked: dict[tuple[PullTemplate, bytes], CheckedPull] = {}  # by the template and the text of the queue
        self._opaques: list[int] = []
        self._parts: list[bytes | memoryview] = []
        self._bytes = 0

    def accept(self, frame: Frame) -> bool:
        """Read what a pull requests, and keep its response; return False if it has to be processed as a command."""
        found = None if frame[0] else self._templates.match(frame[1])
        if found is None:
            return False
        try:
            return self._pull(*found)
        except Exception:  # as a command it gets its own response, and an unexpected error is logged
            return False

    def _pull(self, template: PullTemplate, values: tuple[bytes, ...]) -> bool:
        queue_text, offset_text, commit_text, opaque_text = values
        pull, checked = template.header, self._checked.get((template, queue_text))
        if checked is None or not self._checks.is_valid(checked):
            checked = self._check(template, queue_text)
        if checked is None:
            return False
        found = self._raw.pull(checked.query, int(offset_text))
        if found.status is RawStatus.NO_NEW_MSG:
            return False
        if pull.sys_flag & PullSysFlag.COMMIT_OFFSET:
            self._offsets.commit(pull.consumer_group, pull.topic, checked.query.queue.queue_id, int(commit_text))
        opaque = int(opaque_text)
        # After the read and the commit: as a command the same pull does both again, which changes nothing.
        if not self._connection.begin(opaque):
            return False
        self._add_response(opaque, found)
        return True

    def _check(self, template: PullTemplate, queue_text: bytes) -> CheckedPull | None:
        checked = self._checks.check_once(client_pull(template.header, int(queue_text)))
        if checked is not None:
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[template, queue_text] = checked
        return checked

    def _add_response(self, opaque: int, found: RawPull) -> None:
        size = sum(map(len, found.parts))
        numbers = found.next_begin_offset, found.min_offset, found.max_offset, opaque
        self._opaques.append(opaque)
        self._parts += json_frame_head(_TEMPLATES[found.status] % numbers, size), *found.parts
        self._bytes += size
        if self._bytes >= _MAX_RESPONSE_BYTES:
            self.process()

    def process(self) -> None:
        """Send the responses."""
        opaques, parts = self._opaques, self._parts
        if opaques:
            self._opaques, self._parts, self._bytes = [], [], 0
            self._on_processed(len(opaques))
            self._connection.reply_together(opaques, parts)


def _template(status: RawStatus) -> bytes:
    """Return the header of the responses with *status*, as a format for the numbers of one."""
    found = RawPull(status, _NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET)
    response = pull_response(RemotingCommand(RequestCode.PULL_MESSAGE, _OPAQUE), found)
    return json_header_template(response, (_NEXT_OFFSET, _MIN_OFFSET, _MAX_OFFSET, _OPAQUE))


_TEMPLATES = {status: _template(status) for status in RawStatus}


_STARTS_OF_PULLS = (b'{"code":11,', b'{"code":361,')
"""Clients write the code first. Pulls of a client that does not are processed as commands."""


# --- the pipelines of all connections ---------------------------------------------------------------


class Pipeline:
    """The requests of one connection that are processed without decoding each: a `RequestPipeline`."""

    def __init__(self, sends: PipelinedSends, pulls: PipelinedPulls) -> None:
        self._sends = sends
        self._pulls = pulls

    def accept(self, frame: Frame) -> bool:
        """Accept a request; return False if it has to be processed as a command, after the requests before it."""
        if not frame[1].startswith(_STARTS_OF_PULLS):
            return self._sends.accept(frame)
        self._sends.process()  # messages are stored before a pull after them reads
        return self._pulls.accept(frame)

    def process(self) -> None:
        """Process the requests that were accepted."""
        self._sends.process()
        self._pulls.process()


class FastPath:
    """Creator of the pipelines of all connections, which share templates, and the properties that the server adds.

    A server without one processes each request as a command: it stores the same bytes, and gives the same answers.
    """

    def __init__(
        self, engine: Engine, settings: BrokerServerSettings, topics: TopicConfigs, raw: RawReader, checks: PullChecks
    ) -> None:
        added = settings.added_properties()
        self._sends = partial(
            PipelinedSends,
            engine=engine,
            topics=topics,
            templates=send_templates(AddedProperties(added)),
            max_messages=settings.max_batch_messages,
            added=AddedProperties({}),  # messages of a batch have no more, as with RocketMQ 5.5.0
            responses=SendResponses(added),
        )
        self._pulls = partial(
            PipelinedPulls, raw=raw, offsets=engine.offsets, checks=checks, templates=pull_templates()
        )

    def pipeline(self, connection: Connection, on_processed: Callable[[int], None]) -> Pipeline:
        """Return the pipeline of a new connection.

        Args:
            on_processed: Called with the number of requests that the pipeline has processed.
        """
        return Pipeline(
            self._sends(connection, on_processed=on_processed), self._pulls(connection, on_processed=on_processed)
        )

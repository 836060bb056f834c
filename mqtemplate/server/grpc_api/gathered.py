"""The fast path: sends and acknowledgements of one connection that were read together are processed as one.

It is only an optimization: a server without it stores the same records and gives the same answers. A call that is
unusual in any way is processed as any other, by the method of the service, in the order of the connection. With access
control each call is: its signature has to be checked.

**Send template.** The requests of one producer differ in few places, here marked by ``|``. All else is the *key* of a
request. It determines the checks and the properties of the record, so they are taken once for each key, with *probes*
in the gaps. A value that the parser finds where its probe was is in this place in every request with this key and
with gaps of the same lengths::

    0A |n| 0A 06 12 04 sent 1A 46 12 07 |order-1| 1A 22 |0102FC..| 28 01 3A 0C 08 |s| 10 |ns| 42 02 vm 68 |3| 22 |n|
       size                              keys            id                    born at                    queue  body
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.errors import StoreError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import GrpcMessageType
from mqtemplate.http2.grpc_call import GatheredCalls
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import Drafts, RecordDraft, pack_host
from mqtemplate.record.properties_template import PropertiesTemplate
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.grpc_api.checks import INLINE_BYTES, check_group_name, check_topic_name
from mqtemplate.server.grpc_api.consuming import GrpcConsuming, ack_answer, superseded
from mqtemplate.server.grpc_api.context import GrpcContexts, is_client_id
from mqtemplate.server.grpc_api.encoded import short_ok_answer, varint
from mqtemplate.server.grpc_api.producing import PLAIN_TYPES, GrpcProducing, unflushed_answer
from mqtemplate.server.requests.response import call_when_durable

Slow = Callable[[GrpcCall, bytes], None]
"""Processes one call as any other."""

# --- sends: the parts of a request ----------------------------------------------------------------

_SHORT = rb"([\x80-\xff]{0,3}[\0-\x7f])"
"""Length of up to 256 MiB, as protobuf encodes it."""
_REQUEST = re.compile(
    rb"\n"
    + _SHORT  # the only message: all that follows
    + rb"(\n.{1,1500}?)(?:(\x12[\x01-\x7f])([!-~]{1,127}))?\x1a\"([0-9A-F]{34})"  # topic, properties, tag, keys, id
    rb"(.{0,60}?:.\x08)([\x80-\xff]{4}[\0-\x7f])(?:\x10([\x80-\xff]{0,4}[\0-\x7f]))?"  # encoding, type, born at
    rb"(.{0,400}?)(?:h([\0-\x7f]))?\"" + _SHORT,  # born host and others, queue, body
    re.DOTALL,
)
_PROBE_ID = b"PROBE.MESSAGE.ID.AT.ITS.OWN.PLACE."
_PROBE_SECONDS = 33_000_000_123
_PROBE_NANOS = {0: 0, 3: 1_000_000, 4: 7_000_000, 5: 777_000_000}
"""Number of bytes -> nanoseconds that take so many."""
_PROBE_QUEUE = 93
_PROBE_BODY = b"PROBE"
_MAX_NANOS = 1_000_000_000

_MAX_KEYS = 1_000
_UNKNOWN: Any = object()


@lru_cache(maxsize=8_192)
def _number(coded: bytes) -> int:
    """Return a number that protobuf encoded. A time has few different parts: the same second, whole milliseconds."""
    value = 0
    for at, byte in enumerate(coded):
        value |= (byte & 0x7F) << 7 * at
    return value


class _Key(NamedTuple):
    """Bytes of a request between its gaps, and the lengths of those gaps that have several.

    Attributes:
        ip: Address of the client. It is a property of messages without a born host.
    """

    ip: str
    front: bytes
    keys_head: bytes
    keys_bytes: int
    middle: bytes
    nanos_bytes: int
    back: bytes
    has_queue: bool

    def request(self, keys: str) -> bytes | None:
        """Return the request with this key that has probes in its gaps; None if a time of birth is unusual."""
        nanos = _PROBE_NANOS.get(self.nanos_bytes)
        if nanos is None:
            return None
        born = (varint(_PROBE_SECONDS), b"\x10" + varint(nanos) if nanos else b"")
        queue = b"h%c" % _PROBE_QUEUE if self.has_queue else b""
        body = b'"' + varint(len(_PROBE_BODY)) + _PROBE_BODY
        system = (self.front, self.keys_head, keys.encode(), b'\x1a"', _PROBE_ID, self.middle, *born, self.back, queue)
        message = b"".join((*system, body))
        return b"\n" + varint(len(message)) + message


_KeyValues = tuple[str, bytes, bytes, int, bytes, int, bytes, bool]
"""The same as a plain tuple, which is created and compared faster."""


class _Template(NamedTuple):
    """Common part of all requests with one key. The gaps of the properties are the id, the keys and the time of birth.

    Attributes:
        queue_id: Queue of a message with a message group or a priority; None for any queue.
        queue_count: Number of queues of the topic.
    """

    topic: str
    properties: PropertiesTemplate
    tags_code: int
    sys_flag: int
    queue_id: int | None
    queue_count: int


class _Accepted(NamedTuple):
    """A send that was checked."""

    call: GrpcCall
    data: bytes
    unique_id: bytes
    draft: RecordDraft


class GatheredSends:
    """Sends of one ordinary message each: without a delay, not in a transaction, to a topic whose queues exist.

    Args:
        slow: See `Slow`.
    """

    def __init__(self, core: ServerCore, producing: GrpcProducing, contexts: GrpcContexts, slow: Slow) -> None:
        self._core = core
        self._store = core.registration.engine.store
        self._topics = core.topics
        self._producing = producing
        self._contexts = contexts
        self._slow = slow
        self._max_body_bytes = core.registration.engine.settings.max_message_size
        self._templates: dict[_KeyValues, _Template | None] = {}
        self._seen: set[int] = set()
        self._ready: set[str] = set()  # topics whose queues exist
        self._checked_state: object = None  # all this holds while the topics have this state

    def process(self, calls: GatheredCalls) -> None:
        """Store the messages of calls that were read together, and answer each call."""
        connection = calls[0][0].connection
        remote = connection.remote
        born_host = pack_host(remote)
        accepted: list[_Accepted] = []
        for call, data in calls:
            found = self._accept(call, data, remote.ip)
            if found is None:
                self._store_together(accepted)  # they were sent before
                accepted = []
                self._slow(call, data)
            else:
                found.draft.born_host = born_host
                accepted.append(found)
        self._store_together(accepted)
        connection.loop.call_soon(self._store.index.index_recent)  # after the answers: no producer waits for it

    def _accept(self, call: GrpcCall, data: bytes, ip: str) -> _Accepted | None:
        """Return the checked message of a call; None if it is unusual, or will be refused."""
        found = _REQUEST.match(data)
        end = len(data)
        if found is None or end > INLINE_BYTES or not is_client_id(call.metadata.get("x-mq-client-id", "")):
            return None
        size, front, keys_head, keys, unique_id, middle, seconds, nanos, back, queue, body_size = found.groups(b"")
        body_at = found.end()
        body_bytes = end - body_at
        is_whole = _number(size) == end - found.end(1) and _number(body_size) == body_bytes
        if not is_whole or not 0 < body_bytes <= self._max_body_bytes or _number(nanos) >= _MAX_NANOS:
            return None
        key = ip, front, keys_head, len(keys), middle, len(nanos), back, bool(queue)
        template = self._template(call, key)
        if template is None:
            return None
        born_ms = _number(seconds) * 1_000 + _number(nanos) // 1_000_000
        properties = template.properties.fill(unique_id, keys, b"%d" % born_ms)
        queue_id = template.queue_id
        if queue_id is None:
            queue_id = self._producing.next_queue() % template.queue_count
        draft = RecordDraft(template.topic, queue_id, data[body_at:], properties, template.tags_code)
        draft.sys_flag, draft.born_timestamp = template.sys_flag, born_ms
        return _Accepted(call, data, unique_id, draft)

    # --- templates -----------------------------------------------------------------------------

    def _template(self, call: GrpcCall, key: _KeyValues) -> _Template | None:
        """Return the template of a key; None if its requests are not ordinary, or a queue has to be created."""
        if self._checked_state is not self._topics.table.state:
            self._templates.clear()
            self._ready.clear()
            self._checked_state = self._topics.table.state
        found = self._templates.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            # The second time: a producer with a text of its own in each message costs no second decoding.
            if hash(key) not in self._seen:
                if len(self._seen) >= _MAX_KEYS:
                    self._seen.clear()
                self._seen.add(hash(key))
                return None
            if len(self._templates) >= _MAX_KEYS:
                self._templates.clear()
            found = self._templates[key] = self._learn(call, _Key(*key))
        template: _Template | None = found
        if template is None or template.topic in self._ready:
            return template
        # The slow path creates the file of a queue in another thread: that may take a disk 100 ms.
        if not all(self._topics.has_queue(template.topic, each) for each in range(template.queue_count)):
            return None
        self._ready.add(template.topic)
        return template

    def _learn(self, call: GrpcCall, key: _Key) -> _Template | None:
        """Decode and check a request with probes in its gaps, as any other; return None if it is not ordinary."""
        keys = "~" * key.keys_bytes
        data = key.request(keys)
        try:
            (message,) = protos.SendMessageRequest.FromString(data or b"").messages
        except (protos.DecodeError, ValueError):
            return None
        topic, system = message.topic.name, message.system_properties
        born = system.born_timestamp
        born_ms = born.seconds * 1_000 + born.nanos // 1_000_000
        has_probes = (
            (message.body, system.message_id, born.seconds) == (_PROBE_BODY, _PROBE_ID.decode(), _PROBE_SECONDS)
            and born.nanos == _PROBE_NANOS[key.nanos_bytes]
            and (not key.has_queue or system.queue_id == _PROBE_QUEUE)
            and (not keys or list(system.keys).count(keys) == 1)
        )
        config = self._topics.table.config(topic)
        if not has_probes or config is None:
            return None
        try:
            check_topic_name(topic)
            self._topics.queue(topic, 0)
            checked = self._producing.check(self._contexts.of(call, "SendMessage").caller, message, config)
        except Exception:  # each of these requests gets its answer as any other, and an unexpected error is logged
            return None
        if checked.kind not in PLAIN_TYPES or checked.send.is_retry:
            return None
        draft = self._core.sends.plain_draft(checked.send, 0, checked.message_id, checked.tag)
        properties = PropertiesTemplate.around(draft.properties, _PROBE_ID, keys.encode(), b"%d" % born_ms)
        if properties is None:
            return None
        count = int(config.get("writeQueueNums", 0))
        is_any = checked.kind is GrpcMessageType.NORMAL
        queue_id = None if is_any else self._producing.queue(system, checked.kind, count)
        return _Template(topic, properties, draft.tags_code, draft.sys_flag, queue_id, count)

    # --- storing -------------------------------------------------------------------------------

    def _store_together(self, accepted: Sequence[_Accepted]) -> None:
        if not accepted:
            return
        drafts = [each.draft for each in accepted]
        try:
            puts = self._put(drafts)
        except Exception:  # the valid ones are stored by themselves, and each of the others gets its own error
            for each in accepted:
                self._slow(each.call, each.data)
            return
        topics = {draft.topic for draft in drafts}
        call_when_durable(self._store, puts.end, topics, partial(_answer, accepted, puts.queue_offsets))

    def _put(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        if len(drafts) > 1:
            return self._store.put(Drafts(drafts))
        offset, size, queue_offset, timestamp = self._store.put(drafts[0])  # for one record faster than `Drafts`
        return PutBatch([offset], [size], [queue_offset], timestamp)


def _answer(accepted: Sequence[_Accepted], queue_offsets: Sequence[int], error: StoreError | None) -> None:
    """Answer sends. This runs in the thread that flushes, or in the I/O thread if nothing is flushed."""
    if error is None:
        answers = [
            short_ok_answer(each.unique_id, offset) for each, offset in zip(accepted, queue_offsets, strict=True)
        ]
    else:
        answers = [unflushed_answer(error)] * len(accepted)
    reply_together([each.call for each in accepted], answers)


# --- acknowledgements -----------------------------------------------------------------------------


class _CheckedAck(NamedTuple):
    """An acknowledgement of one message that was checked."""

    call: GrpcCall
    data: bytes
    entry: Any
    handle: ReceiptHandle


class GatheredAcks:
    """Acknowledgements of one message each: push consumers send one for each message.

    Those of one group and topic change its progress together, and all of them are one record of the journal.

    Args:
        slow: See `Slow`.
    """

    def __init__(self, consuming: GrpcConsuming, contexts: GrpcContexts, slow: Slow) -> None:
        self._pop = consuming.pop
        self._consuming = consuming
        self._contexts = contexts
        self._slow = slow

    def process(self, calls: GatheredCalls) -> None:
        """Acknowledge the messages of calls that were read together, and answer each call."""
        accepted: dict[tuple[str, str], list[_CheckedAck]] = {}
        with self._pop.journal.writing():
            for call, data in calls:
                if not self._accept(call, data, accepted):
                    self._ack_together(accepted)  # they were sent before
                    accepted.clear()
                    self._slow(call, data)
            self._ack_together(accepted)

    def _accept(self, call: GrpcCall, data: bytes, accepted: dict[tuple[str, str], list[_CheckedAck]]) -> bool:
        """Add the checked acknowledgement of a call; return False if it is unusual, or will be refused."""
        if len(data) > INLINE_BYTES:
            return False
        try:
            context = self._contexts.of(call, "AckMessage")
            request = protos.AckMessageRequest.FromString(data)
            (entry,) = request.entries
            key = check_group_name(request.group.name), check_topic_name(request.topic.name)
            handle = self._consuming.handle(context, entry.receipt_handle)
        except Exception:  # the call gets its answer as any other, and an unexpected error is logged
            return False
        accepted.setdefault(key, []).append(_CheckedAck(call, data, entry, handle))
        return True

    def _ack_together(self, accepted: Mapping[tuple[str, str], Sequence[_CheckedAck]]) -> None:
        for (group, topic), acks in accepted.items():
            answers = _AckAnswers(acks)
            try:
                answers.complete(self._pop.ack_all(group, topic, [each.handle for each in acks], answers.durable))
            except Exception:  # each one gets its own error; it does not matter if one is done already
                for each in acks:
                    self._slow(each.call, each.data)


class _AckAnswers:
    """Answers acknowledgements when their results are known and they are durable, in any order. Thread-safe."""

    def __init__(self, acks: Sequence[_CheckedAck]) -> None:
        self._acks = acks
        self._lock = threading.Lock()
        self._results: Sequence[bool] = ()
        self._is_durable = False
        self._error: Exception | None = None

    def durable(self, error: Exception | None) -> None:
        with self._lock:
            self._is_durable, self._error = True, error
            results = self._results
        self._answer_done(results)

    def complete(self, results: Sequence[bool]) -> None:
        with self._lock:
            self._results = results
            is_durable = self._is_durable
        for each, is_done in zip(self._acks, results, strict=True):
            if not is_done:
                each.call.reply(ack_answer([each.entry], [superseded(each.entry.receipt_handle)]))
        if is_durable:
            self._answer_done(results)

    def _answer_done(self, results: Sequence[bool]) -> None:
        done = [each for each, is_done in zip(self._acks, results, strict=False) if is_done]
        if done:
            answers = [ack_answer([each.entry], [self._error]) for each in done]
            reply_together([each.call for each in done], answers)


# --- answers --------------------------------------------------------------------------------------


def reply_together(calls: Sequence[GrpcCall], answers: Sequence[bytes]) -> None:
    """Reply to calls of one connection with one write to its socket."""
    loop = calls[0].connection.loop
    if loop.is_current_thread:
        for call, answer in zip(calls, answers, strict=True):
            call.reply(answer)
    else:
        loop.call_soon(partial(reply_together, calls, answers))

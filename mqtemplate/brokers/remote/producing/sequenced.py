"""Sequenced sends to a server of this library."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import send_error
from mqtemplate.errors import (
    MessageError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.remoting.protocol.bodies.own_requests import SendSequencedRequestHeader, SendSequencedResponseHeader
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.messages import EncodedBatch
from mqtemplate.remoting.protocol.sequenced import encode_queue_batch, encode_queue_batches
from mqtemplate.results import SequencedResult
from mqtemplate.topics import check_send_topic

_MAX_BODY_BYTES = (1 << 20) - 1_024  # a run has its topic in addition
_RETRY_S = 0.1
_MAY_PASS = (ResponseCode.SYSTEM_BUSY, ResponseCode.FLUSH_DISK_TIMEOUT)

_Messages = Sequence[tuple[Message, MessageQueue]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Body of one request, for one broker."""

    broker_name: str
    topics: Iterable[str]
    body: bytes
    count: int


@dataclass(frozen=True, slots=True)
class SequencedSends:
    """Sends numbered messages in parts. A part without a response is sent again: the server drops repeats."""

    context: ClientContext

    def send(self, messages: _Messages, sequence: SendSequence, timeout_ms: int = 10_000) -> SequencedResult:
        """See `MessageSends.send_sequenced`.

        Raises:
            SendTimeoutError: The server did not respond in time, also after repeats.
        """
        return self._send_parts(map(self._encode, _parts(messages)), sequence, timeout_ms)

    def send_encoded(
        self, batch: EncodedBatch, queue: MessageQueue, sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """Send encoded messages to one queue; otherwise as `send`.

        Their properties are those of an application, which nothing checks here, and perhaps a delay.
        """
        (topic,) = names = self._find_topics({batch.topic})
        parts = (
            _Part(queue.broker_name, names.keys(), encode_queue_batch(names[topic], queue.queue_id, data), count)
            for data, count in _cut(batch)
        )
        return self._send_parts(parts, sequence, timeout_ms)

    def _find_topics(self, topics: set[str]) -> dict[str, str]:
        """Return the names on the wire of checked topics; the client then has the addresses of their brokers."""
        for topic in topics:
            check_send_topic(topic)
            self.context.routes.publish_route(topic)
        return {topic: self.context.namespace.wrap(topic) for topic in topics}

    def _encode(self, messages: _Messages) -> _Part:
        names = {queue.broker_name for _, queue in messages}
        if len(names) > 1:
            raise MessageError(f"a sequenced send goes to one broker, this one names {', '.join(sorted(names))}")
        topics = self._find_topics({message.topic for message, _ in messages})
        body = encode_queue_batches(((message, queue.queue_id) for message, queue in messages), topics)
        return _Part(names.pop(), topics.keys(), body, len(messages))

    def _send_parts(self, parts: Iterable[_Part], sequence: SendSequence, timeout_ms: int) -> SequencedResult:
        deadline = time.monotonic() + timeout_ms / 1_000
        stored = repeated = 0
        for part in parts:
            result = self._send_part(part, sequence.after(stored + repeated), deadline, timeout_ms)
            stored, repeated = stored + result.stored, repeated + result.repeated
        return SequencedResult(stored, repeated)

    def _send_part(self, part: _Part, sequence: SendSequence, deadline: float, timeout_ms: int) -> SequencedResult:
        context, broker_name = self.context, part.broker_name
        header = SendSequencedRequestHeader(
            producer_group=context.namespace.wrap(context.settings.producer_group),
            app_id=sequence.app_id,
            version=sequence.version,
            partition=sequence.partition,
            first=sequence.first,
            born_timestamp=context.clock.now_ms(),
        )
        failure: object = ""
        while True:
            left_ms = int((deadline - time.monotonic()) * 1_000)
            if left_ms <= 0:
                raise SendTimeoutError(
                    f"{part.count} messages of partition {sequence.partition} were not acknowledged in {timeout_ms} ms "
                    f"by broker {broker_name!r} ({failure}); send them again with the same numbers"
                )
            try:
                request = RemotingCommand.request(RequestCode.SEND_SEQUENCED_MESSAGES, header, part.body)
                response = self._invoke(broker_name, request, min(left_ms, context.settings.request_timeout_ms))
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                failure = exc
            else:
                if response.code == ResponseCode.SUCCESS:
                    self._forget_default_routes(part.topics)
                    answer = response.header(SendSequencedResponseHeader)
                    return SequencedResult(answer.stored, answer.repeated)
                failure = response.remark
                if response.code not in _MAY_PASS:
                    address = context.routes.address(broker_name)
                    raise send_error(response, f"send {part.count} numbered messages", address, has_timer=False)
            threading.Event().wait(min(_RETRY_S, max(0.0, deadline - time.monotonic())))

    def _forget_default_routes(self, topics: Iterable[str]) -> None:
        """Look up the real queues of topics that the server has just created."""
        for topic in topics:
            route = self.context.routes.cached(topic)
            if route is not None and route.is_default:
                self.context.routes.forget(topic)

    def _invoke(self, broker_name: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        context = self.context
        address = context.routes.address(broker_name)
        context.instance.register_at([address])
        announced = context.instance.announced.get(address)
        if announced is None:
            raise RemoteConnectError(f"{address} has not answered a heartbeat")
        if Capability.SEQUENCED_SEND not in announced:
            raise UnsupportedError(
                f"broker {broker_name!r} at {address} does not drop repeated sends (RocketMQ's brokers do not); "
                "use send_batch"
            )
        return context.instance.invoke(address, request, timeout_ms)


def _parts(messages: _Messages) -> Iterator[_Messages]:
    """Yield the messages in parts that fit into a request."""
    start = size = 0
    for index, (message, _) in enumerate(messages):
        size += len(message.body) + 64 + sum(len(name) + len(value) for name, value in message.properties.items())
        if size > _MAX_BODY_BYTES and index > start:
            yield messages[start:index]
            start, size = index, len(message.body)
    if start < len(messages):
        yield messages[start:]


def _cut(batch: EncodedBatch) -> Iterator[tuple[memoryview, int]]:
    """Yield encoded messages in parts that fit into a request, with their number."""
    first = at = 0
    while first < len(batch.ends):
        last = max(bisect_right(batch.ends, at + _MAX_BODY_BYTES), first + 1)
        yield batch.data[at : batch.ends[last - 1]], last - first
        first, at = last, batch.ends[last - 1]

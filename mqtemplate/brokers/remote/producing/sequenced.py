"""Sequenced sends to a server of this library."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.errors import send_error
from mqtemplate.errors import (
    MessageError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.sequenced import SendSequencedRequestHeader, SendSequencedResponseHeader
from mqtemplate.remoting.protocol.sequenced import encode_runs
from mqtemplate.results import SequencedResult
from mqtemplate.topics import check_send_topic

_MAX_BODY_BYTES = 1 << 20
_RETRY_S = 0.1
_MAY_PASS = (ResponseCode.SYSTEM_BUSY, ResponseCode.FLUSH_DISK_TIMEOUT)

_Messages = Sequence[tuple[Message, MessageQueue]]


@dataclass(frozen=True, slots=True)
class SequencedSends:
    """Sends numbered messages in parts. A part without a response is sent again: the server drops repeats."""

    context: ClientContext

    def send(self, messages: _Messages, sequence: SendSequence, timeout_ms: int) -> SequencedResult:
        """See `Broker.send_sequenced`.

        Raises:
            SendTimeoutError: The server did not respond in time, also after repeats.
        """
        deadline = time.monotonic() + timeout_ms / 1_000
        stored = repeated = 0
        for part in _parts(messages):
            result = self._send_part(part, sequence.after(stored + repeated), deadline, timeout_ms)
            stored, repeated = stored + result.stored, repeated + result.repeated
        return SequencedResult(stored, repeated)

    def _send_part(self, part: _Messages, sequence: SendSequence, deadline: float, timeout_ms: int) -> SequencedResult:
        context = self.context
        broker_names = {queue.broker_name for _, queue in part}
        if len(broker_names) > 1:
            raise MessageError(f"a sequenced send goes to one broker, this one names {', '.join(sorted(broker_names))}")
        topics = {topic: context.namespace.wrap(topic) for topic in {message.topic for message, _ in part}}
        for topic in topics:
            check_send_topic(topic)
            context.routes.publish_route(topic)  # has the address of the broker
        body = encode_runs(((message, queue.queue_id) for message, queue in part), topics)
        header = SendSequencedRequestHeader(
            producer_group=context.namespace.wrap(context.settings.producer_group),
            app_id=sequence.app_id,
            version=sequence.version,
            partition=sequence.partition,
            first=sequence.first,
            born_timestamp=context.clock.now_ms(),
        )
        (broker_name,) = broker_names
        failure: object = ""
        while True:
            left_ms = int((deadline - time.monotonic()) * 1_000)
            if left_ms <= 0:
                raise SendTimeoutError(
                    f"{len(part)} messages of partition {sequence.partition} were not acknowledged in {timeout_ms} ms "
                    f"by broker {broker_name!r} ({failure}); send them again with the same numbers"
                )
            try:
                request = RemotingCommand.request(RequestCode.SEND_SEQUENCED_MESSAGES, header, body)
                response = self._invoke(broker_name, request, min(left_ms, context.settings.request_timeout_ms))
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                failure = exc
            else:
                if response.code == ResponseCode.SUCCESS:
                    self._forget_default_routes(topics)
                    answer = response.header(SendSequencedResponseHeader)
                    return SequencedResult(answer.stored, answer.repeated)
                failure = response.remark
                if response.code not in _MAY_PASS:
                    address = context.routes.address(broker_name)
                    raise send_error(response, f"send {len(part)} numbered messages", address, has_timer=False)
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

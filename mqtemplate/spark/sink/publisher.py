"""Publishing of the rows of one task: queues, numbers, and the sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from mqtemplate.broker import Broker, Capability
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageQueue, SendSequence
from mqtemplate.remoting.protocol.messages import EncodedBatch
from mqtemplate.results import SendResult, SequencedResult
from mqtemplate.spark.sink.options import SinkOptions
from mqtemplate.spark.sink.rows import OutgoingRow

_MAX_IN_FLIGHT = 16
_MAX_BATCH_BYTES = 1 << 20
_MAX_BATCH = 1_000

_Numbered = tuple[Message, MessageQueue]


class RowPublisher(Protocol):
    """Sends messages with their queues, in order."""

    def publish(self, messages: Sequence[_Numbered]) -> None:
        """Send the next messages of the task."""

    def finish(self) -> SequencedResult:
        """Wait for all sends. Return the numbers of messages stored and dropped."""

    def close(self) -> None:
        """Wait until nothing is being sent, also after an error."""


@dataclass(slots=True)
class SequencedPublisher:
    """Sends to a broker that drops repeats: each broker of a cluster gets its own numbers.

    One send is under way while the caller creates the next messages. The next one starts after its answer: the broker
    refuses a gap in the numbers.
    """

    broker: Broker
    sequence: SendSequence
    timeout_ms: int
    _sent: dict[str, int] = field(default_factory=dict)
    _stored: int = 0
    _repeated: int = 0
    _sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "mqtemplate-spark-sink"))
    _under_way: Future[None] | None = None

    def publish(self, messages: Sequence[_Numbered]) -> None:
        self._await_answer()
        self._under_way = self._sender.submit(self._send, messages)

    def finish(self) -> SequencedResult:
        self._await_answer()
        return SequencedResult(self._stored, self._repeated)

    def close(self) -> None:
        self._sender.shutdown()

    def _await_answer(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _send(self, messages: Sequence[_Numbered]) -> None:
        for name, part in _by_broker(messages):
            self._count(name, len(part), self.broker.sends.send_sequenced(part, self._next(name), self.timeout_ms))

    def _next(self, broker_name: str) -> SendSequence:
        return self.sequence.after(self._sent.get(broker_name, 0))

    def _count(self, broker_name: str, sent: int, result: SequencedResult) -> None:
        self._sent[broker_name] = self._sent.get(broker_name, 0) + sent
        self._stored += result.stored
        self._repeated += result.repeated


@dataclass(slots=True)
class EncodedPublisher(SequencedPublisher):
    """Sends to our server, which takes encoded messages as well."""

    broker: RemoteBroker

    def publish_encoded(self, batch: EncodedBatch, queue: MessageQueue) -> None:
        """Send the next messages of the task to one queue."""
        self._await_answer()
        self._under_way = self._sender.submit(self._send_encoded, batch, queue)

    def _send_encoded(self, batch: EncodedBatch, queue: MessageQueue) -> None:
        name = queue.broker_name
        self._count(
            name, len(batch.ends), self.broker.sends.send_encoded(batch, queue, self._next(name), self.timeout_ms)
        )


@dataclass(slots=True)
class PlainPublisher:
    """Sends to a broker of RocketMQ, in batches where it allows them. A task that is repeated sends its rows again."""

    broker: Broker
    timeout_ms: int
    _futures: deque[Future[SendResult]] = field(default_factory=deque)
    _count: int = 0

    def publish(self, messages: Sequence[_Numbered]) -> None:
        batches_delays = Capability.BATCH_DELAY in self.broker.capabilities
        for queue, part in _batches(messages, single_delays=not batches_delays):
            if len(self._futures) >= _MAX_IN_FLIGHT:
                self._futures.popleft().result()
            self._futures.append(self.broker.sends.send_async(part, queue, self.timeout_ms))
            self._count += len(part)

    def finish(self) -> SequencedResult:
        while self._futures:
            self._futures.popleft().result()
        return SequencedResult(self._count, 0)

    def close(self) -> None:
        wait(self._futures)


def create_publisher(broker: Broker, options: SinkOptions, sequence: SendSequence) -> RowPublisher:
    """Return the publisher for a broker.

    Raises:
        UnsupportedError: Repeats must be dropped, and the broker does not drop them.
    """
    drops_repeats = Capability.SEQUENCED_SEND in broker.capabilities
    if options.idempotent and not drops_repeats:
        raise UnsupportedError(
            "option idempotent=true: the brokers of RocketMQ do not drop repeats, so a repeated task sends its rows "
            "again; leave the option out, and let consumers skip repeats by key"
        )
    if drops_repeats and options.idempotent is not False:
        if isinstance(broker, RemoteBroker):
            return EncodedPublisher(broker, sequence, options.send_timeout_ms)
        return SequencedPublisher(broker, sequence, options.send_timeout_ms)
    return PlainPublisher(broker, options.send_timeout_ms)


class QueueChooser:
    """Chooses the queue of each row. A repeated task chooses the same ones, as long as the topic keeps its queues."""

    def __init__(self, broker: Broker, partition: int) -> None:
        self._broker = broker
        self._turn = partition
        self._queues: dict[str, Sequence[MessageQueue]] = {}

    def choose(self, rows: Iterable[OutgoingRow]) -> list[_Numbered]:
        """Return the messages of the next rows with their queues. Rows that name none share one queue of the topic."""
        chosen, shared = [], self._next_turn()
        for message, queue_id, sharding_key in rows:
            queues = self._queues.get(message.topic) or self._find(message.topic)
            if queue_id is not None:
                queue = _with_id(queues, message.topic, queue_id)
            elif sharding_key is not None:
                # The same queue as `select_queue_by_hash`, whose package loads what executors do not have.
                queue = queues[abs(java_string_hash(sharding_key)) % len(queues)]
            else:
                queue = queues[shared % len(queues)]
            chosen.append((message, queue))
        return chosen

    def choose_one(self, topic: str) -> MessageQueue:
        """Return the queue of all next rows, which name none: that of `choose`."""
        queues = self._queues.get(topic) or self._find(topic)
        return queues[self._next_turn() % len(queues)]

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _find(self, topic: str) -> Sequence[MessageQueue]:
        queues = self._queues[topic] = self._broker.queues(topic)
        return queues


def _with_id(queues: Sequence[MessageQueue], topic: str, queue_id: int) -> MessageQueue:
    if not 0 <= queue_id < len(queues):
        raise MessageError(f"queueId must be 0..{len(queues) - 1} for topic {topic!r}, got {queue_id}")
    return queues[queue_id]


def _by_broker(messages: Sequence[_Numbered]) -> Iterator[tuple[str, Sequence[_Numbered]]]:
    names = {queue.broker_name for _, queue in messages}
    for name in sorted(names):
        yield name, messages if len(names) == 1 else [each for each in messages if each[1].broker_name == name]


def _batches(messages: Sequence[_Numbered], *, single_delays: bool) -> Iterator[tuple[MessageQueue, list[Message]]]:
    """Yield the messages in batches for one queue; delayed ones singly if a batch may not have them."""
    for queue, run in groupby(messages, lambda each: each[1]):
        part: list[Message] = []
        size = 0
        for message, _ in run:
            is_single = single_delays and not message.properties.keys().isdisjoint(DELAY_PROPERTIES)
            size += len(message.body)
            if part and (is_single or size > _MAX_BATCH_BYTES or len(part) >= _MAX_BATCH):
                yield queue, part
                part, size = [], len(message.body)
            if is_single:
                yield queue, [message]
            else:
                part.append(message)
        if part:
            yield queue, part

"""Measurement of sends and of calls of handlers: messages, durations and errors by topic.

On the path of a message stand two reads of a clock and one update under a lock, about half a microsecond. Names,
labels and sums are computed when the values are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.metrics import OTHER, HistogramSnapshot, MetricKind, MetricSample
from mqtemplate.observability.busy import GAP_NS, BusyTimes
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observation.interface import HandleAsync, HandleMany, HandleOne, ObservedListener, Sends
from mqtemplate.results import HalfMessage, SendResult
from mqtemplate.user_code import type_name

_F = TypeVar("_F")
_Future = TypeVar("_Future", bound=Future[Any])

_MAX_ERROR_TYPES = 50
_SKEW_WINDOW_MS = 60_000
_DELIVER_MS = Property.TIMER_DELIVER_MS


class Operation:
    """Messages, durations and errors of one kind of operation with one topic. The lock is that of `Operations`."""

    __slots__ = ("counts", "errors", "messages", "total_ns")

    def __init__(self) -> None:
        self.messages = 0
        self.total_ns = 0
        self.counts = [0] * 128  # durations by their number of bits, as in `ValueHistogram`; the callers count in place
        self.errors: dict[str, int] = {}

    def took(self, duration_ns: int) -> None:
        """Count the duration of an operation. A clock that was set back makes it 0."""
        duration_ns = max(duration_ns, 0)
        self.total_ns += duration_ns
        self.counts[duration_ns.bit_length()] += 1

    def durations(self) -> HistogramSnapshot:
        """Return the durations up to now."""
        buckets = {1 << bits: count for bits, count in enumerate(self.counts) if count}
        return HistogramSnapshot(sum(buckets.values()), self.total_ns, buckets)

    def failed(self, error: str, count: int) -> None:
        """Count messages that failed with an error of this type."""
        key = error if error in self.errors or len(self.errors) < _MAX_ERROR_TYPES else OTHER
        self.errors[key] = self.errors.get(key, 0) + count


class Operations:
    """Operations of one kind, by topic.

    Args:
        name: Prefix of the metrics: ``client.send``, ``listener.handle``.
        labels: Labels of all of them.
        max_topics: Most topics; those beyond it are counted together.
    """

    def __init__(self, name: str, labels: dict[str, str], max_topics: int) -> None:
        self._name = name
        self._labels = labels
        self._max_topics = max_topics
        self.lock = threading.Lock()
        self._by_topic: dict[str, Operation] = {}
        self.find = self._by_topic.get

    def of(self, topic: str) -> Operation:
        """With the lock: return the operations with a topic."""
        found = self._by_topic.get(topic)
        if found is None:
            key = topic if len(self._by_topic) < self._max_topics - 1 else OTHER
            found = self._by_topic.setdefault(key, Operation())
        return found

    def succeeded(self, topic: str, count: int, duration_ns: int) -> None:
        """Count one operation with some messages."""
        with self.lock:
            operation = self.find(topic) or self.of(topic)
            operation.messages += count
            operation.took(duration_ns)

    def failed(self, topic: str, count: int, duration_ns: int, error: BaseException | None) -> None:
        """Count one operation that failed; *error* None: a handler requested redelivery."""
        with self.lock:
            operation = self.of(topic)
            operation.messages += count
            operation.took(duration_ns)
            operation.failed("RECONSUME_LATER" if error is None else type_name(error, "__qualname__"), count)

    def samples(self) -> Iterator[MetricSample]:
        """Yield ``<name>.messages``, ``<name>.duration_ns`` and ``<name>.errors``."""
        with self.lock:
            read = [
                (topic, each.messages, each.durations(), dict(each.errors)) for topic, each in self._by_topic.items()
            ]
        for topic, messages, durations, errors in read:
            labels = self._labels | {"topic": topic}
            yield MetricSample(f"{self._name}.messages", MetricKind.COUNTER, messages, labels)
            yield MetricSample(f"{self._name}.duration_ns", MetricKind.HISTOGRAM, durations, labels)
            for error, count in errors.items():
                yield MetricSample(f"{self._name}.errors", MetricKind.COUNTER, count, labels | {"error": error})


class MeasuredSends:
    """Sends that are measured; see `Sends` for the methods."""

    def __init__(self, sends: Sends, operations: Operations, clock: Clock) -> None:
        self._sends = sends
        self._operations = operations
        self._now_ns = nanoseconds(clock) if clock.is_virtual else time.perf_counter_ns
        self.send = _measured_send(sends.send, operations, self._now_ns)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        return self._measured(messages, lambda: self._sends.send_batch(messages, queue, timeout_ms))

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self._measured([message], lambda: self._sends.send_one_way(message, queue))

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        return self._measured([message], lambda: self._sends.send_half(message, group, queue, timeout_ms))

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        return self._measured_later(messages, self._sends.send_async(messages, queue, timeout_ms))

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        return self._measured_later([message], self._sends.request(message, queue, timeout_ms))

    def reply(self, request: MessageExt, body: bytes, properties: Any = None, timeout_ms: int = 3_000) -> None:
        self._sends.reply(request, body, properties, timeout_ms)

    def _measured(self, messages: Sequence[Message], send: Callable[[], _F]) -> _F:
        start_ns = self._now_ns()
        topic = messages[0].topic if messages else ""
        try:
            result = send()
        except BaseException as exc:
            self._operations.failed(topic, len(messages), self._now_ns() - start_ns, exc)
            raise
        self._operations.succeeded(topic, len(messages), self._now_ns() - start_ns)
        return result

    def _measured_later(self, messages: Sequence[Message], future: _Future) -> _Future:
        start_ns, topic = self._now_ns(), messages[0].topic if messages else ""

        def done(finished: Future[Any]) -> None:
            error = None if finished.cancelled() else finished.exception()
            duration_ns = self._now_ns() - start_ns
            if error is None:
                self._operations.succeeded(topic, len(messages), duration_ns)
            else:
                self._operations.failed(topic, len(messages), duration_ns, error)

        future.add_done_callback(done)
        return future


def _measured_send(
    send: Callable[..., SendResult], operations: Operations, now_ns: Callable[[], int]
) -> Callable[..., SendResult]:
    """Return *send*, measured. A function, since the attributes of an object would cost more than the counting."""
    lock, find, of, failed = operations.lock, operations.find, operations.of, operations.failed

    def measured(message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        start_ns = now_ns()
        try:
            result = send(message, queue, timeout_ms)
        except BaseException as exc:
            failed(message.topic, 1, now_ns() - start_ns, exc)
            raise
        took_ns = now_ns() - start_ns
        with lock:
            operation = find(message.topic) or of(message.topic)
            operation.messages += 1
            operation.total_ns += took_ns
            operation.counts[took_ns.bit_length()] += 1
        return result

    return measured


class MeasuredHandler:
    """Measurement of the calls of one listener's handler."""

    def __init__(
        self,
        listener: ObservedListener,
        operations: Operations,
        lateness: LatenessRecorder,
        skew: ClockSkew,
        clock: Clock,
    ) -> None:
        self._listener = listener
        self._operations = operations
        self._lateness = lateness
        self._skew = skew
        self._now_ns = nanoseconds(clock)
        self._busy = BusyTimes()

    def one(self, handle: HandleOne[_F]) -> HandleOne[_F]:
        """Return *handle*, measured."""
        # All that each call needs is in variables: attributes would cost a tenth of a microsecond more (measured).
        now_ns, operations, busy, note_rare = self._now_ns, self._operations, self._busy, self._note_rare
        lock, find, of, gap_ns = operations.lock, operations.find, operations.of, GAP_NS

        def measured(message: MessageExt) -> _F:
            start_ns = now_ns()
            failure = handle(message)
            end_ns = now_ns()
            took_ns, stored_ms = end_ns - start_ns, message.store_timestamp
            with lock:
                operation = find(message.topic) or of(message.topic)
                operation.messages += 1
                operation.total_ns += took_ns
                operation.counts[took_ns.bit_length()] += 1
                if (
                    failure is not None
                    or _DELIVER_MS in message.properties
                    or not message.born_timestamp <= stored_ms <= end_ns // 1_000_000
                ):
                    note_rare(operation, message, failure, start_ns, end_ns)
                # After the split of `note_rare`: a message does not wait for its own call.
                if not busy.start_ns <= start_ns <= busy.end_ns + gap_ns:
                    busy.add(start_ns, end_ns)
                elif end_ns > busy.end_ns:
                    busy.end_ns = end_ns  # as `BusyTimes.extend`; one call less
            return failure

        return measured

    def one_async(self, handle: HandleAsync[_F]) -> HandleAsync[_F]:
        """Return *handle*, measured: the time until the coroutine has ended."""

        async def measured(message: MessageExt) -> _F:
            start_ns = self._now_ns()
            failure = await handle(message)
            self._note(message, failure, start_ns, self._now_ns())
            return failure

        return measured

    def _note(self, message: MessageExt, failure: Any, start_ns: int, end_ns: int) -> None:
        with self._operations.lock:
            operation = self._operations.of(message.topic)
            operation.messages += 1
            operation.took(end_ns - start_ns)
            self._note_rare(operation, message, failure, start_ns, end_ns)
            if not self._busy.extend(start_ns, end_ns):
                self._busy.add(start_ns, end_ns)

    def _note_rare(self, operation: Operation, message: MessageExt, failure: Any, start_ns: int, end_ns: int) -> None:
        """With the lock: note what few messages have: a failure, a due time, a proof that clocks differ."""
        if failure is not None:
            operation.failed(_error_type(failure), 1)
        if _DELIVER_MS in message.properties:
            self._late(message, start_ns, end_ns)
        stored_ms = message.store_timestamp
        if message.born_timestamp > stored_ms or stored_ms * 1_000_000 > end_ns:
            self._skew.note(message, start_ns // 1_000_000)

    def many(self, handle: HandleMany[_F]) -> HandleMany[_F]:
        """Return *handle*, measured: one call with all its messages."""

        def measured(messages: Sequence[MessageExt]) -> _F:
            start_ns = self._now_ns()
            failures: Any = handle(messages)
            end_ns = self._now_ns()
            with self._operations.lock:
                operation = self._operations.of(messages[0].topic)
                operation.messages += len(messages)
                operation.took(end_ns - start_ns)
                for failure in failures:
                    operation.failed(_error_type(failure), len(failure.messages))
                for message in messages:
                    if _DELIVER_MS in message.properties:
                        self._late(message, start_ns, end_ns)
                if not self._busy.extend(start_ns, end_ns):
                    self._busy.add(start_ns, end_ns)
            return failures  # type: ignore[no-any-return]

        return measured

    def _late(self, message: MessageExt, start_ns: int, end_ns: int) -> None:
        self._lateness.record(self._listener, message, start_ns // 1_000_000, end_ns // 1_000_000, self._busy)


class ClockSkew:
    """The least differences of clocks that handled messages prove.

    A producer whose message was born after it was stored has a clock that is ahead of the broker's. A message that was
    stored after its handler was called shows that the clock of this process is behind.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = self._behind = (0, 0)  # difference in ms, time at which it was seen

    def note(self, message: MessageExt, called_ms: int) -> None:
        """Note a message that proves a difference."""
        ahead_ms = message.born_timestamp - message.store_timestamp
        behind_ms = message.store_timestamp - called_ms
        if ahead_ms >= self.ahead_ms:
            self._ahead = (ahead_ms, called_ms)
        if behind_ms >= self.behind_ms:
            self._behind = (behind_ms, called_ms)

    @property
    def ahead_ms(self) -> int:
        """Least time by which a producer's clock is ahead of the broker's, as seen in the last minute."""
        return self._recent(self._ahead)

    @property
    def behind_ms(self) -> int:
        """Least time by which the clock of this process is behind the broker's, as seen in the last minute."""
        return self._recent(self._behind)

    def _recent(self, seen: tuple[int, int]) -> int:
        return max(0, seen[0]) if self._clock.now_ms() - seen[1] < _SKEW_WINDOW_MS else 0


def _error_type(failure: Any) -> str:
    return "RECONSUME_LATER" if failure.error is None else type_name(failure.error, "__qualname__")


def nanoseconds(clock: Clock) -> Callable[[], int]:
    """Return a function that returns the time of *clock* in nanoseconds since the epoch."""
    return (lambda: clock.now_ms() * 1_000_000) if clock.is_virtual else time.time_ns

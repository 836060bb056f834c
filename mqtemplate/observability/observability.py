"""The observability of one application: metrics, traces and lateness of its sends and handlers.

Sends and calls of handlers are counted by topic: messages, durations and errors. On the path of a message stand two
reads of a clock and one update under a lock, about half a microsecond. Names, labels and sums are computed when the
values are read.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import FailedMessages, HandlerCall, HandlerWrapper, ListenerInfo, Observation
from mqtemplate.calls.send import SEND, SendCall, SendNext, SendWrapper, send_and_note
from mqtemplate.calls.steps import chained
from mqtemplate.clock import Clock
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.message import MessageExt, Property
from mqtemplate.metrics import OTHER, HistogramSnapshot, MetricKind, Metrics, MetricSample, warn_limited
from mqtemplate.observability.collectors import GroupLag, GroupLags, PendingByHorizon, listener_samples
from mqtemplate.observability.lateness import BusyTimes, LatenessRecorder
from mqtemplate.observability.settings import ObservabilitySettings
from mqtemplate.user_code import type_name

if TYPE_CHECKING:
    from mqtemplate.observability.tracing import Tracing

_log = get_logger("mqtemplate.metrics")

_MAX_ERROR_TYPES = 50
_ERRORS_ADVICE = "raise fewer classes of exceptions; those created at run time each are a class of their own"
_SKEW_WINDOW_MS = 60_000
_DELIVER_MS = Property.TIMER_DELIVER_MS


class OperationCounts:
    """Messages, durations and errors of one kind of operation with one topic. `Operations` has the lock."""

    __slots__ = ("counts", "errors", "messages", "total_ns")

    def __init__(self) -> None:
        self.messages = 0
        self.total_ns = 0
        self.counts = [0] * 128  # durations by their number of bits, as in `ValueHistogram`
        self.errors: dict[str, int] = {}

    def add(self, messages: int, duration_ns: int) -> None:
        """Count an operation with some messages. A clock that was set back makes its duration 0."""
        if duration_ns < 0:  # noqa: PLR1730  a call of ``max`` would cost a tenth of what the counting does
            duration_ns = 0
        self.messages += messages
        self.total_ns += duration_ns
        self.counts[duration_ns.bit_length()] += 1

    def durations(self) -> HistogramSnapshot:
        """Return the durations up to now."""
        buckets = {1 << bits: count for bits, count in enumerate(self.counts) if count}
        return HistogramSnapshot(sum(buckets.values()), self.total_ns, buckets)

    def failed(self, error: str, count: int) -> bool:
        """Count messages that failed with an error of this type. Return True for the first that has no own series."""
        key = error if error in self.errors or len(self.errors) < _MAX_ERROR_TYPES else OTHER
        is_first_other = key == OTHER and key not in self.errors
        self.errors[key] = self.errors.get(key, 0) + count
        return is_first_other


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
        self._by_topic: dict[str, OperationCounts] = {}
        self._has_other_errors = False
        self.find = self._by_topic.get

    def of(self, topic: str) -> OperationCounts:
        """With the lock: return the operations with a topic."""
        found = self._by_topic.get(topic)
        if found is None:
            key = topic if len(self._by_topic) < self._max_topics - 1 else OTHER
            if key == OTHER and key not in self._by_topic:
                warn_limited(f"{self._name}.messages", self._max_topics)
            found = self._by_topic.setdefault(key, OperationCounts())
        return found

    def failed(self, operation: OperationCounts, error: BaseException | None, count: int) -> None:
        """With the lock: count messages of an operation that failed."""
        if operation.failed(_error_type(error), count) and not self._has_other_errors:
            self._has_other_errors = True
            warn_limited(f"{self._name}.errors", _MAX_ERROR_TYPES, _ERRORS_ADVICE)

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


def measured_sends(operations: Operations, clock: Clock) -> SendWrapper:
    """Return the wrapper that counts sends."""
    now_ns = nanoseconds(clock) if clock.is_virtual else time.perf_counter_ns
    lock, find, of = operations.lock, operations.find, operations.of

    def wrap(next_: SendNext) -> SendNext:
        # All that most sends need is in variables: attributes would cost more than the counting (measured).
        def measured(call: SendCall) -> Any:
            start_ns = now_ns()
            if call.kind is not SEND:
                return send_and_note(next_, call, lambda _, error: note(call, start_ns, error))
            try:
                result = next_(call)
            except BaseException as exc:
                note(call, start_ns, exc)
                raise
            took_ns, topic = now_ns() - start_ns, call.messages[0].topic
            with lock:
                (find(topic) or of(topic)).add(1, took_ns)
            return result

        return measured

    def note(call: SendCall, start_ns: int, error: BaseException | None) -> None:
        took_ns, count = now_ns() - start_ns, len(call.messages)
        with lock:
            operation = of(call.messages[0].topic if count else "")
            operation.add(count, took_ns)
            if error is not None:
                operations.failed(operation, error, count)

    return wrap


def measured_handling(
    listener: ListenerInfo, operations: Operations, lateness: LatenessRecorder, skew: ClockSkew
) -> HandlerWrapper:
    """Return the wrapper that counts the calls of a listener's handler. A batch is one call with all its messages."""
    # All that each call needs is in variables: attributes would cost a tenth of a microsecond more (measured).
    now_ns, busy = nanoseconds(listener.clock), BusyTimes()
    lock, find, of = operations.lock, operations.find, operations.of

    def wrap(next_: Any) -> Any:
        def measured(call: HandlerCall) -> Sequence[FailedMessages]:
            start_ns = now_ns()
            failures: Sequence[FailedMessages] = next_(call)
            note(call.messages, failures, start_ns, now_ns())
            return failures

        async def measured_async(call: HandlerCall) -> Sequence[FailedMessages]:
            start_ns = now_ns()
            failures: Sequence[FailedMessages] = await next_(call)
            note(call.messages, failures, start_ns, now_ns())
            return failures

        return measured_async if inspect.iscoroutinefunction(next_) else measured

    def note(messages: Sequence[MessageExt], failures: Sequence[FailedMessages], start_ns: int, end_ns: int) -> None:
        topic, end_ms = messages[0].topic, end_ns // 1_000_000
        with lock:
            operation = find(topic) or of(topic)
            operation.add(len(messages), end_ns - start_ns)
            for failure in failures:
                operations.failed(operation, failure.error, len(failure.messages))
            for message in messages:
                if _DELIVER_MS in message.properties:
                    lateness.record(listener, message, start_ns // 1_000_000, end_ms, busy)
                if not message.born_timestamp <= message.store_timestamp <= end_ms:
                    skew.note(message, start_ns // 1_000_000)
            # After the lateness: a message does not wait for its own call.
            if not busy.extend(start_ns, end_ns):
                busy.add(start_ns, end_ns)

    return wrap


class ClockSkew:
    """The least differences of clocks that handled messages prove.

    A producer whose message was born after it was stored has a clock that is ahead of the broker's. A message that was
    stored after its handler was called shows that the clock of this process is behind.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Difference in ms, steady time at which it was seen: the repair is a step of the clock.
        self._ahead = self._behind = (0, 0)

    def note(self, message: MessageExt, called_ms: int) -> None:
        """Note a message that proves a difference."""
        ahead_ms = message.born_timestamp - message.store_timestamp
        behind_ms = message.store_timestamp - called_ms
        now_ms = self._clock.steady_ms()
        if ahead_ms >= self.ahead_ms:
            self._ahead = (ahead_ms, now_ms)
        if behind_ms >= self.behind_ms:
            self._behind = (behind_ms, now_ms)

    @property
    def ahead_ms(self) -> int:
        """Least time by which a producer's clock is ahead of the broker's, as seen in the last minute."""
        return self._recent(self._ahead)

    @property
    def behind_ms(self) -> int:
        """Least time by which the clock of this process is behind the broker's, as seen in the last minute."""
        return self._recent(self._behind)

    def _recent(self, seen: tuple[int, int]) -> int:
        return max(0, seen[0]) if self._clock.steady_ms() - seen[1] < _SKEW_WINDOW_MS else 0


def _error_type(error: BaseException | None) -> str:
    return "RECONSUME_LATER" if error is None else type_name(error, "__qualname__")


def nanoseconds(clock: Clock) -> Callable[[], int]:
    """Return a function that returns the time of *clock* in nanoseconds since the epoch."""
    return (lambda: clock.now_ms() * 1_000_000) if clock.is_virtual else time.time_ns


class Observability(Observation):
    """Measures and traces an application. Give it to the template and to the registry of the listeners.

    ::

        observability = Observability(broker)
        template = RocketMQTemplate(broker, observation=observability)
        registry = ListenerRegistry(broker, converter, observation=observability)
        observability.watch(registry)
        observability.metrics.samples()

    An application creates it if ``mqtemplate.management.enabled`` is true.

    Attributes:
        metrics: The metrics of the application and of an embedded broker.
        lateness: Lateness of the deliveries, and the recent late ones.
        listeners: The containers of the listeners that `watch` was given.
    """

    def __init__(
        self,
        broker: Broker,
        settings: ObservabilitySettings | None = None,
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings = settings or ObservabilitySettings()
        self.broker = broker
        self.metrics = Metrics(settings.metrics.max_series)
        if broker.metrics is not None:
            self.metrics.add_collector(broker.metrics.samples)
        causes = broker.delayed.release_causes if broker.is_embedded else None
        self.lateness = LatenessRecorder(broker.clock, settings.lateness.threshold_ms, causes)
        self._tracing = create_tracing(settings) if tracing is None else tracing
        self._lock = threading.Lock()
        self._skew = ClockSkew(broker.clock)
        self._sends = Operations("client.send", {}, settings.metrics.max_series)
        self._handled: dict[tuple[str, str], Operations] = {}
        self.listeners: Iterable[ListenerContainer] = ()
        self.lags = GroupLags(broker)
        self._group_messages = GroupMessages(broker, self.lags)
        self._pending = PendingByHorizon(broker, settings.metrics.pending_interval_ms)
        if settings.metrics.enabled:
            self.metrics.add_collector(self._samples)
            self.metrics.gauge("clock.now_ms", broker.clock.now_ms)
            self.metrics.gauge("clock.ahead_ms", lambda: self._skew.ahead_ms)
            self.metrics.gauge("clock.behind_ms", lambda: self._skew.behind_ms)

    def watch(self, listeners: Iterable[ListenerContainer]) -> None:
        """Show the states and the lags of these listeners, too; the registry of an application, for example."""
        self.listeners = listeners

    def sends(self, clock: Clock) -> SendWrapper:
        """Return the wrapper that measures and traces sends as the settings say."""
        wrappers: list[SendWrapper] = []
        if self.settings.metrics.enabled:
            wrappers.append(measured_sends(self._sends, clock))
        if self._tracing is not None:
            wrappers.append(self._tracing.sends())
        return chained(wrappers)

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return the wrapper that measures and traces the calls of a listener's handler as the settings say."""
        wrappers: list[HandlerWrapper] = []
        if self.settings.metrics.enabled:
            operations = self._operations_of(listener)
            wrappers.append(measured_handling(listener, operations, self.lateness, self._skew))
        if self._tracing is not None:
            wrappers.append(self._tracing.handling(listener))
        return chained(wrappers)

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """Return the properties of a reply, with the trace context of the handler."""
        return properties if self._tracing is None else self._tracing.reply_properties(properties)

    def _operations_of(self, listener: ListenerInfo) -> Operations:
        key = (listener.id, listener.group)
        with self._lock:
            operations = self._handled.get(key)
            if operations is None:
                labels = {"listener": listener.id, "group": listener.group}
                operations = Operations("listener.handle", labels, self.settings.metrics.max_series)
                self._handled[key] = operations
        return operations

    def _samples(self) -> Iterable[MetricSample]:
        yield from self._sends.samples()
        for operations in list(self._handled.values()):
            yield from operations.samples()
        yield from self.lateness.samples()
        yield from listener_samples(self.listeners)
        yield from self.lags.samples(self.listeners)
        yield from self._group_messages.samples(self.listeners)
        yield from self._pending.samples()

    def export_to_opentelemetry(self) -> None:
        """Export the metrics by the program's meter provider.

        Raises:
            ImportError: ``opentelemetry-api`` is not installed.
        """
        from mqtemplate.observability.otel_metrics import export_metrics

        export_metrics(self.metrics)


def create_tracing(settings: ObservabilitySettings) -> Tracing | None:
    """Return the tracing for the settings; None if it is off, or if ``opentelemetry-api`` is not installed."""
    if not settings.tracing.enabled or find_spec("opentelemetry") is None:
        return None
    from mqtemplate.observability.tracing import Tracing

    return Tracing(settings.tracing.sampling_probability, max_traces_per_second=settings.tracing.max_traces_per_second)


_READ_MS = 10_000
"""Least time between two reads of `GroupMessages`: each takes the first unread message of each queue with a lag."""


class GroupMessages:
    """Ages of unread messages and numbers of dead letters of the groups of a broker in this process.

    Another process that has the broker exports them itself.

    Args:
        lags: Lags of the groups of the broker.
    """

    def __init__(self, broker: Broker, lags: GroupLags) -> None:
        self._broker = broker
        self._lags = lags
        self._lock = threading.Lock()
        self._read: list[MetricSample] = []
        self._next_ms = 0

    def samples(self, listeners: Iterable[ListenerContainer]) -> list[MetricSample]:
        """Return ``group.behind_ms`` and ``group.dead_letters``, at most ten seconds old."""
        if not self._broker.is_embedded:
            return []
        with self._lock:
            now_ms = self._broker.clock.steady_ms()
            if now_ms >= self._next_ms:
                try:
                    self._read = [*self._behind(listeners), *self._dead_letters()]
                except MQTemplateError as exc:
                    _log.debug("metrics.groups_unknown", reason=str(exc))
                    return []
                self._next_ms = now_ms + _READ_MS
            return self._read

    def _behind(self, listeners: Iterable[ListenerContainer]) -> Iterator[MetricSample]:
        # Imported here, as below: most processes are clients, and have no broker.
        from mqtemplate.operations.progress import behind_ms

        now_ms = self._broker.clock.now_ms()
        queues: dict[tuple[str, str], list[GroupLag]] = {}
        for lag in self._lags.read(listeners):
            if not lag.listener:
                queues.setdefault((lag.group, lag.queue.topic), []).append(lag)
        for (group, topic), lags in queues.items():
            age_ms = behind_ms(self._broker, lags, now_ms)
            if age_ms is None:
                _log.debug("metrics.age_unknown", group=group, topic=topic)
            else:
                yield MetricSample("group.behind_ms", MetricKind.GAUGE, age_ms, {"group": group, "topic": topic})

    def _dead_letters(self) -> Iterator[MetricSample]:
        from mqtemplate.operations.access import BrokerAccess
        from mqtemplate.operations.dead_letters import DeadLetters, LetterCounts

        access = BrokerAccess(self._broker)
        counts = dict.fromkeys(access.admin.group_names(), LetterCounts(0)) | DeadLetters(access).counts()
        for group, count in sorted(counts.items()):
            for state, number in (("open", count.open), ("resent", count.resent), ("purged", count.purged)):
                yield MetricSample("group.dead_letters", MetricKind.GAUGE, number, {"group": group, "state": state})

"""Values that are read from a broker and from listeners when metrics are scraped."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mqtemplate.broker import Broker, Capability
from mqtemplate.errors import MQTemplateError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.listener.failures.failure import NextStep
from mqtemplate.listener.failures.failure_log import HANGING
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.pending import PendingQuery

_log = get_logger("mqtemplate.metrics")

_REMOTE_INTERVAL_MS = 10_000
"""Least time between two reads of lags from another process: a lag takes a request for each queue."""

_SILENT_MS = 60_000
"""Time for which scrapes do not read again what a broker in another process has not answered: they would wait for each
timeout, and the process would count as one that hangs."""

_HORIZONS = {"1m": 60_000, "10m": 600_000, "1h": 3_600_000, "1d": 86_400_000, "7d": 7 * 86_400_000}
_BEYOND = "later"


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Messages of one queue that a group has not consumed.

    Attributes:
        lag: Messages after the committed offset.
        committed: Committed queue offset; None before the first commit.
        listener: Id of the listener, if it does not read from the broker of the application.
        is_exported_by_server: True if the broker is a server of this library, which exports the lag itself.
    """

    group: str
    queue: MessageQueue
    lag: int
    committed: int | None
    listener: str = ""
    is_exported_by_server: bool = False

    @property
    def first_unread(self) -> int:
        """Queue offset of the first of these messages. Retention may have deleted it."""
        return self.committed or 0

    def is_of(self, container: ListenerContainer) -> bool:
        """Return True if it is the lag of a listener."""
        return self.group == container.endpoint.settings.group and self.listener in ("", container.endpoint.id)


def listener_samples(listeners: Iterable[ListenerContainer]) -> Iterator[MetricSample]:
    """Yield states and counts of listeners."""
    for container in listeners:
        labels = {"listener": container.endpoint.id, "group": container.endpoint.settings.group}
        yield MetricSample("listener.running", MetricKind.GAUGE, int(container.is_running), labels)
        yield MetricSample("listener.paused", MetricKind.GAUGE, int(container.state.value == "paused"), labels)
        yield MetricSample("listener.in_flight", MetricKind.GAUGE, container.in_flight, labels)
        yield MetricSample("listener.concurrency", MetricKind.GAUGE, container.concurrency, labels)
        yield MetricSample("listener.hanging", MetricKind.GAUGE, container.hanging_count, labels)
        if container.endpoint.settings.is_pop:
            renewed, expired = container.renewals
            yield MetricSample("listener.renewed", MetricKind.COUNTER, renewed, labels)
            yield MetricSample("listener.expired", MetricKind.COUNTER, expired, labels)
        # From 0: the increase of a counter that begins at its first value is unknown.
        outcomes = {**dict.fromkeys((*(each.value for each in NextStep), HANGING), 0), **container.outcomes}
        for outcome, count in outcomes.items():
            yield MetricSample("listener.failed", MetricKind.COUNTER, count, labels | {"next_step": outcome})


class GroupLags:
    """Lags of consumer groups, by queue.

    With an embedded broker these are all clustering groups that have committed or are connected; with another process
    the groups of the listeners, and the queues that are assigned to them here.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._read: list[GroupLag] = []
        self._next_ms = 0
        self._silent_until_ms = 0

    def read(self, listeners: Iterable[ListenerContainer]) -> list[GroupLag]:
        """Return the lags now, or the lags of the last seconds if the broker is another process.

        Raises:
            BrokerError: The broker does not answer.
        """
        broker = self._broker
        committed = broker.groups.consumed_topics()
        if committed is None:
            return self._remote(listeners)
        containers = list(listeners)
        own = [each for each in containers if each.broker is broker]
        lags = [*_lags_of_groups(broker, committed), *_lags_of_new_groups(broker, committed, own)]
        return (
            lags
            if len(own) == len(containers)
            else [*lags, *self._remote([each for each in containers if each.broker is not broker])]
        )

    def _remote(self, listeners: Iterable[ListenerContainer]) -> list[GroupLag]:
        """Return the lags of listeners whose broker may be another process: now, or the lags of the last seconds."""
        with self._lock:
            now_ms = self._broker.clock.steady_ms()
            if now_ms >= self._next_ms:
                self._read = [lag for container in listeners for lag in _lags_of(container, self._broker)]
                self._next_ms = now_ms + _REMOTE_INTERVAL_MS
            return self._read

    def samples(self, listeners: Iterable[ListenerContainer]) -> Iterator[MetricSample]:
        """Yield ``group.lag`` and ``group.committed``; nothing while the broker does not answer.

        A lag that a server of this library exports is left out: with one in each process its sum would be too large.
        """
        clock = self._broker.clock
        if clock.steady_ms() < self._silent_until_ms:
            return
        try:
            lags = self.read(listeners)
        except MQTemplateError as exc:
            self._silent_until_ms = clock.steady_ms() + _SILENT_MS
            _log.debug("metrics.lag_unknown", reason=str(exc))
            return
        for each in lags:
            if each.is_exported_by_server:
                continue
            labels = {"group": each.group, "topic": each.queue.topic, "queue": str(each.queue.queue_id)}
            if each.listener or not self._broker.is_embedded:
                labels["broker"] = each.queue.broker_name
            if each.listener:  # two clusters may have brokers, groups and topics of the same names
                labels["listener"] = each.listener
            yield MetricSample("group.lag", MetricKind.GAUGE, each.lag, labels)
            if each.committed is not None:
                yield MetricSample("group.committed", MetricKind.GAUGE, each.committed, labels)


def _lags_of_groups(broker: Broker, committed: Mapping[str, Collection[str]]) -> Iterator[GroupLag]:
    for group, topics in sorted(committed.items()):
        for topic in sorted(topics):
            for queue in broker.queues(topic):
                yield _lag(broker, group, queue, broker.groups.committed_offset(group, queue))


def _lags_of_new_groups(
    broker: Broker, committed: Mapping[str, Collection[str]], listeners: Iterable[ListenerContainer]
) -> Iterator[GroupLag]:
    """Yield the lags of listeners whose group has not committed yet."""
    for container in listeners:
        if container.endpoint.settings.group not in committed:
            yield from _lags_of(container, broker)


def _lags_of(container: ListenerContainer, own: Broker) -> Iterator[GroupLag]:
    """Yield the lags of a listener; none if its broker does not tell offsets, as a proxy over gRPC."""
    settings, broker = container.endpoint.settings, container.broker
    # Only servers of this library take sequenced sends. They do not know the offsets of broadcasting groups.
    is_ours = not broker.is_embedded and Capability.SEQUENCED_SEND in broker.capabilities
    for queue, committed in sorted(container.positions().items()):
        try:
            lag = _lag(broker, settings.group, queue, committed)
        except UnsupportedError:
            return
        yield replace(
            lag,
            listener="" if broker is own else container.endpoint.id,
            is_exported_by_server=is_ours and not settings.is_broadcasting,
        )


def _lag(broker: Broker, group: str, queue: MessageQueue, committed: int | None) -> GroupLag:
    start = broker.reader.min_offset(queue) if committed is None else committed
    return GroupLag(group, queue, max(0, broker.reader.max_offset(queue) - start), committed)


class PendingByHorizon:
    """Numbers of pending delayed messages by the time until they are due.

    Args:
        interval_ms: Least time between two counts.
    """

    def __init__(self, broker: Broker, interval_ms: int) -> None:
        self._broker = broker
        self._interval_ms = interval_ms
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._next_ms = 0
        self._silent_until_ms = 0

    def counts(self) -> dict[str, int]:
        """Return horizon -> number of messages that are due within it, and not within the one before."""
        with self._lock:
            clock = self._broker.clock
            if clock.steady_ms() >= self._next_ms:
                self._counts = self._count(clock.now_ms())
                self._next_ms = clock.steady_ms() + self._interval_ms
            return dict(self._counts)

    def _count(self, now_ms: int) -> dict[str, int]:
        counted = self._broker.delayed.count_pending(PendingQuery(), 60_000)
        counts = dict.fromkeys([*_HORIZONS, _BEYOND], 0)
        for start_ms, count in counted.buckets.items():
            left_ms = start_ms - now_ms
            horizon = next((name for name, span_ms in _HORIZONS.items() if left_ms < span_ms), _BEYOND)
            counts[horizon] += count
        return counts

    def samples(self) -> Iterator[MetricSample]:
        """Yield ``delay.pending`` by horizon; nothing if the broker does not list pending messages."""
        clock = self._broker.clock
        if clock.steady_ms() < self._silent_until_ms:
            return
        try:
            counts = self.counts()
        except (UnsupportedError, MQTemplateError) as exc:
            self._silent_until_ms = clock.steady_ms() + _SILENT_MS
            _log.debug("metrics.pending_unknown", reason=str(exc))
            return
        for horizon, count in counts.items():
            yield MetricSample("delay.pending", MetricKind.GAUGE, count, {"horizon": horizon})

"""Broker of a Spark listener as Spark's processes reach it: the interface, the commit of offsets, and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mqtemplate.broker import Broker
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.spark.listening.redelivery import SendBacks
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.records.offsets import OffsetTable, from_spark


class SharedBroker(Protocol):
    """Broker of a listener, as Spark's processes reach it.

    Attributes:
        metrics: Metrics of the broker, or of the listener alone if the broker is a cluster.
        send_backs: Sender of rows that come back.
    """

    metrics: Metrics
    send_backs: SendBacks

    @property
    def broker(self) -> Broker: ...

    def start(self, retry_topic: str) -> None:
        """Let Spark's processes reach the broker. A second call has no effect."""

    def stop(self) -> None:
        """End what `start` started. A second call has no effect."""

    def location(self) -> BrokerLocation:
        """Return the location for Spark's processes."""

    def options(self) -> dict[str, str]:
        """Return the options of the source for it."""

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of a topic; none if it is missing."""

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue of the broker for one in a checkpoint."""


def commit_offsets(
    broker: Broker, queue_of: Callable[[MessageQueue], MessageQueue], group: str, end: OffsetTable
) -> None:
    """Commit the end of a batch for a group, but no lower offset than before, as a repeated batch would.

    Args:
        queue_of: Returns the queue of the broker for one in a checkpoint.
    """
    for read, offset in sorted(end.items()):
        queue = queue_of(read)
        if offset > (broker.groups.committed_offset(group, queue) or 0):
            broker.groups.commit_offset(group, queue, offset)


class BatchMetrics:
    """Metrics ``spark.<group>.*`` of the batches; docs/metrics.md has their names."""

    def __init__(self, metrics: Metrics, group: str) -> None:
        prefix = f"spark.{group}"
        self.batches = metrics.counter(f"{prefix}.batches")
        self.rows = metrics.counter(f"{prefix}.messages")
        self.batch_ms = metrics.histogram(f"{prefix}.batch_ms")
        self.failed_attempts = metrics.counter(f"{prefix}.failed_attempts")

    def count(self, messages: int, took_ms: int) -> None:
        """Count a handled batch."""
        self.batches.add()
        self.rows.add(messages)
        self.batch_ms.observe(took_ms)


class ListenerMonitor(BatchMetrics):
    """Metrics of a listener, among those of its broker.

    Attributes:
        metrics: All metrics of the broker; if the broker is a cluster, those of this listener.
    """

    def __init__(self, shared: SharedBroker, group: str, topics: tuple[str, ...]) -> None:
        super().__init__(shared.metrics, group)
        self._shared, self._group, self._topics = shared, group, topics
        self.metrics = shared.metrics
        prefix = f"spark.{group}"
        self.failures = self.metrics.counter(f"{prefix}.failures")
        self.restarts = self.metrics.counter(f"{prefix}.restarts")
        self.is_running = False
        self.metrics.gauge(f"{prefix}.running", lambda: int(self.is_running))
        self.metrics.gauge(f"{prefix}.lag", lambda: sum(self.lag().values()))

    def lag(self) -> dict[MessageQueue, int]:
        """Return for each queue the number of messages after the committed offset of the group."""
        lags, broker = {}, self._shared.broker
        for topic in self._topics:
            for queue in self._shared.queues(topic):
                start = broker.reader.min_offset(queue)
                committed = max(broker.groups.committed_offset(self._group, queue) or 0, start)
                lags[queue] = max(0, broker.reader.max_offset(queue) - committed)
        return lags


def messages_of(progress: Any, first: OffsetTable) -> int:
    """Return the number of messages between the offsets of a batch, before tags are selected.

    Args:
        progress: Progress of the query, of one batch. Its numbers of rows count a row each time that it is read.
        first: Start of the first batch.
    """
    (source,) = progress["sources"]
    # A missing offset is null, as JSON or as JSON in a string.
    start, end = (json.loads(source[name] or "null") for name in ("startOffset", "endOffset"))
    if end is None:
        return 0
    known = first if start is None else from_spark(start, "")
    return sum(max(0, offset - known.get(queue, 0)) for queue, offset in from_spark(end, "").items())

"""Metrics of a Spark listener, and the lag of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtemplate.message import MessageQueue

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker


class ListenerMonitor:
    """Metrics ``spark.<group>.*`` of a listener, among those of its broker; docs/metrics.md has their names."""

    def __init__(self, broker: EmbeddedBroker, group: str, topics: tuple[str, ...]) -> None:
        self._broker, self._group, self._topics = broker, group, topics
        metrics = broker.metrics
        prefix = f"spark.{group}"
        self.batches = metrics.counter(f"{prefix}.batches")
        self.rows = metrics.counter(f"{prefix}.messages")
        self.batch_ms = metrics.histogram(f"{prefix}.batch_ms")
        self.failed_attempts = metrics.counter(f"{prefix}.failed_attempts")
        self.failures = metrics.counter(f"{prefix}.failures")
        self.restarts = metrics.counter(f"{prefix}.restarts")
        self.is_running = False
        metrics.gauge(f"{prefix}.running", lambda: int(self.is_running))
        metrics.gauge(f"{prefix}.lag", lambda: sum(self.lag().values()))

    def lag(self) -> dict[MessageQueue, int]:
        """Return for each queue the number of messages after the committed offset of the group."""
        lags = {}
        for topic in self._topics:
            for queue in self._broker.queues(topic):
                start = self._broker.min_offset(queue)
                committed = max(self._broker.committed_offset(self._group, queue) or 0, start)
                lags[queue] = max(0, self._broker.max_offset(queue) - committed)
        return lags

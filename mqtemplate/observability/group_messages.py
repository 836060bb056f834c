"""Unread messages and dead letters of consumer groups, read from a broker in this process when metrics are scraped."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from mqtemplate.broker import Broker
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.observability.collectors import GroupLag, GroupLags

_log = get_logger("mqtemplate.metrics")

_INTERVAL_MS = 10_000
"""Least time between two reads: each takes the first unread message of each queue with a lag."""


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
                self._next_ms = now_ms + _INTERVAL_MS
            return self._read

    def _behind(self, listeners: Iterable[ListenerContainer]) -> Iterator[MetricSample]:
        oldest_ms: dict[tuple[str, str], int] = {}
        now_ms = self._broker.clock.now_ms()
        for lag in self._lags.read(listeners):
            if not lag.listener:
                key, stored_ms = (lag.group, lag.queue.topic), self._stored_ms(lag) if lag.lag else now_ms
                oldest_ms[key] = min(stored_ms, oldest_ms.get(key, now_ms))
        for (group, topic), stored_ms in oldest_ms.items():
            yield MetricSample(
                "group.behind_ms", MetricKind.GAUGE, now_ms - stored_ms, {"group": group, "topic": topic}
            )

    def _stored_ms(self, lag: GroupLag) -> int:
        """Return the time at which the first unread message was stored; now if it cannot be read."""
        reader, now_ms = self._broker.reader, self._broker.clock.now_ms()
        try:
            found = reader.pull(lag.queue, max(lag.committed or 0, reader.min_offset(lag.queue)), 1).messages
        except MQTemplateError as exc:
            _log.debug("metrics.age_unknown", group=lag.group, topic=lag.queue.topic, reason=str(exc))
            return now_ms
        return min(found[0].store_timestamp, now_ms) if found else now_ms

    def _dead_letters(self) -> Iterator[MetricSample]:
        # Imported here: most processes are clients, and have no broker.
        from mqtemplate.operations.access import BrokerAccess
        from mqtemplate.operations.dead_letters import DeadLetters, LetterCounts

        access = BrokerAccess(self._broker)
        counts = dict.fromkeys(access.admin.group_names(), LetterCounts(0)) | DeadLetters(access).counts()
        for group, count in sorted(counts.items()):
            for state, number in (("open", count.open), ("resent", count.resent), ("purged", count.purged)):
                yield MetricSample("group.dead_letters", MetricKind.GAUGE, number, {"group": group, "state": state})

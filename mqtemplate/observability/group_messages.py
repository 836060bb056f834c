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

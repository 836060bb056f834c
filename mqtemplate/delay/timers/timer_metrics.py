"""Number of pending timers by topic: the file ``config/timermetrics``, for RocketMQ's tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mqtemplate.errors import StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.store.files.json_files import DataVersion, read_table
from mqtemplate.store.files.store_files import StoreFiles

_log = get_logger("mqtemplate.delay")

TIMER_METRICS_FILE = "config/timermetrics"
_INTERVAL_MS = 30_000  # a write takes several flushes, and only operators read the file
_MOST_TOPICS = 10_000


class TimerMetrics:
    """Counts timers by topic: up when one is put on the wheel, down when it leaves the wheel.

    The numbers are for information only. After a kill they may lack the changes of the last half minute. The exact
    total is the metric ``delay.waiting.timer``. Source: RocketMQ ``store: TimerMetrics``.
    """

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._version = DataVersion()
        self._counts: dict[str, dict[str, int]] = {}  # as in the file: topic -> "count" and "timeStamp"
        self._is_changed = False
        self._written_ms = -1

    def load(self) -> None:
        """Continue with the numbers in the file; with none if it cannot be read."""
        try:
            table = read_table(self._store_files, TIMER_METRICS_FILE)
            self._version = DataVersion.of(table)
            for topic, pair in (table.get("timingCount") or {}).items():
                self._counts[topic] = {name: int(pair[name]) for name in ("count", "timeStamp")}
        except (StoreError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as exc:
            _log.warning("timer_metrics.ignored", reason=str(exc))

    def clear(self) -> None:
        """Reset all numbers to zero."""
        self._counts.clear()

    def add(self, counts: Mapping[str, int], now_ms: int, sign: int = 1) -> None:
        """Add *counts*, which map a topic to a number of timers; with a *sign* of -1 subtract them."""
        for topic, count in counts.items():
            before = self._counts[topic]["count"] if topic in self._counts else 0
            self._counts[topic] = {"count": before + sign * count, "timeStamp": now_ms}
            self._is_changed = True

    def counts(self) -> list[tuple[str, int]]:
        """Return each topic with its number of timers."""
        return [(topic, max(pair["count"], 0)) for topic, pair in self._counts.items()]

    def write(self, now_ms: int) -> None:
        """Write the file if numbers changed and the last write is long enough ago."""
        if not self._is_changed or 0 <= now_ms - self._written_ms < _INTERVAL_MS or len(self._counts) > _MOST_TOPICS:
            return
        self._is_changed, self._written_ms = False, now_ms
        counts = {topic: pair | {"count": max(pair["count"], 0)} for topic, pair in dict(self._counts).items()}
        table: dict[str, Any] = {"dataVersion": self._version.next(now_ms), "timingCount": counts}
        self._store_files.write_bytes(TIMER_METRICS_FILE, json.dumps(table, separators=(",", ":")).encode())

"""How many timers wait for each topic: the file ``config/timermetrics``, for RocketMQ's tools."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import structlog

from mqtemplate.errors import StoreError
from mqtemplate.store import StoreFiles
from mqtemplate.store.files.json_files import DataVersion, read_table

_log = structlog.stdlib.get_logger("mqtemplate.delay")

TIMER_METRICS_FILE = "config/timermetrics"
_INTERVAL_MS = 30_000  # a write takes several flushes, and nobody but people reads it
_MOST_TOPICS = 10_000


class TimerMetrics:
    """Counts up when a timer is put on the wheel, and down when it leaves it.

    It informs, no more: after a kill it may be off by what happened in the last half minute. The exact number of all is
    the metric ``delay.waiting.timer``. Source: RocketMQ ``store: TimerMetrics``.
    """

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._version = DataVersion()
        self._counts: Counter[str] = Counter()
        self._changed_ms: dict[str, int] = {}
        self._is_changed = False
        self._written_ms = -1

    def load(self) -> None:
        """Go on from what the file tells; from nothing, where it cannot be read."""
        try:
            table = read_table(self._store_files, TIMER_METRICS_FILE)
            self._version = DataVersion.of(table)
            for topic, pair in (table.get("timingCount") or {}).items():
                self._counts[topic], self._changed_ms[topic] = int(pair["count"]), int(pair["timeStamp"])
        except (StoreError, ValueError, KeyError, TypeError, AttributeError) as exc:
            _log.warning("delay.timermetrics_unreadable", reason=str(exc))

    def begin_anew(self) -> None:
        """Nothing waits."""
        self._counts.clear()
        self._changed_ms.clear()

    def add(self, counts: Counter[str], now_ms: int, sign: int = 1) -> None:
        """Topic -> how many more wait for it, or, with -1, how many fewer."""
        for topic, count in counts.items():
            self._counts[topic] += sign * count
            self._changed_ms[topic] = now_ms
            self._is_changed = True

    def write(self, now_ms: int) -> None:
        """Write the file, if something changed and it was not written just now."""
        if not self._is_changed or 0 <= now_ms - self._written_ms < _INTERVAL_MS or len(self._counts) > _MOST_TOPICS:
            return
        self._is_changed, self._written_ms = False, now_ms
        counts = {
            topic: {"count": max(count, 0), "timeStamp": self._changed_ms[topic]}
            for topic, count in dict(self._counts).items()
        }
        table: dict[str, Any] = {"dataVersion": self._version.next(now_ms), "timingCount": counts}
        self._store_files.write_bytes(TIMER_METRICS_FILE, json.dumps(table, separators=(",", ":")).encode())

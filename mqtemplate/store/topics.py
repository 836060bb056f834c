"""The topics and their queues: ``config/topics.json``."""

from __future__ import annotations

import threading
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.store.home import Home
from mqtemplate.store.json_files import DataVersion, read_table, write_table

__all__ = ["TopicTable"]

_READ_AND_WRITE = 6


class TopicTable:
    """Topic -> how many queues it has. What upstream keeps beside that number is kept as it was found."""

    _NAME = "config/topics.json"

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._version = DataVersion()
        self._table: dict[str, dict[str, Any]] = {}

    def load(self) -> None:
        table = read_table(self._home, self._NAME)
        self._table = dict(table.get("topicConfigTable", {}))

    def queue_count(self, topic: str) -> int:
        """How many queues *topic* has; 0 if there is no such topic."""
        config = self._table.get(topic)
        return 0 if config is None else int(config.get("writeQueueNums", 0))

    def create(self, topic: str, queue_count: int) -> int:
        """Make *topic*, or give it more queues (never fewer: they may hold messages). Gives how many it has now."""
        with self._lock:
            queue_count = max(queue_count, self.queue_count(topic))
            if queue_count > self.queue_count(topic):
                self._table[topic] = _topic_config(topic, queue_count) | {
                    key: value
                    for key, value in self._table.get(topic, {}).items()
                    if key not in ("readQueueNums", "writeQueueNums")
                }
                self._persist()
            return queue_count

    def _persist(self) -> None:
        version = self._version.next(self._clock.now_ms())
        write_table(self._home, self._NAME, {"dataVersion": version, "topicConfigTable": self._table})


def _topic_config(topic: str, queue_count: int) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": _READ_AND_WRITE,
        "readQueueNums": queue_count,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
        "writeQueueNums": queue_count,
    }

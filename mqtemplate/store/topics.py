"""The topics and their queues: ``config/topics.json``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.store.files.json_files import DataVersion, format_errors, read_table, write_table
from mqtemplate.store.files.store_files import StoreFiles

_READ_AND_WRITE = 6


class TopicTable:
    """Topic -> how many queues it has. What upstream keeps beside that number stays as it was found."""

    _NAME = "config/topics.json"

    def __init__(self, store_files: StoreFiles, clock: Clock) -> None:
        self._store_files = store_files
        self._clock = clock
        self._lock = threading.Lock()
        self._version = DataVersion()
        self._table: dict[str, dict[str, Any]] = {}
        self._other: dict[str, Any] = {}

    def load(self) -> None:
        table = read_table(self._store_files, self._NAME)
        with format_errors(self._NAME):
            self._version = DataVersion.of(table)
            self._table = dict(table.pop("topicConfigTable", {}))
            for config in self._table.values():
                int(config.get("writeQueueNums", 0)), int(config.get("readQueueNums", 0))
        self._other = table

    @property
    def version(self) -> DataVersion:
        """Counts the changes of this table."""
        return self._version

    def names(self) -> list[str]:
        """All topics."""
        return list(self._table)

    def config(self, topic: str) -> dict[str, Any] | None:
        """All that is kept of *topic*, by upstream's names, such as ``perm``; None if there is no such topic."""
        config = self._table.get(topic)
        return None if config is None else _topic_config(topic) | config

    def queue_count(self, topic: str) -> int:
        """How many queues *topic* has; 0 if there is no such topic."""
        config = self._table.get(topic)
        return 0 if config is None else int(config.get("writeQueueNums", 0))

    def create(self, topic: str, queue_count: int) -> int:
        """Make *topic*, or give it more queues (never fewer: they may hold messages). Gives how many it has now.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            if queue_count <= self.queue_count(topic):
                return self.queue_count(topic)
            found = self._table.get(topic, {})
            # some may be closed to writing
            read_count = max(queue_count, int(found.get("readQueueNums", 0)))
            counts = {"readQueueNums": read_count, "writeQueueNums": queue_count}
            table = self._table | {topic: _topic_config(topic) | found | counts}
            self._write(table)
            self._table = table
            return queue_count

    def update(self, topic: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Set some of what is kept of *topic*, as an administrator says it, also fewer queues; made if missing.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            config = _topic_config(topic) | self._table.get(topic, {}) | dict(changes)
            if config != self._table.get(topic):
                table = self._table | {topic: config}
                self._write(table)
                self._table = table
            return config

    def delete(self, topic: str) -> bool:
        """Forget *topic*; False if there is none.

        Raises:
            StoreError: The table could not be written; it is as before.
        """
        with self._lock:
            if topic not in self._table:
                return False
            table = {name: config for name, config in self._table.items() if name != topic}
            self._write(table)
            self._table = table
            return True

    def _write(self, table: dict[str, dict[str, Any]]) -> None:
        version = self._version.next(self._clock.now_ms())
        write_table(self._store_files, self._NAME, self._other | {"dataVersion": version, "topicConfigTable": table})


def _topic_config(topic: str) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": _READ_AND_WRITE,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
    }

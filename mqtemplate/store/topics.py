"""The topics and their queues: ``config/topics.json``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.store.files.json_files import DataVersion, VersionedTable, check_names, format_errors
from mqtemplate.store.files.store_files import StoreFiles

_READ_AND_WRITE = 6


class TopicTable:
    """Topic -> number of its queues. All other settings that RocketMQ keeps for a topic stay as they were found.

    A method that changes the table writes the file first. If that raises `StoreError`, the table is as before.
    """

    def __init__(self, store_files: StoreFiles, clock: Clock) -> None:
        self._file = VersionedTable(store_files, clock, "config/topics.json", entries="topicConfigTable")
        self._lock = threading.Lock()
        self._table: dict[str, dict[str, Any]] = {}

    def load(self) -> None:
        """Read the file."""
        table = self._file.load()
        with format_errors(self._file.name):
            self._table = dict(table.get("topicConfigTable", {}))
            check_names("topic", self._table)
            for config in self._table.values():  # the numbers that the broker and its tools read
                for name in ("writeQueueNums", "readQueueNums", "perm"):
                    int(config.get(name, 0))

    @property
    def version(self) -> DataVersion:
        """Number of changes of this table."""
        return self._file.version

    @property
    def state(self) -> object:
        """An object that is replaced by each change. While it is the same one, so are all settings."""
        return self._table

    def has(self, topic: str) -> bool:
        """Return True if *topic* exists."""
        return topic in self._table

    def names(self) -> list[str]:
        """Return all topics."""
        return list(self._table)

    def count(self) -> int:
        """Return the number of topics."""
        return len(self._table)

    def config(self, topic: str) -> dict[str, Any] | None:
        """Return the settings of *topic* by RocketMQ's names, such as ``perm``; None if there is no such topic."""
        config = self._table.get(topic)
        return None if config is None else _default_config(topic) | config

    def queue_count(self, topic: str) -> int:
        """Return the number of queues of *topic*; 0 if there is no such topic."""
        config = self._table.get(topic)
        return 0 if config is None else int(config.get("writeQueueNums", 0))

    def create(self, topic: str, queue_count: int) -> int:
        """Create *topic*, or add queues. Return the number of its queues.

        The number is never reduced, because the queues may contain messages.
        """
        with self._lock:
            if queue_count <= self.queue_count(topic):
                return self.queue_count(topic)
            found = self._table.get(topic, {})
            # RocketMQ removes queues in two steps: it reduces the write queues first, then the read queues.
            read_count = max(queue_count, int(found.get("readQueueNums", 0)))
            counts = {"readQueueNums": read_count, "writeQueueNums": queue_count}
            self._write(self._table | {topic: _default_config(topic) | found | counts})
            return queue_count

    def update(self, topic: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings of *topic*; create it if missing. An administrator may also reduce the queues.

        Returns:
            All settings of the topic.
        """
        self.update_all({topic: changes})
        return _default_config(topic) | self._table[topic]

    def update_all(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change or create several topics, as `update` does, and write the file once."""
        with self._lock:
            changed = {
                topic: config
                for topic, change in changes.items()
                if (config := _default_config(topic) | self._table.get(topic, {}) | dict(change))
                != self._table.get(topic)
            }
            if changed:
                self._write(self._table | changed)

    def delete(self, topic: str) -> bool:
        """Delete *topic*. Return False if there is none."""
        with self._lock:
            if topic not in self._table:
                return False
            self._write({name: config for name, config in self._table.items() if name != topic})
            return True

    def _write(self, table: dict[str, dict[str, Any]]) -> None:
        self._file.save(topicConfigTable=table)
        self._table = table


def _default_config(topic: str) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": _READ_AND_WRITE,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
    }

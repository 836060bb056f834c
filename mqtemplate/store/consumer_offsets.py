"""The progress of the consumer groups: ``config/consumerOffset.json``."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mqtemplate.clock import Clock
from mqtemplate.store.files.json_files import VersionedTable, check_names, format_errors
from mqtemplate.store.files.store_files import StoreFiles


class ConsumerOffsets:
    """(group, topic) -> queue id -> the next queue offset to consume.

    Args:
        name: The file. A broadcasting group has a file for each member.
        flush: Make durable what consumers may have read. A durable offset must not be ahead of the log after a power
            failure: the group would skip the messages that get the lost queue offsets.
    """

    def __init__(
        self,
        store_files: StoreFiles,
        clock: Clock,
        name: str = "config/consumerOffset.json",
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        # The topics of a group follow from the offsets; RocketMQ computes its groupTopicMap again. So it is not
        # written.
        self._file = VersionedTable(store_files, clock, name, "offsetTable", "groupTopicMap")
        self._flush = flush
        self._lock = threading.Lock()
        self._table: dict[tuple[str, str], dict[int, int]] = {}
        self._is_dirty = False
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call *changed* at the first change after each `persist`."""
        self._on_change = changed

    def load(self) -> None:
        """Read the file."""
        table = self._file.load()
        with format_errors(self._file.name):
            for key, offsets in table.get("offsetTable", {}).items():
                topic, _, group = key.rpartition("@")
                check_names("topic", [topic])
                check_names("group", [group])
                self._table[group, topic] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the committed offset; None if there is none."""
        offsets = self._table.get((group, topic))
        return None if offsets is None else offsets.get(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Set the next queue offset to consume."""
        offsets = self._table.get((group, topic))
        if offsets is None:
            with self._lock:
                offsets = self._table.setdefault((group, topic), {})
        if offsets.get(queue_id) != queue_offset:
            offsets[queue_id] = queue_offset
            if not self._is_dirty:
                self._mark_dirty()

    def _mark_dirty(self) -> None:
        self._is_dirty = True
        self._on_change()

    def groups(self) -> set[str]:
        """Return all groups that have committed an offset."""
        return {group for group, _ in list(self._table)}

    def topics_of(self, group: str) -> set[str]:
        """Return all topics in which *group* has committed an offset."""
        return {topic for name, topic in list(self._table) if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Return all groups that have committed an offset in *topic*."""
        return {group for group, name in list(self._table) if name == topic}

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return queue id -> committed offset."""
        return dict(self._table.get((group, topic), {}))

    def all(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return a copy of the whole table, by group and topic."""
        return {key: dict(offsets) for key, offsets in list(self._table.items())}

    def forget(self, *, group: str | None = None, topic: str | None = None) -> None:
        """Remove the offsets of a group, of a topic, or of a group in a topic if both are given."""
        with self._lock:
            kept = {
                key: offsets
                for key, offsets in self._table.items()
                if (group is not None and key[0] != group) or (topic is not None and key[1] != topic)
            }
            is_change = len(kept) < len(self._table)
            self._table = kept
        if is_change and not self._is_dirty:
            self._mark_dirty()

    def persist(self) -> None:
        """Write the table, if it has changed."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        with self._lock:
            tables = list(self._table.items())
        table = {
            f"{topic}@{group}": {str(queue): offset for queue, offset in dict(offsets).items()}
            for (group, topic), offsets in tables
        }
        try:
            self._flush()
            self._file.save(offsetTable=table)
        except BaseException:
            self._is_dirty = True
            raise

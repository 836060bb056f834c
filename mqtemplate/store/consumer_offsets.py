"""How far each consumer group is done: ``config/consumerOffset.json``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.store.files.json_files import DataVersion, format_errors, read_table, write_table
from mqtemplate.store.files.store_files import StoreFiles


class ConsumerOffsets:
    """(group, topic) -> queue id -> the first queue offset not yet done. Other members of the file stay as found.

    Args:
        name: The file. A group that broadcasts keeps a file for each member.
        flush: Makes durable what consumers may have read. An offset that lasts must not be ahead of what a power
            failure leaves: new messages would take the places before it, and be passed over.
    """

    def __init__(
        self,
        store_files: StoreFiles,
        clock: Clock,
        name: str = "config/consumerOffset.json",
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self._store_files = store_files
        self._clock = clock
        self._name = name
        self._flush = flush
        self._lock = threading.Lock()
        self._version = DataVersion()
        self._table: dict[tuple[str, str], dict[int, int]] = {}
        self._other: dict[str, Any] = {}
        self._is_dirty = False
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call *changed* at the first change after each `persist`."""
        self._on_change = changed

    def load(self) -> None:
        table = read_table(self._store_files, self._name)
        with format_errors(self._name):
            self._version = DataVersion.of(table)
            # which topics a group has follows from the offsets, and upstream finds that out by itself
            self._other = {name: value for name, value in table.items() if name not in ("offsetTable", "groupTopicMap")}
            for key, offsets in table.get("offsetTable", {}).items():
                topic, _, group = key.rpartition("@")
                self._table[group, topic] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        offsets = self._table.get((group, topic))
        return None if offsets is None else offsets.get(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        offsets = self._table.get((group, topic))
        if offsets is None:
            with self._lock:
                offsets = self._table.setdefault((group, topic), {})
        if offsets.get(queue_id) != queue_offset:
            offsets[queue_id] = queue_offset
            if not self._is_dirty:
                self._is_dirty = True
                self._on_change()

    def groups(self) -> set[str]:
        """Every group that ever said how far it is."""
        return {group for group, _ in list(self._table)}

    def topics_of(self, group: str) -> set[str]:
        """Every topic that *group* ever said how far it is in."""
        return {topic for name, topic in list(self._table) if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Every group that ever said how far it is in *topic*."""
        return {group for group, name in list(self._table) if name == topic}

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Queue id -> the first queue offset not yet done."""
        return dict(self._table.get((group, topic), {}))

    def all(self) -> dict[tuple[str, str], dict[int, int]]:
        """The whole table, by group and topic, at one sweep."""
        return {key: dict(offsets) for key, offsets in list(self._table.items())}

    def forget(self, *, group: str | None = None, topic: str | None = None) -> None:
        """Drop what a group said, or what was said of a topic, or (both given) what the group said of it."""
        with self._lock:
            kept = {
                key: offsets
                for key, offsets in self._table.items()
                if (group is not None and key[0] != group) or (topic is not None and key[1] != topic)
            }
            is_change = len(kept) < len(self._table)
            self._table = kept
        if is_change and not self._is_dirty:
            self._is_dirty = True
            self._on_change()

    def persist(self) -> None:
        """Write the table, if it changed."""
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
            version = self._version.next(self._clock.now_ms())
            write_table(self._store_files, self._name, self._other | {"dataVersion": version, "offsetTable": table})
        except BaseException:
            self._is_dirty = True
            raise

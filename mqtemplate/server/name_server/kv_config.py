"""Key-value table of a name server: namespace -> key -> value, in ``config/kvConfig.json``."""

from __future__ import annotations

import threading

from mqtemplate.store.files.json_files import format_errors, read_table, write_table
from mqtemplate.store.files.store_files import StoreFiles

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""Namespace of the ordered topics: topic -> ``broker:queues``, separated by ``;``."""


class KVConfig:
    """Texts that administration tools store and read. A change is on disk before the call returns."""

    _NAME = "config/kvConfig.json"

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._lock = threading.Lock()
        self._table: dict[str, dict[str, str]] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: The file is no such table.
        """
        with format_errors(self._NAME):
            found = read_table(self._store_files, self._NAME).get("configTable", {})
            self._table = {
                str(namespace): {str(key): str(value) for key, value in entries.items()}
                for namespace, entries in found.items()
            }

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, or None if there is none."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """Return all entries of a namespace, or None if it never had one."""
        entries = self._table.get(namespace)
        return None if entries is None else dict(entries)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set an entry.

        Raises:
            StoreError: The file could not be written; it is as before.
        """
        with self._lock:
            self._replace(namespace, self._table.get(namespace, {}) | {key: value})

    def delete(self, namespace: str, key: str) -> None:
        """Remove an entry, if it exists.

        Raises:
            StoreError: The file could not be written; it is as before.
        """
        with self._lock:
            entries = self._table.get(namespace, {})
            if key in entries:
                self._replace(namespace, {name: value for name, value in entries.items() if name != key})

    def _replace(self, namespace: str, entries: dict[str, str]) -> None:
        table = self._table | {namespace: entries}
        write_table(self._store_files, self._NAME, {"configTable": table})
        self._table = table

"""A name server's entries that belong to nobody: namespace -> key -> value, in ``config/kvConfig.json``."""

from __future__ import annotations

import threading

from mqtemplate.store import StoreFiles
from mqtemplate.store.files.json_files import format_errors, read_table, write_table

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""The namespace of ordered topics: topic -> ``broker:queues``, separated by ``;``."""


class KVConfig:
    """Texts that tools put here and read again. A change is in the file before the call returns."""

    _NAME = "config/kvConfig.json"

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._lock = threading.Lock()
        self._table: dict[str, dict[str, str]] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: It cannot be understood.
        """
        with format_errors(self._NAME):
            found = read_table(self._store_files, self._NAME).get("configTable", {})
            self._table = {
                str(namespace): {str(key): str(value) for key, value in entries.items()}
                for namespace, entries in found.items()
            }

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All entries of a namespace; None if there never was one."""
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
        """Remove an entry, if it is there.

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

"""Lookup of records by physical offset or by key."""

from __future__ import annotations

from collections.abc import Iterator

from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import split_keys
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import KEYS, TIMER_DEL_UNIQKEY, UNIQ_KEY, find_property
from mqtemplate.store.message_store import MessageStore

_MAX_RECORDS_OF_KEY = 100_000


class RecordLookup:
    """Reads records by physical offset or by key, and skips unreadable ones: their release reports them."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def at(self, physical_offset: int, size: int = 0) -> StoredRecord | None:
        """Return the record at an offset; None if it is unreadable.

        Args:
            size: Bytes of the record, if known: this saves one read.
        """
        try:
            if size:
                return self._store.read(physical_offset, size)
            return self._store.read_at(physical_offset)
        except CorruptRecordError:
            return None

    def by_key(self, topic: str, key: str) -> Iterator[StoredRecord]:
        """Yield the records of *topic* that may have *key*, the newest first. The index stores hashes of keys only."""
        for physical_offset in self._store.index.find(topic, key, max_count=_MAX_RECORDS_OF_KEY):
            record = self.at(physical_offset)
            if record is not None and record.topic == topic:
                yield record


def has_key(record: StoredRecord, key: str) -> bool:
    """Return True if *key* is the message id or one of the keys of a record."""
    properties = record.properties_bytes
    if find_property(properties, UNIQ_KEY) == key:
        return True
    return key in split_keys(find_property(properties, KEYS))


def is_marker(record: StoredRecord) -> bool:
    """Return True if a record is a delete marker, ours or RocketMQ's, and not a message."""
    return find_property(record.properties_bytes, TIMER_DEL_UNIQKEY) is not None

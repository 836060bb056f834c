"""The keys of many records at once: tails of one shape as the rows of one array.

A record's tail is its topic and its properties, each behind its length; as it stands in the log, or, where the topic's
length takes two bytes there, with one. Tails have one *shape* if they differ only in
the values of properties, and no value in its length: then each key lies in the same columns of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.java_hash import java_hash_of_rows
from mqtemplate.record.codec import StoredRecord, find_property
from mqtemplate.store.index.index_file import index_key_hashes, to_index_hashes

_FEWEST = 8
"""Tails that are worth the trouble of finding out their shape."""
_MOST_SHAPES = 8
_LAST_SEPARATOR = 2
_FIRST_BEYOND_ASCII = 0x80


def keys_of(topic: str, properties: bytes) -> list[str]:
    """The keys that a record is indexed under, with repetitions, in RocketMQ's order.

    Its id, each blank-separated word of its business keys, and its tags as ``T#tags``.
    Source: RocketMQ ``IndexService.buildIndex`` (5.5.0).
    """
    keys = []
    prefix = topic + "#"
    if unique := find_property(properties, b"UNIQ_KEY"):
        keys.append(prefix + unique)
    if b"KEYS\x01" in properties and (words := find_property(properties, b"KEYS")):
        keys += [prefix + word for word in words.split(" ") if word]
    if b"TAGS\x01" in properties and (tags := find_property(properties, b"TAGS")):
        keys.append(f"{prefix}T#{tags}")
    return keys


def tail_of(record: StoredRecord) -> bytes:
    """The tail of a record that was read. (No topic has more than 255 bytes.)"""
    topic, properties = record.topic.encode()[:255], record.properties_bytes
    return bytes([len(topic)]) + topic + len(properties).to_bytes(2, "big") + properties


def hash_keys(tails: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """What the index keeps of the keys of records: hashes in the order of the records, and how many each has."""
    parts = _hash_alike(tails)
    counts = np.zeros(len(tails), np.int64)
    for rows, hashes in parts:
        counts[rows] = hashes.shape[1]
    starts = np.cumsum(counts) - counts
    all_hashes = np.empty(int(counts.sum()), np.int32)
    for rows, hashes in parts:
        all_hashes[starts[rows][:, None] + np.arange(hashes.shape[1])] = hashes
    return all_hashes, counts


class _Part(NamedTuple):
    """Records with equally many keys: which, and a row of hashes for each."""

    rows: NDArray[np.intp]
    hashes: NDArray[np.int32]


def _hash_alike(tails: Sequence[bytes]) -> list[_Part]:
    lengths = np.fromiter(map(len, tails), np.int64, len(tails))
    parts, others = [], []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        for _ in range(_MOST_SHAPES):
            if len(rows) < _FEWEST:
                break
            table = np.frombuffer(b"".join([tails[row] for row in rows.tolist()]), np.uint8).reshape(-1, length)
            shape = _TailShape(tails[rows[0]])
            is_done = shape.are_alike(table)
            if is_done[0]:
                parts.append(_Part(rows[is_done], shape.hashes(table[is_done])))
            else:
                others.append(int(rows[0]))
                is_done[:] = False
                is_done[0] = True
            rows = rows[~is_done]
        others += rows.tolist()
    return parts + [_one(row, tails[row]) for row in others]


def _one(row: int, tail: bytes) -> _Part:
    topic_end = 1 + tail[0]
    keys = keys_of(tail[1:topic_end].decode("utf-8", "replace"), tail[topic_end + 2 :])
    return _Part(np.array([row]), index_key_hashes(keys)[None, :])


class _Column(NamedTuple):
    """Where a key's text lies in the tail, and what comes before it in the key."""

    prefix: str
    begin: int
    end: int


class _TailShape:
    """What all tails like *first* have in common. Irregular ones are not even like themselves."""

    def __init__(self, first: bytes) -> None:
        self._row = np.frombuffer(first, np.uint8)
        self._is_fixed = np.ones(len(first), np.bool_)
        self._is_key = np.zeros(len(first), np.bool_)
        topic_end = 1 + first[0]
        values = dict(self._values(first, topic_end + 2))
        self._columns = list(self._key_columns(first[1:topic_end].decode("utf-8", "replace") + "#", values, first))
        for column in self._columns:
            self._is_key[column.begin : column.end] = True

    def _values(self, first: bytes, at: int) -> Iterator[tuple[bytes, slice]]:
        """Where the values are; none where the list is not regular: then all is fixed, and a key in it is no column."""
        *pairs, rest = first[at:].split(b"\x02")
        pairs += [rest] if rest else []
        found = {}
        for pair in pairs:
            name, _, value = pair.partition(b"\x01")
            if not value or b"\x01" in value or name in found:
                self._is_fixed[:] = False  # and no byte of it is allowed
                return
            found[name] = slice(at + len(name) + 1, at + len(pair))
            at += len(pair) + 1
        for value_at in found.values():
            self._is_fixed[value_at] = False
        yield from found.items()

    @staticmethod
    def _key_columns(prefix: str, values: dict[bytes, slice], first: bytes) -> Iterator[_Column]:
        """As `keys_of` lists them."""
        if unique := values.get(b"UNIQ_KEY"):
            yield _Column(prefix, unique.start, unique.stop)
        if words := values.get(b"KEYS"):
            at = words.start
            for word in first[words].split(b" "):
                if word:
                    yield _Column(prefix, at, at + len(word))
                at += len(word) + 1
        if tags := values.get(b"TAGS"):
            yield _Column(prefix + "T#", tags.start, tags.stop)

    def are_alike(self, rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which rows have this shape, and ASCII keys."""
        is_bad = np.where(self._is_fixed, rows != self._row, rows <= _LAST_SEPARATOR)
        is_bad |= self._is_key & (rows >= _FIRST_BEYOND_ASCII)
        is_bad |= ~self._is_fixed & ((rows == ord(" ")) != (self._row == ord(" ")))
        is_alike: NDArray[np.bool_] = np.logical_not(np.any(is_bad, axis=1))
        return is_alike

    def hashes(self, rows: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Of rows that are alike: a column a key."""
        hashes = np.empty((len(rows), len(self._columns)), np.int32)
        for number, (prefix, begin, end) in enumerate(self._columns):
            hashes[:, number] = java_hash_of_rows(prefix, rows[:, begin:end])
        return to_index_hashes(hashes)

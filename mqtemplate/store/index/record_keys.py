"""Index keys of records, for many records at once.

Encoded properties have one *shape* if they differ only in the values, and each value has the same length: then each key
is in the same columns of all of them. The topic is no part of the shape, since its hash is added to that of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import java_string_hash
from mqtemplate.message import split_keys
from mqtemplate.record.arrays import Rows
from mqtemplate.record.properties import KEYS, PROPERTY_SEPARATOR, TAGS, UNIQ_KEY, find_property, value_spans

_MIN_RECORDS = 8
"""Fewer records are faster one by one."""
_MAX_SHAPES = 8
_LAST_SEPARATOR = PROPERTY_SEPARATOR[0]  # both separators are below all characters of a value
_FIRST_NON_ASCII = 0x80


def keys_of(topic: str, properties: bytes) -> list[str]:
    """Return the keys under which a record is indexed, with repetitions, in RocketMQ's order.

    These are its message id, each word of its business keys, and its tags as ``T#tags``.
    Source: RocketMQ ``IndexService.buildIndex`` (5.5.0).
    """
    keys = []
    prefix = topic + "#"
    if unique := find_property(properties, UNIQ_KEY):
        keys.append(prefix + unique)
    keys += [prefix + key for key in split_keys(find_property(properties, KEYS))]
    if tags := find_property(properties, TAGS):
        keys.append(f"{prefix}T#{tags}")
    return keys


def hash_keys(topics: Sequence[str], properties: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the hashes of all keys in the order of the records, and the number of keys of each record.

    Args:
        topics, properties: Of each record; the properties encoded.
    """
    parts = _hash_by_shape(topics, properties)
    counts = np.zeros(len(topics), np.int64)
    for rows, hashes in parts:
        counts[rows] = hashes.shape[1]
    starts = np.cumsum(counts) - counts
    all_hashes = np.empty(int(counts.sum()), np.int32)
    for rows, hashes in parts:
        all_hashes[starts[rows][:, None] + np.arange(hashes.shape[1])] = hashes
    return all_hashes, counts


def hash_similar(
    topics: Sequence[str], properties: Sequence[bytes], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Do the same for records whose properties mostly have one shape.

    Args:
        topics: Of one record each, or of several adjacent ones.
        properties: Of the same records, encoded, of one length, joined.
        counts: Numbers of records.
    """
    lengths = np.fromiter(map(len, properties), np.int64, len(properties)) // counts
    length = int(lengths[0])
    if (lengths == length).all():
        rows = np.frombuffer(b"".join(properties), np.uint8).reshape(int(counts.sum()), length)
        shape = PropertiesShape(rows[0].tobytes())
        if shape.matches(rows).all():
            hashes = shape.hashes(rows, np.repeat(hash_topics(topics), counts))
            return hashes.ravel(), np.full(len(rows), hashes.shape[1])
    parts = zip(topics, properties, lengths.tolist(), counts.tolist(), strict=True)
    records = [(topic, each[n * size : (n + 1) * size]) for topic, each, size, count in parts for n in range(count)]
    return hash_keys([topic for topic, _ in records], [encoded for _, encoded in records])


class _Part(NamedTuple):
    """Records with the same number of keys: their numbers, and a row of hashes for each."""

    rows: NDArray[np.intp]
    hashes: NDArray[np.int32]


def _hash_by_shape(topics: Sequence[str], properties: Sequence[bytes]) -> list[_Part]:
    starts = hash_topics(topics)
    lengths = np.fromiter(map(len, properties), np.int64, len(properties))
    parts, others = [], []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        for _ in range(_MAX_SHAPES):
            if len(rows) < _MIN_RECORDS:
                break
            data = b"".join([properties[row] for row in rows.tolist()])
            table = np.frombuffer(data, np.uint8).reshape(len(rows), length)
            shape = PropertiesShape(properties[rows[0]])
            is_done = shape.matches(table)
            if is_done[0]:
                parts.append(_Part(rows[is_done], shape.hashes(table[is_done], starts[rows[is_done]])))
            else:
                others.append(int(rows[0]))
                is_done[:] = False
                is_done[0] = True
            rows = rows[~is_done]
        others += rows.tolist()
    return parts + [_hash_one(row, topics[row], properties[row]) for row in others]


def _hash_one(row: int, topic: str, properties: bytes) -> _Part:
    return _Part(np.array([row]), index_key_hashes(keys_of(topic, properties))[None, :])


class PropertiesShape:
    """The common shape of all properties like *first*. Irregular ones do not even match themselves."""

    def __init__(self, first: bytes) -> None:
        values = value_spans(first, 0)
        # A byte matches if it is at most `_range` above `_lowest`. In a value that is any byte but the separators, in a
        # key any ASCII character but these, elsewhere the byte of the first properties.
        self._lowest = np.frombuffer(first, np.uint8).copy()
        self._range = np.zeros(len(first), np.uint8)
        if not values:  # then the separators count as values, and `matches` rejects every row
            self._lowest[:] = _LAST_SEPARATOR + 1
        for columns in values.values():
            self._lowest[columns], self._range[columns] = _LAST_SEPARATOR + 1, 0xFF - _LAST_SEPARATOR - 1
        self._keys = list(_key_columns(first, values))
        for _, columns in self._keys:
            self._range[columns] = _FIRST_NON_ASCII - 1 - _LAST_SEPARATOR - 1
        self._words = values.get(KEYS, slice(0, 0))
        self._blanks = np.frombuffer(first[self._words], np.uint8) == ord(" ")

    def matches(self, rows: Rows) -> NDArray[np.bool_]:
        """Return True for each row that has this shape and ASCII keys."""
        matches: NDArray[np.bool_] = np.all(rows - self._lowest <= self._range, axis=1)
        if len(self._blanks):  # blanks separate business keys
            matches &= np.all((rows[:, self._words] == ord(" ")) == self._blanks, axis=1)
        return matches

    def hashes(self, rows: Rows, topic_hashes: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return the hashes of the keys in matching rows: one column for each key.

        Args:
            topic_hashes: Of each row, or one for all.
        """
        hashes = np.empty((len(rows), len(self._keys)), np.int32)
        for number, (prefix, columns) in enumerate(self._keys):
            hashes[:, number] = index_hashes_of_rows(topic_hashes, prefix, rows[:, columns])
        return hashes


def _key_columns(properties: bytes, values: dict[bytes, slice]) -> Iterator[tuple[str, slice]]:
    """Yield what is between topic and value in each key, and the columns of the value, in the order of `keys_of`."""
    if unique := values.get(UNIQ_KEY):
        yield "#", unique
    if words := values.get(KEYS):
        at = words.start
        for word in properties[words].split(b" "):
            if word:
                yield "#", slice(at, at + len(word))
            at += len(word) + 1
    if tags := values.get(TAGS):
        yield "#T#", tags


# --- hashes -----------------------------------------------------------------------------------------


def index_key_hashes(keys: Sequence[str]) -> NDArray[np.int32]:
    """Return the hashes that an index file stores for keys. Each key has the form ``topic#key``."""
    return _to_index_hashes(java_string_hashes(keys))


def hash_topics(topics: Sequence[str]) -> NDArray[np.uint32]:
    """Return `java_string_hash` of each topic, without a sign."""
    return np.fromiter(map(_topic_hash, topics), np.uint32, len(topics))


@lru_cache(maxsize=1_024)
def _topic_hash(topic: str) -> int:
    return java_string_hash(topic) & 0xFFFF_FFFF


def index_hashes_of_rows(topic_hashes: NDArray[np.uint32], prefix: str, rows: Rows) -> NDArray[np.int32]:
    """Return the index hash of topic, *prefix* and ASCII text of each row. Texts of one length cost almost nothing.

    Args:
        topic_hashes: Of each row, or one for all.
    """
    length = rows.shape[1]
    powers = _powers_of_31((len(prefix) + length).bit_length())
    starts = topic_hashes * powers[len(prefix)] + np.uint32(java_string_hash(prefix))
    hashes: NDArray[np.uint32] = rows.astype(np.uint32) @ powers[length - 1 :: -1][:length] + starts * powers[length]
    return _to_index_hashes(hashes.view(np.int32))


def _to_index_hashes(hashes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Source: RocketMQ ``IndexFile.indexKeyHashMethod``."""
    hashes = np.abs(hashes)
    hashes[hashes < 0] = 0  # the smallest i4 has no positive counterpart
    return hashes


def java_string_hashes(texts: Sequence[str]) -> NDArray[np.int32]:
    """Return `java_string_hash` of each text, for a fraction of the time.

    A hash is the sum of ``unit * 31 ** (number of units after it)`` over its UTF-16 units. So one product over the
    units of all texts and one running sum are enough.
    """
    units = np.frombuffer("".join(texts).encode("utf-16-le", "surrogatepass"), "<u2")
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if lengths.sum() != len(units):  # some characters need two units
        lengths = np.fromiter(
            (len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts), np.int64, len(texts)
        )
    ends = np.cumsum(lengths)
    units_after = np.repeat(ends, lengths) - np.arange(1, len(units) + 1)
    powers = _powers_of_31(int(lengths.max(initial=0)).bit_length())
    sums = np.zeros(len(units) + 1, np.uint32)
    np.cumsum(units * powers[units_after], dtype=np.uint32, out=sums[1:])
    hashes: NDArray[np.uint32] = sums[ends] - sums[ends - lengths]
    return hashes.view(np.int32)


@lru_cache(maxsize=32)
def _powers_of_31(bits: int) -> NDArray[np.uint32]:
    """Return ``31 ** 0 .. 31 ** (2 ** bits - 1)``, modulo 2 ** 32."""
    factors = np.full(1 << bits, 31, np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)

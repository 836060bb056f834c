"""Index keys of records: read from the commit log, from record to record by their sizes, and hashed many at once.

Encoded properties have one *shape* if they differ only in the values, and each value has the same length: then each key
is in the same columns of all of them. The topic is not part of the shape: its hash is added to the other hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mqtemplate.event_log import get_logger
from mqtemplate.hashes import UTF_16, java_string_hash, tags_code
from mqtemplate.message import split_keys
from mqtemplate.record.columns import RecordBatch, Rows, count_leading, read_column, row_bytes, to_rows
from mqtemplate.record.layout import (
    BODY_AT,
    BODY_CRC_AT,
    BODY_LENGTH_AT,
    BORN_TIMESTAMP_AT,
    HEAD,
    HOST_FLAGS,
    MAGIC_V1,
    PHYSICAL_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    SysFlag,
    read_size_and_magic,
)
from mqtemplate.record.properties import (
    KEYS,
    PENDING_KEY,
    PROPERTY_SEPARATOR,
    REAL_TOPIC,
    TAGS,
    UNIQ_KEY,
    find_property,
    value_spans,
)
from mqtemplate.store.commit_log import LogReader, is_blank, whole_record_at
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.index_file import KeyRows, RecentKeys, RecentRecords

_MIN_RECORDS = 8
"""Fewer records are faster one by one."""
_MAX_SHAPES = 8
_LAST_SEPARATOR = PROPERTY_SEPARATOR[0]  # both separators are below all characters of a value
_FIRST_NON_ASCII = 0x80
_PENDING_PREFIX = "#P "
_NO_TOPIC = np.zeros(1, np.uint32)


def keys_of(topic: str, properties: bytes) -> list[str]:
    """Return the keys under which a record is indexed, with repetitions, in RocketMQ's order.

    These are its message id, each word of its business keys, and its tags as ``T#tags``.
    Source: RocketMQ ``IndexService.buildIndex`` (5.5.0). A delayed message also has its pending key, see
    `pending_key_text`.
    """
    keys = []
    prefix = topic + "#"
    if unique := find_property(properties, UNIQ_KEY):
        keys.append(prefix + unique)
    keys += [prefix + key for key in split_keys(find_property(properties, KEYS))]
    if tags := find_property(properties, TAGS):
        keys.append(f"{prefix}T#{tags}")
    if (pending := find_property(properties, PENDING_KEY)) and (topic := find_property(properties, REAL_TOPIC) or ""):
        keys.append(pending_key_text(topic, pending))
    return keys


def pending_key_text(topic: str, key: str) -> str:
    """Return the key under which a message for *topic* with a pending key is indexed, in whatever topic it is stored.

    No other key starts like this: a topic has a character.
    """
    return f"{_PENDING_PREFIX}{topic}{key}"


def pending_key_hash(topic: str, key: str) -> int:
    """Return the hash of a pending key in the index: that of `index_key_hashes`, for a fraction of the time."""
    units: Sequence[int] = key.encode() if key.isascii() else memoryview(key.encode(UTF_16, "surrogatepass")).cast("H")
    if len(units) > _LONG_KEY:
        return int(index_key_hashes([pending_key_text(topic, key)])[0])
    value = _pending_key_start(topic)
    for unit in units:
        value = 31 * value + unit
    value &= 0xFFFF_FFFF
    return 0 if value == 0x8000_0000 else min(value, 0x1_0000_0000 - value)


@lru_cache(maxsize=1_024)
def _pending_key_start(topic: str) -> int:
    """Return `java_string_hash` of what is before the key in `pending_key_text`, without a sign."""
    return java_string_hash(pending_key_text(topic, "")) & 0xFFFF_FFFF


def hash_keys(topics: Sequence[str], properties: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the hashes of all keys in the order of the records, and the number of keys of each record.

    Args:
        topics, properties: Of each record; the properties encoded.
    """
    sizes = np.fromiter(map(len, properties), np.int64, len(properties))
    return _Shapes(sizes, lambda rows, _: to_rows([properties[row] for row in rows.tolist()])).hash_keys(
        topics, np.arange(len(topics))
    )


def hash_batch(batch: RecordBatch, rows: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Do the same for records of a batch."""
    return _Shapes.of(batch, rows).hash_keys(batch.topic_names, batch.topic_number[rows])


def tags_codes(batch: RecordBatch) -> NDArray[np.int64]:
    """Return the number that a consume queue stores for the tags of each record of a batch."""
    return _Shapes.of(batch, np.arange(len(batch))).tags_codes()


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


class _Shapes:
    """Records by the shape of their properties.

    Args:
        sizes: Bytes of the encoded properties of each record.
        rows_of: Returns the properties of some records, which have one size.
    """

    def __init__(self, sizes: NDArray[np.int64], rows_of: Callable[[NDArray[np.intp], int], Rows]) -> None:
        self._count = len(sizes)
        self._found: list[tuple[NDArray[np.intp], Rows, PropertiesShape]] = []
        self._others: list[tuple[int, bytes]] = []  # records of no shape, or of a rare one
        for size in np.unique(sizes).tolist():
            rows = np.flatnonzero(sizes == size)
            self._add(rows, rows_of(rows, size))

    @classmethod
    def of(cls, batch: RecordBatch, rows: NDArray[np.intp]) -> Self:
        """Return the shapes of some records of a batch."""
        return cls(batch.properties_size[rows], lambda part, size: batch.properties_rows(rows[part], size))

    def _add(self, rows: NDArray[np.intp], table: Rows) -> None:
        for _ in range(_MAX_SHAPES):
            if len(rows) < _MIN_RECORDS:
                break
            shape = PropertiesShape(table[0].tobytes())
            is_done = shape.matches(table)
            if is_done.all():
                self._found.append((rows, table, shape))
                return
            if is_done[0]:
                self._found.append((rows[is_done], table[is_done], shape))
            else:
                self._others.append((int(rows[0]), table[0].tobytes()))
                is_done[:] = False
                is_done[0] = True
            rows, table = rows[~is_done], table[~is_done]
        self._others += zip(rows.tolist(), row_bytes(table), strict=True)

    def hash_keys(
        self, topics: Sequence[str], topic_numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the hashes of all keys in the order of the records, and the number of keys of each record."""
        topic_hashes = hash_topics(topics)[topic_numbers]
        parts = [(rows, shape.hashes(table, topic_hashes[rows])) for rows, table, shape in self._found]
        others = [keys_of(topics[topic_numbers[row]], properties) for row, properties in self._others]
        counts = np.zeros(self._count, np.int64)
        for rows, hashes in parts:
            counts[rows] = hashes.shape[1]
        for (row, _), keys in zip(self._others, others, strict=True):
            counts[row] = len(keys)
        if len(parts) == 1 and not others:
            return parts[0][1].ravel(), counts
        starts = np.cumsum(counts) - counts
        all_hashes = np.empty(int(counts.sum()), np.int32)
        for rows, hashes in parts:
            all_hashes[starts[rows][:, None] + np.arange(hashes.shape[1])] = hashes
        if others:
            hashes, at = index_key_hashes([key for keys in others for key in keys]), 0
            for (row, _), keys in zip(self._others, others, strict=True):
                all_hashes[starts[row] : starts[row] + len(keys)] = hashes[at : at + len(keys)]
                at += len(keys)
        return all_hashes, counts

    def tags_codes(self) -> NDArray[np.int64]:
        """Return the number that a consume queue stores for the tags of each record."""
        codes = np.zeros(self._count, np.int64)
        for rows, table, shape in self._found:
            codes[rows] = shape.tags_codes(table)
        for row, properties in self._others:
            codes[row] = tags_code(find_property(properties, TAGS))
        return codes


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
        for _, key_columns in self._keys:
            self._range[key_columns] = _FIRST_NON_ASCII - 1 - _LAST_SEPARATOR - 1
        self._words = values.get(KEYS, slice(0, 0))
        self._tags = values.get(TAGS)
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
            starts = _NO_TOPIC if prefix == _PENDING_PREFIX else topic_hashes
            hashes[:, number] = index_hashes_of_rows(starts, prefix, rows[:, columns])
        return hashes

    def tags_codes(self, rows: Rows) -> NDArray[np.int32] | int:
        """Return the number that a consume queue stores for the tags of each matching row, or one for all of them."""
        return 0 if self._tags is None else _hashes_of_rows(_NO_TOPIC, "", rows[:, self._tags])


def _key_columns(properties: bytes, values: dict[bytes, slice]) -> Iterator[tuple[str, slice | NDArray[np.intp]]]:
    """Yield what is between topic and value in each key, and the columns of the value, in the order of `keys_of`.

    `_PENDING_PREFIX` has no topic before it.
    """
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
    if (pending := values.get(PENDING_KEY)) and (topic := values.get(REAL_TOPIC)):
        yield _PENDING_PREFIX, np.r_[topic, pending]


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
    return _to_index_hashes(_hashes_of_rows(topic_hashes, prefix, rows))


def _hashes_of_rows(topic_hashes: NDArray[np.uint32], prefix: str, rows: Rows) -> NDArray[np.int32]:
    length = rows.shape[1]
    powers = _powers_of_31((len(prefix) + length).bit_length())
    starts = topic_hashes * powers[len(prefix)] + np.uint32(java_string_hash(prefix))
    hashes: NDArray[np.uint32] = rows.astype(np.uint32) @ powers[length - 1 :: -1][:length] + starts * powers[length]
    return hashes.view(np.int32)


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


_log = get_logger("mqtemplate.store")

_RECENT_SHARE = 8
"""So many records in memory take the time of one that is read from the log, or less."""
_LONG_KEY = 64
_FEWEST_ALIKE = 8
"""Fewer records are faster one by one."""
_MOST_BYTES = 512 << 10
"""Of large records it is faster to read the keys only, one by one."""
# Columns that are equal in records of one shape: size and magic, flags, body length.
_FIXED = np.r_[0:BODY_CRC_AT, SYS_FLAG_AT:BORN_TIMESTAMP_AT, BODY_LENGTH_AT:BODY_AT]

_Keyed = tuple[bytes, bytes, int, int]
"""Topic and encoded properties of a record, its physical offset and its store timestamp."""


class KeyReader:
    """Reader of the keys of all records in order. Damaged bytes before other records are logged and skipped.

    Attributes:
        position: Physical offset of the next record.
    """

    def __init__(self, log: LogReader, recent_keys: RecentKeys) -> None:
        self._log = log
        self._recent_keys = recent_keys
        self._recent = RecentRecords()  # those that were taken
        self.position = 0
        self._last_start = -1  # of the record before `position`; -1 if unknown

    def move_to(self, physical_offset: int) -> None:
        """Continue at another record."""
        self.position, self._last_start = physical_offset, -1

    @property
    def has_recent(self) -> bool:
        """True if records that were taken from memory remain."""
        return self.position <= self._recent.last

    def read(self, end: int, count: int) -> KeyRows:
        """Return the keys of records before *end*, which is the end of a record.

        Args:
            count: Maximum number of records. Those in memory count less, since they take less time.
        """
        parts: list[KeyRows] = []
        while count > 0 and self.position < end:
            recent = self._next_recent(count * _RECENT_SHARE)
            if recent is not None and recent.offsets[0] == self.position:
                parts.append(self._read_recent(recent))
                count -= -(-int(recent.counts.sum()) // _RECENT_SHARE)
            else:
                done, rows = self._read_log(end if recent is None else min(int(recent.offsets[0]), end), count)
                parts.append(rows)
                count -= done
        return _join(parts)

    def read_recent(self, count: int) -> KeyRows | None:
        """Return the keys of up to *count* records, the next ones, if the first is in memory; else None."""
        recent = self._next_recent(count)
        return self._read_recent(recent) if recent is not None and recent.offsets[0] == self.position else None

    def _next_recent(self, count: int) -> RecentRecords | None:
        """Return the next records that are in memory, adjacent ones; None without any."""
        if not self.has_recent:
            self._recent = self._recent_keys.take()
        return self._recent.part(self.position, count) if self.has_recent else None

    def _read_recent(self, recent: RecentRecords) -> KeyRows:
        self._last_start, self.position = recent.last, int(recent.ends[-1])
        hashes, keys = hash_similar(recent.topics, recent.properties, recent.counts)
        times = np.repeat(recent.timestamps, recent.counts)
        return KeyRows(hashes, np.repeat(recent.record_offsets(), keys), np.repeat(times, keys))

    def _read_log(self, end: int, count: int) -> tuple[int, KeyRows]:
        """Read records before *end* from the log. Return their number and their keys."""
        records: list[_Keyed] = []
        parts: list[KeyRows] = []
        left = count
        while left > 0 and self.position < end:
            found = self._log.files.find(self.position)
            if found is None:  # its file was deleted meanwhile
                self.move_to(max(self.position, min(self._log.start, end)))
                break
            file, file_start = found
            limit = min(end - file_start, file.size)
            alike = self._read_alike(file, file_start, limit, left)
            if alike is not None:
                done, rows = alike
                left -= done
                parts += [*_key_rows(records), rows]
                records.clear()
                continue
            left -= self._read_plain(file, file_start, limit, left, records)
            if left > 0 and self.position < end:
                left -= self._read_other(file, file_start, end, records)
        return count - left, _join([*parts, *_key_rows(records)])

    def _read_alike(self, file: MappedFile, file_start: int, limit: int, count: int) -> tuple[int, KeyRows] | None:
        """Read the next records together, if several have one size and one shape, as records of one producer often do.

        Returns:
            Their number and their keys; None if they are not alike.
        """
        at = self.position - file_start
        size, magic = read_size_and_magic(file.view, at) if at + HEAD.size < limit else (0, 0)
        count = min(count, (limit - at) // size, _MOST_BYTES // size) if size > HEAD.size else 0
        if count < _FEWEST_ALIKE or read_size_and_magic(file.view, at + (_FEWEST_ALIKE - 1) * size) != (size, magic):
            return None
        data = file.read(at, count * size)
        _, _, _, sys_flag, _, _, body_length = HEAD.unpack_from(data)
        tail_at = HEAD.size + body_length
        is_plain = magic == MAGIC_V1 and not sys_flag & HOST_FLAGS and body_length >= 0 and tail_at + 3 < size
        if not is_plain or sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK:
            return None
        topic_end = tail_at + 1 + data[tail_at]
        if topic_end + 2 > size or topic_end + 2 + int.from_bytes(data[topic_end : topic_end + 2], "big") != size:
            return None
        rows = np.frombuffer(data, np.uint8).reshape(count, size)
        properties = rows[:, topic_end + 2 :]
        shape = PropertiesShape(data[topic_end + 2 : size])
        offsets = self.position + size * np.arange(count)
        fixed = np.r_[_FIXED, tail_at : topic_end + 2]
        is_alike = shape.matches(properties) & (rows[:, fixed] == rows[0, fixed]).all(axis=1)
        is_alike &= read_column(rows, PHYSICAL_OFFSET_AT, ">i8") == offsets
        done = count_leading(is_alike)
        if done < _FEWEST_ALIKE:
            return None
        self._last_start = self.position + (done - 1) * size
        self.position += done * size
        topic = data[tail_at + 1 : topic_end].decode("utf-8", "replace")
        hashes = shape.hashes(properties[:done], hash_topics([topic]))
        keys = hashes.shape[1]
        times = read_column(rows[:done], STORE_TIMESTAMP_AT, ">i8")
        return done, KeyRows(hashes.ravel(), np.repeat(offsets[:done], keys), np.repeat(times, keys))

    def take(self, batch: RecordBatch) -> KeyRows | None:
        """Return the keys of records that another reader has read; None if they are not the next ones."""
        start = int(batch.physical_offset[0])
        found = self._log.files.find(self.position)
        if start != self.position and found is not None and is_blank(found[0], self.position - found[1]):
            self.position = found[1] + found[0].size
        if start != self.position:
            return None
        self._last_start = int(batch.physical_offset[-1])
        self.position += batch.byte_count
        kind = batch.sys_flag & SysFlag.TRANSACTION_MASK
        rows = np.flatnonzero(kind != SysFlag.TRANSACTION_ROLLBACK)
        hashes, keys = hash_batch(batch, rows)
        times, offsets = batch.store_timestamp[rows], batch.physical_offset[rows]
        return KeyRows(hashes, np.repeat(offsets, keys), np.repeat(times, keys))

    def _read_plain(self, file: MappedFile, file_start: int, limit: int, count: int, records: list[_Keyed]) -> int:
        """Read on in one file while the records are V1 with IPv4 hosts. Return their number."""
        view = file.view
        at, last_start, done = self.position - file_start, self._last_start, 0
        last_head, unpack, add = limit - HEAD.size, HEAD.unpack_from, records.append
        while done < count and at <= last_head:
            size, magic, physical_offset, sys_flag, timestamp, _, body_length = unpack(view, at)
            topic_at = at + HEAD.size + 1 + body_length
            end = at + size
            is_plain = magic == MAGIC_V1 and not sys_flag & HOST_FLAGS and physical_offset == file_start + at
            if not is_plain or body_length < 0 or topic_at >= end or end > limit:
                break
            topic_end = topic_at + view[topic_at - 1]
            if topic_end + 2 > end or topic_end + 2 + (view[topic_end] << 8 | view[topic_end + 1]) != end:
                break
            if sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
                add((view[topic_at:topic_end], view[topic_end + 2 : end], physical_offset, timestamp))
            last_start, at = physical_offset, end
            done += 1
        self.position, self._last_start = file_start + at, last_start
        return done

    def _read_other(self, file: MappedFile, file_start: int, end: int, records: list[_Keyed]) -> int:
        """Read a blank, a record with IPv6 hosts or a long topic, or damage. Return the number of records."""
        at = self.position - file_start
        if is_blank(file, at):
            self.position = file_start + file.size
            return 0
        record = whole_record_at(file, at, file_start)
        if record is None:
            self._skip_damage(end)
            return 0
        if record.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
            records.append((record.topic.encode(), record.properties_bytes, self.position, record.store_timestamp))
        self._last_start = self.position
        self.position += record.total_size
        return 1

    def _skip_damage(self, end: int) -> None:
        """Continue with the next whole record.

        It may be before `position`, if the size of the last record is damaged.
        """
        damaged = self.position
        following = self._log.find_record_after(damaged if self._last_start < 0 else self._last_start)
        self.move_to(end if following is None else min(following, end))
        _log.warning(
            "store.index_damage_skipped",
            file=self._log.path_of(damaged).name,
            physical_offset=damaged,
            continued_at=self.position,
        )


def _join(parts: Sequence[KeyRows]) -> KeyRows:
    if len(parts) == 1:
        return parts[0]
    columns = (np.concatenate(each) for each in zip(*parts, strict=True)) if parts else (np.array([], np.int64),) * 3
    return KeyRows(*columns)


def _key_rows(records: Sequence[_Keyed]) -> list[KeyRows]:
    """Return the keys of records one by one; an empty list for none."""
    if not records:
        return []
    topics, properties, physical_offsets, timestamps = zip(*records, strict=True)
    hashes, counts = hash_keys([topic.decode("utf-8", "replace") for topic in topics], properties)
    offsets = np.repeat(np.array(physical_offsets, np.int64), counts)
    return [KeyRows(hashes, offsets, np.repeat(np.array(timestamps, np.int64), counts))]

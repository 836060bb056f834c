"""Reading the keys of the records in the commit log, from record to record by their sizes, without checksums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mqtemplate.event_log import get_logger
from mqtemplate.record.layout import HEAD, HOST_FLAGS, MAGIC_V1, SysFlag
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.index.index_file import KeyRows
from mqtemplate.store.index.record_keys import hash_keys, tail_of
from mqtemplate.store.log_reader import LogReader, is_blank, whole_record_at

_log = get_logger("mqtemplate.store")


_Tail = tuple[bytes, int, int]
"""Tail of a record (see `record_keys`), its physical offset and its store timestamp."""


class KeyReader:
    """Reader of the keys of all records in order. Damaged bytes before other records are logged and skipped.

    Attributes:
        position: Physical offset of the next record.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self.position = 0
        self._last_start = -1  # of the record before `position`; -1 if unknown

    def move_to(self, physical_offset: int) -> None:
        """Continue at another record."""
        self.position, self._last_start = physical_offset, -1

    def read(self, end: int, count: int) -> KeyRows:
        """Return the keys of up to *count* records before *end*, which is the end of a record."""
        tails: list[_Tail] = []
        while count > 0 and self.position < end:
            found = self._log.find(self.position)
            if found is None:  # its file was deleted meanwhile
                self.move_to(max(self.position, min(self._log.start, end)))
                break
            file, file_start = found
            count -= self._read_plain(file, file_start, min(end - file_start, file.size), count, tails)
            if count > 0 and self.position < end:
                count -= self._read_other(file, file_start, end, tails)
        return _key_rows(tails)

    def _read_plain(self, file: MappedFile, file_start: int, limit: int, count: int, tails: list[_Tail]) -> int:
        """Read on in one file while the records are V1 with IPv4 hosts. Return their number."""
        view = file.view
        at, last_start, done = self.position - file_start, self._last_start, 0
        last_head, unpack, add = limit - HEAD.size, HEAD.unpack_from, tails.append
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
                add((view[topic_at - 1 : end], physical_offset, timestamp))
            last_start, at = physical_offset, end
            done += 1
        self.position, self._last_start = file_start + at, last_start
        return done

    def _read_other(self, file: MappedFile, file_start: int, end: int, tails: list[_Tail]) -> int:
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
            tails.append((tail_of(record), self.position, record.store_timestamp))
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


def _key_rows(tails: Sequence[_Tail]) -> KeyRows:
    data, physical_offsets, timestamps = zip(*tails, strict=True) if tails else ((), (), ())
    hashes, counts = hash_keys(data)
    return KeyRows(
        hashes,
        np.repeat(np.array(physical_offsets, np.int64), counts),
        np.repeat(np.array(timestamps, np.int64), counts),
    )

"""Reading keys off the commit log: from record to record by their sizes, without checking them."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

import numpy as np
import structlog

from mqtemplate.record.codec import HOST_FLAGS, MAGIC_V1, SysFlag
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.index.index_file import KeyRows
from mqtemplate.store.index.record_tails import hash_keys, tail_of
from mqtemplate.store.log_walk import HEAD, is_blank, record_in

_log = structlog.stdlib.get_logger("mqtemplate.store")


_Tail = tuple[bytes, int, int]
"""Where the keys of a record are (see `record_tails`), its physical offset and its store timestamp."""


def _rows(tails: Sequence[_Tail]) -> KeyRows:
    data, physical_offsets, timestamps = zip(*tails, strict=True) if tails else ((), (), ())
    hashes, counts = hash_keys(data)
    return KeyRows(
        hashes,
        np.repeat(np.array(physical_offsets, np.int64), counts),
        np.repeat(np.array(timestamps, np.int64), counts),
    )


class KeyReader:
    """Goes over the log and collects the keys of its records; ``position`` is the next record.

    What is no record, in front of others, is damage: it is logged, and left out.
    """

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.position = 0
        self._last_start = -1

    def go_to(self, physical_offset: int) -> None:
        self.position, self._last_start = physical_offset, -1

    def read(self, end: int, count: int) -> KeyRows:
        """The keys of up to *count* records before *end*, where a record ends."""
        tails: list[_Tail] = []
        while count > 0 and self.position < end:
            found = self._log.find(self.position)
            if found is None:  # its file was deleted at this moment
                self.go_to(max(self.position, min(self._log.begin, end)))
                break
            file, file_start = found
            count -= self._read_plain(file.view, file_start, min(end - file_start, file.size), count, tails)
            if count > 0 and self.position < end:
                count -= self._read_other(file.view, file_start, file.size, end, tails)
        return _rows(tails)

    def _read_plain(self, view: mmap, file_start: int, limit: int, count: int, into: list[_Tail]) -> int:
        """Read on in one file while records are of the usual kind; gives how many."""
        at, last_start, done = self.position - file_start, self._last_start, 0
        last_head, unpack, add = limit - HEAD.size, HEAD.unpack_from, into.append
        while done < count and at <= last_head:
            size, magic, physical_offset, sys_flag, timestamp, body_length = unpack(view, at)
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

    def _read_other(self, view: mmap, file_start: int, file_size: int, end: int, into: list[_Tail]) -> int:
        """Take what is not of the usual kind: a blank, a record with IPv6 hosts or a long topic, or damage."""
        at = self.position - file_start
        if is_blank(view, at, file_size):
            self.position = file_start + file_size
            return 0
        record = record_in(view, at, file_start)
        if record is None:
            self._skip_damage(end)
            return 0
        if record.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
            into.append((tail_of(record), self.position, record.store_timestamp))
        self._last_start = self.position
        self.position += record.total_size
        return 1

    def _skip_damage(self, end: int) -> None:
        """Go on with the next whole record. It may lie before `position`, if it was the size that led astray."""
        damaged = self.position
        behind = self._log.find_record_after(damaged if self._last_start < 0 else self._last_start)
        self.go_to(end if behind is None else min(behind, end))
        _log.warning(
            "store.index_skips_damage",
            file=self._log.path_of(damaged).name,
            physical_offset=damaged,
            goes_on_at=self.position,
        )

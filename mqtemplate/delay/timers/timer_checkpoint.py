"""How far the timers are: the file ``config/timercheck``."""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from typing import NamedTuple

from mqtemplate.store.files.mapped_file import MappedFile

TIMER_CHECKPOINT_SIZE = 4_096


class Writer(Enum):
    """Who wrote the file last: this service, RocketMQ, or nobody, or something damaged it."""

    OURS = "ours"
    ROCKETMQ = "rocketmq"
    NOBODY = "nobody"


class TimerCheckpoint(NamedTuple):
    """Big-endian; the file has 4096 bytes, of which upstream uses 56.

    ==  ==  =========================  ================================================================
     0  i8  last_read_time_ms          the first slot that is not wholly handed over
     8  i8  last_timer_log_flush_pos   end of the timer log that is on the disk, with the wheel over it
    16  i8  last_timer_queue_offset    next unit of the timer topic's queue to put on the wheel
    24  i8  master_timer_queue_offset  `NO_MASTER`, or what upstream wrote
    32  i8  state_version
    40  i8  timestamp                  ms, of this version
    48  i8  counter                    versions so far
    56  i8  (free)
    64  i8  precision_ms               ours: the length of a slot; 0 in a file that upstream made
    72  i8  wheel_checksum             ours: see `TimerWheel.checksum`
    ==  ==  =========================  ================================================================

    Ours, too: from 80 on these ten once more, and at 160 their CRC-32 as i8. Upstream keeps what it does not know, so
    where the two differ it wrote last; where a single bit does, the file is damaged.

    Source: RocketMQ ``store: TimerCheckpoint``.
    """

    last_read_time_ms: int
    last_timer_log_flush_pos: int
    last_timer_queue_offset: int
    master_timer_queue_offset: int
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0
    free: int = 0
    precision_ms: int = 0
    wheel_checksum: int = 0


NO_MASTER = (1 << 63) - 1
"""As ``master_timer_queue_offset``: no other broker tells how far to go. Upstream takes the lower one of this and the
place that its timer log shows. A number that lags behind the log, as it does after a kill, would make it put messages
on the wheel a second time."""

_CHECKPOINT = struct.Struct(">10q")
_CRC = struct.Struct(">q")
_COPY_AT = _CHECKPOINT.size
_CRC_AT = 2 * _CHECKPOINT.size
assert (_COPY_AT, _CRC_AT) == (80, 160)


def read_timer_checkpoint(file: MappedFile) -> tuple[TimerCheckpoint, Writer]:
    """The checkpoint, and who wrote it; that of nobody is worth nothing."""
    page = file.view[: _CRC_AT + _CRC.size]
    front, copy, crc = page[:_COPY_AT], page[_COPY_AT:_CRC_AT], _CRC.unpack(page[_CRC_AT:])[0]
    writer = Writer.ROCKETMQ
    if not any(page[:16]) and not any(page[_COPY_AT:]):
        writer = Writer.NOBODY
    elif front == copy or zlib.crc32(front) == crc:
        writer = Writer.OURS
    elif zlib.crc32(copy) == crc:
        wrong_bits = (int.from_bytes(front, "big") ^ int.from_bytes(copy, "big")).bit_count()
        if wrong_bits == 1:
            front, writer = copy, Writer.OURS
    elif any(page[_COPY_AT:]):
        writer = Writer.NOBODY
    return TimerCheckpoint(*_CHECKPOINT.unpack(front)), writer


def write_timer_checkpoint(file: MappedFile, checkpoint: TimerCheckpoint) -> None:
    """Return when it is on the disk."""
    data = _CHECKPOINT.pack(*checkpoint)
    file.write(0, data + data + _CRC.pack(zlib.crc32(data)))
    file.flush()

"""Progress of the timers: the file ``config/timercheck``."""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from typing import NamedTuple

from mqtemplate.store.files.mapped_file import MappedFile

TIMER_CHECKPOINT_SIZE = 4_096


class Writer(Enum):
    """Broker that wrote the file last; `UNKNOWN` if the file is new or damaged."""

    OURS = "ours"
    ROCKETMQ = "rocketmq"
    UNKNOWN = "unknown"


class TimerCheckpoint(NamedTuple):
    """The contents of the file. Big-endian; the file has 4096 bytes, of which RocketMQ uses 56.

    ==  ==  =========================  ================================================================
     0  i8  last_read_time_ms          the first slot that is not completely released
     8  i8  last_timer_log_flush_pos   end of the timer log on disk; the wheel on disk agrees with it
    16  i8  last_timer_queue_offset    next unit of the timer topic's queue to put on the wheel
    24  i8  master_timer_queue_offset  `NO_MASTER`, or RocketMQ's number
    32  i8  state_version
    40  i8  timestamp                  ms, of this version
    48  i8  counter                    versions so far
    56  i8  (free)
    64  i8  precision_ms               ours: the length of a slot; 0 in a file that RocketMQ created
    72  i8  wheel_checksum             ours: see `TimerWheel.checksum`
    ==  ==  =========================  ================================================================

    Also ours: a copy of these ten numbers at 80, and their CRC-32 as i8 at 160. RocketMQ changes only its own fields.
    So if the numbers and their copy differ, RocketMQ wrote last. If they differ in a single bit, the file is damaged.

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
"""Value of ``master_timer_queue_offset``: there is no master broker that limits how far to read.

RocketMQ starts at the lower one of this number and the queue offset that its timer log shows. After a kill, a number of
ours would be lower than the log, and RocketMQ would put messages on the wheel a second time."""

_CHECKPOINT = struct.Struct(">10q")
_CRC = struct.Struct(">q")
_COPY_AT = _CHECKPOINT.size
_CRC_AT = 2 * _CHECKPOINT.size
assert (_COPY_AT, _CRC_AT) == (80, 160)


def read_timer_checkpoint(file: MappedFile) -> tuple[TimerCheckpoint, Writer]:
    """Return the checkpoint and its writer. With `Writer.UNKNOWN` the checkpoint is meaningless."""
    page = file.view[: _CRC_AT + _CRC.size]
    front, copy, crc = page[:_COPY_AT], page[_COPY_AT:_CRC_AT], _CRC.unpack(page[_CRC_AT:])[0]
    writer = Writer.ROCKETMQ
    if not any(page[:16]) and not any(page[_COPY_AT:]):
        writer = Writer.UNKNOWN  # a new file
    elif front == copy or zlib.crc32(front) == crc:
        writer = Writer.OURS
    elif zlib.crc32(copy) == crc:
        wrong_bits = (int.from_bytes(front, "big") ^ int.from_bytes(copy, "big")).bit_count()
        if wrong_bits == 1:  # damage: RocketMQ always changes several bits, its timestamp alone has some
            front, writer = copy, Writer.OURS
    elif any(page[_COPY_AT:]):
        writer = Writer.UNKNOWN  # neither the numbers nor their copy match the CRC
    return TimerCheckpoint(*_CHECKPOINT.unpack(front)), writer


def write_timer_checkpoint(file: MappedFile, checkpoint: TimerCheckpoint) -> None:
    """Write the checkpoint, and flush it."""
    data = _CHECKPOINT.pack(*checkpoint)
    file.write(0, data + data + _CRC.pack(zlib.crc32(data)))
    file.flush()

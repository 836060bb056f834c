"""How far the timers are: the file ``config/timercheck``."""

from __future__ import annotations

import struct
from typing import NamedTuple

from mqtemplate.store.mapped_file import MappedFile

__all__ = ["TIMER_CHECKPOINT_SIZE", "TimerCheckpoint", "read_timer_checkpoint", "write_timer_checkpoint"]

TIMER_CHECKPOINT_SIZE = 4_096


class TimerCheckpoint(NamedTuple):
    """Big-endian; the file has 4096 bytes, of which upstream uses 56.

    ==  ==  =========================  ================================================================
     0  i8  last_read_time_ms          the first slot that is not wholly handed over
     8  i8  last_timer_log_flush_pos   end of the timer log that is on the disk, with the wheel over it
    16  i8  last_timer_queue_offset    next unit of the timer topic's queue to put on the wheel
    24  i8  master_timer_queue_offset  the same: there is no other broker
    32  i8  state_version
    40  i8  timestamp                  ms, of this version
    48  i8  counter                    versions so far
    56  i8  (free)
    64  i8  precision_ms               ours: the length of a slot; 0 in a file that upstream made
    ==  ==  =========================  ================================================================

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


_CHECKPOINT = struct.Struct(">9q")
assert _CHECKPOINT.size == 72


def read_timer_checkpoint(file: MappedFile) -> TimerCheckpoint:
    return TimerCheckpoint(*_CHECKPOINT.unpack_from(file.view))


def write_timer_checkpoint(file: MappedFile, checkpoint: TimerCheckpoint) -> None:
    """Return when it is on the disk."""
    _CHECKPOINT.pack_into(file.view, 0, *checkpoint)
    file.flush()

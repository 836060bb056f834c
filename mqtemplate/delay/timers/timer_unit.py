"""One unit of the timer log: its bytes, and the check by which a damaged one is known."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

import numpy as np

MAGIC_DEFAULT = 1
MAGIC_ROLL = 2
MAGIC_DELETE = 4
MAGIC_DONE = 8
"""Ours: nobody here need look at the unit. Upstream allows the bit and gives it no meaning."""
_MAGIC_MASK = 0xF
DONE_RECORD_SIZE = 1
"""Ours, beside that bit: of one byte upstream reads no record, so it passes over the unit as over a lost message."""


class TimerUnit(NamedTuple):
    """One message on the wheel. Big-endian, 52 bytes.

    ==  ==  ===============  =================================================================
     0  i4  size             52
     4  i8  previous_pos     timer log offset of the unit before in the same slot, -1 for none
    12  i4  magic            bits: 1 default, 2 roll (parked, to be set on again), 4 delete marker, 8 done
    16  i8  write_time_ms    the clock when it was written, rounded down to a tick
    24  i4  delay_ms         slot time minus ``write_time_ms``
    28  i8  physical_offset  the record in the timer topic
    36  i4  record_size      bytes of that record; `DONE_RECORD_SIZE` once it is marked as done
    40  i4  topic_hash       Java hash of the real topic, 0 if there is none
    44  i8  tail             ours, see `seal_units`; upstream writes 0 and reads nothing here
    ==  ==  ===============  =================================================================

    ``tail`` holds the exact due time (ms) in its low 44 bits, 0 where only the record tells it, and above them a check
    of everything else.

    Source: RocketMQ ``store: TimerLog``.
    """

    size: int
    previous_pos: int
    magic: int
    write_time_ms: int
    delay_ms: int
    physical_offset: int
    record_size: int
    topic_hash: int
    tail: int

    @property
    def slot_ms(self) -> int:
        return self.write_time_ms + self.delay_ms

    @property
    def deliver_ms(self) -> int:
        """When it is due; 0 where only the record tells that."""
        return self.tail & LATEST_DELIVER_MS


_UNIT = struct.Struct(">iqiqiqiiq")
TIMER_UNIT_SIZE = _UNIT.size
assert TIMER_UNIT_SIZE == 52
TIMER_UNIT_DTYPE = np.dtype(
    [
        ("size", ">i4"),
        ("previous_pos", ">i8"),
        ("magic", ">i4"),
        ("write_time_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_size", ">i4"),
        ("topic_hash", ">i4"),
        ("tail", ">i8"),
    ]
)
assert TIMER_UNIT_DTYPE.itemsize == TIMER_UNIT_SIZE

_DELIVER_BITS = 44
LATEST_DELIVER_MS = (1 << _DELIVER_BITS) - 1
"""The latest due time that fits into a unit, in the year 2527."""
_MASK_64 = (1 << 64) - 1

# The same 52 bytes as words. Each is multiplied by an odd number without long runs of equal bits, so that whichever
# single bit is wrong, the high 20 bits of the sum are.
_WORDS = struct.Struct(">5QIQ")
_WORDS_DTYPE = np.dtype([("front", ">u8", 5), ("topic_hash", ">u4"), ("tail", ">u8")])
_FACTORS = tuple(0x9E3779B97F4A7C15 * factor & _MASK_64 for factor in (1, 3, 7, 13, 29, 37, 41))
_FACTOR_ARRAY = np.array(_FACTORS, np.uint64)


def unpack_unit(data: bytes | mmap, at: int = 0) -> TimerUnit | None:
    """The unit there; None if it is none, or a damaged one."""
    unit = TimerUnit._make(_UNIT.unpack_from(data, at))
    if unit.size != TIMER_UNIT_SIZE or unit.magic & ~_MAGIC_MASK:
        return None
    if unit.tail:  # the same sum as in `_checks`, which takes ten times as long for a single one
        *words, tail = _WORDS.unpack_from(data, at)
        words.append(tail & LATEST_DELIVER_MS)
        total = sum([word * factor for word, factor in zip(words, _FACTORS, strict=True)]) & _MASK_64
        if tail >> _DELIVER_BITS != max(total >> _DELIVER_BITS, 1):
            return None
    return unit


def deliver_times(units: np.ndarray) -> np.ndarray:
    """`TimerUnit.deliver_ms` of each."""
    return np.asarray(units["tail"].astype(np.int64) & LATEST_DELIVER_MS)


def seal_units(units: np.ndarray) -> None:
    """Put the check beside the due times that stand in ``tail``."""
    deliver = deliver_times(units)
    units["tail"] = deliver
    units["tail"] = deliver.view(np.uint64) | (_checks(units) << np.uint64(_DELIVER_BITS))


def are_sound(units: np.ndarray) -> np.ndarray:
    """For each unit, whether it is one, and undamaged as far as can be told: upstream's have no check."""
    has_shape = (units["size"] == TIMER_UNIT_SIZE) & (units["magic"] & ~_MAGIC_MASK == 0)
    found = units["tail"].astype(np.int64).view(np.uint64) >> np.uint64(_DELIVER_BITS)
    return np.asarray(has_shape & ((found == _checks(units)) | (units["tail"] == 0)))


def _checks(units: np.ndarray) -> np.ndarray:
    """The check of each, never 0; what stands in the high bits of ``tail`` does not count."""
    words = np.ascontiguousarray(units).view(_WORDS_DTYPE)
    sums = words["topic_hash"] * _FACTOR_ARRAY[5] + (words["tail"] & np.uint64(LATEST_DELIVER_MS)) * _FACTOR_ARRAY[6]
    front = words["front"]
    for place in range(5):
        sums += front[:, place] * _FACTOR_ARRAY[place]
    return np.asarray(np.maximum(sums >> np.uint64(_DELIVER_BITS), np.uint64(1)))

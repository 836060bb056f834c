"""One unit of the timer log: its bytes, and the check that detects damage."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

import numpy as np


class Magic:
    """Bits of ``TimerUnit.magic``. Source: RocketMQ ``TimerMessageStore.Magic.DEFAULT``, ….

    ``DONE`` is ours: the message is not pending here. RocketMQ accepts the bit and gives it no meaning.
    """

    DEFAULT = 1
    ROLL = 2
    DELETE = 4
    DONE = 8
    MASK = 0xF


DONE_RECORD_SIZE = 1
"""Ours, written beside `Magic.DONE`: RocketMQ reads no record of one byte, so it skips the unit like a lost message."""


class TimerUnit(NamedTuple):
    """One message on the wheel. Big-endian, 52 bytes.

    ==  ==  ===============  =================================================================
     0  i4  size             52
     4  i8  previous_pos     timer log offset of the previous unit of the slot, -1 for none
    12  i4  magic            bits: 1 default, 2 roll (parked, to be rolled), 4 delete marker, 8 done
    16  i8  write_time_ms    the clock when it was written, rounded down to a tick
    24  i4  delay_ms         slot time minus ``write_time_ms``
    28  i8  physical_offset  the record in the timer topic
    36  i4  record_size      bytes of that record; `DONE_RECORD_SIZE` once it is marked as done
    40  i4  topic_hash       Java hash of the real topic, 0 if there is none
    44  i8  tail             ours, see `seal_units`; RocketMQ writes 0 and does not read it
    ==  ==  ===============  =================================================================

    ``tail`` has the exact due time (ms) in its low 44 bits, 0 if only the record has it. The 20 bits above are a check
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
        """Slot that the unit is linked to."""
        return self.write_time_ms + self.delay_ms


_FORMAT = "iqiqiqiiq"  # i: 4 bytes, q: 8 bytes, for struct and for numpy
_UNIT = struct.Struct(f">{_FORMAT}")
TIMER_UNIT_SIZE = _UNIT.size
TIMER_UNIT_DTYPE = np.dtype([(name, f">{kind}") for name, kind in zip(TimerUnit._fields, _FORMAT, strict=True)])
assert TIMER_UNIT_SIZE == TIMER_UNIT_DTYPE.itemsize == 52

_DELIVER_BITS = 44
MAX_DELIVER_MS = (1 << _DELIVER_BITS) - 1
"""The latest due time that fits into a unit, in the year 2527."""
_MASK_64 = (1 << 64) - 1

# The same 52 bytes as words: five of 8 bytes, ``topic_hash``, ``tail``. Each is multiplied by an odd number without
# long runs of equal bits. So each single wrong bit of a word changes the high 20 bits of the sum, which are the check.
_WORDS = struct.Struct(">5QIQ")
_WORDS_DTYPE = np.dtype([("front", ">u8", 5), ("topic_hash", ">u4"), ("tail", ">u8")])
_FACTORS = tuple(0x9E3779B97F4A7C15 * factor & _MASK_64 for factor in (1, 3, 7, 13, 29, 37, 41))
_FACTOR_ARRAY = np.array(_FACTORS, np.uint64)


def unpack_unit(data: bytes | mmap, at: int = 0) -> TimerUnit | None:
    """Return the unit at *at*; None if there is none, or a damaged one."""
    unit = TimerUnit._make(_UNIT.unpack_from(data, at))
    if unit.size != TIMER_UNIT_SIZE or unit.magic & ~Magic.MASK:
        return None
    if unit.tail:  # RocketMQ's units have no check
        # The same sum as in `_checks`. For a single unit numpy takes ten times as long.
        *words, tail = _WORDS.unpack_from(data, at)
        words.append(tail & MAX_DELIVER_MS)
        total = sum([word * factor for word, factor in zip(words, _FACTORS, strict=True)]) & _MASK_64
        if tail >> _DELIVER_BITS != max(total >> _DELIVER_BITS, 1):
            return None
    return unit


def deliver_times(units: np.ndarray) -> np.ndarray:
    """Return the due time of each unit; 0 if only the record has it."""
    return np.asarray(units["tail"].astype(np.int64) & MAX_DELIVER_MS)


def slots_of(units: np.ndarray) -> np.ndarray:
    """Return `TimerUnit.slot_ms` of each unit."""
    return np.asarray(units["write_time_ms"].astype(np.int64) + units["delay_ms"])


def create_units(
    arrivals: np.ndarray, slots_ms: np.ndarray, magic: np.ndarray, write_ms: int, precision_ms: int
) -> np.ndarray:
    """Return the units of messages, given as `ARRIVAL_DTYPE`, without their ``previous_pos`` and check."""
    units = np.empty(len(arrivals), TIMER_UNIT_DTYPE)
    # The slot may be before the write time, if the message is late, or more than four signed bytes after it, if the
    # clock was set back. Then the write time is adjusted: only its sum with the delay has a meaning.
    max_delay_ms = ((1 << 31) - 1) // precision_ms * precision_ms
    writes_ms = np.maximum(np.minimum(write_ms, slots_ms), slots_ms - max_delay_ms)
    units["size"] = TIMER_UNIT_SIZE
    units["magic"] = magic
    units["write_time_ms"] = writes_ms
    units["delay_ms"] = slots_ms - writes_ms
    units["physical_offset"] = arrivals["physical_offset"]
    units["record_size"] = arrivals["size"]
    units["topic_hash"] = arrivals["topic_hash"]
    fits = (arrivals["deliver_ms"] >= 0) & (arrivals["deliver_ms"] <= MAX_DELIVER_MS)
    units["tail"] = np.where(fits, arrivals["deliver_ms"], 0)
    return units


def seal_units(units: np.ndarray) -> None:
    """Write the check of each unit beside the due time in ``tail``."""
    deliver = deliver_times(units)
    units["tail"] = deliver  # clears an old check
    units["tail"] = deliver.view(np.uint64) | (_checks(units) << np.uint64(_DELIVER_BITS))


def are_valid(units: np.ndarray) -> np.ndarray:
    """Return for each unit whether it is one and undamaged. RocketMQ's units have no check; their form is compared."""
    has_form = (units["size"] == TIMER_UNIT_SIZE) & (units["magic"] & ~Magic.MASK == 0)
    found = units["tail"].astype(np.int64).view(np.uint64) >> np.uint64(_DELIVER_BITS)
    return np.asarray(has_form & ((found == _checks(units)) | (units["tail"] == 0)))


def _checks(units: np.ndarray) -> np.ndarray:
    """Return the check of each unit, never 0. The check that is stored in ``tail`` is left out of the sum."""
    words = np.ascontiguousarray(units).view(_WORDS_DTYPE)
    sums = words["topic_hash"] * _FACTOR_ARRAY[5] + (words["tail"] & np.uint64(MAX_DELIVER_MS)) * _FACTOR_ARRAY[6]
    front = words["front"]
    for index in range(5):
        sums += front[:, index] * _FACTOR_ARRAY[index]
    return np.asarray(np.maximum(sums >> np.uint64(_DELIVER_BITS), np.uint64(1)))

"""Blocks of records of one queue, and the interface of a location that has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.record.layout import HEAD_FIELDS, SMALLEST_RECORD, read_size_and_magic
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange

MAX_ROWS = 8_192  # of a block; from here to 32,768 rows the time per row is the same
MAX_BYTES = 32 * 1024 * 1024  # of a block; bodies may be megabytes
_REMOTE_BYTES = 4 << 20  # of a block from several responses
_ROWS = ("at", "sizes", "queue_offsets", "physical_offsets")
_HEAD = np.dtype(HEAD_FIELDS)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBlock:
    """Records of one queue in ascending order, at most `MAX_ROWS` and, except for one record, `MAX_BYTES`.

    Attributes:
        data: Bytes that contain the records; other records may lie between them.
        at: Position in *data* of each record.
        sizes: Bytes of each record.
        queue_offsets: Queue offset of each record.
        physical_offsets: Position of each record in the commit log, in bytes.
        source: File or broker that the bytes come from, for errors.
    """

    queue: MessageQueue
    data: npt.NDArray[np.uint8]
    at: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    queue_offsets: npt.NDArray[np.int64]
    physical_offsets: npt.NDArray[np.int64]
    source: Path | str


def pieces(sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Split records into blocks by rows and by bytes; each block has at least one record."""
    ends = np.cumsum(sizes)
    at = 0
    while at < len(sizes):
        before = int(ends[at - 1]) if at else 0
        stop = min(at + MAX_ROWS, int(np.searchsorted(ends, before + MAX_BYTES, side="right")))
        yield slice(at, max(stop, at + 1))
        at = max(stop, at + 1)


def blocks_of(bodies: Iterable[bytes], found: QueueRange, source: str) -> Iterator[RecordBlock]:
    """Yield the records of responses as blocks, without those outside of the range.

    Args:
        bodies: Records, one after the other, in ascending order over all bodies.
        source: The broker.

    Raises:
        RemoteProtocolError: The bytes are not records.
    """
    pending: list[bytes] = []
    starts: list[int] = []
    size = 0
    for body in bodies:
        starts += _starts(body, size, source)
        pending.append(body)
        size += len(body)
        if len(starts) >= MAX_ROWS or size >= _REMOTE_BYTES:
            yield from _block_of(b"".join(pending), starts, found, source)
            pending, starts, size = [], [], 0
    if starts:
        yield from _block_of(b"".join(pending), starts, found, source)


def _starts(body: bytes, before: int, source: str) -> list[int]:
    """Return the position of each record of a body, counted from *before*."""
    starts: list[int] = []
    at, end = 0, len(body)
    while at < end:
        size = read_size_and_magic(body, at)[0] if end - at >= SMALLEST_RECORD else 0
        if not SMALLEST_RECORD <= size <= end - at:
            raise RemoteProtocolError(
                f"{source}: message {len(starts)} of a response has {size} bytes, {end - at} left"
            )
        starts.append(before + at)
        at += size
    return starts


def _block_of(data: bytes, starts: list[int], found: QueueRange, source: str) -> Iterator[RecordBlock]:
    block = block_at(data, np.array(starts, np.int64), found, source)
    wanted = (block.queue_offsets >= found.start) & (block.queue_offsets < found.end)
    if not wanted.all():
        block = replace(block, **{name: getattr(block, name)[wanted] for name in _ROWS})
    if len(block.at):
        yield block


def block_at(data: bytes | memoryview, at: npt.NDArray[np.int64], found: QueueRange, source: str) -> RecordBlock:
    """Return a block of adjacent records. Queue offsets and positions are those that the records state."""
    array = np.frombuffer(data, np.uint8)
    heads = np.ndarray((len(array) - _HEAD.itemsize + 1,), _HEAD, buffer=array.data, strides=(1,))[at]
    return RecordBlock(
        queue=found.queue,
        data=array,
        at=at,
        sizes=np.diff(np.append(at, len(array))),
        queue_offsets=heads["queue_offset"].astype(np.int64),
        physical_offsets=heads["physical_offset"].astype(np.int64),
        source=source,
    )


class Blocks(Protocol):
    """Queues of a location, and their records in blocks.

    It is picklable: planner and tasks run in different processes, tasks perhaps on other machines.
    """

    def topics(self) -> set[str]:
        """Return all topics, also those without a message."""

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, sorted; none if the topic is missing or, in a folder, has no message yet."""

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the first queue offset that is stored; the maximum if there is none."""

    def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the last queue offset that can be read."""

    def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first queue offset stored at or after *timestamp_ms*; the maximum if there is none."""

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        """Return the offset that a group has committed, or None."""

    def commit(self, group: str, offsets: OffsetTable) -> OffsetTable:
        """Set the offsets of a group, if this location can do so from outside of the broker, but none to a lower one.

        Returns:
            The offsets of the group that are after *offsets*, and stay.
        """

    def make_durable(self, latest: OffsetTable) -> None:
        """Have all messages before *latest* survive a crash of the machine."""

    def message_bytes(self, found: QueueRange) -> float:
        """Return the average size of a record of a range, estimated from some of them."""

    def identity(self, found: QueueRange) -> str:
        """Return a text that is equal for equal stores and differs for others, from the content of a range."""

    def check_identity(self, found: QueueRange, identity: str) -> None:
        """Check in a task that this is the store that was planned.

        Raises:
            SparkError: This machine has another store at the same path, or none.
        """

    def blocks(self, found: QueueRange, tag_codes: npt.NDArray[np.int64] | None) -> Iterator[RecordBlock]:
        """Yield the records of a range in order.

        Args:
            tag_codes: Hash codes of tags: records with others may be left out. None: all.

        Raises:
            OffsetOutOfRangeError: A record was deleted.
            CorruptRecordError: The records cannot be separated.
        """

    def where(self) -> str:
        """Return advice for the error about lost messages: what may have happened here."""

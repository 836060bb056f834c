"""Division of a read into tasks, by bytes and cores, and the work of one task on the executors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.spark.location.folder import FolderBlocks
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.records.blocks import Blocks
from mqtemplate.spark.records.offsets import QueueRange
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA, record_batches

CORES_VARIABLE = "MQTEMPLATE_SPARK_CORES"
"""Environment variable with the number of tasks that run at once; by default the cores of this machine."""

_ROW_BYTES = 256  # the work for a message without its bytes, as bytes of work
_SMALLEST_TASK = 8 << 20  # below this work, one more task costs more than it saves
_LARGEST_TASK = 256 << 20  # above it, a failed task repeats too much


@dataclass(frozen=True, slots=True)
class Share:
    """Ranges that one task reads.

    Attributes:
        identity: See `Blocks.identity`, of the first range.
    """

    ranges: tuple[QueueRange, ...]
    identity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rules for the number of tasks.

    Attributes:
        cores: Tasks that run at once.
        min_tasks: Minimum number of tasks, if there are so many messages; None: the size decides.
        max_messages: Maximum number of messages of a task; None: the size decides.
    """

    cores: int
    min_tasks: int | None = None
    max_messages: int | None = None


def core_count() -> int:
    """Return the number of tasks that run at once, as far as this process knows."""
    stated = os.environ.get(CORES_VARIABLE, "")
    return int(stated) if stated.isdecimal() and int(stated) else os.cpu_count() or 1


def distribute(
    ranges: Iterable[QueueRange], rules: Division, message_bytes: Callable[[QueueRange], float]
) -> list[tuple[QueueRange, ...]]:
    """Divide ranges into tasks of about equal work, in the order of queues and offsets. Leave out empty ranges.

    A read that is small is one task: a task costs more than reading some ten thousand messages. A larger one gets a
    task for each core, and a read of gigabytes a multiple of that.

    Args:
        message_bytes: Returns the average size of a record of a range.
    """
    filled = sorted(found for found in ranges if len(found))
    if not filled:
        return []
    weights = [_ROW_BYTES + message_bytes(found) for found in filled]
    work = sum(len(found) * weight for found, weight in zip(filled, weights, strict=True))
    tasks = _task_count(work, sum(map(len, filled)), rules)
    shares: list[list[QueueRange]] = [[]]
    room = quota = work / tasks
    for found, weight in zip(filled, weights, strict=True):
        rest = found
        while len(rest):
            count = len(rest) if len(shares) == tasks else min(len(rest), max(1, round(room / weight)))
            shares[-1].append(replace(rest, end=rest.start + count))
            rest = replace(rest, start=rest.start + count)
            room -= count * weight
            if room < weight / 2 and len(shares) < tasks:
                shares.append([])
                room += quota
    return [tuple(part) for share in shares if share for part in _limited(share, rules.max_messages)]


def _task_count(work: float, messages: int, rules: Division) -> int:
    tasks = min(rules.cores, -(-work // _SMALLEST_TASK))
    if (rounds := -(-work // (_LARGEST_TASK * rules.cores))) > 1:
        tasks = rules.cores * rounds
    return int(min(max(tasks, rules.min_tasks or 1, 1), messages))


def _limited(share: list[QueueRange], most: int | None) -> list[list[QueueRange]]:
    """Split the ranges of a task that has more than *most* messages."""
    if most is None:
        return [share]
    parts: list[list[QueueRange]] = [[]]
    room = most
    for found in share:
        rest = found
        while len(rest):
            if not room:
                parts.append([])
                room = most
            count = min(len(rest), room)
            parts[-1].append(replace(rest, end=rest.start + count))
            rest, room = replace(rest, start=rest.start + count), room - count
    return parts


def open_blocks(options: SourceOptions) -> Blocks:
    """Return the records of the location that the options name."""
    location = options.location
    if location.store is not None:
        return FolderBlocks(location.store, options.broker_name)
    from mqtemplate.spark.location.cluster import ClusterBlocks

    return ClusterBlocks(location, options.group, retry_s=options.retry_ms / 1_000)


@dataclass(frozen=True, slots=True)
class TaskReader:
    """Reader of the messages that the options select. It is picklable.

    Args:
        schema: Columns to build.
    """

    options: SourceOptions
    schema: pa.Schema

    def batches(self, share: Share) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task.

        Without ``checkCrcs`` a damaged record may come as it is, unless its length or its position does not match.

        Raises:
            SparkError: This machine has another store or none, or messages were deleted during the read.
            CorruptRecordError: A record is damaged.
        """
        if not share.ranges:
            return
        options = self.options
        codes = None if options.selector.codes is None or options.selector.selects_all else _codes(options)
        blocks = open_blocks(options)
        if share.identity:
            blocks.check_identity(share.ranges[0], share.identity)
        for found in share.ranges:
            try:
                batches = record_batches(
                    blocks.blocks(found, codes),
                    self._needed(),
                    options.max_body_bytes,
                    check_crcs=options.check_crcs,
                )
                yield from self._selected(batches)
            except OffsetOutOfRangeError as exc:
                raise SparkError(f"messages were deleted during the read: {exc}; run it again") from exc

    def _needed(self) -> pa.Schema:
        """Return the columns to build: the columns of the result, and what the selector needs."""
        selector, schema = self.options.selector, self.schema
        if selector.selects_all:
            return schema
        name = "tags" if isinstance(selector, TagSelector) else "properties"
        return schema if name in schema.names else schema.append(ARROW_SCHEMA.field(name))

    def _selected(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        selector = self.options.selector
        if selector.selects_all:
            yield from batches
            return
        tags: Any = pa.array(sorted(selector.tags)) if isinstance(selector, TagSelector) else None
        for batch in batches:
            if tags is not None:
                mask = pc.is_in(batch["tags"], tags)
            else:
                mask = pa.array([selector.matches(dict(pairs)) for pairs in batch["properties"].to_pylist()])
            batch = batch.filter(mask).select(self.schema.names)
            if batch.num_rows:
                yield batch


def _codes(options: SourceOptions) -> Any:
    return np.fromiter(options.selector.codes or (), np.int64)

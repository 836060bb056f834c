"""What a read of a store folder means: where it begins and ends, and what lies between. Without Spark."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from mqtemplate.errors import ConfigurationError, OffsetOutOfRangeError, SparkError
from mqtemplate.spark.blocks import LocalBlocks
from mqtemplate.spark.offsets import EARLIEST, LATEST, OffsetTable, QueueRange
from mqtemplate.spark.options import Position, SourceOptions
from mqtemplate.spark.record_batches import QueueSlice, record_batches
from mqtemplate.store import FolderStoreFiles
from mqtemplate.store.files.json_files import read_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.spark")
_UNITS_AT_ONCE = 65_536
_NOT_BY_PATTERN = (SCHEDULE_TOPIC, TIMER_TOPIC, RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


class StoreReading:
    """Queues, offsets and record batches of a folder, as the options ask for them.

    Cheap to make and picklable: it holds paths and numbers.

    Raises:
        SparkError: The folder is not a store.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._blocks = LocalBlocks(options.store)
        self._durable_until = 0

    # --- which queues --------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """The queues that have messages, or had some: (topic, queue id)."""
        return [(topic, queue_id) for topic in self._topics() for queue_id in self._blocks.queue_ids(topic)]

    def require_topics(self) -> None:
        """Fail where a topic was never heard of, as a batch that reads nothing would hide a typing mistake.

        Raises:
            SparkError: With the topics there are.
        """
        known = {*self._blocks.topics(), *self._configured_topics()}
        for topic in self._options.topics:
            if topic not in known:
                close = difflib.get_close_matches(topic, known, n=1)
                there = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known)) or 'none'}"
                raise SparkError(f"topic {topic!r} is not in the store {self._options.store!r}; {there}")

    def _topics(self) -> tuple[str, ...]:
        pattern = self._options.topic_pattern
        if pattern is None:
            return self._options.topics
        topics = (topic for topic in self._blocks.topics() if not topic.startswith(_NOT_BY_PATTERN))
        return tuple(topic for topic in topics if pattern.fullmatch(topic))

    def _configured_topics(self) -> Iterable[str]:
        table = read_table(FolderStoreFiles(self._blocks.store), "config/topics.json")
        configured: dict[str, object] = table.get("topicConfigTable", {})
        return configured

    # --- from where to where -------------------------------------------------------------------

    def beginning(self) -> OffsetTable:
        """Where ``startingOffsets`` or ``startingTimestamp`` point to, now."""
        return self._resolve(self._options.start, "startingOffsets", EARLIEST)

    def beginning_at(self, committed: Callable[[str, int], int | None]) -> OffsetTable:
        """Where a group is, as *committed* tells by (topic, queue id); the beginning of a queue where it tells None."""
        return {queue: self._clamped(queue, committed(*queue)) for queue in self.queues()}

    def ending(self) -> OffsetTable:
        """Where ``endingOffsets`` or ``endingTimestamp`` point to, now; what lies before is on the disk."""
        self._make_durable(self._latest())
        return self._resolve(self._options.end, "endingOffsets", LATEST)

    def latest(self) -> OffsetTable:
        """The end of each queue now; what lies before it is on the disk, so that no crash takes it back."""
        latest = self._latest()
        self._make_durable(latest)
        return latest

    def with_new_queues(self, start: OffsetTable) -> OffsetTable:
        """*start*, and the beginning of each queue that came later."""
        new = set(self.queues()) - set(start)
        return {**start, **{queue: self._blocks.min_offset(*queue) for queue in new}}

    def ranges(self, start: OffsetTable, end: OffsetTable) -> list[QueueRange]:
        """What lies between two tables, after checking that all of it is still there.

        Raises:
            SparkError: Messages are gone, and ``failOnDataLoss`` is not false.
        """
        found = []
        for queue, stop in sorted(end.items()):
            first, last = self._blocks.min_offset(*queue), self._blocks.max_offset(*queue)
            begin = start.get(queue, first)
            if begin > stop:
                self._lost(queue, begin, stop, f"the batch would end at {stop}, before it begins")
            elif begin < stop and (begin < first or stop > last):
                self._lost(queue, begin, stop, f"the queue now goes from {first} to {last}")
            found.append(QueueRange(*queue, max(begin, first), min(stop, last)))
        return found

    def check_not_shrunk(self, start: OffsetTable, latest: OffsetTable) -> None:
        """Fail where a queue ends before the place a query has reached: it would wait there unseen.

        Raises:
            SparkError: It does, and ``failOnDataLoss`` is not false.
        """
        for queue, offset in sorted(start.items()):
            if latest.get(queue, 0) < offset:
                self._lost(queue, offset, offset, f"the queue now ends at {latest.get(queue, 0)}")

    def _latest(self) -> OffsetTable:
        return {queue: self._blocks.max_offset(*queue) for queue in self.queues()}

    def _make_durable(self, latest: OffsetTable) -> None:
        ends = [self._physical_end(*queue, offset) for queue, offset in latest.items() if offset]
        end = max(ends, default=0)
        if end > self._durable_until:
            self._blocks.make_durable(self._durable_until, end)
            self._durable_until = end

    def _physical_end(self, topic: str, queue_id: int, queue_offset: int) -> int:
        (unit,) = self._blocks.units(topic, queue_id, queue_offset - 1, queue_offset)
        return int(unit["physical_offset"]) + int(unit["size"])

    def _resolve(self, position: Position, option: str, missing: int) -> OffsetTable:
        queues = self.queues()
        if isinstance(position, dict):
            self._refuse_strangers(position, option)
            return {queue: self._offset(queue, position.get(queue, missing)) for queue in queues}
        if isinstance(position, int):
            return {queue: self._blocks.search_offset(*queue, position) for queue in queues}
        if position == "group":
            return self.beginning_at(self._committed)
        return {queue: self._offset(queue, LATEST if position == "latest" else EARLIEST) for queue in queues}

    def _committed(self, topic: str, queue_id: int) -> int | None:
        table = read_table(FolderStoreFiles(self._blocks.store), "config/consumerOffset.json")
        offset = table.get("offsetTable", {}).get(f"{topic}@{self._options.group}", {}).get(str(queue_id))
        return None if offset is None else int(offset)

    def _clamped(self, queue: tuple[str, int], offset: int | None) -> int:
        """A group that is behind what was kept goes on with what is there, as a consumer of the broker would."""
        return max(offset or 0, self._blocks.min_offset(*queue))

    def _offset(self, queue: tuple[str, int], wanted: int) -> int:
        if wanted == LATEST:
            return self._blocks.max_offset(*queue)
        return self._blocks.min_offset(*queue) if wanted == EARLIEST else wanted

    def _refuse_strangers(self, position: OffsetTable, option: str) -> None:
        topics = self._topics()
        for topic, queue_id in position:
            if topic not in topics:
                raise ConfigurationError(f"option {option} names topic {topic!r}; read are {', '.join(topics)}")
            there = self._blocks.queue_ids(topic)
            if queue_id not in there:
                raise ConfigurationError(f"option {option} names queue {queue_id} of {topic!r}; there are {there}")

    def _lost(self, queue: tuple[str, int], start: int, end: int, why: str) -> None:
        topic, queue_id = queue
        if self._options.fail_on_data_loss:
            raise SparkError(
                f"messages are gone: {topic}, queue {queue_id}, offsets {start} to {end} should be read, but {why}. "
                "The folder was cleaned, replaced, or lost its newest messages. Set failOnDataLoss=false to go on with "
                "what is there, or begin anew with another checkpoint"
            )
        _log.warning("spark.data_loss", topic=topic, queue=queue_id, start=start, end=end, reason=why)

    # --- what lies between ---------------------------------------------------------------------

    def batches(self, ranges: Iterable[QueueRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The messages of *ranges* that the tags select, with the columns of *schema*.

        Raises:
            SparkError: A file that held some of them was deleted meanwhile.
            CorruptRecordError: One is damaged.
        """
        for found in ranges:
            for start in range(found.start, found.end, _UNITS_AT_ONCE):
                part = QueueRange(found.topic, found.queue_id, start, min(start + _UNITS_AT_ONCE, found.end))
                try:
                    yield from self._part(part, schema)
                except OffsetOutOfRangeError as exc:
                    raise SparkError(f"messages went away while they were read: {exc}; run it again") from exc

    def _part(self, part: QueueRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        units = self._blocks.units(part.topic, part.queue_id, part.start, part.end)
        queue_offsets = np.arange(part.start, part.end)
        selector = self._options.selector
        if not selector.selects_all:
            likely = np.isin(units["tags_code"], np.fromiter(selector.codes, np.int64))
            units, queue_offsets = units[likely], queue_offsets[likely]
        queue = QueueSlice(part.topic, self._options.broker_name, part.queue_id, queue_offsets, units)
        wanted: Any = None if selector.selects_all else pa.array(sorted(selector.tags))
        for batch in record_batches(self._blocks, queue, schema if wanted is None else _with_tags(schema)):
            if wanted is not None:  # two tags may have one hash
                batch = batch.filter(pc.is_in(batch["tags"], wanted)).select(schema.names)
            if batch.num_rows:
                yield batch


def _with_tags(schema: pa.Schema) -> pa.Schema:
    return schema if "tags" in schema.names else schema.append(pa.field("tags", pa.string()))

"""Reader of a store folder: start and end of a read, and the record batches between them. Without Spark."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import ConfigurationError, OffsetOutOfRangeError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.spark.offsets import EARLIEST, LATEST, OffsetTable, QueueRange
from mqtemplate.spark.options import Position, SourceOptions
from mqtemplate.spark.reader.local_blocks import QueueSlice, local_blocks
from mqtemplate.spark.record_batches import record_batches
from mqtemplate.spark.store_folder import StoreFolder
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.json_files import read_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_log = get_logger("mqtemplate.spark")
_UNITS_AT_ONCE = 65_536
_NOT_BY_PATTERN = (SCHEDULE_TOPIC, TIMER_TOPIC, RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


class StoreReader:
    """Queues, offsets and record batches of a folder, according to the options.

    It is picklable: it holds paths and numbers.

    Raises:
        SparkError: The folder is not a store.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._folder = StoreFolder(options.store)
        self._durable_until = 0

    # --- queues --------------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that have or had messages: (topic, queue id)."""
        return [(topic, queue_id) for topic in self._topics() for queue_id in self._folder.queue_ids(topic)]

    def require_topics(self) -> None:
        """Check that the topics exist: a batch that reads nothing would hide a typing mistake.

        Raises:
            SparkError: A topic does not exist; the text names the nearest one, or all.
        """
        known = {*self._folder.topics(), *self._config("topics.json").get("topicConfigTable", {})}
        for topic in self._options.topics:
            if topic not in known:
                close = difflib.get_close_matches(topic, known, n=1)
                topics = ", ".join(sorted(known)) or "none"
                hint = f"did you mean {close[0]!r}?" if close else f"its topics are: {topics}"
                raise SparkError(f"topic {topic!r} is not in the store {self._options.store!r}; {hint}")

    def _topics(self) -> tuple[str, ...]:
        pattern = self._options.topic_pattern
        if pattern is None:
            return self._options.topics
        topics = (topic for topic in self._folder.topics() if not topic.startswith(_NOT_BY_PATTERN))
        return tuple(topic for topic in topics if pattern.fullmatch(topic))

    def _config(self, name: str) -> dict[str, Any]:
        return read_table(FolderStoreFiles(self._folder.store), f"config/{name}")

    # --- start and end -------------------------------------------------------------------------

    def start_offsets(self) -> OffsetTable:
        """Return the current offsets of ``startingOffsets`` or ``startingTimestamp``."""
        return self._resolve(self._options.start, "startingOffsets", EARLIEST)

    def offsets_of(self, committed: Callable[[str, int], int | None]) -> OffsetTable:
        """Return the offsets of a group from a function of (topic, queue id); None means the start of the queue.

        No offset is that of a deleted message: a consumer of the broker would skip these, too.
        """
        return {queue: max(committed(*queue) or 0, self._folder.min_offset(*queue)) for queue in self.queues()}

    def end_offsets(self) -> OffsetTable:
        """Return the current offsets of ``endingOffsets`` or ``endingTimestamp``; all messages before are flushed."""
        self.latest_offsets()
        return self._resolve(self._options.end, "endingOffsets", LATEST)

    def latest_offsets(self) -> OffsetTable:
        """Return the current end of each queue; all messages before are flushed, so that no crash removes them."""
        latest = {queue: self._folder.max_offset(*queue) for queue in self.queues()}
        self._make_durable(latest)
        return latest

    def with_new_queues(self, start: OffsetTable) -> OffsetTable:
        """Return *start*, with the start of each queue that was created later."""
        new = set(self.queues()) - set(start)
        return {**start, **{queue: self._folder.min_offset(*queue) for queue in new}}

    def ranges(self, start: OffsetTable, end: OffsetTable) -> list[QueueRange]:
        """Return the ranges between two tables, after a check that all their messages are still stored.

        Raises:
            SparkError: Messages are gone, and ``failOnDataLoss`` is not false.
        """
        found = []
        for queue, stop in sorted(end.items()):
            first, last = self._folder.min_offset(*queue), self._folder.max_offset(*queue)
            known = start.get(queue, first)
            if known > stop:
                self._lost(queue, known, stop, f"the batch would end at {stop}, before its start")
            elif known < stop and (known < first or stop > last):
                self._lost(queue, known, stop, f"the queue now goes from {first} to {last}")
            found.append(QueueRange(*queue, max(known, first), min(stop, last)))
        return found

    def check_not_shrunk(self, start: OffsetTable, latest: OffsetTable) -> None:
        """Check that no queue ends before the offset that the query has reached: the query would wait without an error.

        Raises:
            SparkError: A queue does, and ``failOnDataLoss`` is not false.
        """
        for queue, offset in sorted(start.items()):
            if latest.get(queue, 0) < offset:
                self._lost(queue, offset, offset, f"the queue now ends at {latest.get(queue, 0)}")

    def _make_durable(self, latest: OffsetTable) -> None:
        last_units = [self._folder.units(*queue, offset - 1, offset)[0] for queue, offset in latest.items() if offset]
        end = max((int(unit["physical_offset"]) + int(unit["size"]) for unit in last_units), default=0)
        if end > self._durable_until:
            self._folder.make_durable(self._durable_until, end)
            self._durable_until = end

    def _resolve(self, position: Position, option: str, missing: int) -> OffsetTable:
        queues = self.queues()
        if isinstance(position, dict):
            self._check_queues_exist(position, option)
            return {queue: self._offset(queue, position.get(queue, missing)) for queue in queues}
        if isinstance(position, int):
            return {queue: self._folder.search_offset(*queue, position) for queue in queues}
        if position == "group":
            return self.offsets_of(self._committed)
        return {queue: self._offset(queue, LATEST if position == "latest" else EARLIEST) for queue in queues}

    def _committed(self, topic: str, queue_id: int) -> int | None:
        table = self._config("consumerOffset.json").get("offsetTable", {})
        offset = table.get(f"{topic}@{self._options.group}", {}).get(str(queue_id))
        return None if offset is None else int(offset)

    def _offset(self, queue: tuple[str, int], given: int) -> int:
        if given == LATEST:
            return self._folder.max_offset(*queue)
        return self._folder.min_offset(*queue) if given == EARLIEST else given

    def _check_queues_exist(self, position: OffsetTable, option: str) -> None:
        topics = self._topics()
        for topic, queue_id in position:
            if topic not in topics:
                raise ConfigurationError(
                    f"option {option} names topic {topic!r}; the topics of this read are {', '.join(topics)}"
                )
            known = self._folder.queue_ids(topic)
            if queue_id not in known:
                raise ConfigurationError(f"option {option} names queue {queue_id} of {topic!r}; its queues are {known}")

    def _lost(self, queue: tuple[str, int], start: int, end: int, why: str) -> None:
        topic, queue_id = queue
        if self._options.fail_on_data_loss:
            raise SparkError(
                f"messages are gone: {topic}, queue {queue_id}, offsets {start} to {end} should be read, but {why}. "
                "The folder was cleaned, replaced, or lost its newest messages. Set failOnDataLoss=false to continue "
                "with the remaining ones, or start again with another checkpoint"
            )
        _log.warning("spark.data_lost", topic=topic, queue=queue_id, start=start, end=end, reason=why)

    # --- record batches ------------------------------------------------------------------------

    def batches(self, ranges: Iterable[QueueRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the messages of *ranges* that the tags select, with the columns of *schema*.

        Raises:
            SparkError: A file with some of them was deleted during the read.
            CorruptRecordError: A record is damaged.
        """
        for found in ranges:
            for part in found.split(_UNITS_AT_ONCE):
                try:
                    yield from self._part(part, schema)
                except OffsetOutOfRangeError as exc:
                    raise SparkError(f"messages were deleted during the read: {exc}; run it again") from exc

    def _part(self, part: QueueRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        units = self._folder.units(part.topic, part.queue_id, part.start, part.end)
        queue_offsets = np.arange(part.start, part.end)
        selector = self._options.selector
        if not selector.selects_all:
            # A unit has only the hash of the tag. Different tags may have equal hashes, so the tags are compared below.
            likely = np.isin(units["tags_code"], np.fromiter(selector.codes, np.int64))
            units, queue_offsets = units[likely], queue_offsets[likely]
        queue = QueueSlice(MessageQueue(part.topic, self._options.broker_name, part.queue_id), queue_offsets, units)
        tags: Any = None if selector.selects_all else pa.array(sorted(selector.tags))
        for batch in record_batches(local_blocks(self._folder, queue), schema if tags is None else _with_tags(schema)):
            if tags is not None:
                batch = batch.filter(pc.is_in(batch["tags"], tags)).select(schema.names)
            if batch.num_rows:
                yield batch


def _with_tags(schema: pa.Schema) -> pa.Schema:
    return schema if "tags" in schema.names else schema.append(pa.field("tags", pa.string()))

"""Start and end of a read, and its division into tasks. Without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mqtemplate.errors import BrokerError, ConfigurationError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.spark.location.folder import StoreFolder
from mqtemplate.spark.reader.options import OffsetsByTime, Position, SourceOptions
from mqtemplate.spark.reader.task import Division, Share, core_count, distribute, open_blocks
from mqtemplate.spark.records.offsets import (
    EARLIEST,
    LATEST,
    GivenOffsets,
    OffsetTable,
    QueueRange,
    from_spark,
    limited,
)
from mqtemplate.topics import RETRY_TOPIC_PREFIX, is_application_topic
from mqtemplate.user_code import did_you_mean

_log = get_logger("mqtemplate.spark")


class StoreReader:
    """Queues, offsets and record batches of a folder or a cluster, according to the options. It is picklable.

    Raises:
        SparkError: The folder is not a store.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._blocks = open_blocks(options)
        if options.location.store is not None:
            StoreFolder(options.location.store)  # checks the folder
        self._missing: set[str] = set()
        self._has_group_of_its_own = True
        self._reported_selections: set[str | None] = set()

    @property
    def selection(self) -> str:
        """The text of the option ``tags`` or ``sql``."""
        return self._options.selector.expression

    def check_selection(self, planned: str | None) -> None:
        """Log once that the query selects other messages than the batch before; messages before are not read again.

        Args:
            planned: Selection of that batch; None if it is not known.
        """
        if planned not in (None, self.selection, *self._reported_selections):
            self._reported_selections.add(planned)
            _log.warning(
                "spark.selection_changed",
                before=planned,
                now=self.selection,
                hint="messages before the checkpoint are not read again; to read them, use another checkpoint",
            )

    # --- queues --------------------------------------------------------------------------------

    def queues(self) -> list[MessageQueue]:
        """Return the queues that are read: in a folder those that have or had messages."""
        return [queue for topic in self._topics() for queue in self._blocks.queues(topic) if self._is_assigned(queue)]

    def require_topics(self) -> None:
        """Check that the topics exist: a batch that reads nothing would hide a typing mistake.

        Raises:
            SparkError: A topic or queue does not exist, or no topic matches the pattern; the text names the nearest.
        """
        for problem in self._missing_topics():
            raise SparkError(problem)
        for topic, broker, queue_id in sorted(self._options.assigned, key=str):
            known = self._blocks.queues(topic)
            if not any(queue.queue_id == queue_id and broker in (None, queue.broker_name) for queue in known):
                ids = sorted(queue.queue_id for queue in known)
                raise SparkError(f"option assign names queue {queue_id} of {topic!r}; its queues are {ids}")

    def warn_of_missing_topics(self) -> None:
        """Log once that a topic does not exist: a stream may start before its topic, or its name may be misspelt.

        A retry topic is created with the first retry.
        """
        problems = set(self._missing_topics(expected=RETRY_TOPIC_PREFIX))
        for problem in sorted(problems - self._missing):
            _log.warning("spark.topic_missing", reason=problem, hint="the query waits until there is one")
        self._missing = problems

    def _missing_topics(self, expected: str | None = None) -> Iterator[str]:
        """Yield a text for each topic that is missing, except those with the prefix *expected*."""
        options = self._options
        if options.topic_pattern is not None:
            if not self._topics():
                topics = ", ".join(self._application_topics()) or "none"
                pattern = options.topic_pattern.pattern
                yield f"no topic matches {pattern!r} in the {options.location}; its topics are: {topics}"
            return
        missing = [topic for topic in options.topics if not self._blocks.queues(topic)]
        missing = [topic for topic in missing if not (expected and topic.startswith(expected))]
        known = self._known_topics() if missing else set()
        for topic in missing:
            if known is None or topic not in known:  # a known one has no messages yet
                yield f"topic {topic!r} is not in the {options.location}; {_hint(topic, known)}"

    def _known_topics(self) -> set[str] | None:
        """Return all topics; None if a cluster does not list them, as to an account without administrator's rights."""
        try:
            return self._blocks.topics()
        except BrokerError:
            return None

    def _topics(self) -> tuple[str, ...]:
        pattern = self._options.topic_pattern
        if pattern is None:
            return self._options.topics
        return tuple(topic for topic in self._application_topics() if pattern.fullmatch(topic))

    def _application_topics(self) -> list[str]:
        """Return the topics that a pattern may match. A half message, for one, may be rolled back."""
        return sorted(filter(is_application_topic, self._blocks.topics()))

    def _is_assigned(self, queue: MessageQueue) -> bool:
        assigned = self._options.assigned
        if not assigned:
            return True
        topic, queue_id = queue.topic, queue.queue_id
        return (topic, None, queue_id) in assigned or (topic, queue.broker_name, queue_id) in assigned

    # --- start and end -------------------------------------------------------------------------

    def from_checkpoint(self, table: Mapping[str, Any]) -> OffsetTable:
        """Return the offsets of a checkpoint. In a folder all queues are of one broker, whatever its name was then.

        Raises:
            SparkError: They are not offsets of this source.
        """
        name = self._options.broker_name
        try:
            offsets = from_spark(table, name)
        except (ValueError, AttributeError, TypeError, KeyError) as exc:
            raise SparkError(
                f"the offsets in the checkpoint are damaged, or of another source ({exc}): {table!r}. Restore the "
                "checkpoint folder from a backup, or delete it, and name the start by option startingOffsets"
            ) from exc
        if self._options.location.store is None:
            return offsets
        return {MessageQueue(queue.topic, name, queue.queue_id): offset for queue, offset in offsets.items()}

    def start_offsets(self) -> OffsetTable:
        """Return the current offsets of ``startingOffsets`` or ``startingTimestamp``."""
        return self._resolve(self._options.start, "startingOffsets", EARLIEST)

    def offsets_of(self, committed: Callable[[MessageQueue], int | None]) -> OffsetTable:
        """Return the offsets of a group from a function of the queue; None means the start of the queue.

        No offset is before the start of its queue: a consumer of the broker would skip deleted messages, too.
        """
        return {queue: max(committed(queue) or 0, self._blocks.min_offset(queue)) for queue in self.queues()}

    def end_offsets(self) -> OffsetTable:
        """Return the current offsets of ``endingOffsets`` or ``endingTimestamp``; all messages before are flushed."""
        self.latest_offsets()
        return self._resolve(self._options.end, "endingOffsets", LATEST)

    def latest_offsets(self) -> OffsetTable:
        """Return the current end of each queue; all messages before are flushed, so that no crash removes them."""
        latest = {queue: self._blocks.max_offset(queue) for queue in self.queues()}
        self._blocks.make_durable(latest)
        return latest

    def with_new_queues(self, start: OffsetTable) -> OffsetTable:
        """Return *start*, with the start of each queue that was created later."""
        new = set(self.queues()) - set(start)
        return {**start, **{queue: self._blocks.min_offset(queue) for queue in new}}

    def limited(self, start: OffsetTable, end: OffsetTable) -> OffsetTable:
        """Return the end of a batch within the limits of messages and bytes."""
        limits = self._options.limits
        most = limits.max_messages
        if limits.max_bytes is not None:
            unread = [QueueRange.of(queue, start.get(queue, 0), offset) for queue, offset in end.items()]
            unread = [found for found in unread if len(found)]
            total = sum(len(found) * self._blocks.message_bytes(found) for found in unread)
            if total > limits.max_bytes:
                within = max(1, int(sum(map(len, unread)) * limits.max_bytes / total))
                most = within if most is None else min(most, within)
        return limited(start, end, most)

    def ranges(self, start: OffsetTable, end: OffsetTable) -> list[QueueRange]:
        """Return the ranges between two tables, after a check that all their messages are still stored.

        Raises:
            SparkError: Messages are gone, and ``failOnDataLoss`` is not false.
        """
        found = []
        self._check_topics_are_read(end)
        for queue, stop in sorted(end.items()):
            first, last = self._blocks.min_offset(queue), self._blocks.max_offset(queue)
            known = start.get(queue, first)
            if known > stop:
                self._lost(queue, known, stop, f"the batch would end at {stop}, before its start")
            elif known < stop and (known < first or stop > last):
                self._lost(queue, known, stop, f"the queue now goes from {first} to {last}")
            found.append(QueueRange.of(queue, max(known, first), min(stop, last)))
        return found

    def shares(self, start: OffsetTable, end: OffsetTable) -> list[Share]:
        """Return the work of each task between two tables."""
        options, blocks = self._options, self._blocks
        rules = Division(
            cores=core_count(), min_tasks=options.min_partitions, max_messages=options.max_records_per_partition
        )
        parts = distribute(self.ranges(start, end), rules, blocks.message_bytes)
        return [Share(part, blocks.identity(part[0])) for part in parts]

    def stored_ranges(self, ranges: Iterable[QueueRange]) -> tuple[QueueRange, ...]:
        """Return what is still stored of some ranges: the messages that a read of them returns."""
        found = []
        for each in ranges:
            first, last = self._blocks.min_offset(each.queue), self._blocks.max_offset(each.queue)
            found.append(replace(each, start=max(each.start, first), end=min(each.end, last)))
        return tuple(each for each in found if len(each))

    def check_not_shrunk(self, start: OffsetTable, latest: OffsetTable) -> None:
        """Check that no queue ends before the offset that the query has reached: the query would wait without an error.

        Raises:
            SparkError: A queue does, and ``failOnDataLoss`` is not false.
        """
        self._check_topics_are_read(start)
        for queue, offset in sorted(start.items()):
            if latest.get(queue, 0) < offset:
                self._lost(queue, offset, offset, f"the queue now ends at {latest.get(queue, 0)}")

    def commit(self, offsets: OffsetTable) -> None:
        """Commit the offsets for the group of the options, if there is one.

        It is logged once if something else commits for the group: then its offsets are of no use as a start.
        """
        if self._options.group is not None:
            ahead = self._blocks.commit(self._options.group, offsets)
            if ahead and self._has_group_of_its_own:
                self._has_group_of_its_own = False
                queue, committed = min(ahead.items())
                _log.warning(
                    "spark.group_shared",
                    group=self._options.group,
                    topic=queue.topic,
                    queue=queue.queue_id,
                    offset=offsets.get(queue),
                    committed=committed,
                    hint="another query or consumer commits for this group, or one did before; give each its own",
                )

    def _check_topics_are_read(self, table: OffsetTable) -> None:
        """Check that the checkpoint has no topic that this query does not read any more.

        Raises:
            SparkError: It has one, and ``failOnDataLoss`` is not false.
        """
        removed = {queue.topic for queue in table} - set(self._topics())
        if removed and self._options.topic_pattern is None and self._options.fail_on_data_loss:
            names = ", ".join(map(repr, sorted(removed)))
            raise SparkError(
                f"the checkpoint has the topic {names}, which the query does not read any more; its topics are "
                f"{', '.join(self._options.topics)}. Add it again, give the query another checkpoint, or set "
                "failOnDataLoss=false to forget its progress"
            )

    def _resolve(self, position: Position, option: str, missing: int) -> OffsetTable:
        queues, blocks = self.queues(), self._blocks
        if isinstance(position, OffsetsByTime):
            self._check_queues_exist(position.times, f"{option}ByTimestamp")
            times = {queue: _given(position.times, queue) for queue in queues}
            return {queue: self._by_time(queue, time, missing) for queue, time in times.items()}
        if isinstance(position, dict):
            self._check_queues_exist(position, option)
            given = {queue: _given(position, queue) for queue in queues}
            return {queue: self._offset(queue, missing if at is None else at) for queue, at in given.items()}
        if isinstance(position, int):
            return {queue: self._by_time(queue, position, missing) for queue in queues}
        if position == "group":
            group = str(self._options.group)
            return self.offsets_of(lambda queue: blocks.committed(group, queue))
        return {queue: self._offset(queue, LATEST if position == "latest" else EARLIEST) for queue in queues}

    def _by_time(self, queue: MessageQueue, timestamp_ms: int | None, missing: int) -> int:
        if timestamp_ms is None:
            return self._offset(queue, missing)
        found = self._blocks.search_offset(queue, timestamp_ms)
        if missing == EARLIEST and self._options.fails_without_time and found >= self._blocks.max_offset(queue):
            raise ConfigurationError(
                f"{queue.topic}, queue {queue.queue_id}: no message was stored at or after {timestamp_ms}; give an "
                "earlier time, or set startingOffsetsByTimestampStrategy=latest to start at the end"
            )
        return found

    def _offset(self, queue: MessageQueue, given: int) -> int:
        if given == LATEST:
            return self._blocks.max_offset(queue)
        return self._blocks.min_offset(queue) if given == EARLIEST else given

    def _check_queues_exist(self, position: GivenOffsets, option: str) -> None:
        topics = self._topics()
        for topic, broker, queue_id in position:
            if topic not in topics:
                raise ConfigurationError(
                    f"option {option} names topic {topic!r}; the topics of this read are {', '.join(topics)}"
                )
            known = self._blocks.queues(topic)
            if broker is not None and broker not in {queue.broker_name for queue in known}:
                names = ", ".join(sorted({queue.broker_name for queue in known}))
                raise ConfigurationError(
                    f"option {option}: topic {topic!r} is not on broker {broker!r}; name one of {names}"
                )
            ids = sorted({queue.queue_id for queue in known if broker in (None, queue.broker_name)})
            if queue_id not in ids:
                raise ConfigurationError(f"option {option} names queue {queue_id} of {topic!r}; its queues are {ids}")

    def _lost(self, queue: MessageQueue, start: int, end: int, why: str) -> None:
        topic, queue_id = queue.topic, queue.queue_id
        if self._options.fail_on_data_loss:
            raise SparkError(
                f"messages are gone: {topic}, queue {queue_id}, offsets {start} to {end} should be read, but {why}. "
                f"{self._blocks.where()}. Set failOnDataLoss=false to continue "
                "with the remaining ones, or start again with another checkpoint"
            )
        _log.warning("spark.data_lost", topic=topic, queue=queue_id, start=start, end=end, reason=why)


def _hint(topic: str, known: set[str] | None) -> str:
    if known is None:
        return "check its name: this account may not list the topics"
    return did_you_mean(topic, known, f"its topics are: {', '.join(sorted(known)) or 'none'}")


def _given(table: GivenOffsets, queue: MessageQueue) -> int | None:
    """Return the value for a queue: that for its broker, or that for any broker."""
    return table.get((queue.topic, queue.broker_name, queue.queue_id), table.get((queue.topic, None, queue.queue_id)))

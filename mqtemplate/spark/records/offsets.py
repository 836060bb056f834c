"""Offsets: tables as Spark stores them, ranges of a queue, and the limits of a batch. Without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.message import MessageQueue

OffsetTable = dict[MessageQueue, int]
"""Queue -> queue offset."""

GivenOffsets = dict[tuple[str, str | None, int], int]
"""(topic, name of the broker or None for any, queue id) -> queue offset, as an option gives them."""

LATEST, EARLIEST = -1, -2
"""End and start of a queue in the JSON of an option, as in Spark's Kafka source."""

FORMAT_VERSION = 2
"""Version of the JSON in a checkpoint. Version 1 had no version and no level for the brokers: it was topic > queue."""

_IS_INITIAL, _START, _SELECTION = "isInitial", "start", "selection"
"""Keys beside the offsets: of the first offset of a query, of the end of its first batch, and of each end."""


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Messages ``start <= queue offset < end`` of one queue. They are the same each time the range is read."""

    topic: str
    queue_id: int
    start: int
    end: int
    broker_name: str = ""

    @classmethod
    def of(cls, queue: MessageQueue, start: int, end: int) -> QueueRange:
        """Return a range of *queue*."""
        return cls(queue.topic, queue.queue_id, start, end, queue.broker_name)

    @property
    def queue(self) -> MessageQueue:
        """The queue."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def split(self, size: int) -> Iterator[QueueRange]:
        """Yield the ranges of at most *size* messages that this one consists of."""
        for start in range(self.start, self.end, size):
            yield replace(self, start=start, end=min(start + size, self.end))


def to_spark(offsets: OffsetTable) -> dict[str, Any]:
    """Return the JSON object that Spark stores in its checkpoint: topic > broker > queue.

    It is sorted, since Spark compares the text.
    """
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets):
        by_broker = topics.setdefault(queue.topic, {})
        by_broker.setdefault(queue.broker_name, {})[str(queue.queue_id)] = int(offsets[queue])
    return {"version": FORMAT_VERSION, "topics": topics}


def initial_to_spark(offsets: OffsetTable) -> dict[str, Any]:
    """Return the JSON object of the first offset of a query, which is marked as such."""
    return {**to_spark(offsets), _IS_INITIAL: True}


def is_initial(table: Mapping[str, Any]) -> bool:
    """Return True if *table* is the object of the first offset of a query."""
    return bool(table.get(_IS_INITIAL))


def selection_in(table: Mapping[str, Any]) -> str | None:
    """Return the selection of messages with which a batch was planned; None if the object does not have it."""
    return table.get(_SELECTION)


def next_to_spark(start: Mapping[str, Any], known: OffsetTable, end: OffsetTable, selection: str) -> dict[str, Any]:
    """Return the JSON object of the end of a batch.

    Spark stores the end of a batch only, and requests the first offset of a query again until the first batch is
    committed. The offset of a group, or the end of a topic, may be another one by then, so the end of the first batch
    contains its start.

    Args:
        start: The object of the start of the batch.
        known: The offsets in *start*.
        selection: Text of the selection of messages.
    """
    if is_initial(start):
        return {**to_spark(end), _SELECTION: selection, _START: to_spark(known)}
    # Spark compares the objects: one without new messages must equal the last one.
    return dict(start) if end == known else {**to_spark(end), _SELECTION: selection}


def start_of_batch(start: Mapping[str, Any], end: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the start of a batch: of the first batch the one that its end contains."""
    found: Mapping[str, Any] = end.get(_START, start) if is_initial(start) else start
    return found


def from_spark(table: Mapping[str, Any], broker_name: str) -> OffsetTable:
    """Return the table of a JSON object from `to_spark`, or of one in version 1.

    Args:
        broker_name: Broker of the queues in version 1.

    Raises:
        SparkError: A newer release wrote the object.
        ValueError, AttributeError, TypeError: The object is not a table of offsets.
    """
    version = table.get("version")
    if not isinstance(version, int):  # a topic may have this name
        return {
            MessageQueue(topic, broker_name, int(queue_id)): int(offset)
            for topic, queues in table.items()
            for queue_id, offset in queues.items()
        }
    if version != FORMAT_VERSION:
        raise SparkError(
            f"the offsets have version {version}, and this release of mqtemplate reads 1 and {FORMAT_VERSION}; "
            "continue the query with the release that wrote its checkpoint, or a newer one"
        )
    return {
        MessageQueue(topic, broker, int(queue_id)): int(offset)
        for topic, by_broker in table["topics"].items()
        for broker, queues in by_broker.items()
        for queue_id, offset in queues.items()
    }


def parse_offsets(text: str, option: str) -> GivenOffsets:
    """Parse an option such as ``{"orders": {"0": 23, "1": -2}}``; -1 means the end of a queue, -2 its start.

    rocketmq-spark's form with a level for the broker's name, ``{"orders": {"broker-a": {"0": 23}}}``, is allowed too.

    Raises:
        ConfigurationError: The text has another form.
    """
    try:
        return parse_queue_table(text, _offset)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as exc:
        raise ConfigurationError(
            f"option {option}: {text!r} is not offsets ({exc}); "
            'write JSON such as {"orders": {"0": 23, "1": -2}} with -2 for earliest and -1 for latest'
        ) from exc


def parse_queue_table(text: str, value: Callable[[object], int]) -> GivenOffsets:
    """Parse JSON with a number for each queue, with or without a level for the names of the brokers.

    The form of a checkpoint and of Spark's progress is allowed, too.

    Raises:
        ValueError, AttributeError, TypeError: The text has another form.
    """
    found: GivenOffsets = {}
    table = json.loads(text)
    if isinstance(table.get("version"), int):
        table = table["topics"]
    for topic, inner in table.items():
        for name, entry in inner.items():
            if isinstance(entry, dict):
                found |= {(topic, name, int(queue_id)): value(number) for queue_id, number in entry.items()}
            else:
                found[topic, None, int(name)] = value(entry)
    return found


def _offset(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < EARLIEST:
        raise ValueError(f"{value!r} is not a queue offset")
    return value


def limited(start: OffsetTable, end: OffsetTable, max_messages: int | None) -> OffsetTable:
    """Return the end of a batch of at most *max_messages*, distributed over the queues by the messages of each.

    Each queue with messages gets at least one, so that none is starved. The batch may exceed the maximum by that many.
    No end is below *start*, also if a queue has become shorter.
    """
    end = {queue: max(offset, start.get(queue, 0)) for queue, offset in {**start, **end}.items()}
    unread = {queue: offset - start.get(queue, 0) for queue, offset in end.items()}
    total = sum(unread.values())
    if max_messages is None or total <= max_messages:
        return end
    return {
        queue: start.get(queue, 0) + (max(1, count * max_messages // total) if count else 0)
        for queue, count in unread.items()
    }

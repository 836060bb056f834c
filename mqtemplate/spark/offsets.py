"""Offsets: tables as Spark stores them, ranges of a queue, and their distribution to tasks. Without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqtemplate.errors import ConfigurationError

OffsetTable = dict[tuple[str, int], int]
"""(topic, queue id) -> queue offset."""

LATEST, EARLIEST = -1, -2
"""End and start of a queue in the JSON of an option, as in Spark's Kafka source."""

_ROWS_A_PARTITION = 20_000  # below this number, one more task costs more than it saves


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Messages ``start <= queue offset < end`` of one queue. They are the same each time the range is read."""

    topic: str
    queue_id: int
    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def split(self, size: int) -> Iterator[QueueRange]:
        """Yield the ranges of at most *size* messages that this one consists of."""
        for start in range(self.start, self.end, size):
            yield QueueRange(self.topic, self.queue_id, start, min(start + size, self.end))


def to_spark(offsets: OffsetTable) -> dict[str, dict[str, int]]:
    """Return the JSON object that Spark stores in its checkpoint. It is sorted, since Spark compares the text."""
    table: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        table.setdefault(topic, {})[str(queue_id)] = int(offset)
    return table


def from_spark(table: Mapping[str, Mapping[str, int]]) -> OffsetTable:
    """Return the table of a JSON object from `to_spark`."""
    return {(topic, int(queue_id)): offset for topic, queues in table.items() for queue_id, offset in queues.items()}


def parse_offsets(text: str, option: str) -> OffsetTable:
    """Parse an option such as ``{"orders": {"0": 23, "1": -2}}``; -1 means the end of a queue, -2 its start.

    rocketmq-spark's form with a level for the broker's name, ``{"orders": {"broker-a": {"0": 23}}}``, is allowed too.

    Raises:
        ConfigurationError: The text has another form.
    """
    try:
        table = json.loads(text)
        return {
            (topic, int(queue_id)): _offset(offset)
            for topic, queues in table.items()
            for queue_id, offset in _without_broker(queues).items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError) as exc:
        raise ConfigurationError(
            f"option {option}: {text!r} is not offsets ({exc}); "
            'write JSON such as {"orders": {"0": 23, "1": -2}} with -2 for earliest and -1 for latest'
        ) from exc


def _without_broker(queues: Mapping[str, Any]) -> Mapping[str, Any]:
    brokers = [inner for inner in queues.values() if isinstance(inner, dict)]
    if not brokers:
        return queues
    if len(brokers) > 1 or len(queues) > 1:
        raise ValueError("a folder holds the queues of one broker, and more than one is named")
    return brokers[0]


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


def distribute(ranges: Iterable[QueueRange], min_partitions: int | None = None) -> list[tuple[QueueRange, ...]]:
    """Distribute ranges over tasks, and leave out empty ranges. Return the ranges of each task.

    By default a task gets whole queues, and small queues share a task: a task costs more than reading some thousand
    messages. With *min_partitions*, large ranges are split as well.
    """
    filled = sorted((found for found in ranges if len(found)), key=len, reverse=True)
    if not filled:
        return []
    total = sum(map(len, filled))
    if min_partitions is None:
        tasks = min(len(filled), -(-total // _ROWS_A_PARTITION))
    else:
        tasks = min(max(min_partitions, 1), total)
        parts = (part for found in filled for part in found.split(-(-total // tasks)))
        filled = sorted(parts, key=len, reverse=True)
    return _pack(filled, tasks)


def _pack(ranges: Sequence[QueueRange], tasks: int) -> list[tuple[QueueRange, ...]]:
    """Assign each range to the task with the fewest messages, the largest range first."""
    shares: list[list[QueueRange]] = [[] for _ in range(tasks)]
    loads = [0] * tasks
    for found in ranges:
        lightest = loads.index(min(loads))
        shares[lightest].append(found)
        loads[lightest] += len(found)
    return [tuple(sorted(share)) for share in shares if share]

"""Which messages: offsets as Spark keeps them, ranges of a queue, and how they are shared out. Without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqtemplate.errors import ConfigurationError

OffsetTable = dict[tuple[str, int], int]
"""(topic, queue id) -> queue offset."""

LATEST, EARLIEST = -1, -2
"""In an option's JSON: the end and the beginning of a queue, as Spark's Kafka source writes them."""

_ROWS_A_PARTITION = 20_000  # below this a further task costs more than it saves


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Messages ``start <= queue offset < end`` of one queue. Reading it gives the same messages each time."""

    topic: str
    queue_id: int
    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


def to_spark(offsets: OffsetTable) -> dict[str, dict[str, int]]:
    """What Spark stores in its checkpoint. Sorted, since Spark compares the text."""
    table: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        table.setdefault(topic, {})[str(queue_id)] = int(offset)
    return table


def from_spark(table: Mapping[str, Mapping[str, int]]) -> OffsetTable:
    """The inverse of `to_spark`."""
    return {(topic, int(queue_id)): offset for topic, queues in table.items() for queue_id, offset in queues.items()}


def parse_offsets(text: str, option: str) -> OffsetTable:
    """Read an option such as ``{"orders": {"0": 23, "1": -2}}``.

    A level with the broker's name, ``{"orders": {"broker-a": {"0": 23}}}``, is rocketmq-spark's form; it is taken too.
    -1 stands for the end of a queue and -2 for its beginning.

    Raises:
        ConfigurationError: It is not of that shape.
    """
    try:
        table = json.loads(text)
        return {
            (topic, int(queue_id)): _offset(offset)
            for topic, queues in table.items()
            for queue_id, offset in _without_broker(queues).items()
        }
    except (ValueError, AttributeError, TypeError) as exc:
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
    only: Mapping[str, Any] = brokers[0]
    return only


def _offset(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < EARLIEST:
        raise ValueError(f"{value!r} is not a queue offset")
    return value


def limited(start: OffsetTable, end: OffsetTable, max_messages: int | None) -> OffsetTable:
    """The end of a batch of at most *max_messages*, shared out among the queues by what each still holds.

    A queue that has something gets at least one, so that none waits for ever; the batch may be larger by as many.
    Never below *start*: a queue that shrank keeps its place.
    """
    end = {queue: max(offset, start.get(queue, 0)) for queue, offset in {**start, **end}.items()}
    waiting = {queue: offset - start.get(queue, 0) for queue, offset in end.items()}
    total = sum(waiting.values())
    if max_messages is None or total <= max_messages:
        return end
    return {
        queue: start.get(queue, 0) + (max(1, count * max_messages // total) if count else 0)
        for queue, count in waiting.items()
    }


def cut(ranges: Iterable[QueueRange], min_partitions: int | None = None) -> list[tuple[QueueRange, ...]]:
    """Share ranges out among tasks, a list of ranges each; empty ranges are left out.

    Without a wish a task gets whole queues, and small queues share one, because a task of its own costs more than
    reading some thousand messages. With *min_partitions* large ranges are cut as well.
    """
    filled = sorted((found for found in ranges if len(found)), key=len, reverse=True)
    if not filled:
        return []
    total = sum(map(len, filled))
    if min_partitions is None:
        tasks = min(len(filled), -(-total // _ROWS_A_PARTITION))
    else:
        tasks = min(max(min_partitions, 1), total)
        filled = sorted(_cut_large(filled, -(-total // tasks)), key=len, reverse=True)
    return _pack(filled, tasks)


def _cut_large(ranges: Sequence[QueueRange], size: int) -> Iterable[QueueRange]:
    for found in ranges:
        for start in range(found.start, found.end, size):
            yield QueueRange(found.topic, found.queue_id, start, min(start + size, found.end))


def _pack(ranges: Sequence[QueueRange], tasks: int) -> list[tuple[QueueRange, ...]]:
    """The largest range first, each to the task that has least."""
    shares: list[list[QueueRange]] = [[] for _ in range(tasks)]
    loads = [0] * tasks
    for found in ranges:
        lightest = loads.index(min(loads))
        shares[lightest].append(found)
        loads[lightest] += len(found)
    return [tuple(sorted(share)) for share in shares if share]

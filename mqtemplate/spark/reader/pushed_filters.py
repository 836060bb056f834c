"""Filters of a query that Spark passes to the source: they reduce the queues, offsets and tags that a batch reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from mqtemplate.message import MessageQueue
from mqtemplate.spark.offsets import OffsetTable

_EQUAL = (EqualTo, EqualNullSafe)
_COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    **dict.fromkeys(_EQUAL, operator.eq),
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, allowed: value in allowed,
}
_OF_QUEUE: dict[str, Callable[[MessageQueue], str | int]] = {
    "topic": lambda queue: queue.topic,
    "brokerName": lambda queue: queue.broker_name,
    "queueId": lambda queue: queue.queue_id,
}
_TYPES: dict[str, type] = {
    "topic": str,
    "brokerName": str,
    "queueId": int,
    "queueOffset": int,
    "storeTimestamp": datetime,
    "tags": str,
}
_CLOCK_MARGIN_MS = 60_000  # the clock of a broker of RocketMQ may be set back, and its store times with it
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

OffsetAt = Callable[[MessageQueue, int], int]
"""Function that returns the first queue offset stored at or after a time in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """Filters that the source applies before it reads, joined by AND."""

    filters: tuple[Any, ...] = ()

    @classmethod
    def split(cls, filters: Iterable[Filter]) -> tuple[PushedFilters, list[Filter]]:
        """Return the filters that the source applies, and those that Spark has to evaluate.

        Some are in both: other tags may have the hash of a tag, and some messages around a time are read too.
        """
        given = list(filters)
        applied = tuple(each for each in given if _is_applied(each))
        return cls(applied), [each for each in given if each not in applied or not _is_exact(each)]

    @property
    def tags(self) -> frozenset[str] | None:
        """Tags to read; None for all messages."""
        sets = [frozenset(_values(each)) for each in self._of("tags")]
        return frozenset.intersection(*sets) if sets else None

    def narrowed(self, start: OffsetTable, end: OffsetTable, offset_at: OffsetAt) -> tuple[OffsetTable, OffsetTable]:
        """Return start and end of the queues with selected messages."""
        starts, ends = {}, {}
        for queue in filter(self._selects, end):
            first, last = self._span(queue, offset_at)
            starts[queue] = max(start[queue], first)
            ends[queue] = max(starts[queue], end[queue] if last is None else min(end[queue], last))
        return starts, ends

    def _of(self, column: str) -> list[Any]:
        return [each for each in self.filters if each.attribute == (column,)]

    def _selects(self, queue: MessageQueue) -> bool:
        return all(
            _COMPARISONS[type(each)](column(queue), each.value)
            for name, column in _OF_QUEUE.items()
            for each in self._of(name)
        )

    def _span(self, queue: MessageQueue, offset_at: OffsetAt) -> tuple[int, int | None]:
        """Return the first queue offset, and one past the last one; None: no limit."""
        spans = [_span(each, _offset) for each in self._of("queueOffset")]
        for each in self._of("storeTimestamp"):
            low, high = _span(each, _milliseconds)
            first = None if low is None else offset_at(queue, max(0, low - _CLOCK_MARGIN_MS))
            last = None if high is None else offset_at(queue, max(0, high + _CLOCK_MARGIN_MS))
            spans.append((first, last))
        firsts = [first for first, _ in spans if first is not None]
        lasts = [last for _, last in spans if last is not None]
        return max(firsts, default=0), min(lasts, default=None)


def _is_applied(each: Any) -> bool:
    """Return True for a comparison of a known column with values of its type."""
    if type(each) not in _COMPARISONS or len(each.attribute) != 1 or each.attribute[0] not in _TYPES:
        return False
    column, values = each.attribute[0], _values(each)
    if column == "tags" and not isinstance(each, (*_EQUAL, In)):
        return False
    return bool(values) and all(type(value) is _TYPES[column] for value in values)


def _is_exact(each: Any) -> bool:
    """Return True if the source selects the very rows that the filter selects."""
    column = each.attribute[0]
    return column in _OF_QUEUE or (column == "queueOffset" and not isinstance(each, In))


def _values(each: Any) -> list[Any]:
    return list(each.value) if isinstance(each, In) else [each.value]


def _span(each: Any, number_of: Callable[[Any], int]) -> tuple[int | None, int | None]:
    """Return the first number that a filter selects, and one past the last one; None: no limit."""
    numbers = [number_of(value) for value in _values(each)]
    if isinstance(each, (LessThan, LessThanOrEqual)):
        return None, numbers[0] + isinstance(each, LessThanOrEqual)
    if isinstance(each, (GreaterThan, GreaterThanOrEqual)):
        return numbers[0] + isinstance(each, GreaterThan), None
    return min(numbers), max(numbers) + 1


def _offset(value: int) -> int:
    return value


def _milliseconds(value: datetime) -> int:
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(milliseconds=1)

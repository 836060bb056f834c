"""Records of a cluster's timer topic: messages with a timer, and the marks that delete them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from mqtemplate.message import MessageExt, Property
from mqtemplate.numbers import parse_number

_Value = TypeVar("_Value")


class TimerId(NamedTuple):
    """Identity of a timer. A recall deletes the messages with its id in one slot of one broker.

    Attributes:
        slot_ms: Time of the slot, at which the broker delivers.
    """

    broker_name: str
    msg_id: str
    slot_ms: int


class TimerRecords(Generic[_Value]):
    """Timers by identity, without those that were deleted.

    - A timer beyond the window of the wheel is stored again; the newest record counts.
    - A mark deletes the messages of its slot, whether they were stored before it or after it.

    Args:
        convert: Returns what to keep of a record.

    Attributes:
        deleted: Timers that have a mark, and possibly no record.
    """

    def __init__(self, convert: Callable[[MessageExt], _Value]) -> None:
        self.deleted: set[TimerId] = set()
        self._convert = convert
        self._records: dict[TimerId, tuple[int, _Value]] = {}

    def add(self, record: MessageExt) -> None:
        """Add a record of the timer topic."""
        timer = timer_id(record)
        if is_mark(record):
            self.deleted.add(timer)
        elif timer not in self._records or self._records[timer][0] <= record.physical_offset:
            self._records[timer] = record.physical_offset, self._convert(record)

    def remaining(self) -> dict[TimerId, _Value]:
        """Return the timers that are not deleted."""
        return {timer: value for timer, (_, value) in self._records.items() if timer not in self.deleted}


def is_mark(record: MessageExt) -> bool:
    """Return True for the record of a recall."""
    return Property.TIMER_DEL_UNIQKEY in record.properties


def timer_id(record: MessageExt) -> TimerId:
    """Return the identity of a timer, or of the timer that a mark deletes."""
    properties = record.properties
    msg_id = properties.get(Property.TIMER_DEL_UNIQKEY)
    if msg_id is None:
        msg_id = record.msg_id
    else:  # RocketMQ 5.3, and 5.5 with appendTopicForTimerDeleteKey: "topic+id"
        msg_id = msg_id.removeprefix(f"{properties.get(Property.REAL_TOPIC, '')}+")
    return TimerId(record.broker_name, msg_id, parse_number(properties.get(Property.TIMER_OUT_MS)) or 0)

"""Resets of the offsets of consumer groups, and groups that are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.broker import GroupInfo, OffsetChange, QueueSpan
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.operations.access import BrokerAccess


class OffsetPosition(Enum):
    """Ends of a queue."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class OffsetTarget:
    """New position of a group. Exactly one attribute is given.

    Attributes:
        position: An end of each queue.
        time_ms: The first message of each queue that was stored at this time (epoch ms) or later.
        queue_offset: A queue offset.
        shift: Number of messages to go forward, or back if it is negative.

    Raises:
        MessageError: None or several are given.
    """

    position: OffsetPosition | None = None
    time_ms: int | None = None
    queue_offset: int | None = None
    shift: int | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.position, self.time_ms, self.queue_offset, self.shift) if each is not None]
        if len(given) != 1:
            raise MessageError(
                f"a reset needs one target: earliest, latest, a time, a queue offset or a shift; got {len(given)}"
            )


def plan_reset(
    access: BrokerAccess, group: str, topic: str, target: OffsetTarget, queue_id: int | None = None
) -> list[OffsetChange]:
    """Return the changes that reset *group* in *topic*, without changes that have no effect.

    An offset that a queue does not have becomes the nearest that it has.

    Args:
        queue_id: Only this queue of each broker.

    Raises:
        UnknownNameError: The topic or the queue does not exist.
    """
    committed = {each.queue: each.committed for each in access.admin.progress(group, topic)}
    spans = [span for span in access.admin.queue_spans(topic) if queue_id in (None, span.queue.queue_id)]
    if not spans:
        raise UnknownNameError(f"topic {topic!r} has no queue {queue_id}; see its queues with: topics {topic}")
    changes = [
        OffsetChange(span.queue, committed.get(span.queue), _offset_of(access, span, target, committed.get(span.queue)))
        for span in spans
    ]
    return [change for change in changes if change.before != change.after]


def _offset_of(access: BrokerAccess, span: QueueSpan, target: OffsetTarget, committed: int | None) -> int:
    if target.position is not None:
        return span.min_offset if target.position is OffsetPosition.EARLIEST else span.max_offset
    if target.time_ms is not None:
        wanted = access.broker.reader.search_offset(span.queue, target.time_ms)
    elif target.queue_offset is not None:
        wanted = target.queue_offset
    else:
        wanted = (span.min_offset if committed is None else committed) + (target.shift or 0)
    return min(max(wanted, span.min_offset), span.max_offset)


def apply_reset(access: BrokerAccess, group: str, changes: list[OffsetChange]) -> None:
    """Set the offsets of a plan, and notify connected members.

    Raises:
        StoreLockedError: The broker is a store directory that another process has open.
        UnsupportedError: A member is connected and cannot be notified.
    """
    if changes:
        access.open_for_changes().admin().set_offsets(group, {change.queue: change.after for change in changes})


def forget_group(access: BrokerAccess, group: str) -> GroupInfo:
    """Delete the committed offsets of a group that is gone, so that retention keeps no messages for it.

    Returns:
        The group as it was.

    Raises:
        UnknownNameError: There is no such group.
        StoreLockedError: The broker is a store directory that another process has open.
        UnsupportedError: A member is connected.
    """
    found = access.admin.group(group)
    access.open_for_changes().admin().forget_group(group)
    return found

"""Resets of the offsets of consumer groups, and groups that are forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

from mqtemplate.broker import GroupInfo, OffsetChange, QueueSpan
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import OldValue
from mqtemplate.operations.bulk import OnProgress
from mqtemplate.operations.changes import (
    Change,
    ChangePreview,
    ChangeResult,
    OffsetsReset,
    offset_value,
    old_offsets,
    plan_restore,
)


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
    committed = _committed(access, group, topic)
    spans = [span for span in access.admin.queue_spans(topic) if queue_id in (None, span.queue.queue_id)]
    if not spans:
        raise UnknownNameError(f"topic {topic!r} has no queue {queue_id}; see its queues with: topics {topic}")
    changes = [
        OffsetChange(span.queue, before, _offset_of(access, span, target, before), span.min_offset)
        for span in spans
        for before in [committed.get(span.queue)]
    ]
    return [change for change in changes if change.before != change.after]


def _committed(access: BrokerAccess, group: str, topic: str | None = None) -> dict[MessageQueue, int | None]:
    return {each.queue: each.committed for each in access.admin.progress(group, topic)}


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


def reset_change(
    access: BrokerAccess, group: str, changes: Sequence[OffsetChange], *, notes: Sequence[str] = (), **target: object
) -> OffsetsReset:
    """Return the change that sets the offsets of a plan at the broker; see `apply_reset`."""

    def set_offsets(offsets: Mapping[MessageQueue, int]) -> None:
        access.open_for_changes().admin().set_offsets(group, offsets)

    return OffsetsReset(access.broker, changes, set_offsets, {"group": group, **target}, notes=notes)


def restored_offsets(access: BrokerAccess, group: str, values: Iterable[OldValue], **target: object) -> OffsetsReset:
    """Return the change that gives a group its offsets of before again."""
    old = old_offsets(values)
    spans: dict[MessageQueue, tuple[int, int]] = {}
    for topic in {queue.topic for queue in old}:
        try:
            found = access.admin.queue_spans(topic)
        except UnknownNameError:
            continue
        spans |= {span.queue: (span.min_offset, span.max_offset) for span in found}
    try:
        committed = _committed(access, group)
    except UnknownNameError:  # it was forgotten
        committed = {}
    changes, notes = plan_restore(old, committed, spans)
    return reset_change(access, group, changes, notes=notes, **target)


def forget_group(access: BrokerAccess, group: str) -> GroupInfo:
    """Delete the committed offsets of a group that is gone, so that retention keeps no messages for it.

    `GroupForgotten` is the same with a preview and an audit line.

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


class GroupForgotten(Change):
    """Deletion of the committed offsets of a group that is gone.

    Args:
        target: Further fields of the audit log.

    Raises:
        UnknownNameError: There is no such group.
    """

    is_by_queue: ClassVar[bool] = True

    def __init__(self, access: BrokerAccess, group: str, **target: object) -> None:
        super().__init__("offsets.forget", {"group": group, **target})
        self._access = access
        self.group = access.admin.group(group)

    @property
    def title(self) -> str:
        return f"Forget group {self.group.name!r} with {self.group.lag} messages that it has not consumed"

    @cached_property
    def preview(self) -> ChangePreview:
        lags = Counter(dict.fromkeys(self.group.topics, 0))
        for each in self.group.progress:
            lags[each.queue.topic] += each.lag
        return ChangePreview(
            count=self.group.lag,
            noun="message",
            topics={topic: count for topic, count in lags.most_common() if count},
            has_effect=True,
            notes=("Retention keeps no messages for it any more, and if it returns, it starts as a new group.",),
            undo="It can be undone: the group gets its offsets again, but not its settings on a server, nor messages "
            "that retention has deleted since.",
        )

    def old_values(self) -> Iterator[OldValue]:
        for each in self.group.progress:
            if each.committed is not None:
                yield offset_value(OffsetChange(each.queue, each.committed, 0)) | {"after": None}

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        forget_group(self._access, self.group.name)
        return ChangeResult(f"forgot group {self.group.name!r}", {})

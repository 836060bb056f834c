"""The `BrokerAdmin` interface, beside `Broker`: topics, groups and offsets, and resets of offsets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from mqtemplate.broker import Broker
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.values import GroupInfo, OffsetChange, QueueProgress, QueueSpan, TopicInfo, TopicKind
from mqtemplate.user_code import did_you_mean


class BrokerAdmin(ABC):
    """Topics, groups and offsets of a broker.

    There are three implementations: for an embedded broker of this process, for a store directory, and for a cluster of
    RocketMQ brokers or servers of this library. The other parts of `mqtemplate.operations` work over this interface.
    """

    @property
    @abstractmethod
    def broker(self) -> Broker:
        """The broker, for reading. It is started. After `open_for_changes` it takes changes too."""

    is_embedded: ClassVar[bool] = False
    """True if the broker is in this process, so that its settings are known here."""

    @property
    def store_path(self) -> Path | None:
        """The store directory; None if it is not on this machine."""
        return None

    def open_for_changes(self) -> Broker:
        """Return the broker, for changes.

        Raises:
            StoreLockedError: The broker is a store directory that another process has open.
        """
        return self.broker

    def refresh(self) -> None:  # noqa: B027  # most implementations always read the current state
        """See what was stored since. Only a store directory that another process has open needs it."""

    @abstractmethod
    def close(self) -> None:
        """Close what this object has opened. A second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- topics --------------------------------------------------------------------------------

    @abstractmethod
    def topic_kinds(self) -> dict[str, TopicKind]:
        """Return the kind of each topic, sorted by name."""

    def topic_names(self) -> list[str]:
        """Return the names of all topics, system topics included, sorted."""
        return list(self.topic_kinds())

    def readable_topics(self) -> list[str]:
        """Return the names of all topics but system topics, sorted."""
        return [name for name, kind in self.topic_kinds().items() if kind is not TopicKind.SYSTEM]

    @abstractmethod
    def queue_spans(self, topic: str) -> list[QueueSpan]:
        """Return the readable queues of *topic*, sorted.

        Raises:
            UnknownNameError: There is no such topic.
        """

    @abstractmethod
    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that have committed an offset in *topic* or subscribe to it, sorted."""

    def topic(self, name: str) -> TopicInfo:
        """Return one topic, with its groups.

        Raises:
            UnknownNameError: There is no such topic.
        """
        spans = tuple(self.queue_spans(name))
        return TopicInfo(name, self.topic_kinds()[name], spans, tuple(self.groups_of(name)))

    def topics(self) -> list[TopicInfo]:
        """Return all topics, sorted by name, without their groups."""
        found = []
        for name, kind in self.topic_kinds().items():
            try:
                found.append(TopicInfo(name, kind, tuple(self.queue_spans(name))))
            except UnknownNameError:  # it was deleted meanwhile
                continue
        return found

    # --- groups --------------------------------------------------------------------------------

    @abstractmethod
    def group_names(self) -> list[str]:
        """Return the names of all consumer groups, without RocketMQ's own, sorted."""

    @abstractmethod
    def group(self, name: str) -> GroupInfo:
        """Return one group with members, subscriptions and progress.

        Raises:
            UnknownNameError: There is no such group.
        """

    def groups(self) -> list[GroupInfo]:
        """Return all groups, sorted by name."""
        found = []
        for name in self.group_names():
            try:
                found.append(self.group(name))
            except UnknownNameError:  # it was deleted meanwhile
                continue
        return found

    def progress(self, group: str, topic: str | None = None) -> Sequence[QueueProgress]:
        """Return the progress of *group* in the queues of *topic*, or in all its queues.

        Raises:
            UnknownNameError: There is no such group.
        """
        return [each for each in self.group(group).progress if topic in (None, each.queue.topic)]

    @abstractmethod
    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Set committed offsets of *group*, and notify its connected members: they continue there.

        Raises:
            UnsupportedError: A member is connected, and the broker has no way to notify it.
        """


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that does not exist, with the nearest known name."""
    names = sorted(known)
    some = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    hint = did_you_mean(name, names, f"there is: {some or 'none'}")
    return UnknownNameError(f"{kind} {name!r} does not exist; {hint}")


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
    admin: BrokerAdmin, group: str, topic: str, target: OffsetTarget, queue_id: int | None = None
) -> list[OffsetChange]:
    """Return the changes that reset *group* in *topic*, without changes that have no effect.

    An offset that a queue does not have becomes the nearest that it has.

    Args:
        queue_id: Only this queue of each broker.

    Raises:
        UnknownNameError: The topic or the queue does not exist.
    """
    committed = {each.queue: each.committed for each in admin.progress(group, topic)}
    spans = [span for span in admin.queue_spans(topic) if queue_id in (None, span.queue.queue_id)]
    if not spans:
        raise UnknownNameError(f"topic {topic!r} has no queue {queue_id}; see its queues with: topics {topic}")
    changes = [
        OffsetChange(span.queue, committed.get(span.queue), _offset_of(admin, span, target, committed.get(span.queue)))
        for span in spans
    ]
    return [change for change in changes if change.before != change.after]


def _offset_of(admin: BrokerAdmin, span: QueueSpan, target: OffsetTarget, committed: int | None) -> int:
    if target.position is not None:
        return span.min_offset if target.position is OffsetPosition.EARLIEST else span.max_offset
    if target.time_ms is not None:
        wanted = admin.broker.reader.search_offset(span.queue, target.time_ms)
    elif target.queue_offset is not None:
        wanted = target.queue_offset
    else:
        wanted = (span.min_offset if committed is None else committed) + (target.shift or 0)
    return min(max(wanted, span.min_offset), span.max_offset)


def apply_reset(admin: BrokerAdmin, group: str, changes: list[OffsetChange]) -> None:
    """Set the offsets of a plan, and notify connected members.

    Raises:
        StoreLockedError: The broker is a store directory that another process has open.
        UnsupportedError: A member is connected and cannot be notified.
    """
    if changes:
        admin.set_offsets(group, {change.queue: change.after for change in changes})

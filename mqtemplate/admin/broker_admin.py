"""The `BrokerAdmin` interface: what an administrator reads and changes, beside the `Broker` interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from mqtemplate.admin.values import GroupInfo, QueueProgress, QueueSpan, TopicInfo, TopicKind
from mqtemplate.broker import Broker
from mqtemplate.errors import UnknownNameError, did_you_mean
from mqtemplate.message import MessageQueue


class BrokerAdmin(ABC):
    """Topics, groups and offsets of a broker.

    There are three implementations: for an embedded broker of this process, for a store directory, and for a cluster of
    RocketMQ brokers or servers of this library. The other parts of `mqtemplate.admin` work over this interface.
    """

    @property
    @abstractmethod
    def broker(self) -> Broker:
        """The broker, for reading. It is started. After `open_for_changes` it takes changes too."""

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
        return [self.group(name) for name in self.group_names()]

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

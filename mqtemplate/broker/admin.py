"""Topics, groups and offsets of a broker, for operators: the `BrokerAdmin` interface and its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mqtemplate.errors import UnknownNameError, UnsupportedError
from mqtemplate.message import MessageQueue
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_application_topic
from mqtemplate.user_code import did_you_mean

_INHERIT, _WRITE, _READ = 1, 2, 4


class TopicKind(Enum):
    """Use of a topic, by its name."""

    NORMAL = "normal"
    RETRY = "retry"
    DEAD_LETTER = "dead letter"
    SYSTEM = "system"

    @classmethod
    def of(cls, topic: str, perm: int = 0) -> TopicKind:
        """Return the kind of the topic with this name.

        Args:
            perm: Its permission. New topics inherit from topics that brokers create with the bit 1: the default topic,
                and one for each broker and cluster.
        """
        if perm & _INHERIT:
            return cls.SYSTEM
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return cls.RETRY
        if topic.startswith(DLQ_TOPIC_PREFIX):
            return cls.DEAD_LETTER
        return cls.NORMAL if is_application_topic(topic) else cls.SYSTEM


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """Messages of one queue that still exist.

    Attributes:
        min_offset: Queue offset of the first message.
        max_offset: One past the queue offset of the last message.
        last_stored_ms: Store time (epoch ms) of the last message; None if there are no messages.
    """

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_stored_ms: int | None = None

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return max(0, self.max_offset - self.min_offset)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """One topic.

    Attributes:
        kind: Use of the topic.
        queues: The readable queues of all brokers.
        groups: Groups that have committed an offset in the topic or subscribe to it.
        shape: Shape of the releases of its delayed messages, for a reader; None without one.
    """

    name: str
    kind: TopicKind
    queues: tuple[QueueSpan, ...]
    groups: tuple[str, ...] = ()
    shape: str | None = None

    @property
    def message_count(self) -> int:
        """Number of messages that still exist."""
        return sum(span.message_count for span in self.queues)

    @property
    def last_stored_ms(self) -> int | None:
        """Store time (epoch ms) of the last message; None if there are no messages."""
        return max((span.last_stored_ms for span in self.queues if span.last_stored_ms is not None), default=None)


@dataclass(frozen=True, slots=True)
class Member:
    """One connected member of a group.

    Attributes:
        address: ``host:port`` as the broker sees it; ``this process`` for a listener in the broker's process.
        language: Language of the client, such as ``JAVA``.
    """

    client_id: str
    address: str
    language: str


@dataclass(frozen=True, slots=True)
class GroupSubscription:
    """Subscription of a group to a topic.

    Attributes:
        expression: ``*``, tags as ``a || b``, or an SQL92 expression.
        expression_type: ``TAG`` or ``SQL92``.
    """

    topic: str
    expression: str
    expression_type: str


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """Progress of a group in one queue.

    Attributes:
        committed: The committed offset: the first queue offset not yet consumed; None before the first commit.
        max_offset: One past the queue offset of the last message.
        min_offset: First queue offset that exists; None if the broker does not report it.
        last_consumed_ms: Store time (epoch ms) of the last consumed message; None if unknown.
    """

    queue: MessageQueue
    committed: int | None
    max_offset: int
    min_offset: int | None = None
    last_consumed_ms: int | None = None

    @property
    def lag(self) -> int:
        """Number of messages that the group has not consumed."""
        start = self.committed if self.committed is not None else self.min_offset or 0
        return max(0, self.max_offset - start)

    @property
    def first_unread(self) -> int:
        """Queue offset of the first message that exists and that the group has not consumed."""
        return max(self.committed or 0, self.min_offset or 0)


@dataclass(frozen=True, slots=True)
class InFlightMessage:
    """A message that a member has received by POP and not acknowledged.

    Attributes:
        topic: Its topic; ``queue`` may be of a retry topic of it.
        msg_id: Its message id; empty if it cannot be read any more.
        keys: Its business keys.
        client: The member that has it; empty if it is not known, as after a restart of the broker.
        since_ms: Time (epoch ms) since which that member has it.
        until_ms: Time (epoch ms) from which it is delivered again, unless it is acknowledged or renewed before.
        is_renewed: The broker renews the time while the member is connected: *until_ms* is the last moment.
        attempt: Number of this delivery, from 1 on.
        message_group: Key of its order; None if the group reads in any order.
        blocked: Number of messages that wait until it is done, since they have the same order.
    """

    queue: MessageQueue
    queue_offset: int
    topic: str
    msg_id: str
    keys: str
    client: str
    since_ms: int
    until_ms: int
    is_renewed: bool
    attempt: int
    message_group: str | None = None
    blocked: int = 0


@dataclass(frozen=True, slots=True)
class GroupDeliveries:
    """Messages of a group that reads by POP: those that members have now.

    Attributes:
        in_flight: Number of messages that members have, in all queues.
        messages: Those that members have for the longest time, the oldest first. Empty if the broker does not tell.
        waiting: Number of messages that wait for others of the same order, or are delivered again in it.
        expired: Number of deliveries that expired since the start of the broker; None if it does not tell.
        held: Number of receives that wait for messages; None if the broker does not tell.
    """

    in_flight: int
    messages: tuple[InFlightMessage, ...] = ()
    waiting: int = 0
    expired: int | None = None
    held: int | None = None

    @property
    def blocking(self) -> tuple[InFlightMessage, ...]:
        """Messages for which others of the same order wait."""
        return tuple(each for each in self.messages if each.blocked)


MAX_IN_FLIGHT_SHOWN = 100
"""Most messages of `GroupDeliveries`."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One consumer group.

    Attributes:
        message_model: ``CLUSTERING`` or ``BROADCASTING``; None without a connected member.
        consume_from_where: Start position in a queue without a committed offset; None without a connected member.
    """

    name: str
    members: tuple[Member, ...]
    subscriptions: tuple[GroupSubscription, ...]
    progress: tuple[QueueProgress, ...]
    message_model: str | None = None
    consume_from_where: str | None = None

    @property
    def lag(self) -> int:
        """Number of messages in all queues that the group has not consumed."""
        return sum(each.lag for each in self.progress)

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that it subscribes to or has an offset in, without its retry topic."""
        names = {each.queue.topic for each in self.progress} | {each.topic for each in self.subscriptions}
        return tuple(sorted(name for name in names if not name.startswith(RETRY_TOPIC_PREFIX)))


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """New committed offset of a group in one queue.

    Attributes:
        before: The committed offset before the change; None if there was none.
        first: First queue offset that exists: messages before it can be neither skipped nor delivered again.
    """

    queue: MessageQueue
    before: int | None
    after: int
    first: int = 0

    @property
    def skipped(self) -> int:
        """Number of messages that the group will not get."""
        return max(0, self.after - self._start)

    @property
    def again(self) -> int:
        """Number of messages that the group will get again."""
        return max(0, self._start - max(self.after, self.first))

    @property
    def _start(self) -> int:
        return self.first if self.before is None else max(self.before, self.first)


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of a topic.

    Attributes:
        queue_count: Number of its queues on each broker, the largest one.
        is_readable: Consumers may read it.
        is_writable: Producers may send to it.
    """

    kind: TopicKind
    queue_count: int
    is_readable: bool
    is_writable: bool

    @classmethod
    def of(cls, topic: str, queue_count: int, perm: int) -> TopicSettings:
        """Return the settings of a topic with a permission of RocketMQ."""
        return cls(TopicKind.of(topic, perm), queue_count, bool(perm & _READ), bool(perm & _WRITE))

    @staticmethod
    def perm_of(*, is_readable: bool, is_writable: bool) -> int:
        """Return the permission of RocketMQ for these rights."""
        return (_READ if is_readable else 0) | (_WRITE if is_writable else 0)


class BrokerAdmin(ABC):
    """Topics, groups and offsets of a broker."""

    # --- topics --------------------------------------------------------------------------------

    @abstractmethod
    def topic_kinds(self) -> dict[str, TopicKind]:
        """Return the kind of each topic, sorted by name."""

    def topic_settings(self) -> dict[str, TopicSettings]:
        """Return the settings of each topic, sorted by name.

        Raises:
            UnsupportedError: The broker does not tell them.
        """
        raise UnsupportedError("this broker does not tell the settings of its topics")

    def set_topic_rights(self, topic: str, *, is_readable: bool, is_writable: bool) -> None:
        """Change who may use an existing topic: consumers, producers, both or none.

        Raises:
            UnsupportedError: The broker cannot change it.
            UnknownNameError: There is no such topic.
        """
        raise UnsupportedError("this broker does not change the rights of its topics")

    @abstractmethod
    def delay_levels_ms(self) -> Sequence[int] | None:
        """Return the delay of each level that the broker uses now, level 1 first; None if it does not say."""

    def topic_shapes(self) -> Mapping[str, str]:
        """Return the shapes of the releases of delayed messages, for a reader, by topic; empty if it does not say."""
        return {}

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
        shape = self.topic_shapes().get(name)
        return TopicInfo(name, self.topic_kinds()[name], spans, tuple(self.groups_of(name)), shape)

    def topics(self) -> list[TopicInfo]:
        """Return all topics, sorted by name, without their groups."""
        found, shapes = [], self.topic_shapes()
        for name, kind in self.topic_kinds().items():
            try:
                found.append(TopicInfo(name, kind, tuple(self.queue_spans(name)), shape=shapes.get(name)))
            except UnknownNameError:  # it was deleted meanwhile
                continue
        return found

    def delete_topic(self, topic: str) -> None:
        """Delete a topic of applications, with the offsets of all groups in it.

        Raises:
            UnsupportedError: The broker does not delete topics.
        """
        raise UnsupportedError(f"this broker does not delete topics, such as {topic!r}")

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

    def deliveries(self, group: str) -> GroupDeliveries | None:
        """Return the messages that members of *group* have received by POP, and not acknowledged.

        Returns:
            None if the group has never read by POP, or the broker does not tell.
        """
        return None

    def create_group(self, name: str) -> None:
        """Create a consumer group with the default settings. An existing one stays as it is.

        Raises:
            UnsupportedError: The broker does not create groups.
        """
        raise UnsupportedError(f"this broker does not create groups, such as {name!r}; its first member does")

    @abstractmethod
    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Set committed offsets of *group*, and notify its connected members: they continue there.

        Raises:
            UnsupportedError: A member is connected, and the broker has no way to notify it.
        """

    @abstractmethod
    def forget_group(self, group: str) -> None:
        """Delete the committed offsets of *group*: if it returns, it starts as a new group.

        Retention keeps no messages for it any more. A server deletes the settings of the group too.

        Raises:
            UnsupportedError: A member is connected.
        """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that does not exist, with the nearest known name."""
    names = sorted(known)
    some = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    hint = did_you_mean(name, names, f"there is: {some or 'none'}")
    return UnknownNameError(f"{kind} {name!r} does not exist; {hint}")

"""The parts of a broker that consume: members of groups, their offsets and locks, and consumption by POP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from mqtemplate.errors import MQTemplateError
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.selectors.tags import Selector

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits


class MessageModel(Enum):
    """Distribution of messages in a group: each to one member (clustering), or each to all members (broadcasting)."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(Enum):
    """Start position of a group in a queue without a committed offset."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """Settings of one member of a consumer group.

    Attributes:
        subscriptions: Topic -> selector. The broker adds the retry topic of the group.
        consume_timestamp: For ``CONSUME_FROM_TIMESTAMP``: epoch milliseconds.
        max_reconsume_times: Number of retries before a message goes to ``%DLQ%group``.
        instance_name: In a broadcasting group: the name under which the committed offsets of this member are stored.
        is_ordered: The member handles the messages of a queue in their order. It locks each queue before it reads it.
        key_limits: By POP: the keys of the messages take turns within these limits, over all members of the group.
    """

    group: str
    subscriptions: dict[str, Selector]
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_timestamp: int | None = None
    max_reconsume_times: int = 16
    instance_name: str = "DEFAULT"
    is_ordered: bool = False
    key_limits: KeyLimits | None = None


class Consumer(ABC):
    """One member of a consumer group.

    In a clustering group each queue is assigned to one member. ``poll`` reads the assigned queues and moves the read
    positions, which are in memory. ``commit`` stores the progress. A member that gets a queue from another member
    starts at the committed offset, so messages that were polled and not committed are delivered again: delivery is
    at least once.
    """

    spec: ConsumerSpec

    @abstractmethod
    def assignment(self) -> frozenset[MessageQueue]:
        """Return the queues that are assigned to this member now, the queues of the retry topic included."""

    @abstractmethod
    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        """Return the next messages of the assigned queues, each queue in order.

        The queues take turns. A message of the retry topic has the topic that it was sent to first.

        Args:
            wait_ms: Time to wait for the first message; on a virtual clock ``poll`` does not wait.
            without: Queues that are not read.

        Raises:
            CorruptRecordError: The next message is corrupt. The read position is after it, so the next ``poll``
                continues with the other messages.
            BrokerClosedError: The broker or this member is closed.
        """

    @abstractmethod
    def wake(self) -> None:
        """Let a ``poll`` that waits in another thread return now; without one, the next that would wait."""

    @abstractmethod
    def position(self, queue: MessageQueue) -> int:
        """Return the queue offset that the next ``poll`` reads from."""

    @abstractmethod
    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Set the queue offset that the next ``poll`` reads from."""

    def move(self, queue: MessageQueue, queue_offset: int) -> None:
        """Do `seek` and `commit`. A queue that `lock_soon` has not locked yet continues there once it is locked."""
        self.seek(queue, queue_offset)
        self.commit(queue, queue_offset)

    @abstractmethod
    def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group: the first queue offset not yet consumed; None if there is none."""

    @abstractmethod
    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Store that all messages before *queue_offset* are consumed."""

    @abstractmethod
    def send_back(
        self,
        message: MessageExt,
        delay_level: int = 0,
        *,
        delay_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Send a message back for a retry: it is delivered again, with ``reconsume_times`` one higher.

        The retry goes through ``%RETRY%group``. After ``max_reconsume_times`` the message goes to ``%DLQ%group``.

        Args:
            delay_level: 0 lets the broker choose (`Broker.retry_delays_ms`), a positive number is a level, and a
                negative one sends the message to ``%DLQ%group`` now.
            delay_ms: The exact delay, instead of a level.
            properties: Properties to add to the message in ``%DLQ%group``, and to a retry with *delay_ms*.

        Raises:
            UnsupportedError: *delay_ms* is given, and the broker does not have `Capability.RETRY_DELAY`.
        """

    @abstractmethod
    def lock(self, queue: MessageQueue) -> bool:
        """Lock a queue for ordered consumption; return False if another member has the lock."""

    @abstractmethod
    def unlock(self, queue: MessageQueue) -> None:
        """Release the lock of a queue."""

    def lock_soon(self, queue: MessageQueue) -> bool:
        """Return True if this member has the lock of a queue, and reads it from the committed offset on.

        If this needs requests, they are sent in another thread, and repeated each second. The first return value is
        then False, and ``poll`` returns early when the queue is locked.
        """
        if not self.lock(queue):
            return False
        # The previous member may have committed more since the queue was assigned to this one.
        committed = self.committed(queue)
        if committed is not None and committed > self.position(queue):
            self.seek(queue, committed)
        return True

    def unlock_soon(self, queue: MessageQueue) -> None:
        """Do `unlock` without waiting for its requests."""
        self.unlock(queue)

    def lost_locks(self) -> frozenset[MessageQueue]:
        """Return the locked queues whose locks another member may have, or may have had, until they are locked again.

        Messages of these queues that were polled before may be handled by then.
        """
        return frozenset()

    def has_lock(self, queue: MessageQueue) -> bool:
        """Return True if a queue that was locked is not one of `lost_locks`. It is quick enough for each message."""
        return True

    def take_resets(self) -> Mapping[MessageQueue, int]:
        """Return the queues that an administrator has reset since the last call, and their new offsets.

        A caller that keeps polled messages discards the messages of these queues, then calls `seek` and `commit`. From
        its first call on, ``poll`` does not read a queue whose reset was not taken. Without a call, ``poll`` continues
        at the new offsets by itself.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Its queues are assigned to the other members."""


class Registration(Protocol):
    """Something that is registered until it is closed."""

    def close(self) -> None:
        """End the registration. A second call has no effect."""


class QueueLock(Protocol):
    """Lock of one queue, which `ConsumerGroups.lock_queue` has taken. It is renewed until it is released."""

    @property
    def is_held(self) -> bool:
        """True while it is certain that no other caller has had the lock since it was taken."""

    def release(self) -> None:
        """Let another caller have the lock."""


class ConsumerGroups(Protocol):
    """Consumer groups and their offsets."""

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        """Join a consumer group.

        Raises:
            ListenerError: The group has a member in this process with other subscriptions or another message model.
        """

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """Return the committed offset of a clustering group; None if there is none."""

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Store that a clustering group has consumed all messages before *queue_offset*."""

    def lock_queue(self, group: str, queue: MessageQueue) -> QueueLock | None:
        """Lock a queue for a caller that is no member of *group*; return None while another caller has the lock.

        The lock of a process that ends, or loses its connection, is free at once; with a broker of RocketMQ it is free
        when it was not renewed for a minute. A process that stands still for a minute loses it too.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        """Return the existing topics of each clustering group; None if another process has the offsets.

        It has committed there, or clients of a server read them.
        """


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message that was received by POP, and the receipt handle of this delivery.

    Attributes:
        message: The message, with the topic that it was sent to first. Its ``reconsume_times`` is one below *attempt*.
        receipt: Text that names this delivery at the broker.
        attempt: 1 for the first delivery, one more for each further one.
    """

    message: MessageExt
    receipt: str
    attempt: int


class PopConsumers(Protocol):
    """Consumption by POP: the broker gives each message to one member, and keeps it invisible for a time.

    The members of a group share all queues: a queue is not assigned to a member, so more members than queues help. A
    message that is not acknowledged within its invisible time is delivered again, with an attempt one higher; after
    ``max_reconsume_times`` retries it goes to ``%DLQ%group``. The blocking calls raise `BrokerError` if the broker
    cannot be reached.

    Source: RocketMQ ``broker: PopMessageProcessor``, and ``ReceiveMessage`` of the gRPC protocol.
    """

    def join(self, spec: ConsumerSpec) -> Registration:
        """Register a member of a group. `receive` needs one, and uses its start position and its number of retries.

        Args:
            spec: A clustering group. ``CONSUME_FROM_TIMESTAMP`` is not supported.

        Raises:
            ListenerError: The group has a member in this process with other subscriptions, or one that pulls.
            UnsupportedError: The broker cannot honour the start position.
        """

    def receive(
        self,
        group: str,
        topic: str,
        max_count: int,
        invisible_ms: int,
        wait_ms: int,
        selector: Selector | None,
        *,
        is_ordered: bool = False,
        attempt_id: str = "",
        auto_renew: bool = False,
    ) -> list[ReceivedMessage]:
        """Return messages that no member has now, and make them invisible to the other members.

        Args:
            invisible_ms: Time after which a message is delivered again, unless it is acknowledged or changed before.
            wait_ms: Time to wait for the first message; on a virtual clock ``receive`` does not wait.
            selector: None for all messages.
            is_ordered: True: messages with one ``hash_key`` are in order. While one of them is invisible, no later one
                is returned.
            attempt_id: With *is_ordered*: the same text in a repeated call, after one whose response was lost, lets the
                broker return the messages of that response.
            auto_renew: True: the broker keeps the messages invisible while the member is alive, up to its own limit.

        Raises:
            BrokerClosedError: The broker is closed, or no member of the group has joined.
        """

    def wake(self, group: str) -> None:
        """Let the calls of `receive` for a group that wait in other threads return now, without messages."""

    def ack(self, group: str, topic: str, receipt: str) -> None:
        """Acknowledge a message: it is not delivered again. A second call has no effect.

        Args:
            topic: `ReceivedMessage.message`'s topic.

        Raises:
            InvalidReceiptHandleError: The invisible time was over, and the message was delivered again.
        """
        [error] = self.ack_all(group, topic, [receipt])
        if error is not None:
            raise error

    def change_invisible(self, group: str, topic: str, receipt: str, invisible_ms: int, *, counts: bool = True) -> str:
        """Set the time for which a message stays invisible, from now on. Return the receipt handle to use from now on.

        Args:
            invisible_ms: 0 makes the message visible at once.
            counts: False: the next delivery has the same attempt, as for a message that no handler had.

        Raises:
            InvalidReceiptHandleError: The invisible time was over, and the message was delivered again.
        """
        [changed] = self.change_all(group, topic, [receipt], invisible_ms, counts=counts)
        if isinstance(changed, MQTemplateError):
            raise changed
        return changed

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        """Acknowledge several messages, if possible with one request and one flush of the broker.

        Return the result for each receipt handle: None, or the error that `ack` raises.
        """

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        """Set the time for which several messages stay invisible, if possible with one request and one flush.

        Return the result for each receipt handle: the one to use from now on, or the error of `change_invisible`.
        """

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Store a copy of a message in ``%DLQ%group``, then acknowledge it.

        Args:
            properties: Properties to add to the copy. A protocol that cannot carry them leaves them out.

        Raises:
            InvalidReceiptHandleError: The invisible time was over, and the message was delivered again.
        """

"""The seven parts of a broker: sends, requests, transactions, reader, groups, POP consumers and delayed messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from mqtemplate.errors import MQTemplateError, UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue, SendSequence
from mqtemplate.pending import (
    BrokerDelays,
    ConditionalSend,
    IndexState,
    PendingCounts,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
)
from mqtemplate.results import HalfMessage, PullResult, SendResult, SequencedResult, TransactionState
from mqtemplate.selectors.tags import Selector

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

CheckTransaction: TypeAlias = Callable[[MessageExt], TransactionState]
"""Function that returns the state of the local transaction of a half message. An exception counts as ``UNKNOWN``."""


QueuedMessage: TypeAlias = tuple[Message, MessageQueue | None]
"""A message that is stored together with a change, and its queue; None lets the queues of the topic take turns."""


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
        """Let a ``poll`` that waits in another thread return now."""

    @abstractmethod
    def position(self, queue: MessageQueue) -> int:
        """Return the queue offset that the next ``poll`` reads from."""

    @abstractmethod
    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Set the queue offset that the next ``poll`` reads from."""

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


class MessageSends(Protocol):
    """Sending methods of a broker.

    Arguments and errors of all methods are the same as of `send`.
    """

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """Store a message; deliver it later if its properties request a delay. *message* is not changed.

        ``DELAY`` requests a level. ``TIMER_DELAY_SEC``, ``TIMER_DELAY_MS``, ``TIMER_DELIVER_MS`` and
        ``__STARTDELIVERTIME`` request a time. With a delay, `PENDING_KEY_PROPERTIES` request that at most one message
        of the topic is pending under a key; all sending methods do that, and a half message when it is committed.

        Args:
            queue: None lets the queues of the topic take turns.

        Raises:
            MessageError: The message is too large, or its delay is not supported.
            SendTimeoutError: The broker did not respond in time.
            SendError: The message was not stored, for example because the disk is full.
            PendingKeyError: A message is pending under the pending key, and the send does not replace it.
            UnsupportedError: There is a pending key, and the broker does not have `Capability.PENDING_KEYS`.
        """

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """Store messages of one topic in one queue, in this order. Arguments and errors as in `send`."""

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """Do `send` (one message) or `send_batch` (several) without waiting for the result."""

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """Send a message without a response."""

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """Store a half message: consumers do not see it before `Transactions.end_transaction` commits it.

        Arguments and errors as in `send`. A delay counts from the commit. If the transaction is not ended, the broker
        checks it; see `Transactions.check_transactions`.

        Args:
            group: Producer group that answers transaction checks.

        Raises:
            UnsupportedError: This broker does not support transactions, or not with a delay.
        """

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """Store messages of any topics in this order, except those that the broker has stored already.

        The first message has the number ``sequence.first``, the next one the following number. A process that repeats
        a partition sends the same messages with the same numbers; each message is stored once, also across a kill of
        the broker. Arguments and errors as in `send`.

        Args:
            messages: Each with its queue. All queues are on one broker.

        Raises:
            SendError: Also if numbers were left out since the last send of the partition.
            UnsupportedError: The broker does not have `Capability.SEQUENCED_SEND`.
        """


class Requests(Protocol):
    """Requests and replies."""

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """Send a message and return a future of the reply. Arguments and errors as in `send`.

        The future fails with `RequestTimeoutError` after *timeout_ms*, counted from this call, also if the message has
        a delay; or with the error of the send. The message is sent with ``CORRELATION_ID``, ``REPLY_TO_CLIENT`` and
        ``TTL``.

        Raises:
            MessageError: The message cannot be sent.
            UnsupportedError: This broker does not support replies.
        """

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        """Send the reply to a message that was sent with `request`.

        Args:
            properties: Further properties of the reply, such as its content type.

        Raises:
            MessageError: *request* is not a request: it lacks a property such as ``CORRELATION_ID``.
            SendError: The reply could not be delivered: the requesting client is not connected, or no longer waits.
        """


class Transactions(Protocol):
    """Ends and checks of transactions; `MessageSends.send_half` begins one."""

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """Commit or roll back a half message; after ``UNKNOWN`` the broker checks the transaction later.

        With an embedded broker the end is durable when this method returns, and a second end has no effect. A cluster
        gets a one-way request: if it is lost, the cluster checks the transaction. A second commit may deliver the
        message a second time.

        Args:
            remark: Reason for the log of the broker, such as the error of the local transaction.
        """

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        """Register a function that answers transaction checks: for half messages of *group* that were not ended.

        *check* gets the message with its real topic. The state that it returns ends the transaction, as
        `end_transaction` does; after ``UNKNOWN`` the broker checks again. RocketMQ checks after 6 s and then each
        30 s, at most 15 times.

        Args:
            threads: Number of threads that run checks; on a virtual clock the step of the service runs them.
            max_waiting: Number of checks that may wait for a thread. Further checks are dropped; the broker repeats
                them.

        Raises:
            ListenerError: The group has a checker in this process already.
            UnsupportedError: This broker does not support transactions.
        """


class MessageReader(Protocol):
    """Reads and finds messages."""

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        """Return messages of one queue, starting at *queue_offset*; wait up to *wait_ms* for the first one.

        Raises:
            OffsetOutOfRangeError: *queue_offset* is below the minimum or above the maximum of the queue.
        """

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the first queue offset that exists."""

    def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the last queue offset that consumers can see."""

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the first queue offset stored at *timestamp* (epoch ms) or later; the maximum if there is none."""

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """Return the message with this `SendResult.offset_msg_id`; None if it does not exist any more.

        Raises:
            MessageError: The id is invalid, or another broker created it.
            CorruptRecordError: The message is corrupt.
        """

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        """Return the messages of *topic* that have *key*, the newest first.

        Args:
            begin_ms: Only messages stored at this time (epoch ms) or later.
            end_ms: Only messages stored at this time or before; None for no limit.
            unique: Look for the message id *key*, not for one of the keys.

        Raises:
            MessageError: *key* is empty or more than one word, or *max_count* is below 1.
        """


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


def refuse_then(then: Sequence[QueuedMessage], broker: str) -> None:
    """Refuse messages that are to be stored together with a change.

    Raises:
        UnsupportedError: There are some. *broker* is the kind of broker that does not support it.
    """
    if then:
        raise UnsupportedError(
            f"{broker} does not store messages together with a cancel or a reschedule; call without then=, and send "
            "them if the result has a count above 0. An embedded broker and a server of this library do both at once"
        )


class ReleaseCauses(Protocol):
    """Why messages were released late."""

    def split(self, topic: str, due_ms: int, released_ms: int) -> tuple[int, int, int]:
        """Return the parts of the time from *due_ms* to *released_ms*: broker stopped, backlog, rate limit."""


class DelayedMessages(Protocol):
    """Control over pending messages: messages that were sent with a delay and are not delivered yet."""

    @property
    def release_causes(self) -> ReleaseCauses | None:
        """Why messages were released late; None if another process releases them."""
        return None

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """Cancel a pending message. A message that is reported as cancelled is never delivered.

        Args:
            handle: `SendResult.handle` of one message or of a batch; a recall handle of RocketMQ works too.
            key: Instead of a handle: a key or a message id. All pending messages that have it are cancelled.
            topic: With *key*: only messages for this topic.
            then: Messages that are stored together with the change: all of it or nothing. They may have a delay, but no
                pending key. If nothing is pending any more, they are not stored.

        Raises:
            MessageError: Neither or both of *handle* and *key* are given, the handle is invalid, or a message of *then*
                cannot be sent.
            SendError: Nothing was changed or stored, for example because the disk is full.
            UnsupportedError: This broker does not support it; *then* needs `Capability.PENDING_KEYS`.
        """

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """Change the deliver time of a pending message; a time in the past means now. Other arguments as in `cancel`.

        Raises:
            DelayError: The delay is longer than the broker supports.
        """

    def send_if(
        self,
        messages: Sequence[QueuedMessage],
        state: PendingState,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
    ) -> ConditionalSend:
        """Store messages, all or none, if a delayed message is in a state; nothing can change it in between.

        Other arguments and errors as in `cancel`.

        Args:
            messages: They may have a delay, but no pending key.
            state: ``PENDING`` or ``DELIVERED``. Of several messages with *key*, one that is pending decides.

        Raises:
            UnsupportedError: The broker does not have `Capability.PENDING_KEYS`.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not send under the condition that a message is pending or delivered; "
            "an embedded broker and a server of this library do"
        )

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """Return pending messages, ordered by deliver time.

        Args:
            cursor: `PendingPage.cursor` of the page before; None for the first page.
            on_compared: Called while many messages are compared, with their number since the last call. It may raise an
                error to end the call. Without it a remote broker stops after a time of its own.

        Raises:
            RemoteTimeoutError: The broker has not answered in time.
        """

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        """Return the number of pending messages, in total and in each time span of *bucket_ms*.

        Args:
            on_compared: See `pending`.
        """

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return where the records of pending messages are, in the files of this machine.

        Raises:
            UnsupportedError: The files of the broker cannot be read here.
        """


class DelayConsole(Protocol):
    """State of the delay services of a cluster, and of the local index of its pending messages."""

    def index_state(self) -> IndexState | None:
        """Return the state of the index; None if each query reads the brokers."""

    def update_index(self, on_read: Callable[[int], None] | None = None) -> None:
        """Read new records into the index.

        Args:
            on_read: Called with the number of records read since the last call. Without it there is a time limit.

        Raises:
            RemoteTimeoutError: The time limit is over. The next call goes on there.
        """

    def totals(self, column: Literal["topic", "level"]) -> dict[str, int]:
        """Return the numbers of pending messages by topic or by level, the largest first; empty without an index."""

    def brokers(self) -> Sequence[BrokerDelays]:
        """Return the state of the delay services of each broker."""

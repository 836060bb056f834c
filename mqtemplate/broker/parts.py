"""The parts of a broker that send, read and control: sends, requests, transactions, reader, delayed messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, TypeAlias

from mqtemplate.broker.consumers import Registration
from mqtemplate.errors import UnsupportedError
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

CheckTransaction: TypeAlias = Callable[[MessageExt], TransactionState]
"""Function that returns the state of the local transaction of a half message. An exception counts as ``UNKNOWN``."""


QueuedMessage: TypeAlias = tuple[Message, MessageQueue | None]
"""A message that is stored together with a change, and its queue; None lets the queues of the topic take turns."""


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

"""The port: what every broker promises, whichever lies behind.

The template and the listeners know this file and no broker. Two delay_stores stand behind it:
`brokers.embedded.EmbeddedBroker`, over files or memory of this process, and a remote one, over
RocketMQ's protocol. `testing.contract` holds the promises as tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from mqtemplate.clock import Clock
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.results import HalfMessage, PullResult, SendResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service

__all__ = [
    "Broker",
    "Capability",
    "CheckTransaction",
    "ConsumeFromWhere",
    "Consumer",
    "ConsumerSpec",
    "MessageModel",
    "Registration",
]

CheckTransaction: TypeAlias = Callable[[MessageExt], TransactionState]
"""Tells what became of the local transaction that a half message waits for. What it raises counts as ``UNKNOWN``."""


class Capability(Enum):
    """What not every broker can do."""

    DELAY_LEVEL = "delay levels"
    TIMER = "any delay or deliver time"
    BATCH_DELAY = "delays on a batch"
    SCHEDULE_CHANGE = "cancel and reschedule"
    PENDING = "look at what waits"
    QUERY = "find messages by id and key"
    LOCAL_FILES = "store files in a folder of this machine"
    TRANSACTION = "transactions"
    TRANSACTION_DELAY = "delays on a message in a transaction"
    REQUEST_REPLY = "requests and replies"
    SQL92 = "selectors by SQL92"


class MessageModel(Enum):
    """Whether the members of a group share the messages out (clustering) or each get all (broadcasting)."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(Enum):
    """Where a group starts in a queue it has never read."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """How a member wants to take part in its group.

    Attributes:
        subscriptions: Topic -> selector. The group's retry topic comes by itself.
        consume_timestamp: For ``CONSUME_FROM_TIMESTAMP``: epoch milliseconds.
        max_reconsume_times: After so many retries a message goes to ``%DLQ%group``.
        instance_name: In a broadcasting group, whose progress this member goes on with.
    """

    group: str
    subscriptions: dict[str, Selector]
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_timestamp: int | None = None
    max_reconsume_times: int = 16
    instance_name: str = "DEFAULT"


class Consumer(ABC):
    """One member of a consumer group.

    The broker shares the queues of a clustering group out among its members. A member reads its queues
    with ``poll``, which moves its read positions in memory, and tells with ``commit`` how far it is done.
    A member that takes a queue over starts at the committed offset, so what was polled but not
    committed comes again: at least once.
    """

    spec: ConsumerSpec

    @abstractmethod
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues that are this member's now, those of the retry topic among them."""

    @abstractmethod
    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        """The next messages of the assigned queues, each queue in order and no queue starved.

        Waits up to *wait_ms* for the first one (on a virtual clock it never waits). Messages of the retry topic
        come with their first topic. Queues in *without* are left alone.

        Raises:
            CorruptRecordError: The next message is damaged. The read position stands behind it, so that
                polling again goes on with its neighbours.
            BrokerClosedError: The broker or this member was closed.
        """

    @abstractmethod
    def wake(self) -> None:
        """End a ``poll`` that waits in another thread; it returns what there is."""

    @abstractmethod
    def position(self, queue: MessageQueue) -> int:
        """The queue offset the next ``poll`` reads from."""

    @abstractmethod
    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Read on from here."""

    @abstractmethod
    def committed(self, queue: MessageQueue) -> int | None:
        """The first queue offset that is not yet done; None if this group never said."""

    @abstractmethod
    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Everything before *queue_offset* is done."""

    @abstractmethod
    def send_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """Give a message back: it comes again through ``%RETRY%group``, one higher in ``reconsume_times``.

        Args:
            delay_level: 0 lets the broker choose (3 + reconsume_times), above 0 is a level, below 0 sends it
                straight to ``%DLQ%group``, where it goes after ``max_reconsume_times`` anyway.
        """

    @abstractmethod
    def lock(self, queue: MessageQueue) -> bool:
        """Take a queue for ordered handling; False while another member has it."""

    @abstractmethod
    def unlock(self, queue: MessageQueue) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Leave the group; the other members get the queues."""


class Registration(Protocol):
    """Something that goes on until it is closed."""

    def close(self) -> None:
        """End it. Closing twice is harmless."""


class Broker(ABC):
    """Takes messages and hands them out.

    Attributes:
        name: The broker's name, as it stands in `MessageQueue.broker_name`.
        clock: What "now" is here.
        capabilities: What it can do beside the promises that every broker keeps.
    """

    name: str
    clock: Clock
    capabilities: frozenset[Capability]

    @abstractmethod
    def start(self) -> None:
        """Open what is needed. Starting twice is harmless."""

    @abstractmethod
    def close(self) -> None:
        """End cleanly; what was acknowledged is kept. Closing twice is harmless."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- sending -------------------------------------------------------------------------------

    @abstractmethod
    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The queues a message of *topic* may go to; an unknown topic is made, as RocketMQ does.

        Raises:
            DestinationError: The name is illegal, or the topic belongs to the broker itself.
        """

    @abstractmethod
    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        """Make a topic, or give it more queues."""

    @abstractmethod
    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """Store a message, or set it waiting if its properties ask for a delay.

        ``DELAY`` is a level; ``TIMER_DELAY_SEC``, ``TIMER_DELAY_MS``, ``TIMER_DELIVER_MS`` and
        ``__STARTDELIVERTIME`` any time. Without *queue* the queues take turns. The message is not changed.

        Raises:
            MessageError: It cannot be sent: too large, or a delay that cannot be kept.
            SendTimeoutError: Not done in time.
            SendError: Not stored, for example a full disk.
        """

    @abstractmethod
    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """Store messages of one topic together, in one queue and in this order. Arguments and errors as `send`."""

    @abstractmethod
    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[SendResult]:
        """Like `send` of one message or `send_batch` of several, without waiting for the answer."""

    @abstractmethod
    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """Hand the message over and ask for no answer."""

    # --- transactions --------------------------------------------------------------------------

    @abstractmethod
    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """Store a message that nobody sees before `end_transaction` commits it. Arguments and errors as `send`.

        A delay counts from the commit. If the end never comes, the broker asks *group*; see `check_transactions`.

        Args:
            group: The producer group that knows about the transaction.

        Raises:
            UnsupportedError: This broker keeps no transactions, or no delay on a message in one.
        """

    @abstractmethod
    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """Deliver a half message, or drop it; ``UNKNOWN`` leaves it to be asked for.

        Over an embedded broker the end is safe when this returns, and a second one changes nothing. A cluster is told
        one way: an end that is lost on the way is asked for, and a second commit may deliver a second time.

        Args:
            remark: Why, for the broker's log: the text of what the local transaction raised.
        """

    @abstractmethod
    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        """Answer the broker's questions about half messages of *group* whose end did not come.

        *check* gets the message with the topic it is for, and its answer ends the transaction as `end_transaction`
        does; ``UNKNOWN`` has the broker ask again. RocketMQ asks after 6 s, then each 30 s, 15 times at most.

        Args:
            threads: How many checks run at once, in threads of their own; on a virtual clock they run as it is stepped.
            max_waiting: Questions that may wait for a thread; one more is not answered now, and comes again.

        Raises:
            ListenerError: The group has a checker here.
            UnsupportedError: This broker keeps no transactions.
        """

    # --- requests ------------------------------------------------------------------------------

    @abstractmethod
    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """Send a message that somebody replies to; the future has the reply. Arguments and errors as `send`.

        The future fails with `RequestTimeoutError` after *timeout_ms*, counted from this call, whatever delay the
        message has; or with what sending raised. The message gets ``CORRELATION_ID``, ``REPLY_TO_CLIENT`` and ``TTL``.

        Raises:
            MessageError: The message cannot be sent.
            UnsupportedError: This broker carries no replies.
        """

    @abstractmethod
    def reply(
        self,
        request: MessageExt,
        body: bytes,
        properties: Mapping[str, str] | None = None,
        timeout_ms: int = 3_000,
    ) -> None:
        """Answer a message that somebody sent with `request`.

        Args:
            properties: The reply's own, such as its content type.

        Raises:
            MessageError: *request* is no request: it does not say where the reply goes.
            SendError: The reply could not be brought: who asked is gone, or waits no longer where the broker can tell.
        """

    # --- reading -------------------------------------------------------------------------------

    @abstractmethod
    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        """Messages of one queue from *queue_offset* on; waits up to *wait_ms* for the first.

        Raises:
            OffsetOutOfRangeError: The queue does not reach so far, or no longer begins so early.
        """

    @abstractmethod
    def min_offset(self, queue: MessageQueue) -> int:
        """The first queue offset that is still there."""

    @abstractmethod
    def max_offset(self, queue: MessageQueue) -> int:
        """One past the last queue offset that a consumer can see."""

    @abstractmethod
    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """The first queue offset stored at or after *timestamp* (epoch ms); the maximum if none is."""

    @abstractmethod
    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        """Join a consumer group.

        Raises:
            ListenerError: The group has a member here with other subscriptions or another message model.
        """

    @abstractmethod
    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """How far a clustering group says it is done; None if it never said."""

    @abstractmethod
    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Note for a clustering group that everything before *queue_offset* is done."""

    # --- what waits ----------------------------------------------------------------------------

    @abstractmethod
    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """Take a waiting message back, so that it is never delivered. Once this says "cancelled", that lasts.

        Args:
            handle: `SendResult.handle`, of one message or several; one that RocketMQ gave works too.
            key: Instead of a handle: a key or message id. Every waiting message that has it is meant.
            topic: With *key*: only messages for this topic.

        Raises:
            MessageError: Neither or both of *handle* and *key*, or the handle is none.
            UnsupportedError: This broker cannot.
        """

    @abstractmethod
    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        """Let a waiting message be delivered at another time; a time that has come means now. Otherwise as `cancel`.

        Raises:
            DelayError: The time is farther away than the broker keeps messages.
        """

    @abstractmethod
    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        """Messages that wait, those due first before others; *cursor* goes on where an earlier page ended."""

    @abstractmethod
    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        """How many messages wait, by spans of time that are *bucket_ms* long."""

    # --- finding -------------------------------------------------------------------------------

    @abstractmethod
    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """The message at the place that `SendResult.offset_msg_id` names; None if it is not there any more.

        Raises:
            MessageError: It is no such id, or one of another broker.
            CorruptRecordError: It is there, but damaged.
        """

    @abstractmethod
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
        """Messages of *topic* that have *key* among their keys (or, *unique*, as message id), the newest first.

        Args:
            begin_ms: Stored at this time (epoch ms) or later.
            end_ms: Stored at this time or before; None for now.
        """

    # --- time ----------------------------------------------------------------------------------

    @abstractmethod
    def services(self) -> Sequence[Service]:
        """What works by itself in this broker, for a harness that steps it on a virtual clock."""

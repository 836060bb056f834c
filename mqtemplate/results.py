"""Results of the operations of a broker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from mqtemplate.message import Message, MessageExt, MessageQueue

__all__ = [
    "DiskSpace",
    "HalfMessage",
    "PendingDecision",
    "PendingOutcome",
    "PullResult",
    "PullStatus",
    "SendResult",
    "SendStatus",
    "SequencedResult",
    "TransactionSendResult",
    "TransactionState",
]


class SendStatus(Enum):
    """Durability of a stored message. Only ``SEND_OK`` means that the configured guarantee holds."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class PendingDecision(StrEnum):
    """Decision of the broker about a message that has a pending key."""

    STORED = "stored"
    """Nothing was pending under the key; the message is stored."""
    REPLACED = "replaced"
    KEPT = "kept"
    POSTPONED = "postponed"


@dataclass(frozen=True, slots=True)
class PendingOutcome:
    """Outcome of a send with a pending key.

    Attributes:
        decision: Of a batch: ``REPLACED`` if one of its messages replaced another; else ``POSTPONED``, ``KEPT`` or
            ``STORED``, the first of these that one of its messages has.
        replaced: Handles of messages that were pending and are cancelled.
        already_delivered: True if the last message under the key was delivered to its topic before this send.
        each: Of a batch: the outcomes of its messages, in their order; None for one without a pending key.
    """

    decision: PendingDecision
    replaced: tuple[str, ...] = ()
    already_delivered: bool = False
    each: tuple[PendingOutcome | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SendResult:
    """Response of the broker to a send.

    A result means that the broker has stored the message. Only ``SEND_OK`` means that the message is as durable as the
    flush settings guarantee. A send that failed raises and returns no result.

    Attributes:
        msg_id: Id that the producer created; equal across its retries. Of a batch: joined by commas.
        offset_msg_id: Id that the broker created: its address and the physical offset. Of a batch: joined by commas.
        message_queue: Queue of the message; of a delayed message the queue that receives it when it is due.
        queue_offset: Queue offset of the message; of a delayed message in the queue of the system topic.
        handle: Handle of a delayed message for `cancel` and `reschedule`. Of a batch: joined by commas.
        region_id: Region that the broker of a cluster reports; None if it reports none.
        trace_on: False: the broker switches off the trace of this message.
        pending: Outcome of a send with a pending key; None without one. If a message that was pending is kept or
            postponed, all ids and the handle are of that message.
    """

    send_status: SendStatus
    msg_id: str
    offset_msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    handle: str | None = None
    region_id: str | None = None
    trace_on: bool = True
    pending: PendingOutcome | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        """Handles of the pending messages that this one replaced; empty without a pending key."""
        return () if self.pending is None else self.pending.replaced


class TransactionState(Enum):
    """State of a local transaction. Source: ``rocketmq-spring: RocketMQLocalTransactionState``.

    ``COMMIT``: deliver the message. ``ROLLBACK``: discard it. ``UNKNOWN``: the broker checks the transaction later.
    """

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """Result of a send in a transaction.

    Attributes:
        local_transaction_state: State of the local transaction; the broker checks an ``UNKNOWN`` one later.
    """

    local_transaction_state: TransactionState = TransactionState.UNKNOWN


@dataclass(frozen=True, slots=True)
class SequencedResult:
    """Result of a sequenced send.

    Attributes:
        stored: Number of messages that this send stored.
        repeated: Number of messages that the broker had stored before.
    """

    stored: int
    repeated: int


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message that the broker has stored, invisible to consumers until its transaction ends.

    Attributes:
        message: The message that was passed to `Broker.send_half`.
        group: Producer group that answers transaction checks.
        send_result: ``queue_offset`` is the offset in the half queue and ``offset_msg_id`` the id of the half message.
            ``transaction_id`` is the message id, and ``message_queue`` the queue that receives the message on commit.
    """

    message: Message
    group: str
    send_result: SendResult


class PullStatus(Enum):
    """Reason why a pull returned messages or none."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"


@dataclass(frozen=True, slots=True)
class PullResult:
    """Messages of one queue.

    Attributes:
        next_begin_offset: Queue offset of the next pull; it is past the messages that the selector did not match.
        min_offset: First queue offset that exists.
        max_offset: One past the last queue offset.
    """

    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[MessageExt]


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space of the disk of a store directory, as ``df`` counts it.

    Attributes:
        used_bytes: All files of the file system, those of other programs too.
        free_bytes: Space that this user can take.
        store_bytes: Disk space of the commit log and the consume queues.
        limit_free_bytes: Free space below which unread messages are deleted or new messages refused.
        full_in_ms: Time until then at the rate of the last minutes; None if the disk does not fill.
        is_roomy: True while 16 more commit log files fit: a nearly full disk of a terabyte has space for months.
    """

    used_bytes: int
    free_bytes: int
    store_bytes: int
    limit_free_bytes: int
    full_in_ms: int | None
    is_roomy: bool

    @property
    def used_ratio(self) -> float:
        """Used part, 0 to 1."""
        return self.used_bytes / max(self.used_bytes + self.free_bytes, 1)

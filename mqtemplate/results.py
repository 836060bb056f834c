"""What the broker answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.message import Message, MessageExt, MessageQueue

__all__ = [
    "HalfMessage",
    "PullResult",
    "PullStatus",
    "SendResult",
    "SendStatus",
    "TransactionSendResult",
    "TransactionState",
]


class SendStatus(Enum):
    """What the broker promises about a message it took."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


@dataclass(frozen=True, slots=True)
class SendResult:
    """The broker's answer to one send.

    A result means the broker has the message; only ``SEND_OK`` says that it is as durable as the
    flush settings promise. A send that failed raises and leaves no result.

    Attributes:
        msg_id: Made by the sender, the same across its retries; of a batch, joined by commas.
        offset_msg_id: Made by the broker: its address and the physical offset; of a batch, joined by commas.
        message_queue: Where the message is, or will be when it is due.
        queue_offset: Its place, counted in messages; of a delayed message the place in the queue it waits in.
        handle: Of a delayed message: what `cancel` and `reschedule` take; of a batch, joined by commas.
    """

    send_status: SendStatus
    msg_id: str
    offset_msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    handle: str | None = None


class TransactionState(Enum):
    """What a local transaction came to. Source: the names of ``rocketmq-spring: RocketMQLocalTransactionState``.

    ``COMMIT``: deliver the message. ``ROLLBACK``: drop it. ``UNKNOWN``: nobody can tell yet; the broker asks later.
    """

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """The answer to a send in a transaction.

    Attributes:
        local_transaction_state: What the local transaction came to; ``UNKNOWN`` is asked for later.
    """

    local_transaction_state: TransactionState = TransactionState.UNKNOWN


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message that the broker has and that nobody sees before its transaction ends.

    Attributes:
        message: As it was given to `Broker.send_half`.
        group: The producer group that is asked about it if its end never comes.
        send_result: ``queue_offset`` is the place in the half queue, ``offset_msg_id`` names the half record,
            ``transaction_id`` is the message's id, and ``message_queue`` is where it goes when it is committed.
    """

    message: Message
    group: str
    send_result: SendResult


class PullStatus(Enum):
    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"


@dataclass(frozen=True, slots=True)
class PullResult:
    """Messages of one queue from one offset on.

    Attributes:
        next_begin_offset: Where to pull next; past the messages that the selector left out, too.
        min_offset: The first queue offset that is still there.
        max_offset: One past the last.
    """

    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[MessageExt]

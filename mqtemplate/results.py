"""What the broker answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.message import MessageExt, MessageQueue

__all__ = ["PullResult", "PullStatus", "SendResult", "SendStatus"]


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

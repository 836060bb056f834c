"""What can be said of messages that wait: questions about them, and the answers to steering them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

__all__ = ["PendingCounts", "PendingMessage", "PendingPage", "PendingQuery", "ScheduleChange", "ScheduleChangeStatus"]


class ScheduleChangeStatus(Enum):
    """What became of a message that was to be cancelled or rescheduled. Exactly one is true, for good.

    ``CANCELLED`` and ``RESCHEDULED``: it was waiting, and the wish was carried out (or had been, before).
    ``ALREADY_DELIVERED``: it is in its topic. ``UNKNOWN``: the broker has no such message, or forgot it with its files.
    """

    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    ALREADY_DELIVERED = "already delivered"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """The answer to a cancel or reschedule.

    Attributes:
        count: How many waiting messages the wish was carried out on by this call; a key may name several.
        handles: The handles of what waits now instead, for a reschedule.
    """

    status: ScheduleChangeStatus
    count: int = 0
    handles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingQuery:
    """Which waiting messages are meant: all that agree with everything given.

    Attributes:
        topic: The topic they are for.
        key: One of their keys, or their message id.
        tag: Their tag.
        before_ms: Due before this (epoch ms).
        after_ms: Due at this or later.
    """

    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    before_ms: int | None = None
    after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessage:
    """One message that waits.

    Attributes:
        topic: Where it goes when it is due.
        deliver_ms: When that is (epoch ms).
        delay_level: Its level; 0 for a timer.
        roll_count: How often it was written again on the way.
        handle: What `cancel` and `reschedule` take.
        body_size: Bytes of the body as stored.
    """

    topic: str
    msg_id: str
    tags: str | None
    keys: str | None
    deliver_ms: int
    delay_level: int
    roll_count: int
    born_timestamp: int
    store_timestamp: int
    body_size: int
    handle: str

    @property
    def deliver_at(self) -> datetime:
        """``deliver_ms`` as a datetime, in UTC."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.deliver_ms)


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Some waiting messages, those due first before others.

    Attributes:
        cursor: Give it to the next call to go on; None at the end.
    """

    messages: tuple[PendingMessage, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class PendingCounts:
    """How many messages wait.

    Attributes:
        buckets: Begin of each span of time (epoch ms) that messages fall due in -> how many; ascending.
    """

    total: int
    buckets: dict[int, int]

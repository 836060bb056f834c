"""Bodies of the responses to our own requests: pending messages and their changes. RocketMQ has none of them."""

from __future__ import annotations

from dataclasses import field

from mqtemplate.remoting.protocol.bodies.json_body import JsonBody


class ScheduleChangeData(JsonBody):
    """Result of a cancel or a reschedule; see `mqtemplate.pending.ScheduleChange`.

    Attributes:
        status: Name of a `mqtemplate.pending.ScheduleChangeStatus`.
    """

    status: str
    count: int = 0
    handles: list[str] = field(default_factory=list)


class PendingMessageData(JsonBody):
    """One pending message; see `mqtemplate.pending.PendingMessage`.

    Attributes:
        cursor: Cursor after this message.
    """

    topic: str
    msg_id: str
    tags: str | None = None
    keys: str | None = None
    deliver_time: int
    delay_level: int
    roll_count: int
    born_timestamp: int
    store_timestamp: int
    body_size: int
    handle: str
    cursor: str


class PendingMessagesData(JsonBody):
    """One page of pending messages.

    Attributes:
        has_more: True if there are matching messages after the last one.
    """

    messages: list[PendingMessageData]
    has_more: bool = False


class PendingCountsData(JsonBody):
    """Numbers of pending messages; see `mqtemplate.pending.PendingCounts`."""

    total: int
    buckets: dict[int, int]

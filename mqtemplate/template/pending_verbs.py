"""Verbs for pending messages: cancel, reschedule, list and count them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypedDict, Unpack

from mqtemplate.broker import Broker
from mqtemplate.durations import Duration
from mqtemplate.errors import MessageError
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.template.background import Background, awaitable
from mqtemplate.template.delay_options import deliver_time, epoch_ms
from mqtemplate.template.send_options import unknown_option


class PendingFilter(TypedDict, total=False):
    """Conditions on pending messages, by name; a message matches if all hold."""

    key: str | None
    """One of the message's keys, or its message id."""

    tag: str | None
    """The message's tag."""

    before: datetime | int | None
    """Due before this time: an aware datetime, or epoch milliseconds."""

    after: datetime | int | None
    """Due at this time or later."""


class PendingVerbs:
    """Verbs of `mqtemplate.template.RocketMQTemplate` for messages that are not delivered yet."""

    broker: Broker
    _background: Background

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """Cancel pending messages, by the handle of a `SendResult` or by a key. Levels and timers alike.

        The returned status is final: a message with ``CANCELLED`` is never delivered, one with ``ALREADY_DELIVERED`` is
        not cancelled, and ``UNKNOWN`` means that the broker has no such message.

        Args:
            handle: `SendResult.handle`; the handle of a batch names all its messages.
            key: A business key or message id, instead of the handle. All pending messages with it are cancelled.
            topic: With *key*: only messages for this topic.
        """
        return self.broker.cancel(handle, key=key, topic=topic)

    def reschedule(
        self,
        handle: str | None = None,
        *,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        key: str | None = None,
        topic: str | None = None,
    ) -> ScheduleChange:
        """Change the deliver time of pending messages; without *delay* and *deliver_at*, deliver them now.

        A message keeps its id, keys and handle. The other arguments are those of `cancel`.

        Args:
            delay: Counted from now; a number is seconds.
            deliver_at: An aware datetime, or epoch milliseconds.
        """
        deliver_ms = deliver_time(delay, deliver_at, self.broker.clock.now_ms())
        return self.broker.reschedule(handle, deliver_ms, key=key, topic=topic)

    def pending(
        self,
        topic: str | None = None,
        *,
        max_count: int = 100,
        cursor: str | None = None,
        **conditions: Unpack[PendingFilter],
    ) -> PendingPage:
        """Return one page of the pending messages that match, in the order of their deliver times.

        Args:
            max_count: Messages of one page.
            cursor: ``cursor`` of the page before.
            conditions: See `PendingFilter`.
        """
        return self.broker.pending(_query("pending", topic, conditions), max_count, cursor)

    def count_pending(
        self, topic: str | None = None, *, by: timedelta = timedelta(minutes=1), **conditions: Unpack[PendingFilter]
    ) -> PendingCounts:
        """Return the number of pending messages that match: in all, and by time spans of their deliver times.

        Args:
            by: Length of a time span.
            conditions: See `PendingFilter`.
        """
        if by < timedelta(milliseconds=1):
            raise MessageError(f"by must be a millisecond or more, got {by}")
        query = _query("count_pending", topic, conditions)
        return self.broker.count_pending(query, by // timedelta(milliseconds=1))

    async_cancel = awaitable(cancel)
    async_reschedule = awaitable(reschedule)
    async_pending = awaitable(pending)
    async_count_pending = awaitable(count_pending)


def _query(verb: str, topic: str | None, conditions: PendingFilter) -> PendingQuery:
    if not conditions.keys() <= PendingFilter.__annotations__.keys():
        raise unknown_option(getattr(PendingVerbs, verb), conditions, PendingFilter.__annotations__)
    return PendingQuery(
        topic=topic,
        key=conditions.get("key"),
        tag=conditions.get("tag"),
        before_ms=epoch_ms("before", conditions.get("before")),
        after_ms=epoch_ms("after", conditions.get("after")),
    )

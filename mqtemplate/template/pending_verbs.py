"""Verbs for pending messages: cancel, reschedule, list and count them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypedDict, Unpack

from mqtemplate.broker import Broker
from mqtemplate.durations import Duration, duration_ms
from mqtemplate.errors import MessageError
from mqtemplate.message import property_text
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.template.asynchronous import Background, awaitable
from mqtemplate.template.delay_options import deliver_time, epoch_ms
from mqtemplate.template.options import unknown_option
from mqtemplate.topics import check_given_topic
from mqtemplate.user_code import shown


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
        return self.broker.cancel(handle, key=key, topic=_checked(topic))

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
        return self.broker.reschedule(handle, deliver_ms, key=key, topic=_checked(topic))

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
        check_count(max_count)
        if cursor is not None and not isinstance(cursor, str):
            raise MessageError(f"cursor must be the text of PendingPage.cursor, got {shown(cursor)}")
        return self.broker.pending(_query("pending", topic, conditions), max_count, cursor)

    def count_pending(
        self, topic: str | None = None, *, by: Duration = timedelta(minutes=1), **conditions: Unpack[PendingFilter]
    ) -> PendingCounts:
        """Return the number of pending messages that match: in all, and by time spans of their deliver times.

        Args:
            by: Length of a time span: a timedelta, text, or seconds.
            conditions: See `PendingFilter`.
        """
        try:
            bucket_ms = duration_ms(by, 1_000)
        except ValueError as exc:
            raise MessageError(f"by must be {exc}") from None
        if bucket_ms < 1:
            raise MessageError(f"by must be a millisecond or more, got {shown(by)}")
        return self.broker.count_pending(_query("count_pending", topic, conditions), bucket_ms)

    async_cancel = awaitable(cancel)
    async_reschedule = awaitable(reschedule)
    async_pending = awaitable(pending)
    async_count_pending = awaitable(count_pending)


def _checked(topic: object) -> str | None:
    return None if topic is None else check_given_topic(topic)


def check_count(max_count: object) -> None:
    """Raise `MessageError` unless this is a number of messages, 1 or more."""
    if type(max_count) is not int or not 1 <= max_count < 2**31:
        raise MessageError(f"max_count must be a whole number, 1 or more, got {shown(max_count)}")


def _query(verb: str, topic: str | None, conditions: PendingFilter) -> PendingQuery:
    if not conditions.keys() <= PendingFilter.__annotations__.keys():
        raise unknown_option(getattr(PendingVerbs, verb), conditions, PendingFilter.__annotations__)
    return PendingQuery(
        topic=_checked(topic),
        key=conditions.get("key"),
        tag=None if (tag := conditions.get("tag")) is None else property_text("the tag", tag),
        before_ms=epoch_ms("before", conditions.get("before")),
        after_ms=epoch_ms("after", conditions.get("after")),
    )

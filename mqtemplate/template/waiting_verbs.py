"""What a sender can still do about messages that wait: take them back, move them, look at them."""

from __future__ import annotations

from datetime import datetime, timedelta

from mqtemplate.broker import Broker
from mqtemplate.errors import MessageError
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.template.delay_options import deliver_time, epoch_ms


class WaitingVerbs:
    """The verbs of `mqtemplate.template.RocketMQTemplate` for messages that are not delivered yet."""

    broker: Broker

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """Take back what waits, by the handle of its `SendResult` or by a key.

        The answer is true for good: ``CANCELLED`` is never delivered, ``ALREADY_DELIVERED`` was not cancelled, and of
        ``UNKNOWN`` the broker knows nothing. Levels and any other delay alike.

        Args:
            handle: `SendResult.handle`; of a batch it names all its messages.
            key: Instead of the handle: a business key or message id. Everything that waits and has it is taken back.
            topic: With *key*: only what is for this topic.
        """
        return self.broker.cancel(handle, key=key, topic=topic)

    def reschedule(
        self,
        handle: str | None = None,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        key: str | None = None,
        topic: str | None = None,
    ) -> ScheduleChange:
        """Let what waits be delivered later or sooner; without *delay* and *deliver_at*, now. Else as `cancel`.

        The message keeps its id, keys and handle.

        Args:
            delay: From now on; a number is seconds.
            deliver_at: An aware datetime, or epoch milliseconds.
        """
        deliver_ms = deliver_time(delay, deliver_at, self.broker.clock.now_ms())
        return self.broker.reschedule(handle, deliver_ms, key=key, topic=topic)

    def pending(
        self,
        topic: str | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        before: datetime | int | None = None,
        after: datetime | int | None = None,
        max_count: int = 100,
        cursor: str | None = None,
    ) -> PendingPage:
        """Messages that wait and agree with all that is given, those due first before others.

        Args:
            before: Due before this: an aware datetime, or epoch milliseconds.
            after: Due at this or later.
            max_count: Of one page.
            cursor: ``cursor`` of the page before.
        """
        return self.broker.pending(_query(topic, key, tag, before, after), max_count, cursor)

    def count_pending(
        self,
        topic: str | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        before: datetime | int | None = None,
        after: datetime | int | None = None,
        by: timedelta = timedelta(minutes=1),
    ) -> PendingCounts:
        """How many messages wait, in all and by the spans of time that they fall due in; arguments as `pending`."""
        if by < timedelta(milliseconds=1):
            raise MessageError(f"by must be a millisecond or more, got {by}")
        return self.broker.count_pending(_query(topic, key, tag, before, after), by // timedelta(milliseconds=1))


def _query(
    topic: str | None, key: str | None, tag: str | None, before: datetime | int | None, after: datetime | int | None
) -> PendingQuery:
    before_ms, after_ms = epoch_ms("before", before), epoch_ms("after", after)
    return PendingQuery(topic=topic, key=key, tag=tag, before_ms=before_ms, after_ms=after_ms)

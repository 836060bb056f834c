"""Delays: the options of the sending verbs as message properties, and the verbs for pending messages.

The broker's clock counts delay levels and relative delays, from the arrival at the broker. Deliver times are absolute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypedDict, Unpack

from mqtemplate.broker import Broker, QueuedMessage
from mqtemplate.durations import Duration, format_ms, option_ms
from mqtemplate.errors import DelayError, MessageError, MQTemplateError
from mqtemplate.message import DELAY_PROPERTIES, Property, key_text, property_text, storable
from mqtemplate.numbers import INT_MAX, PARSED_MAX, parse_number
from mqtemplate.pending import (
    ConditionalSend,
    PendingCounts,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.template.asynchronous import Background, awaitable
from mqtemplate.template.options import Send, unknown_option
from mqtemplate.topics import check_given_topic
from mqtemplate.user_code import shown

_ABSOLUTE = frozenset({Property.TIMER_DELIVER_MS, Property.START_DELIVER_TIME})

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

# A smaller number is epoch seconds until the year 5138; epoch milliseconds have been larger since 1973.
_SECONDS_BELOW = 100_000_000_000


_TWO_DELAYS = "{} and {} are two delays for one message; pass one of them"


def delay_properties(
    delay_level: int, delay: Duration | None, deliver_at: datetime | int | None, now_ms: int
) -> dict[str, str]:
    """Return the property that requests the delay from the broker; empty for a message without a delay.

    Args:
        delay_level: 0, or a position in the broker's level table.
        delay: A relative delay: ``"3h"`` or a timedelta; a number is seconds, with a `UnitWarning`. Fractions of a
            millisecond are rounded up.
        deliver_at: An aware datetime, rounded up likewise, or epoch milliseconds.
        now_ms: The current time. It only serves to detect epoch seconds, given by mistake.

    Raises:
        DelayError: Two of the options are given, or one has an invalid value.
    """
    _check_level(delay_level)
    if delay_level and (delay is not None or deliver_at is not None):
        raise DelayError(
            _TWO_DELAYS.format(f"delay_level={delay_level}", "delay" if delay is not None else "deliver_at")
        )
    if delay is not None and deliver_at is not None:
        raise DelayError(_TWO_DELAYS.format("delay", "deliver_at"))
    if delay_level:
        return {Property.DELAY: str(int(delay_level))}
    if delay is not None:
        delay_ms = _delay_ms(delay)
        return {Property.TIMER_DELAY_MS: str(delay_ms)} if delay_ms else {}
    if deliver_at is not None:
        return {Property.TIMER_DELIVER_MS: str(_deliver_ms(deliver_at, now_ms))}
    return {}


def deliver_time(delay: Duration | None, deliver_at: datetime | int | None, now_ms: int) -> int:
    """Return the new deliver time (epoch ms) of a pending message: *now_ms* if neither option is given.

    Raises:
        DelayError: Both are given, or one has an invalid value.
    """
    if delay is not None and deliver_at is not None:
        raise DelayError(_TWO_DELAYS.format("delay", "deliver_at"))
    if deliver_at is not None:
        return _deliver_ms(deliver_at, now_ms)
    return now_ms if delay is None else now_ms + _delay_ms(delay)


def epoch_ms(name: str, time: datetime | int | None) -> int | None:
    """Return the value of the option *name* in epoch milliseconds.

    Raises:
        DelayError: It is a naive datetime, or not a time.
    """
    if time is None:
        return None
    if isinstance(time, int) and not isinstance(time, bool):
        if abs(time) > PARSED_MAX:
            raise DelayError(f"{name} must be epoch milliseconds of at most 18 digits, got {shown(time)}")
        return time
    if isinstance(time, datetime) and (since_epoch := _since_epoch(name, time)) is not None:
        return since_epoch // _MILLISECOND
    raise DelayError(f"{name} must be an aware datetime or epoch milliseconds, got {type(time).__name__} {shown(time)}")


def _since_epoch(name: str, time: datetime) -> timedelta | None:
    """Return the time since the epoch; None for a naive datetime.

    It is the difference of two times, and not `astimezone`: that fails near the years 1 and 9999.
    """
    try:
        return None if time.utcoffset() is None else time - _EPOCH
    except Exception as exc:  # a tzinfo of the caller raised it
        raise DelayError(f"{name} has a time zone without an offset: {type(exc).__name__}: {exc}") from exc


def _check_level(delay_level: object) -> None:
    if not isinstance(delay_level, int) or isinstance(delay_level, bool) or not 0 <= delay_level <= INT_MAX:
        raise DelayError(
            f"delay_level must be 0 (no delay) or a position in the level table (1 = 1s … 18 = 2h by default), "
            f"got {type(delay_level).__name__} {shown(delay_level)}; for other delays pass delay= or deliver_at="
        )


def _delay_ms(delay: object) -> int:
    if (isinstance(delay, timedelta) and delay < timedelta(0)) or (isinstance(delay, int | float) and delay < 0):
        given = f"-{format_ms(-(delay // _MILLISECOND))}" if isinstance(delay, timedelta) else shown(delay)
        raise DelayError(f"delay must not be negative, got {given}; to deliver at once pass no delay")
    return option_ms("delay", delay, DelayError)


def _deliver_ms(deliver_at: object, now_ms: int) -> int:
    if isinstance(deliver_at, datetime):
        since_epoch = _since_epoch("deliver_at", deliver_at)
        if since_epoch is None:
            raise DelayError(
                f"deliver_at={deliver_at.isoformat()} is a naive datetime: another time in each time zone; "
                "give it a time zone: datetime(..., tzinfo=UTC), or .astimezone() for the zone of this machine"
            )
        return _check_deliver_ms("deliver_at", -(-since_epoch // _MILLISECOND), now_ms)
    if isinstance(deliver_at, int) and not isinstance(deliver_at, bool):
        return _check_deliver_ms("deliver_at", deliver_at, now_ms)
    hints = {str: "; datetime.fromisoformat(...) parses text", float: "; for time.time() pass int(seconds * 1000)"}
    raise DelayError(
        f"deliver_at must be an aware datetime or whole epoch milliseconds, "
        f"got {type(deliver_at).__name__} {shown(deliver_at)}{hints.get(type(deliver_at), '')}"
    )


def _check_deliver_ms(name: str, deliver_ms: int, now_ms: int) -> int:
    """Refuse epoch seconds, which would be a time in 1970. The broker handles other past times: it delivers at once."""
    if deliver_ms < 0:
        raise DelayError(f"{name} must not be before 1970, got {shown(deliver_ms)}")
    if deliver_ms > PARSED_MAX:
        raise DelayError(f"{name} must be epoch milliseconds of at most 18 digits, got {shown(deliver_ms)}")
    if deliver_ms < _SECONDS_BELOW <= now_ms:
        raise DelayError(f"{name}={deliver_ms} looks like seconds; it takes epoch milliseconds: {deliver_ms * 1_000}")
    return deliver_ms


def delay_header(name: str, value: object, now_ms: int) -> dict[str, str]:
    """Return the property for a delay header, ``DELAY`` or ``TIMER_…``, with the effect of the option it equals.

    Raises:
        DelayError: The value is not a whole number, or is out of range.
    """
    number = None if isinstance(value, bool) else parse_number(storable(f"header {name}", value).strip())
    if number is None:
        unit = {Property.DELAY: "a level", Property.TIMER_DELAY_SEC: "seconds"}.get(name, "milliseconds")
        raise DelayError(
            f"header {name} must be a whole number ({unit}), got {shown(value)}; or pass delay= or deliver_at="
        )
    if name == Property.DELAY:
        _check_level(number)
    elif name in _ABSOLUTE:
        _check_deliver_ms(f"header {name}", number, now_ms)
    elif number < 0:
        raise DelayError(f"header {name} must not be negative, got {number}; to deliver at once leave it out")
    return {name: str(number)} if number else {}


def check_one_delay(names: Iterable[str]) -> None:
    """Raise `DelayError` if the properties of one message contain several delays."""
    delays = [name for name in names if name in DELAY_PROPERTIES]
    if len(delays) > 1:
        raise DelayError(f"{' and '.join(delays)} are {len(delays)} delays for one message; give one of them")


# --- pending messages --------------------------------------------------------------------------------


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


class ChangeableOutbox(Protocol):
    """Messages of an application that its broker does not have yet."""

    def change_unsent(self, key: str, topic: str | None, deliver_ms: int | None) -> ScheduleChange | None:
        """Reschedule the messages with a key or a message id, or cancel them if *deliver_ms* is None.

        Returns:
            The result; None if there is no such message.
        """

    def defer_change(self, key: str, topic: str | None, deliver_ms: int | None, reason: str) -> None:
        """Store the same change for the messages that the broker has, until it can be reached again."""


class PendingVerbs(ABC):
    """Verbs of `mqtemplate.template.RocketMQTemplate` for messages that are not delivered yet."""

    broker: Broker
    _background: Background
    _outboxes: dict[Hashable, ChangeableOutbox]

    def add_outbox(self, table: Hashable, outbox: ChangeableOutbox) -> None:
        """Let `cancel` and `reschedule` by key look in an outbox, too. An outbox does this when it is created.

        Args:
            table: Identity of its table: of several outboxes over one table the last one is used.
        """
        self._outboxes[table] = outbox

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[Send] = (),
    ) -> ScheduleChange:
        """Cancel pending messages, by the handle of a `SendResult` or by a key. Levels and timers alike.

        The returned status is final: a message with ``CANCELLED`` is never delivered, one with ``ALREADY_DELIVERED`` is
        not cancelled, and ``UNKNOWN`` means that the broker has no such message.

        With *key*, messages that an outbox of this template has not sent yet are cancelled first, also while the
        broker cannot be reached. In an open transaction call ``cancel`` of the outbox instead.

        Args:
            handle: `SendResult.handle`; the handle of a batch names all its messages.
            key: A business key or message id, instead of the handle. All pending messages with it are cancelled.
            topic: With *key*: only messages for this topic.
            then: Messages to send if this call cancels: ``then=[Send("orders:cancelled", order)]``. They are stored
                together with the cancel, all of it or nothing, and `ScheduleChange.sent` has their results. If nothing
                is pending any more, they are not sent. They may have delays, but no ``pending_key``. Middlewares do not
                see them.
        """
        topic = _checked(topic)
        if then:
            return self.broker.delayed.cancel(handle, key=key, topic=topic, then=self._queued(then))
        if key is not None and handle is None and self._outboxes:
            return self._change_everywhere(key_text(key), topic, None)
        return self.broker.delayed.cancel(handle, key=key, topic=topic)

    def reschedule(
        self,
        handle: str | None = None,
        *,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[Send] = (),
    ) -> ScheduleChange:
        """Change the deliver time of pending messages; without *delay* and *deliver_at*, deliver them now.

        A message keeps its id, keys and handle. The other arguments are as in `cancel`.

        Args:
            delay: ``"3h"`` or a timedelta, counted from now.
            deliver_at: An aware datetime, or epoch milliseconds.
        """
        deliver_ms = deliver_time(delay, deliver_at, self.broker.clock.now_ms())
        topic = _checked(topic)
        if then:
            return self.broker.delayed.reschedule(handle, deliver_ms, key=key, topic=topic, then=self._queued(then))
        if key is not None and handle is None and self._outboxes:
            return self._change_everywhere(key_text(key), topic, deliver_ms)
        return self.broker.delayed.reschedule(handle, deliver_ms, key=key, topic=topic)

    def send_if(
        self,
        sends: Send | Sequence[Send],
        *,
        pending: str | None = None,
        delivered: str | None = None,
        key: str | None = None,
        topic: str | None = None,
        state: PendingState = PendingState.PENDING,
    ) -> ConditionalSend:
        """Send only if a delayed message is still pending, or was delivered. The broker decides and stores in one step.

        ::

            template.send_if(Send("mails:reminder", mail), pending=result.handle)
            template.send_if([Send("orders:expired", order)], delivered=result.handle)
            template.send_if(Send("mails:reminder", mail), key="cart-17", state=PendingState.PENDING)

        Args:
            sends: Messages, stored all or none. They may have delays, but no ``pending_key``. Middlewares do not see
                them.
            pending: Handle of a message that must be pending.
            delivered: Handle of a message that must be delivered to its topic.
            key: A business key or message id, instead of a handle. One message with it that is pending decides.
            topic: With *key*: only messages for this topic.
            state: With *key*: ``PENDING`` or ``DELIVERED``.

        Returns:
            The state, and the results of the messages: empty if the condition did not hold.
        """
        given = [each for each in (pending, delivered, key) if each is not None]
        if len(given) != 1:
            raise MessageError(
                f"send_if needs one condition: pending=handle, delivered=handle or key=..., got {len(given)} of them"
            )
        if state not in (PendingState.PENDING, PendingState.DELIVERED) or (
            key is None and state is not PendingState.PENDING
        ):
            raise MessageError(
                "state must be PendingState.PENDING or PendingState.DELIVERED, and is for key= only, "
                f"got {shown(state)}"
            )
        messages = self._queued([sends] if isinstance(sends, Send) else sends)
        if not messages:
            raise MessageError("send_if has no message to send; give it at least one Send")
        wanted = PendingState.DELIVERED if delivered is not None else PendingState(state)
        handle = pending if delivered is None else delivered
        return self.broker.delayed.send_if(messages, wanted, handle, key=key, topic=_checked(topic))

    @abstractmethod
    def _queued(self, sends: Sequence[Send]) -> list[QueuedMessage]:
        """Return the messages of *sends* with their queues."""

    def _change_everywhere(self, key: str, topic: str | None, deliver_ms: int | None) -> ScheduleChange:
        """Change the messages of the outboxes and of the broker.

        The outboxes are first: a message may be relayed meanwhile, and then the broker has it.
        """
        found = [(each, each.change_unsent(key, topic, deliver_ms)) for each in self._outboxes.values()]
        unsent = [change for _, change in found if change is not None]
        delayed = self.broker.delayed
        try:
            sent = (
                delayed.cancel(key=key, topic=topic)
                if deliver_ms is None
                else delayed.reschedule(deliver_ms=deliver_ms, key=key, topic=topic)
            )
        except MessageError:
            raise
        except MQTemplateError as error:
            if not any(change.count for change in unsent):
                raise
            # The broker is down, and the outbox has the message. An older one with this key may be at the broker.
            for outbox, change in found:
                if change is not None:
                    outbox.defer_change(key, topic, deliver_ms, str(error))
            sent = ScheduleChange(ScheduleChangeStatus.UNKNOWN)
        return _together([*unsent, sent])

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
        return self.broker.delayed.pending(_query("pending", topic, conditions), max_count, cursor)

    def count_pending(
        self, topic: str | None = None, *, by: Duration = timedelta(minutes=1), **conditions: Unpack[PendingFilter]
    ) -> PendingCounts:
        """Return the number of pending messages that match: in all, and by time spans of their deliver times.

        Args:
            by: Length of a time span: ``"1h"`` or a timedelta.
            conditions: See `PendingFilter`.
        """
        bucket_ms = option_ms("by", by, MessageError)
        if bucket_ms < 1:
            raise MessageError(f"by must be a millisecond or more, got {shown(by)}")
        return self.broker.delayed.count_pending(_query("count_pending", topic, conditions), bucket_ms)

    async_cancel = awaitable(cancel)
    async_reschedule = awaitable(reschedule)
    async_send_if = awaitable(send_if)
    async_pending = awaitable(pending)
    async_count_pending = awaitable(count_pending)


def _together(changes: list[ScheduleChange]) -> ScheduleChange:
    """Return the result of one call in several places: of those that changed messages, or else of those that know any.

    The last one is of the broker.
    """
    done = [change for change in changes if change.count]
    known = [change for change in reversed(changes) if change.status is not ScheduleChangeStatus.UNKNOWN]
    handles = tuple(handle for change in done for handle in change.handles)
    status = (done or known or changes)[0].status
    return ScheduleChange(status, sum(change.count for change in done), handles)


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

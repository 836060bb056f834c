"""Inbox: it records the ids of messages in the transaction of their effect, so that the effect happens once."""

from __future__ import annotations

from mqtemplate.calls.handling import ListenerInfo
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.listener.handler.current import current_group
from mqtemplate.message import Message, Property
from mqtemplate.outbox.database import Execute, purge_messages, record_message
from mqtemplate.services import ClockWatch

_PURGE_INTERVAL_MS = 60_000
_PURGE_COUNT = 1_000
_AFTER_CLOCK_SET_MS = 3_600_000


class InboxCore:
    """Rules of an inbox, without a database library.

    Args:
        keep: Time for which an id is kept. It must be longer than a message can be repeated: longer than its retries
            and the retention of the broker.
    """

    def __init__(self, keep: Duration = "7d", clock: Clock | None = None) -> None:
        self._keep_ms = option_ms("keep", keep, ConfigurationError)
        self._clock = clock or SystemClock()
        self._purge_ms = 0  # steady
        self._watch = ClockWatch(self._clock)

    def record(self, execute: Execute, message: Message | str, consumer: str | None) -> bool:
        """Record a message; return False if it is recorded already. Delete old ids from time to time."""
        now_ms = self._clock.now_ms()
        is_new = record_message(execute, _consumer(consumer), message_id(message), now_ms)
        if is_new and self._may_purge():
            # In the same transaction: with SQLite another one would wait for this one.
            is_full = purge_messages(execute, now_ms - self._keep_ms, _PURGE_COUNT) == _PURGE_COUNT
            self._purge_ms = self._clock.steady_ms() + (0 if is_full else _PURGE_INTERVAL_MS)
        return is_new

    def _may_purge(self) -> bool:
        """Return True if it is time to delete old ids: not soon after the clock was set forward, maybe by mistake."""
        steady_ms = self._clock.steady_ms()
        if self._watch.moved_ms() > 0:
            self._purge_ms = steady_ms + _AFTER_CLOCK_SET_MS
        return steady_ms >= self._purge_ms


def check_single_messages(listener: ListenerInfo) -> None:
    """Refuse a listener of batches: the id of a message must be stored with its own effect, and with no other.

    Raises:
        ListenerError: The handler takes batches.
    """
    if listener.is_batch:
        raise ListenerError(
            f"listener {listener.id}: the middleware of an inbox handles one message in one transaction, and the "
            "handler takes batches; call is_new of the inbox for each message in the handler"
        )


def message_id(message: Message | str) -> str:
    """Return the id that a message keeps when it is repeated; a text is an id already.

    Raises:
        ListenerError: The message has no id.
    """
    found = message if isinstance(message, str) else message.properties.get(Property.UNIQ_KEY)
    if not found:
        raise ListenerError("the message has no UNIQ_KEY, so a repeat cannot be recognised; pass a key of its content")
    return found


def _consumer(given: str | None) -> str:
    consumer = given or current_group()
    if consumer is None:
        raise ListenerError("outside of a listener an inbox cannot know the consumer; pass consumer='billing'")
    return consumer

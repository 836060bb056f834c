"""The listener, and the record of what it received."""

from __future__ import annotations

from threading import Condition
from typing import NamedTuple

from mqtemplate import Clock, MessageExt, message_listener, service


class Arrival(NamedTuple):
    """One received message; times are in epoch milliseconds."""

    text: str
    keys: str | None
    sent_ms: int
    due_ms: int
    received_ms: int

    @property
    def late_ms(self) -> int:
        """Milliseconds from the due time to the arrival."""
        return self.received_ms - self.due_ms


@service
class ArrivalBook:
    """The received messages. The listener adds them, and the program waits for them."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self._changed = Condition()

    def add(self, arrival: Arrival) -> None:
        """Add a message."""
        with self._changed:
            self.arrivals.append(arrival)
            self._changed.notify_all()

    def wait_for(self, keys: str, timeout_s: float) -> bool:
        """Wait for the message with these keys; return False if it does not arrive in time."""
        with self._changed:
            return self._changed.wait_for(lambda: any(arrival.keys == keys for arrival in self.arrivals), timeout_s)


@message_listener(
    topic="schedule-message-topic", consumer_group="schedule-consumer-group", selector_expression="sync-tags"
)
class ScheduleListener:
    """Listener for the messages of `ScheduleMessageService`."""

    def __init__(self, book: ArrivalBook, clock: Clock) -> None:
        self._book = book
        self._clock = clock

    def on_message(self, text: str, message: MessageExt) -> None:
        """Record the message."""
        due_ms = message.deliver_timestamp or message.store_timestamp  # a RocketMQ broker does not set the former
        self._book.add(Arrival(text, message.keys, message.born_timestamp, due_ms, self._clock.now_ms()))

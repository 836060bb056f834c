"""The listener that receives, and where it writes down what came."""

from __future__ import annotations

from threading import Condition
from typing import NamedTuple

from mqtemplate import Clock, MessageExt, message_listener, service


class Arrival(NamedTuple):
    """One message as it reached the handler; times are milliseconds since the epoch."""

    text: str
    keys: str | None
    sent_ms: int
    due_ms: int
    received_ms: int

    @property
    def late_ms(self) -> int:
        return self.received_ms - self.due_ms


@service
class ArrivalBook:
    """What has arrived. One object, shared by the listener that writes and the program that waits."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self._changed = Condition()

    def add(self, arrival: Arrival) -> None:
        with self._changed:
            self.arrivals.append(arrival)
            self._changed.notify_all()

    def wait_for(self, keys: str, patience_s: float) -> bool:
        """Wait until the message with these keys is here; False if it did not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: any(arrival.keys == keys for arrival in self.arrivals), patience_s)


@message_listener(
    topic="schedule-message-topic", consumer_group="schedule-consumer-group", selector_expression="sync-tags"
)
class ScheduleListener:
    """Receives what `ScheduleMessageService` sent, when it is due."""

    def __init__(self, book: ArrivalBook, clock: Clock) -> None:
        self._book = book
        self._clock = clock

    def on_message(self, text: str, message: MessageExt) -> None:
        due_ms = message.deliver_timestamp or message.store_timestamp  # a RocketMQ broker does not tell the former
        self._book.add(Arrival(text, message.keys, message.born_timestamp, due_ms, self._clock.now_ms()))

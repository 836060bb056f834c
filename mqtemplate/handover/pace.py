"""The pace of the mover: it gives way to the sends of the application, and moves at most so many messages a second."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from mqtemplate.broker import Broker, MessageSends
from mqtemplate.clock import Clock
from mqtemplate.errors import PendingKeyUnknownError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.old_broker import has_topic, inner_queue, is_old, shown_queue
from mqtemplate.message import Message, MessageQueue, Property, SendSequence
from mqtemplate.results import HalfMessage, SendResult, SequencedResult

FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 8, 4, 64
"""Messages that are sent at one time. As many may wait for the new broker if it stops."""
_LOAD_MS = 2.5
"""A send of the application waits about this long, if it arrives while the mover works. Twice that, with a third more
messages in a second, doubled the 99th percentile of the sends once more."""
_ALONE_LOAD_MS = 20
"""Load of a step for an application that is stopped."""
_GIVE_WAY_MS, _GIVE_WAY_STEP_S = 10, 0.000_5
_RATE_MS = 10_000


class Pace:
    """The number of messages that a mover sends at one time, and its rest after each step.

    On a virtual clock no step takes time, so only the rate counts.

    Args:
        is_sending: Returns True while the application sends.
        used_s: Returns the processor time of this thread.

    Attributes:
        window: Number of messages that are sent at one time. It fits the load that they are.
    """

    def __init__(
        self,
        clock: Clock,
        settings: MoverSettings,
        is_sending: Callable[[], bool],
        used_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.window = FIRST_WINDOW
        self._clock, self._settings, self._is_sending, self._used_s = clock, settings, is_sending, used_s
        self._load_ms = _LOAD_MS if settings.busy_share < 1 else _ALONE_LOAD_MS
        self._moved_at: deque[tuple[int, int]] = deque()
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._start_ms, self._used_before_s = self._clock.steady_ms(), self._used_s()
        self._answer_ms = 0  # time of this step until the first of its sends was answered: nothing was loaded then
        self._burst_ms = 0  # time from there to the last answer

    def answered(self, sent_ms: int, first_ms: int) -> None:
        """Note that all sends are answered: they began at a steady time, and the first answer came at another one."""
        self._answer_ms += first_ms - sent_ms
        self._burst_ms += self._clock.steady_ms() - first_ms

    def give_way(self) -> None:
        """Wait until the application does not send, for at most `_GIVE_WAY_MS`."""
        end_ms = self._clock.steady_ms() + _GIVE_WAY_MS
        while not self._clock.is_virtual and self._is_sending() and self._clock.steady_ms() < end_ms:
            self._clock.sleep(_GIVE_WAY_STEP_S)

    def rest_ms(self, count: int) -> int:
        """End a step with *count* messages. Fit the window, and return the pause before the next step.

        The load of a step for the sends of the application is the processor time of this thread, and the time in which
        the new broker stored the messages.
        """
        load_ms = (self._used_s() - self._used_before_s) * 1_000 + self._burst_ms
        if not self._clock.is_virtual and load_ms > self._load_ms:
            self.window = max(LEAST_WINDOW, self.window // 2)
        elif not self._clock.is_virtual and count >= self.window and load_ms < self._load_ms / 2:
            self.window = min(MOST_WINDOW, self.window * 2)
        busy_ms = self._clock.steady_ms() - self._start_ms - self._answer_ms
        return max(1, count * 1_000 // self._settings.rate, round(busy_ms * (1 / self._settings.busy_share - 1)))

    def moved(self, count: int) -> None:
        """Count messages that have moved."""
        now_ms = self._clock.steady_ms()
        self._moved_at.append((now_ms, count))
        while now_ms - self._moved_at[0][0] > _RATE_MS:
            self._moved_at.popleft()

    @property
    def rate(self) -> float:
        """Messages that have moved in a second, over the last ten seconds."""
        now_ms = self._clock.steady_ms()
        moved = sum(count for at_ms, count in list(self._moved_at) if now_ms - at_ms <= _RATE_MS)
        return moved * 1_000 / _RATE_MS


class SendsInFlight(MessageSends):
    """The sends of an application during a hand-over: to the new broker, or to the old one once that is aborted.

    It knows if one waits for its answer, so that a mover gives way. A send with a pending key raises
    `PendingKeyUnknownError`.

    Args:
        old: The old broker; None: all sends go to the new one.
        is_to_old: Returns True if the sends go to the old broker now. For a topic that only the new broker has they go
            there all the same: the listeners of this application do not read that topic at the old one.
    """

    def __init__(self, new: Broker, old: Broker | None = None, is_to_old: Callable[[], bool] = lambda: False) -> None:
        self._new, self._old, self._is_to_old = new, old, is_to_old
        self._at_old: set[str] = set()  # topics that the old broker certainly has
        self._in_flight: list[None] = []  # unlike a number, one thread adds while another one removes

    def are_in_flight(self) -> bool:
        """Return True if a send waits for its answer."""
        return bool(self._in_flight)

    def broker_of(self, topic: str) -> Broker:
        """Return the broker that a message for a topic goes to now."""
        if self._old is None or not self._is_to_old():
            return self._new
        if topic not in self._at_old:
            if not has_topic(self._old, topic):
                return self._new
            self._at_old.add(topic)
        return self._old

    def route(self, topic: str, queue: MessageQueue | None) -> tuple[Broker, MessageQueue | None]:
        """Return the broker that a message goes to now, and the queue as that broker knows it.

        For a queue of the other broker it is the one with its number.
        """
        broker = self.broker_of(topic)
        return broker, None if queue is None else self._queue_of(broker, queue)

    def _queue_of(self, broker: Broker, queue: MessageQueue) -> MessageQueue:
        if is_old(queue.broker_name) is (broker is self._old):
            return inner_queue(queue)
        queues = broker.queues(queue.topic)
        return queues[queue.queue_id % len(queues)]

    def _shown(self, result: SendResult, broker: Broker) -> SendResult:
        if broker is not self._old:
            return result
        return replace(result, message_queue=shown_queue(result.message_queue))

    @contextlib.contextmanager
    def _counted(
        self, messages: Sequence[Message], queue: MessageQueue | None
    ) -> Iterator[tuple[Broker, MessageQueue | None]]:
        refuse_pending_keys(messages)
        self._in_flight.append(None)
        try:
            yield self.route(messages[0].topic if messages else "", queue)
        finally:
            self._in_flight.pop()

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        with self._counted([message], queue) as (broker, inner):
            return self._shown(broker.sends.send(message, inner, timeout_ms), broker)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        with self._counted(messages, queue) as (broker, inner):
            return self._shown(broker.sends.send_batch(messages, inner, timeout_ms), broker)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        refuse_pending_keys(messages)
        broker, inner = self.route(messages[0].topic if messages else "", queue)
        future = broker.sends.send_async(messages, inner, timeout_ms)
        self._in_flight.append(None)
        future.add_done_callback(lambda done: self._in_flight.pop())
        return self._shown_later(future) if broker is self._old else future

    def _shown_later(self, future: AwaitableFuture[SendResult]) -> AwaitableFuture[SendResult]:
        shown: AwaitableFuture[SendResult] = AwaitableFuture()

        def end(done: Future[SendResult]) -> None:
            if (error := done.exception()) is not None:
                shown.set_exception(error)
            else:
                shown.set_result(replace(done.result(), message_queue=shown_queue(done.result().message_queue)))

        future.add_done_callback(end)
        return shown

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        with self._counted([message], queue) as (broker, inner):
            broker.sends.send_one_way(message, inner)

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        with self._counted([message], queue) as (broker, inner):
            half = broker.sends.send_half(message, group, inner, timeout_ms)
            return replace(half, send_result=self._shown(half.send_result, broker))

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """See `MessageSends`. All messages go to one broker, which knows what it has got of the sequence."""
        given = [message for message, _ in messages]
        with self._counted(given, None) as (broker, _):
            routed = [(message, self._queue_of(broker, queue)) for message, queue in messages]
            return broker.sends.send_sequenced(routed, sequence, timeout_ms)


def refuse_pending_keys(messages: Iterable[Message]) -> None:
    """Raise `PendingKeyUnknownError` if a message has a pending key, or its commit cancels another one."""
    for message in messages:
        if Property.CANCELS in message.properties:
            raise PendingKeyUnknownError(
                f"cancels= of a transaction for {message.topic!r}, during a hand-over: the message to cancel may be in "
                "another broker than the transaction; cancel it after the commit"
            )
        if (key := message.properties.get(Property.PENDING_KEY)) is not None:
            raise PendingKeyUnknownError(
                f"pending_key={key!r} of a message for {message.topic!r}, during a hand-over: the message that is "
                "pending under the key may be in the old broker, in the new one, or between them, so neither can "
                "decide; send it without the key, or after the hand-over is confirmed and its settings are removed"
            )

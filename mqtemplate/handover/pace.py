"""The pace of the mover: it gives way to the sends of the application, and moves at most so many messages a second."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mqtemplate.broker import Broker, MessageSends
from mqtemplate.clock import Clock
from mqtemplate.errors import UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.message import Message, MessageQueue, Property, SendSequence
from mqtemplate.results import HalfMessage, SendResult, SequencedResult

FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 8, 4, 64
"""Messages that are sent at one time. As many may wait for the new broker if it stops."""
_LOAD_MS = 5
"""A send of the application waits about this long, if it arrives while the mover works."""
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
        if not self._clock.is_virtual and load_ms > _LOAD_MS:
            self.window = max(LEAST_WINDOW, self.window // 2)
        elif not self._clock.is_virtual and count >= self.window and load_ms < _LOAD_MS / 2:
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
    """The sends of a new broker during a hand-over. It knows if one waits for its answer, so that a mover gives way.

    A send with a pending key raises `UnsupportedError`.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._in_flight: list[None] = []  # unlike a number, one thread adds while another one removes

    def are_in_flight(self) -> bool:
        """Return True if a send waits for its answer."""
        return bool(self._in_flight)

    @contextlib.contextmanager
    def _counted(self, messages: Iterable[Message]) -> Iterator[MessageSends]:
        _refuse_pending_keys(messages)
        self._in_flight.append(None)
        try:
            yield self._broker.sends
        finally:
            self._in_flight.pop()

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        with self._counted([message]) as sends:
            return sends.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        with self._counted(messages) as sends:
            return sends.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        _refuse_pending_keys(messages)
        future = self._broker.sends.send_async(messages, queue, timeout_ms)
        self._in_flight.append(None)
        future.add_done_callback(lambda done: self._in_flight.pop())
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        with self._counted([message]) as sends:
            sends.send_one_way(message, queue)

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        with self._counted([message]) as sends:
            return sends.send_half(message, group, queue, timeout_ms)

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        with self._counted((message for message, _ in messages)) as sends:
            return sends.send_sequenced(messages, sequence, timeout_ms)


def _refuse_pending_keys(messages: Iterable[Message]) -> None:
    """Raise `UnsupportedError` if a message has a pending key, or its commit cancels another one."""
    for message in messages:
        if Property.CANCELS in message.properties:
            raise UnsupportedError(
                f"cancels= of a transaction for {message.topic!r}, during a hand-over: the message to cancel may be in "
                "another broker than the transaction; cancel it after the commit"
            )
        if (key := message.properties.get(Property.PENDING_KEY)) is not None:
            raise UnsupportedError(
                f"pending_key={key!r} of a message for {message.topic!r}, during a hand-over: the message that is "
                "pending under the key may be in the old broker, in the new one, or between them, so neither can "
                "decide; send it without the key, or after the hand-over is confirmed and its settings are removed"
            )

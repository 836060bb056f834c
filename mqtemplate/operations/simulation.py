"""Simulation: the pending messages of a store directory in virtual time, under other settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mqtemplate.broker import QueueSpan
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import MessageError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.access import snapshot_broker
from mqtemplate.operations.messages import read_queue
from mqtemplate.operations.why_late import percentiles
from mqtemplate.pending import PendingQuery
from mqtemplate.services import Service

_PAGE = 500
_MINUTE = 60_000
_CLEANING = "store.cleaning"


@dataclass(slots=True)
class SimulatedMinute:
    """One minute of a simulation.

    Attributes:
        start_ms: Start of the minute (epoch ms).
        due: Messages that fall due in it.
        delivered: Messages that the broker delivers to their topics in it.
        consumed: Messages that consumers finish in it.
        backlog: Delivered messages that consumers have not finished at its end.
        lateness_ms: Greatest time from the deliver time of a message to its end, of those finished in it.
    """

    start_ms: int
    due: int = 0
    delivered: int = 0
    consumed: int = 0
    backlog: int = 0
    lateness_ms: int = 0


@dataclass(slots=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        minutes: The minutes in which something happens, in order.
        undelivered: Pending messages that are due after the end of the simulation.
        lateness_ms: Percentile -> time from the deliver time to the end of the handling: 50, 99, 100.
    """

    start_ms: int
    minutes: list[SimulatedMinute] = field(default_factory=list)
    delivered: int = 0
    undelivered: int = 0
    lateness_ms: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """Consumers of a simulation.

    Attributes:
        rate: Messages per second that the consumers of each topic handle; None for no limit.

    Raises:
        MessageError: *rate* is not above 0.
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise MessageError(f"the rate of consumers must be above 0 per second, got {self.rate}")


def simulate(
    path: Path,
    settings: EmbeddedSettings,
    *,
    span_ms: int,
    consumption: Consumption | None = None,
    start_ms: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Simulation:
    """Run the pending messages of a store directory forward in virtual time.

    A broker with *settings* works on a snapshot: nothing on the disk changes. Delivered messages take memory.

    Args:
        span_ms: Length of the simulated time.
        start_ms: Start of the simulated time (epoch ms); by default now. With a later time the messages that are due
            before are late, as after a stop of the broker.
        on_progress: Called with the simulated milliseconds since the last call.

    Raises:
        StoreError: The directory is missing, or is not a store.
    """
    start_ms = SystemClock().now_ms() if start_ms is None else start_ms
    clock = VirtualClock(start_ms)
    with snapshot_broker(path, settings, clock) as broker:
        run = _SimulationRun(broker, clock, start_ms + span_ms, on_progress)
        run.due_by_minute()
        run.deliver()
        return run.result(consumption or Consumption())


class _SimulationRun:
    """One simulation."""

    def __init__(
        self, broker: EmbeddedBroker, clock: VirtualClock, end_ms: int, on_progress: Callable[[int], None]
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._start_ms, self._end_ms = clock.now_ms(), end_ms
        self._on_progress = on_progress
        self._minutes: dict[int, SimulatedMinute] = {}
        self._undelivered = 0
        self._due: dict[str, list[int]] = defaultdict(list)  # topic -> deliver times, ascending
        self._delivered: list[tuple[int, str]] = []  # time of the delivery, topic
        self._ends: dict[MessageQueue, int] = {}

    def due_by_minute(self) -> None:
        """Read all pending messages, and note where their topics end."""
        cursor = None
        while True:
            page = self._broker.delayed.pending(PendingQuery(), _PAGE, cursor)
            for message in page.messages:
                if message.deliver_ms > self._end_ms:
                    self._undelivered += 1
                else:
                    self._due[message.topic].append(message.deliver_ms)
                    self._minute(max(message.deliver_ms, self._start_ms)).due += 1
            cursor = page.cursor
            if cursor is None:
                break
        self._ends = {span.queue: span.max_offset for topic in self._due for span in self._spans(topic)}

    def deliver(self) -> None:
        """Step the broker until the end of the simulated time, and read what it has delivered."""
        services = [service for service in self._broker.services() if service.name != _CLEANING]
        while (due_ms := self._step(services)) is not None and due_ms <= self._end_ms:
            now_ms = self._clock.now_ms()
            self._clock.set_ms(max(due_ms, now_ms))
            self._on_progress(self._clock.now_ms() - now_ms)
        for topic in self._due:
            for span in self._spans(topic):
                found = read_queue(self._broker, span.queue, self._ends.get(span.queue, 0), span.max_offset)
                self._delivered += [(message.store_timestamp, topic) for message in found]

    def _step(self, services: list[Service]) -> int | None:
        """Do the work that is due now. Return the time of the next work."""
        while True:
            steps = [service.step() for service in services]
            due_ms = min((step for step in steps if step is not None), default=None)
            if due_ms is None or due_ms > self._clock.now_ms():
                return due_ms

    def _spans(self, topic: str) -> list[QueueSpan]:
        return [] if self._broker.topics.config(topic) is None else self._broker.admin().queue_spans(topic)

    def result(self, consumption: Consumption) -> Simulation:
        """Return the result: the consumers of each topic handle its messages one after the other."""
        lateness: list[int] = []
        spacing_ms = 0.0 if consumption.rate is None else 1_000 / consumption.rate
        free_ms: dict[str, float] = {}
        number: dict[str, int] = defaultdict(int)
        for delivered_ms, topic in sorted(self._delivered):
            # The broker delivers the messages of a topic in the order of their deliver times.
            due = self._due[topic]
            due_ms = due[min(number[topic], len(due) - 1)]
            number[topic] += 1
            end_ms = max(free_ms.get(topic, 0.0), float(delivered_ms)) + spacing_ms
            free_ms[topic] = end_ms
            late_ms = max(0, round(end_ms) - due_ms)
            lateness.append(late_ms)
            self._minute(delivered_ms).delivered += 1
            consumed = self._minute(round(end_ms))
            consumed.consumed += 1
            consumed.lateness_ms = max(consumed.lateness_ms, late_ms)
        minutes = [self._minutes[start] for start in sorted(self._minutes)]
        waiting = 0
        for minute in minutes:
            waiting += minute.delivered - minute.consumed
            minute.backlog = waiting
        return Simulation(self._start_ms, minutes, len(lateness), self._undelivered, percentiles(lateness))

    def _minute(self, time_ms: int) -> SimulatedMinute:
        start_ms = time_ms - time_ms % _MINUTE
        return self._minutes.setdefault(start_ms, SimulatedMinute(start_ms))

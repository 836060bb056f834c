"""Lateness of delayed messages: the time from the deliver time to the call of the handler, and its causes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mqtemplate.calls.handling import ListenerInfo
from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageExt
from mqtemplate.metrics import OTHER, MetricKind, MetricSample, ValueHistogram

if TYPE_CHECKING:
    from mqtemplate.broker import ReleaseCauses


_log = get_logger("mqtemplate.lateness")

_ON_TIME_MS = 20
"""A delivery that is not later needs no cause: that is the time of a flush, a fetch and a switch of threads."""
_MAX_RECENT = 200
_MAX_REPORTS = 10
"""Most reports of a second."""
_MAX_LISTENERS = 200
_WINDOW_MS = 60_000
GAP_NS = 5_000_000
"""Calls with a shorter pause between them count as one time: between two calls a thread fetches and commits."""
_MAX_TIMES = 256


class Cause(Enum):
    """Cause of a part of the lateness of a delivery."""

    BROKER_STOPPED = "broker_stopped"  # the broker did not run
    BACKLOG = "backlog"  # the broker ran, and had to release other messages first
    RATE_LIMIT = "rate_limit"  # the shape of the topic: its rate, jitter or spread
    RELEASE = "release"  # one of these three: the broker is another process, whose metrics tell which
    CONSUMER_LAG = "consumer_lag"  # the listener did not fetch it: stopped, paused, or far behind
    SLOW_HANDLER = "slow_handler"  # it waited while handlers of the listener ran


@dataclass(frozen=True, slots=True)
class LateDelivery:
    """One delivery of a delayed message. Times are milliseconds since the epoch.

    Attributes:
        due_ms: Deliver time.
        released_ms: Time at which the broker released it to its topic.
        started_ms: Time at which the handler was called.
        handled_ms: Time at which the handler returned.
        causes: Cause -> milliseconds, only those above 0; their sum is `late_ms`.
    """

    msg_id: str
    topic: str
    listener: str
    group: str
    due_ms: int
    released_ms: int
    started_ms: int
    handled_ms: int
    causes: Mapping[Cause, int]

    @property
    def late_ms(self) -> int:
        """Time from the deliver time to the call of the handler."""
        return max(0, self.started_ms - self.due_ms)

    @property
    def main_cause(self) -> Cause | None:
        """The cause of the largest part; None for a delivery that was not late."""
        return max(self.causes, key=lambda cause: self.causes[cause], default=None)


class BusyTimes:
    """The union of the times of some calls, in order. It has no lock: the caller holds one.

    A call is added when it returns. A message that waited for a thread is handled by a thread whose last call was added
    right before, so that the calls that are still running are not needed.

    Attributes:
        start_ns, end_ns: The newest time. A caller that must be quick may move its end, as `extend` does.
    """

    __slots__ = ("_times", "end_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns = self.end_ns = 0
        self._times: deque[tuple[int, int]] = deque(maxlen=_MAX_TIMES)  # earlier times, oldest first

    def extend(self, start_ns: int, end_ns: int) -> bool:
        """Add a call that adjoins the newest time; return False if it does not."""
        if start_ns > self.end_ns + GAP_NS or start_ns < self.start_ns:
            return False
        self.end_ns = max(self.end_ns, end_ns)
        return True

    def add(self, start_ns: int, end_ns: int) -> None:
        """Add a call after a pause, or a long one that started before the newest time."""
        if start_ns > self.end_ns:
            if self.end_ns:
                self._times.append((self.start_ns, self.end_ns))
            self.start_ns, self.end_ns = start_ns, end_ns
            return
        while self._times and self._times[-1][1] + GAP_NS >= start_ns:
            start_ns = min(start_ns, self._times.pop()[0])
        self.start_ns, self.end_ns = min(start_ns, self.start_ns), max(end_ns, self.end_ns)

    def overlap_ms(self, from_ms: int, to_ms: int) -> int:
        """Return how much of a span of time some handler ran."""
        from_ns, to_ns = from_ms * 1_000_000, to_ms * 1_000_000
        total = max(0, min(self.end_ns, to_ns) - max(self.start_ns, from_ns))
        for start_ns, end_ns in reversed(self._times):
            if end_ns <= from_ns:
                break
            total += max(0, min(end_ns, to_ns) - max(start_ns, from_ns))
        return total // 1_000_000


class _ListenerLateness:
    """The lateness of the deliveries to one listener."""

    __slots__ = ("by_cause", "histogram", "worst")

    def __init__(self) -> None:
        self.histogram = ValueHistogram()
        self.by_cause: dict[Cause, int] = {}
        self.worst: tuple[int, int, int] = (0, 0, 0)  # start of a minute, the worst in it, and in the one before

    def note_worst(self, now_ms: int, late_ms: int) -> None:
        start_ms, worst, before = self.worst
        if now_ms >= start_ms + _WINDOW_MS:
            before = worst if now_ms < start_ms + 2 * _WINDOW_MS else 0
            start_ms, worst = now_ms, 0
        self.worst = (start_ms, max(worst, late_ms), before)


class LatenessRecorder:
    """Splits the lateness of each delivery, counts it by cause, and reports deliveries beyond a threshold.

    The parts of one delivery:

    ==================  ================  =======================================================================
    from                to                causes
    ==================  ================  =======================================================================
    deliver time        release           ``broker_stopped``, ``rate_limit``, and the rest ``backlog``; ``release``
                                          if the broker is another process
    release             call              ``slow_handler`` while handlers of the listener ran, else ``consumer_lag``
    ==================  ================  =======================================================================

    The lateness of a retry counts from the deliver time of the retry.

    Args:
        threshold_ms: Least lateness of an event ``delivery.late``.
        causes: The knowledge of the broker in this process; None if it is another process.
    """

    def __init__(self, clock: Clock, threshold_ms: int, causes: ReleaseCauses | None = None) -> None:
        self._clock = clock
        self._threshold_ms = threshold_ms
        self._causes = causes
        self._log = LimitedLog(_log, clock.now_ms)
        self._listeners: dict[tuple[str, str], _ListenerLateness] = {}
        self._recent: deque[LateDelivery] = deque(maxlen=_MAX_RECENT)
        self._reported = (0, 0)  # second, number of deliveries in it that were reported

    def recent(self) -> list[LateDelivery]:
        """Return the last deliveries beyond the threshold, at most ten of each second, the newest first."""
        return list(reversed(self._recent))

    def worst_ms(self, group: str | None = None) -> int:
        """Return the longest lateness of a delivery (to a group) in the last one to two minutes."""
        latest_ms = self._clock.now_ms() - 2 * _WINDOW_MS
        return max(
            (
                max(each.worst[1:])
                for (_, its_group), each in list(self._listeners.items())
                if group in (None, its_group) and each.worst[0] > latest_ms
            ),
            default=0,
        )

    def record(
        self, listener: ListenerInfo, message: MessageExt, started_ms: int, handled_ms: int, busy: BusyTimes
    ) -> None:
        """Record a delivery. Calls for one listener come one at a time."""
        due_ms = message.deliver_timestamp
        if due_ms is None:
            return
        key = (listener.id, listener.group)
        found = self._listeners.get(key)
        if found is None:
            key = key if len(self._listeners) < _MAX_LISTENERS else (OTHER, OTHER)
            found = self._listeners.setdefault(key, _ListenerLateness())
        late_ms = started_ms - due_ms
        found.histogram.observe(late_ms)
        found.note_worst(started_ms, late_ms)
        if late_ms <= _ON_TIME_MS:
            return
        released_ms = min(max(message.store_timestamp, due_ms), started_ms)
        causes = self._split(message.topic, due_ms, released_ms, started_ms, busy)
        for cause, part_ms in causes.items():
            found.by_cause[cause] = found.by_cause.get(cause, 0) + part_ms
        if late_ms >= self._threshold_ms and self._may_report(started_ms):
            self._report(
                LateDelivery(
                    message.msg_id,
                    message.topic,
                    listener.id,
                    listener.group,
                    due_ms,
                    message.store_timestamp,
                    started_ms,
                    handled_ms,
                    causes,
                )
            )

    def _split(self, topic: str, due_ms: int, released_ms: int, started_ms: int, busy: BusyTimes) -> dict[Cause, int]:
        if self._causes is None:
            parts = {Cause.RELEASE: released_ms - due_ms}
        else:
            stopped_ms, backlog_ms, limited_ms = self._causes.split(topic, due_ms, released_ms)
            parts = {Cause.BROKER_STOPPED: stopped_ms, Cause.BACKLOG: backlog_ms, Cause.RATE_LIMIT: limited_ms}
        slow_ms = busy.overlap_ms(released_ms, started_ms) if started_ms > released_ms else 0
        parts |= {Cause.SLOW_HANDLER: slow_ms, Cause.CONSUMER_LAG: started_ms - released_ms - slow_ms}
        return {cause: part_ms for cause, part_ms in parts.items() if part_ms > 0}

    def _may_report(self, now_ms: int) -> bool:
        """Return True for the first deliveries of a second: after an outage all are late, and a report costs time."""
        second = now_ms // 1_000
        self._reported = (second, self._reported[1] + 1 if second == self._reported[0] else 1)
        return self._reported[1] <= _MAX_REPORTS

    def _report(self, delivery: LateDelivery) -> None:
        self._recent.append(delivery)
        main = delivery.main_cause
        self._log.warning(
            "delivery.late",
            listener=delivery.listener,
            group=delivery.group,
            topic=delivery.topic,
            msg_id=delivery.msg_id,
            due=delivery.due_ms,
            late_ms=delivery.late_ms,
            handling_ms=delivery.handled_ms - delivery.started_ms,
            cause=None if main is None else main.value,
            **{f"{cause.value}_ms": part_ms for cause, part_ms in delivery.causes.items()},
        )

    def samples(self) -> Iterator[MetricSample]:
        """Yield ``lateness.delivery_ms`` and ``lateness.caused_ms`` of each listener."""
        for (listener, group), each in list(self._listeners.items()):
            labels = {"listener": listener, "group": group}
            yield MetricSample("lateness.delivery_ms", MetricKind.HISTOGRAM, each.histogram.snapshot(), labels)
            for cause, total_ms in list(each.by_cause.items()):
                yield MetricSample("lateness.caused_ms", MetricKind.COUNTER, total_ms, labels | {"cause": cause.value})

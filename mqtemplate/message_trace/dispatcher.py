"""Sender of trace records to the trace topic, in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, Property
from mqtemplate.message_trace.records import TraceRecord
from mqtemplate.services import Service, ServiceThread, wall_time
from mqtemplate.topics import TRACE_TOPIC

CLOUD_TOPIC_PREFIX = "rmq_sys_TRACE_DATA_"
"""Start of the trace topics of a cloud provider; the region follows. Source: ``client: TraceConstants``."""

_log = get_logger("mqtemplate.trace")

_LIMIT = 2_048  # records that wait; source: AsyncTraceDispatcher.queueSize
_BATCH = 100  # records of one trace message
_MAX_CHARACTERS = 118_000  # source: AsyncTraceDispatcher, 128,000 without the header
_INTERVAL_MS = 500
_TIMEOUT_MS = 5_000


class TraceDispatcher:
    """Sender of the trace records of one broker. A `Service`; on a system clock it has a thread of its own, which
    starts with the first record.

    A record is sent within half a second, together with others. While the broker does not take them, 2,048 records
    wait, and further ones are dropped: a trace never holds up a message.

    Args:
        topic: The trace topic; empty for RocketMQ's own.
        is_cloud: True: the trace topics of a cloud provider, one for each region.
    """

    name = "message trace"

    def __init__(self, broker: Broker, topic: str = "", *, is_cloud: bool = False) -> None:
        self.is_cloud = is_cloud
        self.topic = topic or TRACE_TOPIC
        self._broker = broker
        self._clock = broker.clock
        self._waiting: deque[TraceRecord] = deque()
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._is_used = False
        self._dropped = 0
        self._due_ms: int | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread: ServiceThread | None = None
        if isinstance(self._clock, VirtualClock):
            self._clock.services.append(self)

    def is_traced(self, topic: str) -> bool:
        """Return True unless the messages of a topic are traces themselves."""
        return not topic.startswith((self.topic, CLOUD_TOPIC_PREFIX))

    def append(self, record: TraceRecord) -> None:
        """Add a record; drop it if too many wait."""
        if len(self._waiting) >= _LIMIT:
            self._dropped += 1
            return
        self._waiting.append(record)
        if self._due_ms is None:
            self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
            if not self._is_used:
                self._start()
            self._wake()

    def _start(self) -> None:
        """Start with the first record: an application that is only checked has no thread, and its broker is closed."""
        with self._starting:
            if self._is_used:
                return
            self._is_used = True
            self._broker.expect_topics({self.topic})
            if not self._clock.is_virtual:
                self._thread = ServiceThread("mqtemplate-trace", [self], self._clock, _report)
                self._thread.start()

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        """Send the records that wait, if it is time. Return the time of the next sending; None without records."""
        if self._due_ms is not None and self._due_ms <= self._clock.steady_ms():
            self._due_ms = None
            self.flush()
        return wall_time(self._clock, self._due_ms)

    def flush(self) -> None:
        """Send all records that wait."""
        with self._sending:
            while records := [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]:
                for message in trace_messages(records, self._topic_of):
                    self._send(message)
            dropped, self._dropped = self._dropped, 0
        if dropped:
            _log.warning("trace.dropped", records=dropped, reason=f"{_LIMIT} records waited for the broker")

    def _topic_of(self, record: TraceRecord) -> str:
        return f"{CLOUD_TOPIC_PREFIX}{record.region}" if self.is_cloud else self.topic

    def _send(self, message: Message) -> None:
        try:
            self._broker.send(message, None, _TIMEOUT_MS)
        except MQTemplateError as exc:  # a trace is not worth a failure of the application
            _log.warning("trace.failed", topic=message.topic, reason=str(exc))

    def close(self) -> None:
        """Send the remaining records, and end."""
        with self._starting:
            self._is_used = True  # a late record starts no thread
        if self._thread is not None:
            self._thread.stop()
        elif isinstance(self._clock, VirtualClock) and self in self._clock.services:
            self._clock.services.remove(self)
        self.flush()


def trace_messages(records: Iterable[TraceRecord], topic_of: Callable[[TraceRecord], str]) -> list[Message]:
    """Return the messages for some records: several records in one body, each found by its keys."""
    messages: list[Message] = []
    for topic, group in groupby(sorted(records, key=topic_of), key=topic_of):
        parts: list[TraceRecord] = []
        for record in group:
            if parts and sum(len(part.text) for part in parts) + len(record.text) > _MAX_CHARACTERS:
                messages.append(_message(topic, parts))
                parts = []
            parts.append(record)
        messages.append(_message(topic, parts))
    return messages


def _message(topic: str, records: list[TraceRecord]) -> Message:
    keys = dict.fromkeys(key for record in records for key in record.keys)
    return Message(topic, "".join(record.text for record in records).encode(), {Property.KEYS: " ".join(keys)})


def _report(service: Service, error: Exception) -> None:
    _log.error("trace.failed", exc_info=error)

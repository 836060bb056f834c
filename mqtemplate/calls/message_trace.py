"""RocketMQ's message trace: who sent and who consumed a message, as messages of a trace topic.

`MessageTrace` is around sends and calls of handlers and writes their records; `TraceDispatcher` sends these in the
background. A record is one line, as RocketMQ's tools read it::

    Pub       time region group topic msg_id tags keys store_host body_bytes cost_ms type offset_msg_id success
    SubBefore time region group request_id msg_id retries keys
    SubAfter  request_id msg_id cost_ms success keys code [time group]
    EndTransaction time region group topic msg_id tags keys store_host type transaction_id state from_check

The byte 1 is between fields, the byte 2 after each record. A missing text is ``null``, as Java writes it. Source:
RocketMQ ``client: TraceDataEncoder``, ``TraceConstants``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import HandlerCall, HandlerWrapper, ListenerInfo, Observation
from mqtemplate.calls.send import HALF, ONE_WAY, REQUEST, SendCall, SendNext, SendWrapper, send_and_note
from mqtemplate.calls.steps import Steps, chained, wrapper_of
from mqtemplate.clock import Clock
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import (
    DELAY_PROPERTIES,
    Message,
    MessageExt,
    Property,
    create_unique_id,
    parse_offset_msg_id,
    split_keys,
)
from mqtemplate.results import HalfMessage, SendResult, SendStatus, TransactionState
from mqtemplate.services import Service, ServiceRunner, wall_time
from mqtemplate.topics import TRACE_TOPIC

CLOUD_TOPIC_PREFIX = "rmq_sys_TRACE_DATA_"
"""Start of the trace topics of a cloud provider; the region follows. Source: ``client: TraceConstants``."""

DEFAULT_REGION = "DefaultRegion"
"""Region of a broker that reports none. Source: ``common: MixAll.DEFAULT_TRACE_REGION_ID``."""

_log = get_logger("mqtemplate.trace")

_STATES = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",  # as RocketMQ spells it
}

_LIMIT = 2_048  # records that wait; source: AsyncTraceDispatcher.queueSize
_BATCH = 100  # records of one trace message
_MAX_CHARACTERS = 118_000  # source: AsyncTraceDispatcher, 128,000 without the header
_INTERVAL_MS = 500
_TIMEOUT_MS = 5_000


class TraceMessageType(IntEnum):
    """Kind of a sent message. Source: ``common: MessageType``, by position."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """Result of a handler. Source: ``client: ConsumeReturnType``, by position."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


class TraceRecord(NamedTuple):
    """One record, and the keys by which the trace topic finds it.

    Attributes:
        region: Region of the broker; the trace topics of a cloud provider contain it.
    """

    text: str
    keys: tuple[str, ...]
    region: str


def trace_record(region: str, msg_id: str, keys: str | None, *fields: object) -> TraceRecord:
    """Return the record with these fields."""
    return TraceRecord("\x01".join(map(_text, fields)) + "\x02", (msg_id, *split_keys(keys)), region)


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
        self._runner = ServiceRunner(self, self._clock, "mqtemplate-trace", _report)
        if self._clock.is_virtual:
            self._runner.start()

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
            self._runner.start()

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
            self._broker.sends.send(message, None, _TIMEOUT_MS)
        except MQTemplateError as exc:  # a trace is not worth a failure of the application
            _log.warning("trace.failed", topic=message.topic, reason=str(exc))

    def close(self) -> None:
        """Send the remaining records, and end."""
        with self._starting:
            self._is_used = True  # a late record starts no thread
        self._runner.stop()
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


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.error("trace.failed", repeated=repeated, exc_info=error)


class TraceOf(Protocol):
    """Function that returns the sender of the trace records of a broker."""

    def __call__(self, broker: Broker, topic: str = "", *, is_cloud: bool = False) -> TraceDispatcher: ...


class Traces:
    """Senders of trace records, created when a template or a listener needs one.

    Args:
        on_created: Gets name and ``close`` of each new one. It has to be closed before its broker.
    """

    def __init__(self, on_created: Callable[[str, Callable[[], object]], object]) -> None:
        self._on_created = on_created
        self._dispatchers: dict[tuple[int, str, bool], TraceDispatcher] = {}

    def dispatcher(self, broker: Broker, topic: str = "", *, is_cloud: bool = False) -> TraceDispatcher:
        """Return the sender for a broker and a trace topic."""
        key = (id(broker), topic, is_cloud)
        if key not in self._dispatchers:
            self._dispatchers[key] = dispatcher = TraceDispatcher(broker, topic, is_cloud=is_cloud)
            self._on_created(f"message trace {dispatcher.topic}", dispatcher.close)
        return self._dispatchers[key]


class MessageTrace(Observation):
    """Observation that writes trace records of one template or one listener.

    One-way sends have no result and are not traced, as in RocketMQ; nor are requests, whose result is the reply.

    Source: RocketMQ ``client: SendMessageTraceHookImpl``, ``ConsumeMessageTraceHookImpl``.

    Args:
        group: Producer or consumer group in the records.
        outer: Observation around this one.
    """

    def __init__(self, dispatcher: TraceDispatcher, group: str, clock: Clock, outer: Observation) -> None:
        self._dispatcher = dispatcher
        self._group = group
        self._now_ms = clock.now_ms
        self._outer = outer

    def sends(self, clock: Clock) -> SendWrapper:
        """Return a wrapper that writes a record for each message that was sent."""

        def wrap(next_: SendNext) -> SendNext:
            def traced(call: SendCall) -> Any:
                if call.kind in (ONE_WAY, REQUEST):
                    return next_(call)
                started_ms = self._now_ms()
                return send_and_note(next_, call, lambda result, _: self._sent(call, result, started_ms))

            return traced

        return chained((self._outer.sends(clock), wrap))

    def _sent(self, call: SendCall, result: Any, started_ms: int) -> None:
        if result is None:  # the send has failed
            return
        messages, is_half = call.messages, call.kind is HALF
        sent: SendResult = result.send_result if is_half else result
        if not sent.trace_on or not self._dispatcher.is_traced(messages[0].topic):
            return
        cost_ms, region = (self._now_ms() - started_ms) // len(messages), sent.region_id or DEFAULT_REGION
        ids = zip(messages, sent.msg_id.split(","), sent.offset_msg_id.split(","), strict=False)
        for message, msg_id, offset_msg_id in ids:
            kind = TraceMessageType.HALF if is_half else _kind_of(message)
            self._write(
                region, msg_id, message.keys,
                "Pub", started_ms, region, self._group, message.topic, msg_id, message.tags, message.keys,
                _host_of(offset_msg_id), len(message.body), cost_ms, kind, offset_msg_id,
                sent.send_status is SendStatus.SEND_OK,
            )  # fmt: skip

    def transaction_ended(self, half: HalfMessage, state: TransactionState) -> None:
        """Write the record of the end of a transaction."""
        self._outer.transaction_ended(half, state)
        message, result = half.message, half.send_result
        if not result.trace_on or not self._dispatcher.is_traced(message.topic):
            return
        region, kind = result.region_id or DEFAULT_REGION, TraceMessageType.COMMIT
        self._write(
            region, result.msg_id, message.keys,
            "EndTransaction", self._now_ms(), region, self._group, message.topic, result.msg_id, message.tags,
            message.keys, _host_of(result.offset_msg_id), kind, result.transaction_id, _STATES[state], False,
        )  # fmt: skip

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        return self._outer.reply_properties(properties)

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return a wrapper that writes a record of each message before and after the call of its handler."""
        return chained((wrapper_of([self._around_handler]), self._outer.handling(listener)))

    def _around_handler(self, call: HandlerCall) -> Steps:
        request_id, started_ms, messages = create_unique_id(), self._now_ms(), call.messages
        for message in filter(self._is_consumption_traced, messages):
            region, msg_id, keys = _region(message), message.msg_id, message.keys
            fields = "SubBefore", started_ms, region, self._group, request_id, msg_id, message.reconsume_times, keys
            self._write(region, msg_id, keys, *fields)
        try:
            failures = yield
        except BaseException:  # the task of the handler was cancelled
            self._consumed(messages, request_id, started_ms, dict.fromkeys(map(id, messages), ConsumeCode.EXCEPTION))
            raise
        codes = {
            id(message): ConsumeCode.FAILED if failure.error is None else ConsumeCode.EXCEPTION
            for failure in failures
            for message in failure.messages
        }
        self._consumed(messages, request_id, started_ms, codes)

    def _consumed(
        self, messages: Sequence[MessageExt], request_id: str, started_ms: int, codes: dict[int, ConsumeCode]
    ) -> None:
        now_ms = self._now_ms()
        for message in filter(self._is_consumption_traced, messages):
            code, cost_ms = codes.get(id(message), ConsumeCode.SUCCESS), (now_ms - started_ms) // len(messages)
            success = code is ConsumeCode.SUCCESS
            fields = "SubAfter", request_id, message.msg_id, cost_ms, success, message.keys, code
            # The trace topics of a cloud provider have neither time nor group here.
            own = () if self._dispatcher.is_cloud else (now_ms, self._group)
            self._write(_region(message), message.msg_id, message.keys, *fields, *own)

    def _write(self, region: str, msg_id: str, keys: str | None, *fields: object) -> None:
        self._dispatcher.append(trace_record(region, msg_id, keys, *fields))

    def _is_consumption_traced(self, message: MessageExt) -> bool:
        return message.properties.get(Property.TRACE_ON) != "false" and self._dispatcher.is_traced(message.topic)


def _host_of(offset_msg_id: str) -> str:
    return str(parse_offset_msg_id(offset_msg_id)[0])


def _region(message: MessageExt) -> str:
    return message.properties.get(Property.MSG_REGION, DEFAULT_REGION)


def _kind_of(message: Message) -> TraceMessageType:
    is_delayed = any(name in message.properties for name in DELAY_PROPERTIES)
    if is_delayed:
        return TraceMessageType.DELAY
    return TraceMessageType.ORDER if Property.SHARDING_KEY in message.properties else TraceMessageType.NORMAL

"""RocketMQ's message trace: who sent and who consumed a message, as messages of a trace topic.

`MessageTrace` is around sends and calls of handlers and writes their records; `TraceDispatcher` sends these in the
background.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import HandlerCall, HandlerWrapper, ListenerInfo, Observation
from mqtemplate.calls.send import SendCall, SendKind, SendNext, SendWrapper, send_and_note
from mqtemplate.calls.steps import Steps, chained, wrapper_of
from mqtemplate.calls.trace_records import (
    ConsumeCode,
    TraceMessageType,
    TraceRecord,
    after_record,
    before_record,
    sent_record,
    transaction_record,
)
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import (
    DELAY_PROPERTIES,
    Message,
    MessageExt,
    Property,
    create_unique_id,
    parse_offset_msg_id,
)
from mqtemplate.results import HalfMessage, SendResult, SendStatus, TransactionState
from mqtemplate.services import Service, ServiceThread, wall_time
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
                if call.kind in (SendKind.ONE_WAY, SendKind.REQUEST):
                    return next_(call)
                started_ms = self._now_ms()
                return send_and_note(next_, call, lambda result, _: self._sent(call, result, started_ms))

            return traced

        return chained((self._outer.sends(clock), wrap))

    def _sent(self, call: SendCall, result: Any, started_ms: int) -> None:
        if result is None:
            return
        if call.kind is SendKind.HALF:
            self._note(call.messages, result.send_result, started_ms, TraceMessageType.HALF)
        else:
            self._note(call.messages, result, started_ms)

    def _note(
        self,
        messages: Sequence[Message],
        result: SendResult,
        started_ms: int,
        kind: TraceMessageType | None = None,
    ) -> None:
        if not result.trace_on or not self._dispatcher.is_traced(messages[0].topic):
            return
        cost_ms = (self._now_ms() - started_ms) // len(messages)
        ids = zip(messages, result.msg_id.split(","), result.offset_msg_id.split(","), strict=False)
        for message, msg_id, offset_msg_id in ids:
            record = sent_record(
                time_ms=started_ms,
                region=result.region_id or DEFAULT_REGION,
                group=self._group,
                topic=message.topic,
                msg_id=msg_id,
                tags=message.tags,
                keys=message.keys,
                store_host=str(parse_offset_msg_id(offset_msg_id)[0]),
                body_bytes=len(message.body),
                cost_ms=cost_ms,
                kind=_kind_of(message) if kind is None else kind,
                offset_msg_id=offset_msg_id,
                success=result.send_status is SendStatus.SEND_OK,
            )
            self._dispatcher.append(record)

    def transaction_ended(self, half: HalfMessage, state: TransactionState) -> None:
        """Write the record of the end of a transaction."""
        self._outer.transaction_ended(half, state)
        message, result = half.message, half.send_result
        if not result.trace_on or not self._dispatcher.is_traced(message.topic):
            return
        record = transaction_record(
            time_ms=self._now_ms(),
            region=result.region_id or DEFAULT_REGION,
            group=self._group,
            topic=message.topic,
            msg_id=result.msg_id,
            tags=message.tags,
            keys=message.keys,
            store_host=str(parse_offset_msg_id(result.offset_msg_id)[0]),
            transaction_id=result.transaction_id,
            state=_STATES[state],
        )
        self._dispatcher.append(record)

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        return self._outer.reply_properties(properties)

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return a wrapper that writes a record of each message before and after the call of its handler."""
        return chained((wrapper_of([self._around_handler]), self._outer.handling(listener)))

    def _around_handler(self, call: HandlerCall) -> Steps:
        request_id, started_ms, messages = create_unique_id(), self._now_ms(), call.messages
        for message in filter(self._is_consumption_traced, messages):
            record = before_record(
                time_ms=started_ms,
                region=_region(message),
                group=self._group,
                request_id=request_id,
                msg_id=message.msg_id,
                retries=message.reconsume_times,
                keys=message.keys,
            )
            self._dispatcher.append(record)
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
            record = after_record(
                time_ms=now_ms,
                region=_region(message),
                group=self._group,
                request_id=request_id,
                msg_id=message.msg_id,
                keys=message.keys,
                cost_ms=(now_ms - started_ms) // len(messages),
                code=codes.get(id(message), ConsumeCode.SUCCESS),
                is_cloud=self._dispatcher.is_cloud,
            )
            self._dispatcher.append(record)

    def _is_consumption_traced(self, message: MessageExt) -> bool:
        return message.properties.get(Property.TRACE_ON) != "false" and self._dispatcher.is_traced(message.topic)


def _region(message: MessageExt) -> str:
    return message.properties.get(Property.MSG_REGION, DEFAULT_REGION)


def _kind_of(message: Message) -> TraceMessageType:
    is_delayed = any(name in message.properties for name in DELAY_PROPERTIES)
    if is_delayed:
        return TraceMessageType.DELAY
    return TraceMessageType.ORDER if Property.SHARDING_KEY in message.properties else TraceMessageType.NORMAL

"""Spans of sends and of calls of handlers, and W3C trace context in message properties.

It uses the API of OpenTelemetry only: the program installs and configures an SDK. The names are those of its semantic
conventions for messaging.

- A send is a ``PRODUCER`` span ``send <topic>``. Its context becomes the properties ``traceparent`` and ``tracestate``,
  which stay with the message: through the delay, each retry, and the dead-letter topic.
- The call of a handler is a ``CONSUMER`` span ``process <topic>`` with a link to the send. With one message the send is
  the parent, too; a batch has a link for each message.
- Outside of a trace a random share of the sends and calls starts one, and at most some in a second. This is decided
  before OpenTelemetry is called, since even a span that is not recorded costs several microseconds. Inside a trace its
  own decision holds.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, StatusCode, Tracer

from mqtemplate.calls.handling import FailedMessages, HandlerCall, HandlerWrapper, ListenerInfo
from mqtemplate.calls.send import SendCall, SendNext, SendWrapper, send_and_note
from mqtemplate.calls.steps import Steps, wrapper_of
from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import Message, MessageExt, Property, split_keys
from mqtemplate.numbers import parse_number
from mqtemplate.results import SendResult
from mqtemplate.user_code import error_text, is_interrupt, safe_text, type_name

_log = LimitedLog(get_logger("mqtemplate.observability"), lambda: time.monotonic_ns() // 1_000_000)

_F = TypeVar("_F")

TRACEPARENT = "traceparent"
"""Message property with the W3C trace context of the send."""

_SYSTEM = "messaging.system"
_OPERATION = "messaging.operation.name"
_OPERATION_TYPE = "messaging.operation.type"
_DESTINATION = "messaging.destination.name"
_PARTITION = "messaging.destination.partition.id"
_MESSAGE_ID = "messaging.message.id"
_CONVERSATION_ID = "messaging.message.conversation_id"
_BODY_SIZE = "messaging.message.body.size"
_BATCH_COUNT = "messaging.batch.message_count"
_GROUP = "messaging.consumer.group.name"
_TAG = "messaging.rocketmq.message.tag"
_KEYS = "messaging.rocketmq.message.keys"
_DELAY_LEVEL = "messaging.rocketmq.message.delay_time_level"
_DELIVER_TIME = "messaging.rocketmq.message.delivery_timestamp"
_ERROR_TYPE = "error.type"
_LISTENER = "mqtemplate.listener"
_RECONSUME_TIMES = "mqtemplate.reconsume_times"
_LATE_MS = "mqtemplate.late_ms"

_MAX_TRACES_AT_ONCE = 5


class Tracing:
    """Creates spans around sends and handlers.

    Args:
        probability: Share of the sends and calls outside of a trace that start one.
        max_traces_per_second: Most traces that they start in a second, on average; at most five at once.
        tracer: Creates the spans; by default that of the program's tracer provider.
        chance: Returns a random number from 0 to below 1.
        now: Returns a time in seconds.

    Attributes:
        probability, chance: The arguments; most sends need nothing else.
    """

    def __init__(
        self,
        probability: float,
        tracer: Tracer | None = None,
        *,
        max_traces_per_second: int = 20,
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.probability = probability
        self._max_traces = max_traces_per_second
        self._now = now
        # Spread over the second: else all traces would be of its first milliseconds, and cost their time there.
        self._most_at_once = min(max_traces_per_second, _MAX_TRACES_AT_ONCE)
        self._left = (float(self._most_at_once), now())  # traces that may start at once, and when that was so
        self._tracer = trace.get_tracer("mqtemplate") if tracer is None else tracer
        self.chance = chance

    def sends(self) -> SendWrapper:
        """Return the wrapper that puts spans around sends."""
        chance, probability, context = self.chance, self.probability, otel_context.get_current
        current = trace.get_current_span

        def wrap(next_: SendNext) -> SendNext:
            def traced(call: SendCall) -> Any:
                # Most sends are not sampled: these cost a random number and a look for a trace.
                is_outside = not context() or current() is INVALID_SPAN
                if is_outside and (chance() >= probability or not self.is_within_limit()):
                    return next_(call)
                span, messages = _safely(lambda: self._start_send(call.messages)) or (None, call.messages)
                call = call.replace(messages=messages)
                return next_(call) if span is None else send_and_note(next_, call, partial(_end_send, span))

            return traced

        return wrap

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return the wrapper that puts spans around the calls of a listener's handler.

        It must run in a context of its own: the span stays the current one there.
        """
        chance, probability, is_batch = self.chance, self.probability, listener.is_batch

        def is_left_out(call: HandlerCall) -> bool:
            # Most calls are not sampled: these cost a random number and a look for a trace of the sender.
            if not is_batch:
                return TRACEPARENT not in call.messages[0].properties and chance() >= probability
            sampled = any(_is_sampled(message.properties.get(TRACEPARENT, "")) for message in call.messages)
            return not sampled and not self.starts_trace()

        def wrap(next_: Any) -> Any:
            spanned = wrapper_of([self._around_batch if is_batch else self._around_message])(next_)

            def traced(call: HandlerCall) -> Any:
                return next_(call) if is_left_out(call) else spanned(call)

            async def traced_async(call: HandlerCall) -> Any:
                return await (next_(call) if is_left_out(call) else spanned(call))

            return traced_async if inspect.iscoroutinefunction(next_) else traced

        return wrap

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """Return the properties of a reply with the context of the handler.

        The handler's span is the parent of what the requester does with the reply.
        """
        carrier = dict(properties)
        if trace.get_current_span().get_span_context().is_valid:
            propagate.inject(carrier)
        return carrier

    def _around_message(self, call: HandlerCall) -> Steps:
        listener, message = call.listener, call.messages[0]
        with _CallSpan(lambda: self._start_process(listener, message)) as span:
            span.change(lambda each: _describe_delivery(each, message, listener.clock))
            span.note_failures((yield))

    def _around_batch(self, call: HandlerCall) -> Steps:
        with _CallSpan(lambda: self._process_span(call.listener, call.messages, otel_context.get_current())) as span:
            span.change(lambda each: each.set_attribute(_BATCH_COUNT, len(call.messages)))
            span.note_failures((yield))

    def _start_process(self, listener: ListenerInfo, message: MessageExt) -> Any:
        """Return the span of a call, as a context manager; None if the call is not sampled.

        A call without the trace of a sender was chosen by chance before.
        """
        if TRACEPARENT not in message.properties:
            if not self.is_within_limit():
                return None
            return self._process_span(listener, [message], otel_context.get_current())
        parent = propagate.extract(message.properties)
        if not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            otel_context.attach(parent)  # what the handler does is not sampled either
            return None
        return self._process_span(listener, [message], parent)

    def _process_span(self, listener: ListenerInfo, messages: Sequence[MessageExt], parent: Any) -> Any:
        topic = messages[0].topic
        return self._tracer.start_as_current_span(
            f"process {topic}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=[link for message in messages if (link := _link(message)) is not None],
            attributes={
                _SYSTEM: "rocketmq",
                _OPERATION: "process",
                _OPERATION_TYPE: "process",
                _DESTINATION: topic,
                _GROUP: listener.group,
                _LISTENER: listener.id,
            },
        )

    def _start_send(self, messages: Sequence[Message]) -> tuple[Span | None, Sequence[Message]]:
        """Start the span of a send. Return it, None if it is not sampled, and the messages to send in its place."""
        current = trace.get_current_span().get_span_context()
        if current.is_valid and not current.trace_flags.sampled:
            return None, [_with_context(message, otel_context.get_current()) for message in messages]
        topic = messages[0].topic
        span = self._tracer.start_span(
            f"send {topic}",
            kind=SpanKind.PRODUCER,
            links=[link for message in messages if (link := _link(message)) is not None],
            attributes=_attributes_of_send(messages),
        )
        inside = trace.set_span_in_context(span)
        return span, [_with_context(message, inside) for message in messages]

    def starts_trace(self) -> bool:
        """Return True if a send or a call outside of a trace starts one."""
        return self.chance() < self.probability and self.is_within_limit()

    def is_within_limit(self) -> bool:
        """Return True if one more trace may start now; count it."""
        left, then = self._left
        now = self._now()
        left = min(self._most_at_once, left + (now - then) * self._max_traces)
        may_start = left >= 1
        self._left = (left - may_start, now)  # threads may count too few: the limit need not be exact
        return may_start


class _CallSpan:
    """The span of a call of a handler, as the current one.

    Span processors, exporters and propagators are the program's. What they raise is logged, and changes neither the
    call nor its outcome.

    Args:
        start: Returns the span as a context manager; None if the call is not sampled.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._manager: Any = None
        self._span: Span | None = None

    def __enter__(self) -> _CallSpan:
        self._manager = _safely(self._start)
        self._span = None if self._manager is None else _safely(self._manager.__enter__)
        return self

    def change(self, change: Callable[[Span], object]) -> None:
        """Call a function with the span, if there is one."""
        if (span := self._span) is not None:
            _safely(lambda: change(span))

    def note_failures(self, failures: Sequence[FailedMessages]) -> None:
        """Note what the handler reported."""
        for failure in failures:
            self.change(partial(_note_failure, failure=failure))

    def __exit__(self, *error: Any) -> None:
        if self._span is not None and _safely(lambda: self._manager.__exit__(*error) or True) is None:
            self._span = None


def _safely(call: Callable[[], _F]) -> _F | None:
    """Return what a function of OpenTelemetry returns; None if something of the program raises in it."""
    try:
        return call()
    except BaseException as error:
        if is_interrupt(error):
            raise
        _log.warning("tracing.failed", reason=error_text(error))
        return None


def _end_send(span: Span, result: Any, error: BaseException | None) -> None:
    """End the span of a send with its result, or with its error."""
    if error is not None:
        _safely(lambda: _fail(span, error))
    else:
        _safely(lambda: _describe_result(span, getattr(result, "send_result", result)))
    _safely(span.end)


def _with_context(message: Message, context: Any) -> Message:
    """Return a copy of *message* that carries the trace context. One that carries its own is returned as it is."""
    if TRACEPARENT in message.properties:
        return message
    properties = dict(message.properties)
    propagate.inject(properties, context)
    return Message(message.topic, message.body, properties, message.flag)


def _is_sampled(traceparent: str) -> bool:
    """Return True if a W3C ``traceparent`` has the flag ``sampled``: version-trace-span-flags, all hex digits."""
    flags = traceparent.rpartition("-")[2]
    return len(flags) == 2 and flags[1] in "13579bdf"


def _link(message: Message) -> Link | None:
    """Return a link to the send of a message; None if it carries no valid context."""
    if TRACEPARENT not in message.properties:
        return None
    found = trace.get_current_span(propagate.extract(message.properties, otel_context.Context())).get_span_context()
    if not found.is_valid:
        return None
    return Link(found, {_MESSAGE_ID: message.msg_id} if isinstance(message, MessageExt) else None)


def _attributes_of_send(messages: Sequence[Message]) -> dict[str, Any]:
    first = messages[0]
    attributes: dict[str, Any] = {
        _SYSTEM: "rocketmq",
        _OPERATION: "send",
        _OPERATION_TYPE: "send",
        _DESTINATION: first.topic,
        _BODY_SIZE: sum(len(message.body) for message in messages),
    }
    if len(messages) > 1:
        attributes[_BATCH_COUNT] = len(messages)
    return attributes | _delay_attributes(first) | _label_attributes(first)


def _delay_attributes(message: Message) -> dict[str, Any]:
    if message.delay_level:
        return {_DELAY_LEVEL: message.delay_level}
    time_ms = parse_number(message.properties.get(Property.TIMER_DELIVER_MS))
    return {} if time_ms is None else {_DELIVER_TIME: time_ms}


def _label_attributes(message: Message) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if message.tags:
        attributes[_TAG] = message.tags
    if message.keys:
        attributes[_KEYS] = split_keys(message.keys)
    if correlation := message.properties.get(Property.CORRELATION_ID):
        attributes[_CONVERSATION_ID] = correlation
    return attributes


def _describe_delivery(span: Span, message: MessageExt, clock: Clock) -> None:
    span.set_attributes(
        {
            _MESSAGE_ID: message.msg_id,
            _PARTITION: str(message.queue_id),
            _BODY_SIZE: len(message.body),
            _RECONSUME_TIMES: message.reconsume_times,
            **_delay_attributes(message),
            **_label_attributes(message),
        }
    )
    due_ms = message.deliver_timestamp
    if due_ms is not None:
        span.set_attribute(_LATE_MS, max(0, clock.now_ms() - due_ms))


def _describe_result(span: Span, result: Any) -> None:
    if isinstance(result, SendResult):
        span.set_attribute(_MESSAGE_ID, result.msg_id)
        span.set_attribute(_PARTITION, str(result.message_queue.queue_id))


def _note_failure(span: Span, failure: FailedMessages) -> None:
    if failure.error is not None:
        _fail(span, failure.error)
    else:
        span.set_attribute(_ERROR_TYPE, "RECONSUME_LATER")
        span.set_status(StatusCode.ERROR, "the handler requested redelivery")


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute(_ERROR_TYPE, type_name(error, "__qualname__"))
    span.set_status(StatusCode.ERROR, safe_text(error))
    span.record_exception(error)  # last: it formats the exception by itself

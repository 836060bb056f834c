"""Spans of sends and handlers, and the trace context in message properties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mqtemplate import DeadLetter, MQApplication, RetryLater, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.calls.handling import Observation
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, MessageExt
from mqtemplate.observability import Observability, ObservabilitySettings, Tracing
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness, messages_in
from tests.listener.hostile import KINDS

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"


class Traced:
    """Exported spans, and applications whose spans they are."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.clock = VirtualClock()

    def observability(self, broker: EmbeddedBroker, probability: float = 1) -> Observability:
        return Observability(broker, ObservabilitySettings(), tracing=Tracing(probability, self.tracer))

    def start(self, broker: EmbeddedBroker, *components: object, probability: float = 1) -> MQApplication:
        overrides = {Observation: self.observability(broker, probability)}
        return MQApplication(*components, broker, overrides=overrides, clock=self.clock, settings={
            "rocketmq.producer.group": "shop"
        })  # fmt: skip

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def span(self, name: str, index: int = 0) -> ReadableSpan:
        return [span for span in self.spans if span.name == name][index]


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
def broker(traced: Traced) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=traced.clock) as broker:
        yield broker


def context_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


@pytest.mark.feature("14.3")
def test_the_context_travels_from_the_send_through_the_delay_to_the_handler(
    traced: Traced, broker: EmbeddedBroker
) -> None:
    with traced.start(broker, bill) as app:
        harness = Harness(app)
        with traced.tracer.start_as_current_span("checkout"):
            result = app.template.sync_send("orders:paid", "x", delay="1h", keys="4466")
        harness.advance("2h")

    checkout, send, process = traced.span("checkout"), traced.span("send orders"), traced.span("process orders")
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert send.parent is not None
    assert (send.parent.trace_id, send.parent.span_id) == context_of(checkout)
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == context_of(send)
    assert linked(process) == [context_of(send)]
    attributes = dict(process.attributes or {})
    assert {
        "messaging.system": "rocketmq",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": result.msg_id,
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("4466",),
    }.items() <= attributes.items()
    assert attributes["mqtemplate.late_ms"] == 0
    assert dict(send.attributes or {})["messaging.message.id"] == result.msg_id


@pytest.mark.feature("14.3")
def test_each_retry_and_the_dead_letter_carry_the_context_of_the_send(traced: Traced, broker: EmbeddedBroker) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def fails(message: MessageExt) -> None:
        raise DeadLetter("enough") if message.reconsume_times == 2 else ValueError("no")

    with traced.start(broker, fails) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", "x")
        harness.advance("5m")
        [dead] = harness.assert_dead_lettered("billing", times=1)

    send = traced.span("send orders")
    processes = [span for span in traced.spans if span.name == "process orders"]
    assert [linked(span) for span in processes] == [[context_of(send)]] * 3
    assert [span.status.status_code for span in processes] == [StatusCode.ERROR] * 3
    assert [(span.attributes or {})["mqtemplate.reconsume_times"] for span in processes] == [0, 1, 2]
    assert [(span.attributes or {})["error.type"] for span in processes] == ["ValueError", "ValueError", "DeadLetter"]
    assert processes[0].events[0].name == "exception"
    assert dead.properties["traceparent"].split("-")[1] == f"{context_of(send)[0]:032x}"


@pytest.mark.feature("14.3")
def test_a_reply_carries_the_context_of_the_handler(traced: Traced, broker: EmbeddedBroker) -> None:
    @message_listener(topic="prices", consumer_group="pricing")
    def price(article: str) -> str:
        return "10"

    with traced.start(broker, price) as app:
        Harness(app)
        reply = app.template.send_and_receive("prices", "A-1", MessageExt)

    process = traced.span("process prices")
    assert reply.properties["traceparent"].split("-")[1:3] == [
        f"{context_of(process)[0]:032x}",
        f"{context_of(process)[1]:016x}",
    ]
    assert "messaging.message.conversation_id" in (process.attributes or {})


@pytest.mark.feature("14.3")
def test_a_traceparent_of_another_client_is_continued(traced: Traced, broker: EmbeddedBroker) -> None:
    """As a Java client with OpenTelemetry's agent sets it."""
    seen: list[str | None] = []

    @message_listener(topic="orders", consumer_group="billing")
    def note(message: MessageExt) -> None:
        seen.append(message.user_properties.get("traceparent"))

    with traced.start(broker, note, probability=0) as app:
        given = f"00-{TRACE_ID}-{SPAN_ID}-01"
        broker.sends.send(Message("orders", b"x", {"traceparent": given, "tracestate": "vendor=1"}))
        Harness(app).advance("1s")

    process = traced.span("process orders")
    assert linked(process) == [(int(TRACE_ID, 16), int(SPAN_ID, 16))]
    assert process.context is not None
    assert process.context.trace_state.get("vendor") == "1"
    assert seen == [given]


def test_what_a_handler_sends_belongs_to_its_trace(traced: Traced, broker: EmbeddedBroker) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    class Bill:
        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        async def on_message(self, order: str) -> None:
            await self.template.async_send("invoices", order)

    with traced.start(broker, Bill) as app:
        app.template.sync_send("orders", "x")
        Harness(app).advance("1s")

    process, send = traced.span("process orders"), traced.span("send invoices")
    assert send.parent is not None
    assert (send.parent.trace_id, send.parent.span_id) == context_of(process)


def test_the_span_is_the_current_one_inside_of_the_handler_only(traced: Traced, broker: EmbeddedBroker) -> None:
    current: list[trace.SpanContext] = []

    @message_listener(topic="orders", consumer_group="billing")
    def note(order: str) -> None:
        current.append(trace.get_current_span().get_span_context())

    with traced.start(broker, note) as app:
        app.template.sync_send("orders", "x")
        Harness(app).advance("1s")

    assert [context.span_id for context in current] == [context_of(traced.span("process orders"))[1]]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_batch_is_one_span_with_a_link_to_each_send(traced: Traced, broker: EmbeddedBroker) -> None:
    @message_listener(topic="orders", consumer_group="billing", consume_message_batch_max_size=8)
    def bill_all(orders: list[str]) -> None: ...

    with traced.start(broker, bill_all) as app:
        for _ in range(3):
            app.template.sync_send("orders", "x", hash_key="same")
        app.template.sync_send("orders", ["y", "z"], hash_key="same")
        Harness(app).advance("1s")

    process = traced.span("process orders")
    sends = [span for span in traced.spans if span.name == "send orders"]
    assert (process.attributes or {})["messaging.batch.message_count"] == 5
    assert (sends[-1].attributes or {})["messaging.batch.message_count"] == 2
    assert process.parent is None
    assert sorted(linked(process)) == sorted([*map(context_of, sends), context_of(sends[-1])])


def test_a_send_that_fails_ends_its_span_with_the_error(traced: Traced, broker: EmbeddedBroker) -> None:
    with traced.start(broker) as app, pytest.raises(MessageError):
        app.template.sync_send("orders", b"x" * (5 << 20))

    send = traced.span("send orders")
    assert send.status.status_code is StatusCode.ERROR
    assert (send.attributes or {})["error.type"] == "MessageError"


def test_other_sends_have_spans_too(traced: Traced, broker: EmbeddedBroker) -> None:
    with traced.start(broker) as app:
        app.template.async_send("later", "x").result()
        app.template.send_one_way("one-way", "x")
        app.template.sync_send("batch", ["x", "y"])

    assert [span.name for span in traced.spans] == ["send later", "send one-way", "send batch"]


@pytest.mark.feature("14.3")
def test_outside_of_a_trace_a_share_of_the_sends_starts_one(traced: Traced, broker: EmbeddedBroker) -> None:
    chances = iter([0.05, 0.5, 0.09, 0.9])
    tracing = Tracing(0.1, traced.tracer, chance=lambda: next(chances))
    template = RocketMQTemplate(broker, observation=Observability(broker, tracing=tracing))
    for _ in range(4):
        template.sync_send("orders", "x")

    assert len(traced.spans) == 2
    assert ["traceparent" in each.properties for each in messages_in(broker, "orders")].count(True) == 2


@pytest.mark.feature("14.3")
def test_the_number_of_traces_in_a_second_is_bounded(traced: Traced, broker: EmbeddedBroker) -> None:
    """Sends inside of a trace follow its decision, and do not count."""
    seconds = [0.0]
    tracing = Tracing(1, traced.tracer, max_traces_per_second=3, now=lambda: seconds[0])
    template = RocketMQTemplate(broker, observation=Observability(broker, tracing=tracing))
    counts = []
    for seconds[0] in (1.0, 1.5, 2.0):
        for _ in range(5):
            template.sync_send("orders", "x")
        counts.append(len(traced.spans))
    with traced.tracer.start_as_current_span("checkout"):
        for _ in range(5):
            template.sync_send("orders", "x")

    assert counts == [3, 4, 6]  # three at once, then three a second
    assert len([span for span in traced.spans if span.name == "send orders"]) == 11


def test_the_traces_of_a_busy_process_are_spread_over_the_second(traced: Traced) -> None:
    """At most five at once, so that those that are seen are not all of the first milliseconds."""
    milliseconds = [0]
    tracing = Tracing(1, traced.tracer, max_traces_per_second=20, now=lambda: milliseconds[0] / 1_000)

    started = []
    for millisecond in range(1_000):
        milliseconds[0] = millisecond
        started += [millisecond for _ in range(90) if tracing.starts_trace()]

    assert started[:5] == [0] * 5
    assert 23 <= len(started) <= 25
    assert {millisecond // 100 for millisecond in started} == set(range(10))


def test_a_trace_that_is_not_sampled_stays_so(traced: Traced, broker: EmbeddedBroker) -> None:
    """The decision is the one of the program's trace, for the message and for what its handler sends."""
    flags: list[int] = []

    @message_listener(topic="orders", consumer_group="billing")
    def note(order: str) -> None:
        flags.append(trace.get_current_span().get_span_context().trace_flags)

    not_sampled = trace.SpanContext(int(TRACE_ID, 16), int(SPAN_ID, 16), is_remote=False)
    with traced.start(broker, note) as app:
        with trace.use_span(trace.NonRecordingSpan(not_sampled)):
            app.template.sync_send("orders", "x")
        Harness(app).advance("1s")
        [message] = messages_in(broker, "orders")

    assert message.properties["traceparent"] == f"00-{TRACE_ID}-{SPAN_ID}-00"
    assert traced.spans == ()
    assert flags == [0]


def test_an_invalid_traceparent_is_ignored(traced: Traced, broker: EmbeddedBroker) -> None:
    with traced.start(broker, bill) as app:
        broker.sends.send(Message("orders", b"x", {"traceparent": "00-nonsense"}))
        Harness(app).advance("1s")

    assert traced.spans == () or linked(traced.span("process orders")) == []


def test_a_message_that_is_sent_is_not_changed(traced: Traced, broker: EmbeddedBroker) -> None:
    message = Message("orders", b"x", {"KEYS": "1"})
    template = RocketMQTemplate(broker, observation=traced.observability(broker))
    template._sends.send(message, None, 3_000)

    assert message.properties == {"KEYS": "1"}


def test_a_retry_later_is_an_error_with_its_type(traced: Traced, broker: EmbeddedBroker) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def later(order: str) -> None:
        raise RetryLater("1h")

    with traced.start(broker, later) as app:
        app.template.sync_send("orders", "x")
        Harness(app, raise_handler_errors=False).advance("1s")

    assert (traced.span("process orders").attributes or {})["error.type"] == "RetryLater"


class HostileProcessor(SpanProcessor):
    """A processor of the program that raises at the start of each span, or at its end."""

    def __init__(self, kind: str, *, at_start: bool) -> None:
        self._kind, self._at_start = kind, at_start

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self._at_start:
            KINDS[self._kind]()

    def on_end(self, span: ReadableSpan) -> None:
        if not self._at_start:
            KINDS[self._kind]()


@pytest.mark.parametrize("at_start", [True, False], ids=["start", "end"])
@pytest.mark.parametrize("kind", ["panic", "exit", "interrupt", "without anything"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_whatever_an_exporter_raises_messages_are_sent_and_handled_once(
    mqtemplate_broker: EmbeddedBroker, kind: str, at_start: bool, is_async: bool
) -> None:
    provider, handled = TracerProvider(), list[str]()
    provider.add_span_processor(HostileProcessor(kind, at_start=at_start))

    def handle(order: str) -> None:
        handled.append(order)

    async def handle_async(order: str) -> None:
        handled.append(order)

    handler: Any = handle_async if is_async else handle
    listener = message_listener("orders", "billing", max_reconsume_times=0)(handler)
    settings = ObservabilitySettings()
    observability = Observability(mqtemplate_broker, settings, tracing=Tracing(1, provider.get_tracer("test")))
    overrides = {Observation: observability}
    with MQApplication(listener, mqtemplate_broker, overrides=overrides, clock=mqtemplate_broker.clock) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", "tea")
        future = app.template.async_send("orders", "cup")
        harness.advance("1s")

    assert sorted(handled) == ["cup", "tea"]
    assert future.result().msg_id


def test_a_span_of_a_hostile_exception_has_its_class(traced: Traced, mqtemplate_broker: EmbeddedBroker) -> None:
    @message_listener("orders", "billing", max_reconsume_times=0)
    def bill(order: str) -> None:
        KINDS["without anything"]()

    with traced.start(mqtemplate_broker, bill) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", "tea")
        harness.advance("1s")

    span = traced.span("process orders")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "WithoutAnything")  # type: ignore[index]

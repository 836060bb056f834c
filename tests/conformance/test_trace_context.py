"""W3C trace context beside a Java client of RocketMQ: it sets ``traceparent``, and it reads ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mqtemplate import message_listener
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import MessageExt
from mqtemplate.observability import Observability, Tracing
from mqtemplate.template import RocketMQTemplate
from tests.conformance.java_clients import Case
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180), pytest.mark.feature("14.3")]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"


class Traced:
    """A client of the server whose sends and handlers are traced."""

    def __init__(self, broker: RemoteBroker) -> None:
        self.broker = broker
        self._exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.observability = Observability(broker, tracing=Tracing(1, provider.get_tracer("test")))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traced(newest: Case) -> Iterator[Traced]:
    with RemoteBroker(RemoteSettings(name_servers=(newest.server.address,))) as broker:
        yield Traced(broker)


def test_a_trace_of_a_java_client_goes_on_in_the_handler_after_the_delay_and_in_its_retry(
    newest: Case, traced: Traced
) -> None:
    topic, group = newest.topic("traced"), newest.group("traced")
    handled: list[MessageExt] = []

    @message_listener(topic, group, consume_from_where="CONSUME_FROM_FIRST_OFFSET", retry=["10ms"], id="bill")
    def bill(message: MessageExt) -> None:
        handled.append(message)
        if len(handled) == 1:
            raise RuntimeError("declined")

    traceparent = f"00-{TRACE_ID}-{SPAN_ID}-01"
    newest.client.send({"topic": topic, "body": b"x", "level": 1, "properties": {"traceparent": traceparent}})
    registry = ListenerRegistry(traced.broker, JsonMessageConverter(), observation=traced.observability)
    registry.register(bill)
    registry.start()
    try:
        eventually(lambda: len(handled) == 2, "the message and its retry are handled", timeout_s=60)
    finally:
        registry.stop()

    spans = eventually(lambda: (found := traced.spans(f"process {topic}")) and len(found) == 2 and found, "two spans")
    assert [message.reconsume_times for message in handled] == [0, 1]
    assert handled[0].properties["DELAY"] == "1"
    for span in spans:
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


def test_a_java_client_reads_the_context_of_our_send(newest: Case, traced: Traced) -> None:
    topic = newest.topic("from-python")

    RocketMQTemplate(traced.broker, observation=traced.observability).sync_send(topic, "x", delay_level=1)

    [found] = newest.client.read(topic, 1, 60_000)
    [span] = traced.spans(f"send {topic}")
    assert span.context is not None
    context, _, flags = found.properties["traceparent"].rpartition("-")
    assert context == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert int(flags, 16) & 1  # sampled

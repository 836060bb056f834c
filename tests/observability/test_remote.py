"""Observability of an application whose broker is another process: here a server behind real sockets."""

from __future__ import annotations

import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mqtemplate import message_listener
from mqtemplate.brokers import RemoteBroker
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry
from mqtemplate.message import Message, MessageExt
from mqtemplate.metrics import HistogramSnapshot
from mqtemplate.observability import Observability, ObservabilitySettings, Tracing
from mqtemplate.observability.settings import LatenessSettings
from mqtemplate.template import RocketMQTemplate
from tests.waiting import eventually


@pytest.mark.feature("14.3")
def test_context_lag_and_lateness_cross_the_wire(free_server: tuple[RemoteBroker, threading.Event]) -> None:
    broker, _ = free_server
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ObservabilitySettings(lateness=LatenessSettings(threshold_ms=0))
    observed = Observability(broker, settings, tracing=Tracing(1, provider.get_tracer("test")))
    handled: list[MessageExt] = []

    @message_listener(topic="orders", consumer_group="billing", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(message: MessageExt) -> None:
        handled.append(message)

    registry = ListenerRegistry(broker, JsonMessageConverter(), observation=observed)
    registry.register(bill)
    observed.watch(registry)
    RocketMQTemplate(broker, observation=observed).sync_send("orders", "x", delay="200ms")
    broker.sends.send(
        Message("orders", b"x", {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"})
    )
    registry.start()
    try:
        eventually(lambda: len(handled) == 2, "two messages handled")
        spans = eventually(
            lambda: (found := exporter.get_finished_spans()) and len(found) == 3 and found, "three spans"
        )
        samples = observed.metrics.samples()
    finally:
        registry.stop()

    by_name = {(span.name, span.parent.trace_id if span.parent else 0) for span in spans}  # type: ignore[union-attr]
    [send] = [span for span in spans if span.name == "send orders"]  # type: ignore[union-attr]
    assert send.context is not None
    assert by_name == {
        ("send orders", 0),
        ("process orders", send.context.trace_id),
        ("process orders", int("4bf92f3577b34da6a3ce929d0e0e4736", 16)),
    }
    [late] = [each.value for each in samples if each.name == "lateness.delivery_ms"]
    assert isinstance(late, HistogramSnapshot)
    assert late.count == 1
    lags = [each for each in samples if each.name == "group.lag"]
    assert {each.labels["broker"] for each in lags} == {"broker-a"}
    assert {each.labels["topic"] for each in lags} >= {"orders"}

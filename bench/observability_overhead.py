"""Share of the embedded send and consume rates that metrics, lateness and tracing cost, and that they cost when off.

The processor time of all variants is measured in turn, a few hundred messages each, so that other programs slow all of
them alike. A rate is messages by second of processor time; the result is the median of the ratios of a round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time, thread_time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from bench.measure import BODY, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.calls.handling import Observation
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry, message_listener
from mqtemplate.observability import Observability, ObservabilitySettings, Tracing, TracingSettings
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_CONSUMED = 5_000


class _NoExport(SpanExporter):
    """Exporter that drops the spans: the cost is the SDK's, without a network."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _tracing(settings: TracingSettings) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_NoExport()))
    tracer, most = provider.get_tracer("bench"), settings.max_traces_per_second
    return Tracing(settings.sampling_probability, tracer, max_traces_per_second=most)


def _variants(broker: EmbeddedBroker) -> dict[str, tuple[Observation | None, str]]:
    """Return name -> observation and target."""
    no_tracing = ObservabilitySettings(tracing=TracingSettings(enabled=False))
    every = TracingSettings(sampling_probability=1, max_traces_per_second=1_000_000)
    return {
        "base": (None, ""),
        "off": (Observation(), "0"),
        "metrics and lateness": (Observability(broker, no_tracing), "<= 10"),
        "metrics and traces, sampled by default": (
            Observability(broker, tracing=_tracing(TracingSettings())), "<= 10"),
        "metrics and traces, all sampled": (Observability(broker, tracing=_tracing(every)), "for information"),
    }  # fmt: skip


def _compare(what: str, works: dict[str, Callable[[], float]], targets: dict[str, str], rounds: int) -> None:
    """Compare the usual variants, and after them the one that would disturb them: its spans fill memory and caches."""
    every = "metrics and traces, all sampled"
    usual = {name: work for name, work in works.items() if name != every}
    _compare_in_turn(what, usual, targets, rounds)
    _compare_in_turn(f"{what}, again", {"base": works["base"], every: works[every]}, targets, rounds // 2)


def _compare_in_turn(what: str, works: dict[str, Callable[[], float]], targets: dict[str, str], rounds: int) -> None:
    """Run all works in turn; print the base's rate and the loss of each other one."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            rate = work()
            if number:  # the first round warms up
                rates[name].append(rate)
    base = rates.pop("base")
    report(what, median(base), "/s", "the base")
    for name, found in rates.items():
        ratios = [rate / other for rate, other in zip(found, base, strict=True)]
        report(f"  {name}", (1 - median(ratios)) * 100, "% lost", targets[name])


def sends(folder: Path, flush: FlushDiskType, count: int, rounds: int) -> None:
    """Compare the rates of ``sync_send``."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=flush)) as broker:
        variants = _variants(broker)

        def sending(observation: Observation | None) -> Callable[[], float]:
            send = RocketMQTemplate(broker, observation=observation).sync_send

            def work() -> float:
                start = thread_time()
                for _ in range(count):
                    send("orders:paid", BODY)
                return count / (thread_time() - start)

            return work

        works = {name: sending(observation) for name, (observation, _) in variants.items()}
        targets = {name: target for name, (_, target) in variants.items()}
        _compare(f"sync_send, 1 thread, {flush.value}", works, targets, rounds)


def consumes(folder: Path, rounds: int) -> None:
    """Compare the rates of a listener that reads stored messages, with a handler that does nothing."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as broker:
        template = RocketMQTemplate(broker)
        for _ in range(_CONSUMED):
            template.sync_send("orders:paid", BODY)
        numbers = iter(range(1_000_000))
        variants = _variants(broker)

        def consuming(observation: Observation | None) -> Callable[[], float]:
            return lambda: _consume(broker, observation, f"group-{next(numbers)}")

        works = {name: consuming(observation) for name, (observation, _) in variants.items()}
        targets = {name: target for name, (_, target) in variants.items()}
        _compare("listener, 1 thread, handler that does nothing", works, targets, rounds)


def _consume(broker: EmbeddedBroker, observation: Observation | None, group: str) -> float:
    done, count = threading.Event(), iter(range(1, _CONSUMED + 1))

    # One thread: with several, the switches between them differ more from round to round than the variants do.
    @message_listener(
        topic="orders", consumer_group=group, consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        consume_thread_number=1, consume_thread_max=1,
    )  # fmt: skip
    def handle(body: bytes) -> None:
        if next(count) == _CONSUMED:
            done.set()

    registry = ListenerRegistry(broker, JsonMessageConverter(), observation=observation)
    registry.register(handle)
    start = process_time()
    registry.start()
    done.wait(120)
    took = process_time() - start
    registry.stop()
    return _CONSUMED / took


def main() -> None:
    with scratch_folder() as folder:
        sends(folder, FlushDiskType.SYNC_FLUSH, 200, 20)
    with scratch_folder() as folder:
        sends(folder, FlushDiskType.ASYNC_FLUSH, 2_000, 40)
    with scratch_folder() as folder:
        consumes(folder, 15)


if __name__ == "__main__":
    run(main)

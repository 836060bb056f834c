"""The observability of one application: metrics, traces and lateness of its sends and handlers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.calls.handling import HandlerWrapper, ListenerInfo, Observation
from mqtemplate.calls.send import SendWrapper
from mqtemplate.calls.steps import chained
from mqtemplate.clock import Clock
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.metrics import Metrics, MetricSample
from mqtemplate.observability.collectors import GroupLags, PendingByHorizon, listener_samples
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.observability import ClockSkew, Operations, measured_handling, measured_sends
from mqtemplate.observability.settings import ObservabilitySettings

if TYPE_CHECKING:
    from mqtemplate.observability.tracing import Tracing


class Observability(Observation):
    """Measures and traces an application. Give it to the template and to the registry of the listeners.

    ::

        observability = Observability(broker)
        template = RocketMQTemplate(broker, observation=observability)
        registry = ListenerRegistry(broker, converter, observation=observability)
        observability.watch(registry)
        observability.metrics.samples()

    An application creates it if ``mqtemplate.management.enabled`` is true.

    Attributes:
        metrics: The metrics of the application and of an embedded broker.
        lateness: Lateness of the deliveries, and the recent late ones.
    """

    def __init__(
        self,
        broker: Broker,
        settings: ObservabilitySettings | None = None,
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings = settings or ObservabilitySettings()
        self.broker = broker
        embedded = broker if isinstance(broker, EmbeddedBroker) else None
        self.metrics = Metrics(settings.metrics.max_series)
        if embedded is not None:
            self.metrics.add_collector(embedded.metrics.samples)
        causes = None if embedded is None else embedded.engine.delayed.release_causes
        self.lateness = LatenessRecorder(broker.clock, settings.lateness.threshold_ms, causes)
        self._tracing = create_tracing(settings) if tracing is None else tracing
        self._lock = threading.Lock()
        self._skew = ClockSkew(broker.clock)
        self._sends = Operations("client.send", {}, settings.metrics.max_series)
        self._handled: dict[tuple[str, str], Operations] = {}
        self._listeners: Iterable[ListenerContainer] = ()
        self.lags = GroupLags(broker)
        self._pending = PendingByHorizon(broker, settings.metrics.pending_interval_ms)
        if settings.metrics.enabled:
            self.metrics.add_collector(self._samples)
            self.metrics.gauge("clock.ahead_ms", lambda: self._skew.ahead_ms)
            self.metrics.gauge("clock.behind_ms", lambda: self._skew.behind_ms)

    @property
    def listeners(self) -> Iterable[ListenerContainer]:
        """The containers of the listeners that `watch` was given."""
        return self._listeners

    def watch(self, listeners: Iterable[ListenerContainer]) -> None:
        """Show the states and the lags of these listeners, too; the registry of an application, for example."""
        self._listeners = listeners

    def sends(self, clock: Clock) -> SendWrapper:
        """Return the wrapper that measures and traces sends as the settings say."""
        wrappers: list[SendWrapper] = []
        if self.settings.metrics.enabled:
            wrappers.append(measured_sends(self._sends, clock))
        if self._tracing is not None:
            wrappers.append(self._tracing.sends())
        return chained(wrappers)

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return the wrapper that measures and traces the calls of a listener's handler as the settings say."""
        wrappers: list[HandlerWrapper] = []
        if self.settings.metrics.enabled:
            operations = self._operations_of(listener)
            wrappers.append(measured_handling(listener, operations, self.lateness, self._skew))
        if self._tracing is not None:
            wrappers.append(self._tracing.handling(listener))
        return chained(wrappers)

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """Return the properties of a reply, with the trace context of the handler."""
        return properties if self._tracing is None else self._tracing.reply_properties(properties)

    def _operations_of(self, listener: ListenerInfo) -> Operations:
        key = (listener.id, listener.group)
        with self._lock:
            operations = self._handled.get(key)
            if operations is None:
                labels = {"listener": listener.id, "group": listener.group}
                operations = Operations("listener.handle", labels, self.settings.metrics.max_series)
                self._handled[key] = operations
        return operations

    def _samples(self) -> Iterable[MetricSample]:
        yield from self._sends.samples()
        for operations in list(self._handled.values()):
            yield from operations.samples()
        yield from self.lateness.samples()
        yield from listener_samples(self._listeners)
        yield from self.lags.samples(self._listeners)
        yield from self._pending.samples()

    def export_to_opentelemetry(self) -> None:
        """Export the metrics by the program's meter provider.

        Raises:
            ImportError: ``opentelemetry-api`` is not installed.
        """
        from mqtemplate.observability.otel_metrics import export_metrics

        export_metrics(self.metrics)


def create_tracing(settings: ObservabilitySettings) -> Tracing | None:
    """Return the tracing for the settings; None if it is off, or if ``opentelemetry-api`` is not installed."""
    if not settings.tracing.enabled or find_spec("opentelemetry") is None:
        return None
    from mqtemplate.observability.tracing import Tracing

    return Tracing(settings.tracing.sampling_probability, max_traces_per_second=settings.tracing.max_traces_per_second)

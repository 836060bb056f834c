"""Settings of metrics, traces, lateness and health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

ENDPOINTS = (
    "health",
    "info",
    "metrics",
    "prometheus",
    "listeners",
    "schedules",
    "handover",
    "changes",
    "lateness",
    "conditions",
    "configprops",
)
"""Endpoints of the actuator."""

OPEN_ENDPOINTS = ("health", "info", "metrics", "prometheus")
"""Endpoints that can be read without a token: probes and scrapers do not have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Metrics of an application and its broker. They are counted where things happen and read when they are scraped."""

    enabled: bool = True
    """True: sends and calls of handlers are measured."""

    max_series: Annotated[int, Ge(10), Le(100_000)] = 1_000
    """Most series (sets of labels) of one metric. Those beyond it are counted together, with the label ``_other``."""

    pending_interval_ms: Annotated[int, Ge(0)] = 30_000
    """Least time between two counts of the pending messages by topic and horizon; scrapes in between get the last
    count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Spans of sends and of calls of handlers, if ``opentelemetry-api`` is installed. Trace context travels in the
    message properties ``traceparent`` and ``tracestate``."""

    enabled: bool = True
    """True: spans are created. Without an SDK in the program they go nowhere and are not created."""

    sampling_probability: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of the sends and calls outside of a trace that start one; those inside a trace follow its own decision."""

    max_traces_per_second: Annotated[int, Ge(0)] = 20
    """Most traces that this process starts in a second on average, at most five at once, so that tracing costs the same
    at any rate: a span in OpenTelemetry's SDK takes longer than an embedded send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessSettings:
    """Time from the deliver time of a delayed message to the call of its handler."""

    threshold_ms: Annotated[int, Ge(0)] = 10_000
    """A later delivery writes the event ``delivery.late`` with the causes (ten a minute, then a count), and is among
    the recent late deliveries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Thresholds of the health. A component beyond its threshold is ``DOWN``, and the application is not ready."""

    max_disk_used_percent: Annotated[int, Ge(1), Le(100)] = 95
    """Used part of the disk of the store directory. It counts only if the disk has no room for 16 more commit log
    files."""

    max_lag: Annotated[int, Ge(0)] | None = None
    """Messages that a group of a listener has not consumed; without it the lag is shown only."""

    max_lateness_ms: Annotated[int, Ge(0)] | None = None
    """Longest lateness of a delivery in the last minute; without it the lateness is shown only."""

    timeout_ms: Annotated[int, Ge(1)] = 3_000
    """Time for the answer of a broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySettings:
    """All settings of the observability of an application."""

    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    lateness: LatenessSettings = LatenessSettings()
    health: HealthSettings = HealthSettings()

"""Metrics, traces, lateness and health of an application. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.observability.catalogue import INSTRUMENTS, Instrument
    from mqtemplate.observability.collectors import GroupLag, GroupLags
    from mqtemplate.observability.health import (
        ApplicationHealth,
        ComponentHealth,
        HealthChecks,
        Status,
        broker_checks,
        listener_checks,
    )
    from mqtemplate.observability.lateness import Cause, LateDelivery, LatenessRecorder
    from mqtemplate.observability.observability import Observability
    from mqtemplate.observability.otel_metrics import export_metrics
    from mqtemplate.observability.prometheus import PrometheusCollector, prometheus_text
    from mqtemplate.observability.settings import (
        HealthSettings,
        LatenessSettings,
        MetricsSettings,
        ObservabilitySettings,
        TracingSettings,
    )
    from mqtemplate.observability.tracing import Tracing

__all__ = [
    "INSTRUMENTS",
    "ApplicationHealth",
    "Cause",
    "ComponentHealth",
    "GroupLag",
    "GroupLags",
    "HealthChecks",
    "HealthSettings",
    "Instrument",
    "LateDelivery",
    "LatenessRecorder",
    "LatenessSettings",
    "MetricsSettings",
    "Observability",
    "ObservabilitySettings",
    "PrometheusCollector",
    "Status",
    "Tracing",
    "TracingSettings",
    "broker_checks",
    "export_metrics",
    "listener_checks",
    "prometheus_text",
]

__getattr__ = late_import(
    __name__,
    {
        "ApplicationHealth": "mqtemplate.observability.health",
        "Cause": "mqtemplate.observability.lateness",
        "ComponentHealth": "mqtemplate.observability.health",
        "GroupLag": "mqtemplate.observability.collectors",
        "GroupLags": "mqtemplate.observability.collectors",
        "HealthChecks": "mqtemplate.observability.health",
        "HealthSettings": "mqtemplate.observability.settings",
        "INSTRUMENTS": "mqtemplate.observability.catalogue",
        "Instrument": "mqtemplate.observability.catalogue",
        "LateDelivery": "mqtemplate.observability.lateness",
        "LatenessRecorder": "mqtemplate.observability.lateness",
        "LatenessSettings": "mqtemplate.observability.settings",
        "MetricsSettings": "mqtemplate.observability.settings",
        "Observability": "mqtemplate.observability.observability",
        "ObservabilitySettings": "mqtemplate.observability.settings",
        "PrometheusCollector": "mqtemplate.observability.prometheus",
        "Status": "mqtemplate.observability.health",
        "Tracing": "mqtemplate.observability.tracing",
        "TracingSettings": "mqtemplate.observability.settings",
        "broker_checks": "mqtemplate.observability.health",
        "export_metrics": "mqtemplate.observability.otel_metrics",
        "listener_checks": "mqtemplate.observability.health",
        "prometheus_text": "mqtemplate.observability.prometheus",
    },
)

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

_NAMES = {
    "catalogue": "INSTRUMENTS Instrument",
    "collectors": "GroupLag GroupLags",
    "health": "ApplicationHealth ComponentHealth HealthChecks Status broker_checks listener_checks",
    "lateness": "Cause LateDelivery LatenessRecorder",
    "observability": "Observability",
    "otel_metrics": "export_metrics",
    "prometheus": "PrometheusCollector prometheus_text",
    "settings": "HealthSettings LatenessSettings MetricsSettings ObservabilitySettings TracingSettings",
    "tracing": "Tracing",
}
"""Module -> the public names that it defines."""

__getattr__ = late_import(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)

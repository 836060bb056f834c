"""Starter of metrics, traces, lateness, health and the actuator, for ``mqtemplate.management.*``."""

from mqtemplate_starter_observability.autoconfiguration import ObservabilityAutoConfiguration

__all__ = ["ObservabilityAutoConfiguration"]

"""The section ``mqtemplate.management.*``: metrics, traces, lateness, health, and the actuator."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass

from mqtemplate.context.config.contradiction import ContradictionError
from mqtemplate.context.settings.properties import (
    SECTION_CONFIG,
    CommaList,
    OptionalSecret,
    OptionalText,
    Properties,
    duration_in,
)
from mqtemplate.http.tokens import weakness_of
from mqtemplate.observability.settings import (
    ENDPOINTS,
    OPEN_ENDPOINTS,
    HealthSettings,
    LatenessSettings,
    MetricsSettings,
    ObservabilitySettings,
    TracingSettings,
)


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class MetricsSection(MetricsSettings):
    """Metrics of the application and its broker; see [metrics](metrics.md)."""

    opentelemetry: bool = False
    """True: export them by the meter provider of OpenTelemetry that the program configures."""

    _milliseconds = field_validator("pending_interval_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class TracingSection(TracingSettings):
    """Spans of sends and handlers, with ``mqtemplate[opentelemetry]``."""


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class LatenessSection(LatenessSettings):
    """Lateness of delayed messages; see [observability](observability.md)."""

    _milliseconds = field_validator("threshold_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class HealthSection(HealthSettings):
    """Thresholds of the health. A component beyond its threshold is ``DOWN``."""

    _milliseconds = field_validator("max_lateness_ms", "timeout_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class DashboardSection:
    """Pages of the application and its broker in a browser; see [dashboard](dashboard.md)."""

    enabled: bool = False
    """True: the management port serves it below ``/dashboard``, and a web framework can mount it. It needs
    ``mqtemplate[dashboard]`` and ``token``: reading needs the token too."""
    allow_changes: bool = False
    """True: changes of messages, dead letters and listeners are allowed to those who have signed in with the token."""
    allowed_hosts: CommaList = ()
    """Host names in addresses of the dashboard, beside those of loopback, such as ``shop.example.com``."""
    audit_log: OptionalText = None
    """File of the audit log; by default ``~/.local/state/mqtemplate/dashboard-audit.jsonl``."""


class ManagementSettings(Properties):
    """Metrics, traces, lateness and health of the application, and its actuator. Off by default, at no cost."""

    enabled: bool = False
    """True: the application, or the server, is observed."""
    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port of the actuator: ``http://address:port/actuator``; 0 for a free one. Without it an application serves the
    actuator through its own web framework, or not at all."""
    address: str = "127.0.0.1"
    """Numeric address of that port. With another than loopback, other machines can read the ``open-endpoints``."""
    token: OptionalSecret = None
    """Token that reads of other than the ``open-endpoints`` and all changes must have, as ``Authorization: Bearer
    <token>``, of at least 16 characters. Without it they are refused."""
    name: OptionalText = None
    """Name of the application in ``/actuator/info``."""
    endpoints: CommaList = ENDPOINTS
    """Endpoints of the actuator to expose."""
    open_endpoints: CommaList = OPEN_ENDPOINTS
    """Those of them that everyone who can connect reads without the token."""
    allowed_hosts: CommaList = ()
    """Public host names in addresses of the actuator, such as ``shop.example.com``. Addresses, names without a dot, and
    names below ``localhost``, ``local``, ``internal`` and ``svc`` are always allowed, and for ``health`` all are."""
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    lateness: LatenessSection = LatenessSection()
    health: HealthSection = HealthSection()
    dashboard: DashboardSection = DashboardSection()

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError("must be a numeric address, such as 127.0.0.1 or ::1") from None
        return value

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        weakness = None if value is None else weakness_of(value.get_secret_value())
        if weakness is not None:
            raise ValueError(weakness)
        return value

    @field_validator("endpoints", "open_endpoints")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in ENDPOINTS]
        if unknown:
            raise ValueError(f"must be some of {', '.join(ENDPOINTS)}; there is no {', '.join(unknown)}")
        return value

    @model_validator(mode="after")
    def _check_enabled(self) -> Self:
        if self.port is not None and not self.enabled:
            raise ContradictionError("is given, but 'enabled' is not true; set it, or remove the port", "port")
        if self.dashboard.enabled and not (self.enabled and self.token):
            missing = "'enabled' is not true" if not self.enabled else "there is no 'token'"
            raise ContradictionError(f"is on, but {missing}; set it, or turn the dashboard off", "dashboard.enabled")
        return self

    @property
    def observability(self) -> ObservabilitySettings:
        """The section as one value for `Observability`."""
        return ObservabilitySettings(
            metrics=self.metrics, tracing=self.tracing, lateness=self.lateness, health=self.health
        )

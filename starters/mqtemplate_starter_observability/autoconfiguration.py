"""Observes an application, and serves its actuator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtemplate import Broker, Schedules
from mqtemplate.actuator import Actuator, ActuatorSources, ManagementServer
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, explain_settings
from mqtemplate.dashboard import MOUNT, check_installed
from mqtemplate.listener import ListenerRegistry
from mqtemplate.observability import HealthChecks, Observability, broker_checks, listener_checks

if TYPE_CHECKING:
    from mqtemplate.dashboard import Dashboard


class ObservabilityAutoConfiguration(AutoConfiguration):
    """Starter that adds an `Observability`, `HealthChecks` and an `Actuator`, and serves it on the management port.

    A service of the application can get `HealthChecks` to add components of its own, and a web framework can mount the
    `Actuator`. With ``mqtemplate.management.dashboard.enabled`` the same holds for the `Dashboard`.
    """

    after = ("logging", "embedded", "rocketmq")

    def condition(self, settings: AppSettings) -> bool | str:
        return settings.mqtemplate.management.enabled or "mqtemplate.management.enabled is not true"

    def contribute(self, context: ApplicationContext) -> None:
        context.register(observability)
        context.register(health_checks)
        context.register(actuator)
        if context.settings.mqtemplate.management.dashboard.enabled:
            check_installed()
            from mqtemplate.dashboard import application_dashboard

            context.register(application_dashboard)
        context.add_part(_Management(context))


class _Management:
    """Shows the listeners, and serves the actuator while the application runs."""

    name = "management"

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._server: ManagementServer | None = None
        self._dashboard: Dashboard | None = None

    def start(self) -> None:
        settings = self._context.settings.mqtemplate.management
        observed = self._context.get(Observability)
        observed.watch(self._context.get(ListenerRegistry))
        self._check_further_brokers()
        if settings.metrics.opentelemetry:
            observed.export_to_opentelemetry()
        if settings.dashboard.enabled:
            from mqtemplate.dashboard import Dashboard

            self._dashboard = self._context.get(Dashboard)
        if settings.port is not None:
            mounted = {} if self._dashboard is None else {MOUNT: self._dashboard.handle}
            self._server = ManagementServer(
                self._context.get(Actuator), settings.port, settings.address, mounted=mounted
            )
            self._server.start()

    def _check_further_brokers(self) -> None:
        """Check the brokers of further templates and of listeners, too: ``broker.audit`` for the template audit."""
        settings = self._context.settings.mqtemplate.management.health
        checks = self._context.get(HealthChecks)
        for name, broker in self._context.brokers.items():
            if name != "broker":
                for kind, check in broker_checks(broker, settings).items():
                    checks.add(f"{kind}.{name}", check)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        if self._dashboard is not None:
            self._dashboard.close()
        self._context.get(HealthChecks).close()


def observability(broker: Broker, settings: AppSettings) -> Observability:
    """Return the observability of the application."""
    return Observability(broker, settings.mqtemplate.management.observability)


def health_checks(
    broker: Broker, settings: AppSettings, listeners: ListenerRegistry, observed: Observability
) -> HealthChecks:
    """Return the checks of the broker and the listeners."""
    health = settings.mqtemplate.management.health
    checks = broker_checks(broker, health) | listener_checks(listeners, observed.lags, observed.lateness, health)
    return HealthChecks(checks, health.timeout_ms, is_virtual=broker.clock.is_virtual)


def actuator(context: ApplicationContext, health: HealthChecks, observed: Observability) -> Actuator:
    """Return the actuator of the application."""
    settings = context.settings.mqtemplate.management
    sources = ActuatorSources(
        health=health,
        metrics=observed.metrics,
        listeners=context.get(ListenerRegistry),
        schedules=context.get(Schedules),
        lags=observed.lags,
        lateness=observed.lateness,
        conditions=context.conditions,
        settings=lambda: explain_settings(context.settings),
        name=settings.name,
        is_ready=context.is_ready.is_set,
    )
    token = None if settings.token is None else settings.token.get_secret_value()
    return Actuator(sources, token=token, endpoints=settings.endpoints)

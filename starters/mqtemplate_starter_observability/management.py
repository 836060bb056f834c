"""The objects that observe an application, its actuator, and the port that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from mqtemplate import Broker, Schedules
from mqtemplate.console import Actuator, ActuatorSources, ManagementAddress, managed_actuator, management_address
from mqtemplate.context import ApplicationContext, AppSettings, explain_settings
from mqtemplate.http import HttpRequest, HttpResponse
from mqtemplate.listener import ListenerRegistry
from mqtemplate.observability import HealthChecks, Observability, broker_checks, listener_checks


class Mounted(Protocol):
    """Pages that are served beside the actuator."""

    def handle(self, request: HttpRequest, /) -> HttpResponse: ...

    def close(self) -> None: ...


class Management:
    """Shows the listeners, and serves the actuator while the application runs.

    Args:
        mounts: Prefix of paths -> type of the object that handles them.
    """

    name = "management"

    def __init__(self, context: ApplicationContext, mounts: Mapping[str, type[Mounted]]) -> None:
        self._context = context
        self._mounts = mounts
        self._address: ManagementAddress | None = None
        self._mounted: dict[str, Mounted] = {}
        self._watching = ExitStack()

    def start(self) -> None:
        settings = self._context.settings.mqtemplate.management
        observed = self._context.get(Observability)
        observed.watch(self._context.get(ListenerRegistry))
        self._check_further_brokers()
        if settings.metrics.opentelemetry:
            observed.export_to_opentelemetry()
        self._mounted = {prefix: self._context.get(kind) for prefix, kind in self._mounts.items()}
        if self._mounted:
            from mqtemplate.console import accounts_watched  # few applications have a dashboard

            self._watching.enter_context(accounts_watched(self._context))
        if settings.port is not None:
            handlers = {prefix: each.handle for prefix, each in self._mounted.items()}
            self._address = management_address(self._context.settings, self._context.get(Actuator), handlers)
            self._address.start()

    def _check_further_brokers(self) -> None:
        """Check the brokers of further templates and of listeners, too: ``broker.audit`` for the template audit."""
        settings = self._context.settings.mqtemplate.management.health
        checks = self._context.get(HealthChecks)
        for name, broker in self._context.brokers.items():
            if name != "broker":
                for kind, check in broker_checks(broker, settings).items():
                    checks.add(f"{kind}.{name}", check)

    def stop(self) -> None:
        self._watching.close()
        if self._address is not None:
            self._address.stop()
        for each in self._mounted.values():
            each.close()
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


def actuator(context: ApplicationContext, broker: Broker, health: HealthChecks, observed: Observability) -> Actuator:
    """Return the actuator of the application."""
    settings = context.settings.mqtemplate.management
    hand_over = None
    if context.settings.mqtemplate.hand_over.from_ is not None:
        from mqtemplate.console import application_hand_over  # few applications need it

        hand_over = application_hand_over(broker)
    if hand_over is not None and settings.observability.metrics.enabled:
        observed.metrics.add_collector(hand_over.samples)
    sources = ActuatorSources(
        health=health,
        metrics=observed.metrics,
        listeners=context.get(ListenerRegistry),
        schedules=context.get(Schedules),
        hand_over=hand_over,
        lags=observed.lags,
        lateness=observed.lateness,
        conditions=context.conditions,
        settings=lambda: explain_settings(context.settings),
        reload=context.reload,
        name=settings.name,
        is_ready=context.is_ready.is_set,
    )
    return managed_actuator(sources, settings, broker.clock)

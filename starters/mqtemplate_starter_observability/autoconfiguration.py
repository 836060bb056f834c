"""Observes an application, and serves its actuator."""

from __future__ import annotations

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration


class ObservabilityAutoConfiguration(AutoConfiguration):
    """Starter that adds an `Observability`, `HealthChecks` and an `Actuator`, and serves it on the management port.

    A service of the application can get `HealthChecks` to add components of its own, and a web framework can mount the
    `Actuator`. With ``mqtemplate.management.dashboard.enabled`` the same holds for the `Dashboard`.
    """

    after = ("logging", "embedded", "rocketmq")

    def condition(self, settings: AppSettings) -> bool | str:
        return settings.mqtemplate.management.enabled or "mqtemplate.management.enabled is not true"

    def contribute(self, context: ApplicationContext) -> None:
        from mqtemplate_starter_observability.management import (
            Management,
            Mounted,
            actuator,
            health_checks,
            observability,
        )

        context.register(observability)
        context.register(health_checks)
        context.register(actuator)
        mounts: dict[str, type[Mounted]] = {}
        if context.settings.mqtemplate.management.dashboard.enabled:
            from mqtemplate.console import MOUNT, Dashboard, application_dashboard, check_installed, dashboard_accounts

            check_installed()
            context.register(dashboard_accounts)
            context.register(application_dashboard)
            mounts[MOUNT] = Dashboard
        context.add_part(Management(context, mounts))

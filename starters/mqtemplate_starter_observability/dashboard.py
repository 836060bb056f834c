"""The dashboard of an application. It is imported only if the settings turn it on: it needs a template library."""

from __future__ import annotations

from mqtemplate import Broker
from mqtemplate.actuator import Actuator
from mqtemplate.context import ApplicationContext, AppSettings
from mqtemplate.dashboard import Dashboard, managed_dashboard


def register(context: ApplicationContext) -> None:
    """Register the `Dashboard` with the application."""
    context.register(dashboard)


def dashboard(broker: Broker, settings: AppSettings, actuator: Actuator) -> Dashboard:
    """Return the dashboard of the application."""
    management = settings.mqtemplate.management
    return managed_dashboard(broker, actuator, management, management.name or broker.name)

"""Console over HTTP: health, metrics and listeners in the shapes of Spring Boot's actuator, and pages in a browser."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.console.access import Access
    from mqtemplate.console.actuator import Actuator, ActuatorSources, asgi_app, managed_actuator, wsgi_app
    from mqtemplate.console.dashboard import (
        Dashboard,
        DashboardServer,
        application_dashboard,
        dashboard_accounts,
        dashboard_asgi_app,
        dashboard_audit,
        dashboard_wsgi_app,
        managed_dashboard,
        several_dashboards,
    )
    from mqtemplate.console.fleet import Place
    from mqtemplate.console.server import (
        MOUNT,
        ManagementAddress,
        ManagementServer,
        check_installed,
        management_address,
    )
    from mqtemplate.console.sources import BrokerSource, FolderSource, OpenSource
    from mqtemplate.handover.control import application_hand_over
    from mqtemplate.operations.audit import AuditLog
    from mqtemplate.running.reload import accounts_watched

__all__ = [
    "MOUNT",
    "Access",
    "Actuator",
    "ActuatorSources",
    "AuditLog",
    "BrokerSource",
    "Dashboard",
    "DashboardServer",
    "FolderSource",
    "ManagementAddress",
    "ManagementServer",
    "OpenSource",
    "Place",
    "accounts_watched",
    "application_dashboard",
    "application_hand_over",
    "asgi_app",
    "check_installed",
    "dashboard_accounts",
    "dashboard_asgi_app",
    "dashboard_audit",
    "dashboard_wsgi_app",
    "managed_actuator",
    "managed_dashboard",
    "management_address",
    "several_dashboards",
    "wsgi_app",
]

_ACTUATOR = "mqtemplate.console.actuator"
_DASHBOARD = "mqtemplate.console.dashboard"
_SERVER = "mqtemplate.console.server"
_SOURCES = "mqtemplate.console.sources"

__getattr__ = late_import(
    __name__,
    {
        "Access": "mqtemplate.console.access",
        "AuditLog": "mqtemplate.operations.audit",
        "accounts_watched": "mqtemplate.running.reload",
        "application_hand_over": "mqtemplate.handover.control",
        **dict.fromkeys(("Actuator", "ActuatorSources", "asgi_app", "managed_actuator", "wsgi_app"), _ACTUATOR),
        **dict.fromkeys(("Dashboard", "DashboardServer", "dashboard_asgi_app", "dashboard_wsgi_app"), _DASHBOARD),
        **dict.fromkeys(
            ("application_dashboard", "dashboard_accounts", "dashboard_audit", "managed_dashboard"), _DASHBOARD
        ),
        **dict.fromkeys(("MOUNT", "ManagementAddress", "ManagementServer", "check_installed"), _SERVER),
        "management_address": _SERVER,
        "Place": "mqtemplate.console.fleet",
        "several_dashboards": _DASHBOARD,
        **dict.fromkeys(("BrokerSource", "FolderSource", "OpenSource"), _SOURCES),
    },
)

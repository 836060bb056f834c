"""Dashboard: pages in a browser to look into a broker and an application, and to change them."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.dashboard.access import Access
    from mqtemplate.dashboard.audit import AuditLog
    from mqtemplate.dashboard.dashboard import Dashboard, dashboard_asgi_app, dashboard_wsgi_app
    from mqtemplate.dashboard.installation import MOUNT, check_installed
    from mqtemplate.dashboard.managed import application_dashboard, managed_dashboard
    from mqtemplate.dashboard.server import DashboardServer
    from mqtemplate.dashboard.sources.broker_source import BrokerSource
    from mqtemplate.dashboard.sources.source import FolderSource, OpenSource

__all__ = [
    "MOUNT",
    "Access",
    "AuditLog",
    "BrokerSource",
    "Dashboard",
    "DashboardServer",
    "FolderSource",
    "OpenSource",
    "application_dashboard",
    "check_installed",
    "dashboard_asgi_app",
    "dashboard_wsgi_app",
    "managed_dashboard",
]

__getattr__ = late_import(
    __name__,
    {
        "MOUNT": "mqtemplate.dashboard.installation",
        "Access": "mqtemplate.dashboard.access",
        "AuditLog": "mqtemplate.dashboard.audit",
        "BrokerSource": "mqtemplate.dashboard.sources.broker_source",
        "Dashboard": "mqtemplate.dashboard.dashboard",
        "DashboardServer": "mqtemplate.dashboard.server",
        "FolderSource": "mqtemplate.dashboard.sources.source",
        "OpenSource": "mqtemplate.dashboard.sources.source",
        "application_dashboard": "mqtemplate.dashboard.managed",
        "check_installed": "mqtemplate.dashboard.installation",
        "managed_dashboard": "mqtemplate.dashboard.managed",
        "dashboard_asgi_app": "mqtemplate.dashboard.dashboard",
        "dashboard_wsgi_app": "mqtemplate.dashboard.dashboard",
    },
)

"""Dashboard: pages in a browser to look into a broker and an application, and to change them."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.dashboard.access import Access
    from mqtemplate.dashboard.audit import AuditLog
    from mqtemplate.dashboard.dashboard import Dashboard, dashboard_asgi_app, dashboard_wsgi_app
    from mqtemplate.dashboard.server import DashboardServer
    from mqtemplate.dashboard.source import BrokerSource, FolderSource, OpenSource

__all__ = [
    "Access",
    "AuditLog",
    "BrokerSource",
    "Dashboard",
    "DashboardServer",
    "FolderSource",
    "OpenSource",
    "dashboard_asgi_app",
    "dashboard_wsgi_app",
]

__getattr__ = late_import(
    __name__,
    {
        "Access": "mqtemplate.dashboard.access",
        "AuditLog": "mqtemplate.dashboard.audit",
        "BrokerSource": "mqtemplate.dashboard.source",
        "Dashboard": "mqtemplate.dashboard.dashboard",
        "DashboardServer": "mqtemplate.dashboard.server",
        "FolderSource": "mqtemplate.dashboard.source",
        "OpenSource": "mqtemplate.dashboard.source",
        "dashboard_asgi_app": "mqtemplate.dashboard.dashboard",
        "dashboard_wsgi_app": "mqtemplate.dashboard.dashboard",
    },
)

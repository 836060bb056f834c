"""The dashboard on an address of its own."""

from __future__ import annotations

from mqtemplate.dashboard.dashboard import MAX_BODY_BYTES, Dashboard
from mqtemplate.event_log import get_logger
from mqtemplate.http.server import HttpServer
from mqtemplate.message import HostAddress

_log = get_logger("mqtemplate.dashboard")

_MAX_CONNECTIONS = 64


class DashboardServer:
    """Serves a dashboard. It has 64 connections; idle ones are closed after 10 s, or earlier for new ones.

    Args:
        port: 0 for a free one.
    """

    def __init__(self, dashboard: Dashboard, host: str, port: int) -> None:
        self._dashboard = dashboard
        self._server = HttpServer(
            dashboard.handle,
            host,
            port,
            thread_name="mqtemplate-dashboard",
            events=_log,
            event="dashboard",
            max_connections=_MAX_CONNECTIONS,
            max_body_bytes=MAX_BODY_BYTES,
        )

    @property
    def address(self) -> HostAddress:
        """The address, with the real port."""
        return self._server.address

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        self._dashboard.prepare()
        self._server.start()
        _log.info("dashboard.started", address=str(self.address))

    def stop(self) -> None:
        """Stop listening, and close the dashboard."""
        self._server.stop()
        self._dashboard.close()

"""HTTP server of the actuator on a port of its own, for applications without a web framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mqtemplate.actuator.response import MAX_BODY_BYTES, Responder
from mqtemplate.actuator.web import handler_of
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse, below
from mqtemplate.http.server import HttpServer
from mqtemplate.message import HostAddress

_log = get_logger("mqtemplate.actuator")

_MAX_CONNECTIONS = 16
_ACTUATOR = "/actuator"


class ManagementServer:
    """Serves an actuator on 16 connections; idle ones are closed after 10 s, or earlier for new ones.

    Requests for the health are served beside the 16.

    Args:
        port: 0 for a free one.
        mounted: Further handlers by the prefix of their paths, such as ``/dashboard``; then 64 connections are allowed.

    Attributes:
        name: Name as a part of an application.
    """

    name = "management server"

    def __init__(
        self,
        actuator: Responder,
        port: int,
        host: str = "127.0.0.1",
        mounted: Mapping[str, HttpHandler] | None = None,
    ) -> None:
        self._actuator = actuator
        self._mounted = dict(mounted or {})
        self._server = HttpServer(
            self._handle,
            host,
            port,
            thread_name="mqtemplate-management",
            events=_log,
            event="management",
            max_connections=4 * _MAX_CONNECTIONS if mounted else _MAX_CONNECTIONS,
            max_body_bytes=16 * MAX_BODY_BYTES if mounted else MAX_BODY_BYTES,
            urgent_path=f"{_ACTUATOR}/health",
        )
        self._handlers = {_ACTUATOR: handler_of(actuator), **self._mounted}

    def _handle(self, request: HttpRequest) -> HttpResponse:
        for mount, handler in self._handlers.items():
            path = below(request.path, mount)
            if path is not None:
                return handler(dataclasses.replace(request, path=path, mount=mount))
        return HttpResponse(404, f"there is: {', '.join(self._handlers)}\n".encode())

    @property
    def address(self) -> HostAddress:
        """The address, with the real port."""
        return self._server.address

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        try:
            self._server.start()
        except ConfigurationError as exc:
            raise ConfigurationError(f"mqtemplate.management: {exc}") from exc
        _log.info("management.started", address=str(self.address), endpoints=",".join(self._actuator.endpoints))

    def stop(self) -> None:
        """Stop listening. Stopping twice is harmless."""
        self._server.stop()

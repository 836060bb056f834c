"""The HTTP server of the console: handlers by the prefix of their paths, on one address."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec

from mqtemplate.console.actuator import MAX_BODY_BYTES, Actuator
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import EventLogger, get_logger
from mqtemplate.extras import install_command
from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse, below
from mqtemplate.http.server import HttpServer

MOUNT = "/dashboard"
"""Path of the dashboard on the management port."""
MAX_FORM_BYTES = 1024 * 1024
_ACTUATOR = "/actuator"
_MAX_CONNECTIONS = 64
_MAX_ACTUATOR_CONNECTIONS = 16


def check_installed() -> None:
    """Check that the template library of the dashboard is installed.

    Raises:
        ConfigurationError: It is missing.
    """
    if find_spec("jinja2") is None:
        raise ConfigurationError(f"the dashboard needs jinja2: {install_command('dashboard')}")


class ConsoleServer(HttpServer):
    """Serves handlers on one address. Idle connections are closed after 10 s, or earlier for new ones.

    Args:
        handlers: Prefix of paths -> handler of the requests below it; the empty prefix has all paths.
        part: Name of the server in its events and threads, such as ``management``.
        facts: Fields of the event of its start, beside the address.

    Attributes:
        name: Name as a part of an application.
    """

    def __init__(
        self,
        handlers: Mapping[str, HttpHandler],
        host: str,
        port: int,
        *,
        part: str,
        events: EventLogger,
        max_connections: int = _MAX_CONNECTIONS,
        max_body_bytes: int = MAX_FORM_BYTES,
        urgent_path: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            self._handle,
            host,
            port,
            thread_name=f"mqtemplate-{part}",
            events=events,
            event=part,
            max_connections=max_connections,
            max_body_bytes=max_body_bytes,
            urgent_path=urgent_path,
        )
        self.name = f"{part} server"
        self._handlers = dict(handlers)
        self._facts = dict(facts or {})

    def _handle(self, request: HttpRequest) -> HttpResponse:
        for mount, handler in self._handlers.items():
            path = below(request.path, mount)
            if path is not None:
                return handler(dataclasses.replace(request, path=path, mount=mount))
        return HttpResponse(404, f"there is: {', '.join(self._handlers)}\n".encode())

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        super().start()
        self.events.info(f"{self.event}.started", address=str(self.address), **self._facts)


class ManagementServer(ConsoleServer):
    """Serves an actuator on 16 connections. Requests for the health are served beside the 16.

    Args:
        port: 0 for a free one.
        mounted: Further handlers by the prefix of their paths, such as ``/dashboard``; then 64 connections are allowed.
    """

    def __init__(
        self,
        actuator: Actuator,
        port: int,
        host: str = "127.0.0.1",
        mounted: Mapping[str, HttpHandler] | None = None,
    ) -> None:
        super().__init__(
            {_ACTUATOR: actuator.handle, **(mounted or {})},
            host,
            port,
            part="management",
            events=get_logger("mqtemplate.actuator"),
            max_connections=_MAX_CONNECTIONS if mounted else _MAX_ACTUATOR_CONNECTIONS,
            max_body_bytes=MAX_FORM_BYTES if mounted else MAX_BODY_BYTES,
            urgent_path=f"{_ACTUATOR}/health",
            facts={"endpoints": ",".join(actuator.endpoints)},
        )

    def start(self) -> None:
        try:
            super().start()
        except ConfigurationError as exc:
            raise ConfigurationError(f"mqtemplate.management: {exc}") from exc

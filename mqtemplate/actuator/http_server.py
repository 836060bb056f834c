"""HTTP server of the actuator on a port of its own, for applications without a web framework."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mqtemplate.actuator.response import MAX_BODY_BYTES, Responder, below_actuator, headers_of
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress

_log = get_logger("mqtemplate.actuator")

_MAX_CONNECTIONS = 16
_TIMEOUT_S = 10.0


class ManagementServer:
    """Serves an actuator. One more connection than 16 is closed at once; an idle one after 10 s.

    Args:
        port: 0 for a free one.

    Attributes:
        name: Name as a part of an application.
    """

    name = "management server"

    def __init__(self, actuator: Responder, port: int, host: str = "127.0.0.1") -> None:
        self._actuator = actuator
        self._wanted = (host, port)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> HostAddress:
        """The address, with the real port."""
        if self._server is None:
            return HostAddress(*self._wanted)
        host, port = self._server.server_address[:2]
        return HostAddress(str(host), int(port))

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        host, port = self._wanted
        try:
            self._server = _Server(self._wanted, self._actuator)
        except OSError as exc:
            raise ConfigurationError(
                f"mqtemplate.management: {host}:{port} cannot be used: {exc.strerror or exc}; "
                "stop the process that uses it, or choose another port"
            ) from exc
        self._thread = threading.Thread(target=self._server.serve_forever, name="mqtemplate-management", daemon=True)
        self._thread.start()
        _log.info("management.started", address=str(self.address), endpoints=",".join(self._actuator.endpoints))

    def stop(self) -> None:
        """Stop listening. Stopping twice is harmless."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], actuator: Responder) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.actuator = actuator
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.warning("management.request_failed", remote=str(client_address[0]), exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        target = urlsplit(self.path)
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else MAX_BODY_BYTES + 1
        if size > MAX_BODY_BYTES or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self.send_error(413)
            return
        body = self.rfile.read(size) if size else b""
        path = target.path
        if path != "/actuator" and not path.startswith("/actuator/"):
            self.send_error(404, explain="the documents are below /actuator")
            return
        response = self.server.actuator.respond(
            self.command,
            below_actuator(path),
            parse_qsl(target.query),
            self.headers.get("Authorization", ""),
            body,
            self.client_address[0],
        )
        self.send_response(response.status)
        for name, value in headers_of(response):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Log each request at the level DEBUG."""
        _log.debug("management.request", remote=self.client_address[0], line=format % args)

"""HTTP server with one thread for each connection."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import EventLogger
from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse
from mqtemplate.message import HostAddress

_TIMEOUT_S = 10.0


class HttpServer:
    """Serves a function on an address.

    Args:
        port: 0 for a free one.
        thread_name: Name of the thread that accepts connections.
        events: Gets the event ``<event>.request_failed``, and ``<event>.request`` at the level DEBUG.
        event: First part of the names of these events.
        max_connections: One more is closed at once; an idle one is closed after 10 s.
        max_body_bytes: A larger body is refused with 413.
    """

    def __init__(
        self,
        handler: HttpHandler,
        host: str,
        port: int,
        *,
        thread_name: str,
        events: EventLogger,
        event: str,
        max_connections: int,
        max_body_bytes: int,
    ) -> None:
        self.handler = handler
        self.events = events
        self.event = event
        self.max_connections = max_connections
        self.max_body_bytes = max_body_bytes
        self._wanted = (host, port)
        self._thread_name = thread_name
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
            self._server = _Server(self, self._wanted)
        except OSError as exc:
            raise ConfigurationError(
                f"{host}:{port} cannot be used: {exc.strerror or exc}; "
                "stop the process that uses it, or choose another port"
            ) from exc
        self._thread = threading.Thread(target=self._server.serve_forever, name=self._thread_name, daemon=True)
        self._thread.start()

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

    def __init__(self, owner: HttpServer, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.owner = owner
        self._places = threading.BoundedSemaphore(owner.max_connections)
        super().__init__(address, _Connection)

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
        event = f"{self.owner.event}.request_failed"
        self.owner.events.warning(event, remote=str(client_address[0]), exc_info=True)


class _Connection(BaseHTTPRequestHandler):
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
        owner = self.server.owner
        length = self.headers.get("Content-Length", "0")
        size = int(length) if length.isdecimal() else owner.max_body_bytes + 1
        if size > owner.max_body_bytes or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self.send_error(413)
            return
        body = self.rfile.read(size) if size else b""
        target = urlsplit(self.path)
        request = HttpRequest(
            method=self.command,
            path=unquote(target.path),
            query=parse_qsl(target.query, keep_blank_values=True),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=body,
            remote=self.client_address[0],
        )
        response = owner.handler(request)
        try:
            self._send(response)
        except ConnectionError:  # the client did not wait for the response
            self.close_connection = True
        finally:
            response.close()

    def _send(self, response: HttpResponse) -> None:
        self.send_response(response.status)
        for name, value in response.all_headers:
            self.send_header(name, value)
        is_stream = not isinstance(response.body, bytes)
        if is_stream:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        for part in (response.body,) if isinstance(response.body, bytes) else response.body:
            self.wfile.write(part)

    def version_string(self) -> str:
        """Return the header ``Server``: it names no versions."""
        return "mqtemplate"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Log each request at the level DEBUG. The query may contain a token, so it is left out."""
        owner = self.server.owner
        line = (format % args).partition("?")[0]
        owner.events.debug(f"{owner.event}.request", remote=self.client_address[0], line=line)

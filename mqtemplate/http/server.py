"""HTTP server with one thread for each connection.

A client cannot hold what the others need: each phase of a request has a deadline, and when all connections are in use,
the one that has waited longest for its client is closed for a new one.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import EventLogger
from mqtemplate.http.exchange import (
    MAX_HEAD_BYTES,
    HttpHandler,
    HttpRequest,
    HttpResponse,
    RefusedRequestError,
    RequestHead,
    below,
    body_length,
    parse_head,
    refused,
    short_body,
)
from mqtemplate.message import HostAddress

_IDLE_S = 10.0
_HEAD_S = 10.0
"""Time for all headers from the first byte on, however often a byte arrives."""
_BODY_S = 30.0
_WRITE_S = 10.0
"""Time for the client to take one response, or one part of a stream."""
_URGENT_PLACES = 4
_END_OF_HEAD = b"\r\n\r\n"


class HttpServer:
    """Serves a function on an address.

    Args:
        port: 0 for a free one.
        thread_name: Name of the thread that accepts connections.
        events: Gets the event ``<event>.request_failed``, and ``<event>.request`` at the level DEBUG.
        event: First part of the names of these events.
        max_connections: Most connections. With one more, the one that has waited longest for its client is closed.
        max_body_bytes: A larger body is refused with 413.
        urgent_path: Requests on this path and below it are served while *max_connections* others are served.
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
        urgent_path: str | None = None,
    ) -> None:
        self.handler = handler
        self.events = events
        self.event = event
        self.max_connections = max_connections
        self.max_body_bytes = max_body_bytes
        self.urgent_path = urgent_path
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
        """Stop listening, and end the connections; a response that is being created is still sent.

        Stopping twice is harmless.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        server.places.close()
        if self._thread is not None:
            self._thread.join(_IDLE_S)


class _ClientGoneError(Exception):
    """The client ended the connection, or does not take its response."""


class _Places:
    """The open connections, limited in number.

    A connection either waits for its client (for a request, or until it takes a response), or has a handler that works
    for it. Only one that waits is ever closed for another.
    """

    def __init__(self, most: int, most_handled: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[_HttpConnection, float] = {}
        self._handled: set[_HttpConnection] = set()
        self.handlers = threading.BoundedSemaphore(most_handled)
        self.is_closed = False

    def add(self, connection: _HttpConnection) -> bool:
        """Add a new connection; return False if all places have handlers that work."""
        with self._lock:
            if len(self._waiting) + len(self._handled) >= self._most:
                if not self._waiting:
                    return False
                oldest = self._longest_waiting()
                del self._waiting[oldest]
                oldest.abort()
            self._waiting[connection] = time.monotonic()
            return True

    def _longest_waiting(self) -> _HttpConnection:
        """Return the one that has waited longest, of the address with the most: it cannot push out other addresses."""
        counts = Counter(each.client_address[0] for each in self._waiting)
        return max(self._waiting, key=lambda each: (counts[each.client_address[0]], -self._waiting[each]))

    def wait(self, connection: _HttpConnection) -> bool:
        """Note that the connection waits for its client; return False if it is closed."""
        with self._lock:
            if connection in self._handled:
                self._handled.remove(connection)
                self._waiting[connection] = time.monotonic()
            return connection in self._waiting and not self.is_closed

    def handle(self, connection: _HttpConnection) -> bool:
        """Note that a handler works for the connection; return False if it was closed for another."""
        with self._lock:
            if self._waiting.pop(connection, None) is None:
                return connection in self._handled
            self._handled.add(connection)
            return True

    def take_handler(self) -> bool:
        """Return True if one more request, which is not urgent, may be handled now."""
        return self.handlers.acquire(blocking=False)

    def remove(self, connection: _HttpConnection) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            self._handled.discard(connection)

    def close(self) -> None:
        """End the connections that wait; those with a handler end after its response."""
        with self._lock:
            self.is_closed = True
            for each in self._waiting:
                each.abort()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1_024  # a client that finds it full tries again after a second

    def __init__(self, owner: HttpServer, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.owner = owner
        reserve = _URGENT_PLACES if owner.urgent_path is not None else 0
        self.places = _Places(owner.max_connections + reserve, owner.max_connections)
        super().__init__(address, socketserver.BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = _HttpConnection(self, request, client_address)
        if self.places.add(connection):
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
        else:
            self.shutdown_request(request)

    def _serve(self, connection: _HttpConnection) -> None:
        try:
            connection.serve()
        except _ClientGoneError:
            pass  # no client to answer
        except Exception:
            self.handle_error(connection.socket, connection.client_address)
        finally:
            self.places.remove(connection)
            self.shutdown_request(connection.socket)

    def handle_error(self, request: Any, client_address: Any) -> None:
        event = f"{self.owner.event}.request_failed"
        self.owner.events.warning(event, remote=str(client_address[0]), exc_info=True)


class _HttpConnection:
    """One connection: requests are read, handled and answered one after the other."""

    def __init__(self, server: _Server, connected: socket.socket, client_address: Any) -> None:
        self.socket = connected
        self.client_address = client_address
        self._owner = server.owner
        self._places = server.places
        self._received = b""
        self._keeps_open = True

    @cached_property
    def _user(self) -> int | None:
        return local_user(self.socket)

    def abort(self) -> None:
        """Wake the thread of the connection: it finds the connection at its end."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was faster

    def serve(self) -> None:
        """Answer requests until the connection ends."""
        while self._keeps_open and self._places.wait(self):
            try:
                head = self._read_head()
                if head is None:
                    return
                body = self._read_body(head)
            except RefusedRequestError as exc:
                self._refuse(exc)
                return
            if not self._places.handle(self):
                return
            self._answer(head, body)

    # --- reading -------------------------------------------------------------------------------

    def _receive(self, deadline: float) -> bytes:
        """Return bytes from the client, empty at the end.

        Raises:
            TimeoutError: The deadline has passed.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            self.socket.settimeout(left)
            return self.socket.recv(65_536)
        except TimeoutError:
            raise
        except OSError:  # the client reset the connection
            return b""

    def _read_head(self) -> RequestHead | None:
        """Return the head of the next request; None if there are no messages."""
        try:
            self._received = self._received or self._receive(time.monotonic() + _IDLE_S)
        except TimeoutError:
            return None
        deadline = time.monotonic() + _HEAD_S
        while True:
            # RFC 9112, section 2.2: some clients send an empty line after a body.
            if self._received.startswith(b"\r\n"):
                self._received = self._received[2:]
            head, end, rest = self._received.partition(_END_OF_HEAD)
            if len(head) > MAX_HEAD_BYTES:
                raise RefusedRequestError(431, f"the headers are too large, allowed are {MAX_HEAD_BYTES} bytes")
            if end:
                self._received = rest
                return parse_head(head)
            try:
                more = self._receive(deadline)
            except TimeoutError:
                raise RefusedRequestError(408, f"the headers did not arrive within {_HEAD_S:.0f} s") from None
            if not more:
                return None
            self._received += more

    def _read_body(self, head: RequestHead) -> bytes:
        headers = head.headers
        size = body_length(headers.get("content-length"), headers.get("transfer-encoding"), self._owner.max_body_bytes)
        expected = headers.get("expect")
        if expected is not None and expected.lower() != "100-continue":
            raise RefusedRequestError(417, f"the only expectation is 100-continue, got {expected[:40]!r}")
        parts, length = [self._received], len(self._received)
        if expected is not None and length < size:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        deadline = time.monotonic() + _BODY_S
        while length < size:
            try:
                more = self._receive(deadline)
            except TimeoutError:
                raise RefusedRequestError(408, f"the body did not arrive within {_BODY_S:.0f} s") from None
            if not more:
                raise short_body(length, size)
            parts.append(more)
            length += len(more)
        received = b"".join(parts)
        self._received = received[size:]
        return received[:size]

    # --- answering -----------------------------------------------------------------------------

    def _answer(self, head: RequestHead, body: bytes) -> None:
        owner, path = self._owner, unquote(head.path)
        is_urgent = owner.urgent_path is not None and below(path, owner.urgent_path) is not None
        if not is_urgent and not self._places.take_handler():
            self._refuse(RefusedRequestError(503, f"{owner.max_connections} requests are served already; try again"))
            return
        request = HttpRequest(
            method=head.method,
            path=path,
            query=parse_qsl(head.query, keep_blank_values=True),
            headers=head.headers,
            body=body,
            remote=str(self.client_address[0]),
            user=None if is_urgent else self._user,
        )
        try:
            response = owner.handler(request)
        finally:
            # Not later: a client that does not take its response must not occupy the handler.
            if not is_urgent:
                self._places.handlers.release()
        try:
            self._send(response, head)
        finally:
            response.close()

    def _send(self, response: HttpResponse, head: RequestHead) -> None:
        is_stream = not isinstance(response.body, bytes)
        self._keeps_open = head.keeps_open and not is_stream and not self._places.is_closed
        # The query may contain a token, so it is left out.
        line = f"{head.method} {head.path} {response.status}"
        self._owner.events.debug(f"{self._owner.event}.request", remote=str(self.client_address[0]), line=line)
        start = self._head_of(response)
        if isinstance(response.body, bytes):
            self._places.wait(self)
            self._write(start if head.method == "HEAD" else start + response.body)
            return
        self._write(start)
        if head.method == "HEAD":
            return
        for part in response.body:
            self._places.wait(self)  # a client that does not read its stream waits, too
            self._write(part)
            if self._places.is_closed or not self._places.handle(self):
                return

    def _head_of(self, response: HttpResponse) -> bytes:
        fields = [
            ("Server", "mqtemplate"),  # it names no versions
            ("Date", formatdate(usegmt=True)),
            *response.all_headers,
            *(() if self._keeps_open else (("Connection", "close"),)),
        ]
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
        lines += (f"{name}: {value}" for name, value in fields)
        assert not any("\r" in line or "\n" in line for line in lines), "a header is one line"
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _write(self, data: bytes) -> None:
        try:
            self.socket.settimeout(_WRITE_S)
            self.socket.sendall(data)
        except OSError as exc:
            raise _ClientGoneError from exc

    def _refuse(self, error: RefusedRequestError) -> None:
        """Answer a request that was not handled, and end the connection."""
        self._keeps_open = False
        response = refused(error)
        assert isinstance(response.body, bytes)
        self._owner.events.debug(
            f"{self._owner.event}.request", remote=str(self.client_address[0]), line=f"refused {error.status}"
        )
        self._places.wait(self)
        self._write(self._head_of(response) + response.body)
        self._discard_rest()

    def _discard_rest(self) -> None:
        """Read what the client still sends: with unread bytes, closing resets the connection and loses the response."""
        deadline, left = time.monotonic() + 1.0, 2 * self._owner.max_body_bytes
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while left > 0 and (more := self._receive(deadline)):
                left -= len(more)
        except OSError:
            pass  # the client was faster, or sends without an end


_TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
# man 5 proc, /proc/pid/net/tcp: after the number of the line, the two addresses, the state, and in the eighth column
# the user id.
_LOCAL, _REMOTE, _USER = 1, 2, 7


def local_user(connected: socket.socket) -> int | None:
    """Return the user id of the client of a connection; None if it is on another machine, or unknown."""
    try:
        here, there = connected.getsockname(), connected.getpeername()
        if not ipaddress.ip_address(there[0].partition("%")[0]).is_loopback:
            return None
        # The socket of the client has the same two addresses, the other way round.
        wanted = (_as_in_table(there), _as_in_table(here))
        with _TABLES[connected.family].open("r", encoding="ascii") as lines:
            for line in lines:
                columns = line.split()
                if (columns[_LOCAL], columns[_REMOTE]) == wanted:
                    return int(columns[_USER])
    except (OSError, ValueError, LookupError):
        return None  # another system, a closed connection, or /proc is hidden
    return None


def _as_in_table(address: tuple[str, int]) -> str:
    """Return an address as the tables show it: words of four bytes in the order of the processor."""
    packed = ipaddress.ip_address(address[0].partition("%")[0]).packed
    words = struct.unpack(f"{'<' if sys.byteorder == 'little' else '>'}{len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"

"""Connections of a client by address: one to each server."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from mqtemplate.errors import BrokerClosedError, RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.sockets import connect, parse_address
from mqtemplate.remoting.streams import Stream


class ConnectionPool:
    """Thread-safe table of connections by address.

    Threads that need the same connection at the same time open one connection together. If that fails, all of them
    fail with one attempt.

    Args:
        start_connection: Called with a new stream and its remote address; it must not use the pool. A callback that
            removes the connection waits until the pool has added it.
    """

    def __init__(
        self,
        timeout_ms: int,
        context: ssl.SSLContext | None,
        start_connection: Callable[[Stream, HostAddress], Connection],
    ) -> None:
        self._timeout_s = timeout_ms / 1_000
        self._context = context
        self._start_connection = start_connection
        self._lock = threading.Lock()
        self._attempts: dict[str, _Attempts] = {}
        self._by_address: dict[str, Connection] = {}
        self._open: dict[int, tuple[str, Connection]] = {}  # by id; includes retired connections
        self._is_closed = False

    def find(self, address: str) -> Connection | None:
        """Return the open connection to *address*, or None."""
        connection = self._by_address.get(address)
        return connection if connection is not None and connection.is_open else None

    def get(self, address: str, deadline: float | None) -> Connection:
        """Return the connection to *address*; open it if there is none.

        Block up to the connect timeout, or until *deadline* on the monotonic clock if that is earlier.

        Raises:
            RemoteConnectError: The connection cannot be opened.
            ConfigurationError: *address* is not ``host:port``.
            BrokerClosedError: The client is closed.
        """
        with self._lock:
            attempts = self._attempts.setdefault(address, _Attempts())
            failed_before = attempts.failed
        with attempts.lock:
            found = self.find(address)
            if found is not None:
                return found
            # An attempt that failed while this thread waited for the lock counts for this thread as well.
            if attempts.error is not None and attempts.failed != failed_before:
                raise RemoteConnectError(str(attempts.error)) from attempts.error
            timeout_s = self._timeout_s if deadline is None else min(self._timeout_s, deadline - time.monotonic())
            try:
                connection = self._connect(address, timeout_s)
            except RemoteConnectError as exc:
                attempts.error = exc
                attempts.failed += 1
                raise
            attempts.error = None
            return connection

    def retire(self, address: str, connection: Connection) -> None:
        """Use *connection* for no further request; responses to pending requests may still arrive on it."""
        with self._lock:
            if self._by_address.get(address) is connection:
                del self._by_address[address]

    def remove(self, connection: Connection) -> str | None:
        """Remove a closed connection; return its address, or None if it was removed before."""
        with self._lock:
            address, _ = self._open.pop(connection.id, (None, connection))
            if address is not None and self._by_address.get(address) is connection:
                del self._by_address[address]
            return address

    def close(self) -> None:
        """Close all connections, and open no more."""
        with self._lock:
            self._is_closed = True
            connections = [connection for _, connection in self._open.values()]
        for connection in connections:
            connection.close("the client is closed")

    def _connect(self, address: str, timeout_s: float) -> Connection:
        stream, remote = connect(parse_address(address), timeout_s, self._context)
        with self._lock:
            if self._is_closed:
                stream.socket.close()
                raise BrokerClosedError("this client is closed; create another one")
            connection = self._start_connection(stream, remote)
            self._open[connection.id] = address, connection
            self._by_address[address] = connection
        return connection


class _Attempts:
    """Attempts to connect to one address, one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failed = 0
        self.error: RemoteConnectError | None = None

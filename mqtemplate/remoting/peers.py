"""The servers that a client talks to, by address, and the one connection to each."""

from __future__ import annotations

import threading
import time

from mqtemplate.errors import BrokerClosedError, RemoteConnectError
from mqtemplate.remoting.addresses import parse_address, peer_address
from mqtemplate.remoting.connection import Connection, Owner
from mqtemplate.remoting.dialing import dial
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.remoting.tls import client_context


class Peers:
    """Connections by address. Thread-safe.

    Those who want the same connection at the same time make one, and learn by one attempt that it cannot be made.

    Raises:
        ConfigurationError: A file of the TLS settings cannot be used.
    """

    def __init__(self, owner: Owner, settings: RemotingClientSettings) -> None:
        self._owner = owner
        self._timeout_s = settings.connect_timeout_ms / 1_000
        self._context = None if settings.tls is None else client_context(settings.tls)
        self._lock = threading.Lock()
        self._dialing: dict[str, _Dialing] = {}
        self._by_address: dict[str, Connection] = {}
        self._address_of: dict[int, str] = {}  # by id; also of those that were retired
        self._open: dict[int, Connection] = {}
        self._is_started = False
        self._is_closed = False

    def find(self, address: str) -> Connection | None:
        """The connection, if there is one."""
        connection = self._by_address.get(address)
        return connection if connection is not None and connection.is_open else None

    def connect(self, address: str, deadline: float | None) -> Connection:
        """The connection, made now if need be; blocks, up to the connect time-out or *deadline* (monotonic seconds).

        Raises:
            RemoteConnectError: It cannot be made.
            ConfigurationError: *address* is none.
            BrokerClosedError: The client is closed.
        """
        with self._lock:
            dialing = self._dialing.setdefault(address, _Dialing())
            before = dialing.attempts
        with dialing.lock:
            found = self.find(address)
            if found is not None:
                return found
            if dialing.error is not None and dialing.attempts != before:
                raise RemoteConnectError(str(dialing.error)) from dialing.error
            timeout_s = self._timeout_s if deadline is None else min(self._timeout_s, deadline - time.monotonic())
            try:
                connection = self._dial(address, timeout_s)
            except RemoteConnectError as exc:
                dialing.error = exc
                dialing.attempts += 1
                raise
            dialing.error = None
            return connection

    def retire(self, address: str, connection: Connection) -> None:
        """Use it no longer for what is new; what is outstanding on it may still be answered."""
        with self._lock:
            if self._by_address.get(address) is connection:
                del self._by_address[address]

    def remove(self, connection: Connection) -> str | None:
        """It has ended; its address, the first time."""
        with self._lock:
            self._open.pop(connection.id, None)
            address = self._address_of.pop(connection.id, None)
            if address is not None and self._by_address.get(address) is connection:
                del self._by_address[address]
            return address

    def close(self) -> None:
        """End all, and make no more."""
        with self._lock:
            self._is_closed = True
            connections = list(self._open.values())
        for connection in connections:
            connection.close("the client is closed")

    def _dial(self, address: str, timeout_s: float) -> Connection:
        stream = dial(parse_address(address), timeout_s, self._context)
        try:
            remote = peer_address(stream.socket.getpeername())
        except OSError as exc:
            stream.socket.close()
            raise RemoteConnectError(f"{address} closed the connection at once ({exc.strerror})") from exc
        connection = Connection(stream, remote, self._owner, is_tls=self._context is not None)
        with self._lock:
            if self._is_closed:
                stream.socket.close()
                raise BrokerClosedError("this client is closed; make another one")
            if not self._is_started:
                self._is_started = True
                self._owner.loop.start()
            self._open[connection.id] = self._by_address[address] = connection
            self._address_of[connection.id] = address
        self._owner.loop.call_soon(connection.begin)
        return connection


class _Dialing:
    """Making the connection to one address."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attempts = 0  # that failed
        self.error: RemoteConnectError | None = None

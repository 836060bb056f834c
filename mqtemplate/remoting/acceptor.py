"""Listener socket of a server, and the limit of its connections."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.processes import descriptor_limit, raise_descriptor_limit
from mqtemplate.remoting.loop.io_loop import READ, IoLoop
from mqtemplate.remoting.sockets import listen_at, peer_address

_log = get_logger("mqtemplate.remoting")

_MAX_ACCEPTS = 64
"""Number of connections accepted at once, before the open connections get their turn."""
_RETRY_MS = 1_000
_FEW = 64
"""So many connections each address may have, whatever its share."""
# man accept: errors of the new connection, not of the listener
_PEER_ERRORS = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}


class Acceptor:
    """Acceptor of connections; it passes them on as non-blocking sockets.

    If the process has no file descriptor left (RLIMIT_NOFILE), it tries again after a second. Clients wait in the
    listen backlog for that time: they are not refused, and the loop does not spin.

    Raises:
        BrokerError: The address is in use or is not one of this machine.
    """

    def __init__(
        self, listen: HostAddress, loop: IoLoop, on_accept: Callable[[socket.socket, HostAddress], None]
    ) -> None:
        self._loop = loop
        self._on_accept = on_accept
        self._socket = listen_at(listen)
        self._is_closed = False
        self._is_watched = False
        self.address = peer_address(self._socket.getsockname())

    def start(self) -> None:
        """Watch the socket. Called in the loop's thread."""
        if not self._is_closed:
            self._is_watched = True
            self._loop.watch(self._socket, READ, self)

    def on_ready(self, events: int) -> None:
        for _ in range(_MAX_ACCEPTS):
            if self._is_closed:
                return
            try:
                sock, sockaddr = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno not in _PEER_ERRORS:
                    self._pause(exc)
                    return
                continue
            sock.setblocking(False)
            self._on_accept(sock, peer_address(sockaddr))

    def abort(self, reason: str) -> None:
        """Do nothing: one connection failed, the next one may succeed."""

    def close(self) -> None:
        """Close the socket. Called in the loop's thread, or before `start`."""
        if not self._is_closed:
            self._is_closed = True
            if self._is_watched:
                self._loop.unwatch(self._socket)
            self._socket.close()

    def _pause(self, exc: OSError) -> None:
        _log.error(
            "remoting.accept_failed",
            listen=str(self.address),
            error=exc.strerror or str(exc),
            retry_after_ms=_RETRY_MS,
            hint="raise the limit of open files (ulimit -n), or lower max_connections",
        )
        self._loop.unwatch(self._socket)
        self._loop.call_later(_RETRY_MS, self.start)


class ConnectionLimit:
    """Decides about each new connection, and counts those that are open. Not thread-safe: the I/O thread uses it.

    The system gives each new socket the lowest free descriptor (``man accept``). So its number tells how many
    descriptors the process has in use, and the last quarter of them remains for the files of the store: a client that
    opens connections cannot stop the others from storing messages.

    Args:
        max_connections: Largest number of connections.
        max_per_address: Largest number for one IP address. None: half of those that are possible.
    """

    def __init__(self, max_connections: int, max_per_address: int | None) -> None:
        self._max_connections = max_connections
        self._max_per_address_setting = max_per_address
        self._per_address: dict[str, int] = {}
        self._total = 0
        self._read_descriptor_limit()

    def start(self) -> None:
        """Raise the limit of open files of this process, as far as it may."""
        raise_descriptor_limit()
        self._read_descriptor_limit()

    def _read_descriptor_limit(self) -> None:
        self._descriptors = descriptor_limit()
        self._max_descriptor = self._descriptors - self._descriptors // 4
        possible = min(self._max_connections, self._max_descriptor)
        share = max(possible // 2, min(_FEW, possible))
        self._max_per_address = share if self._max_per_address_setting is None else self._max_per_address_setting

    def refusal(self, sock: socket.socket, remote: HostAddress) -> str | None:
        """Count a new connection, or return why it is refused."""
        of_address = self._per_address.get(remote.ip, 0)
        if self._total >= self._max_connections:
            return f"max-connections is {self._max_connections}"
        if sock.fileno() >= self._max_descriptor:
            return (
                f"the process may have {self._descriptors} open files, and the last {self._descriptors // 4} are not "
                "for connections; raise the limit (ulimit -n, or LimitNOFILE)"
            )
        if of_address >= self._max_per_address:
            return f"max-connections-per-address is {self._max_per_address}"
        self._per_address[remote.ip] = of_address + 1
        self._total += 1
        return None

    def leave(self, remote: HostAddress) -> None:
        """Count a connection that has ended."""
        self._total -= 1
        left = self._per_address[remote.ip] - 1
        if left:
            self._per_address[remote.ip] = left
        else:
            del self._per_address[remote.ip]

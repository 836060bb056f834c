"""Listener socket of a server."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import READ, IoLoop
from mqtemplate.remoting.sockets import listen_at, peer_address

_log = get_logger("mqtemplate.remoting")

_MAX_ACCEPTS = 64
"""Number of connections accepted at once, before the open connections get their turn."""
_RETRY_MS = 1_000
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

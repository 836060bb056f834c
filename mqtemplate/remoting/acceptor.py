"""The door of a server: listens, and takes who comes, as long as there is room."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import structlog

from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.addresses import peer_address
from mqtemplate.remoting.io_loop import READ, IoLoop

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

_BACKLOG = 1_024
_AT_ONCE = 64
"""So many are taken before those who are connected have their turn again."""
_REST_MS = 1_000
_THEIR_FAULT = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}


class Acceptor:
    """Takes connections, and hands them over as non-blocking sockets.

    Where the system has no room for another (its files are counted, RLIMIT_NOFILE), it rests for a second: those who
    wait are neither refused nor asked for again and again.

    Raises:
        BrokerError: The address cannot be listened at.
    """

    def __init__(
        self, listen: HostAddress, loop: IoLoop, on_accept: Callable[[socket.socket, HostAddress], None]
    ) -> None:
        self._loop = loop
        self._on_accept = on_accept
        self._socket = _listen_at(listen)
        self._is_closed = False
        self._is_watched = False
        self.address = peer_address(self._socket.getsockname())

    def begin(self) -> None:
        if not self._is_closed:
            self._is_watched = True
            self._loop.watch(self._socket, READ, self)

    def on_ready(self, events: int) -> None:
        for _ in range(_AT_ONCE):
            if self._is_closed:
                return
            try:
                sock, sockaddr = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno not in _THEIR_FAULT:
                    self._rest(exc)
                    return
                continue
            sock.setblocking(False)
            self._on_accept(sock, peer_address(sockaddr))

    def abort(self, reason: str) -> None:
        """One connection could not be taken over; the next may be."""

    def close(self) -> None:
        """Listen no longer. In the loop's thread, or before it has begun."""
        if not self._is_closed:
            self._is_closed = True
            if self._is_watched:
                self._loop.forget(self._socket)
            self._socket.close()

    def _rest(self, exc: OSError) -> None:
        _log.error(
            "remoting.cannot_accept",
            listen=str(self.address),
            error=exc.strerror or str(exc),
            try_again_ms=_REST_MS,
            hint="raise the limit of open files (ulimit -n), or lower max_connections",
        )
        self._loop.forget(self._socket)
        self._loop.call_later(_REST_MS, self.begin)


def _listen_at(listen: HostAddress) -> socket.socket:
    is_ipv6 = ":" in listen.ip
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and listen.ip == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server((listen.ip, listen.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise BrokerError(
            f"cannot listen at {listen} ({reason}); is another server running there, and is the address one of this "
            "machine? Port 0 lets the system choose"
        ) from exc
    sock.setblocking(False)
    return sock

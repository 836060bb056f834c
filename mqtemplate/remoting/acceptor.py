"""Accepting connections: the listener socket, the limit of connections, and the start of TLS on a new one."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable

from mqtemplate.durations import format_ms
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.processes import descriptor_limit, raise_descriptor_limit
from mqtemplate.remoting.io_loop import READ, WRITE, IoLoop
from mqtemplate.remoting.settings import FIRST_TLS_BYTE, TlsMode
from mqtemplate.remoting.sockets import PlainStream, Stream, TlsStream, listen_at, peer_address

# --- listener socket ------------------------------------------------------------------------------


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


# --- detection of TLS, handshake ------------------------------------------------------------------


class Handshake:
    """Detection of TLS, and the handshake if the client uses it, without blocking the I/O thread.

    Args:
        on_done: Called with the stream when it is ready; the socket is not watched then. None: the connection failed
            and is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        remote: HostAddress,
        loop: IoLoop,
        context: ssl.SSLContext,
        mode: TlsMode,
        on_done: Callable[[Stream | None], None],
        peer_log: LimitedLog,
    ) -> None:
        self._socket = sock
        self._peer_log = peer_log
        self._tls: ssl.SSLSocket | None = None
        self._remote = remote
        self._loop = loop
        self._context = context
        self._mode = mode
        self._on_done = on_done
        self._is_done = False

    def start(self, timeout_ms: int, idle_ms: int) -> None:
        """Watch the socket: *idle_ms* for the first byte, then *timeout_ms* for the handshake."""
        self._timeout_ms = timeout_ms
        self._timer = self._loop.call_later(idle_ms, lambda: self.fail(f"idle for {format_ms(idle_ms)}", is_bad=False))
        self._loop.watch(self._socket, READ, self)

    def on_ready(self, events: int) -> None:
        if self._is_done:
            return
        try:
            if self._tls is None:
                self._detect()
            if self._tls is not None:
                self._handshake(self._tls)
        except ssl.SSLError as exc:
            self.fail(f"TLS handshake: {exc.reason or exc}")
        except OSError as exc:
            self.fail(exc.strerror or str(exc), is_bad=False)

    def abort(self, reason: str) -> None:
        self.fail(f"internal error: {reason}")

    def fail(self, reason: str, *, is_bad: bool = True) -> None:
        """Close the connection; *is_bad*: by a fault of the client, which is logged as a warning."""
        if self._is_done:
            return
        log = self._peer_log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self._remote), reason=reason)
        sock = self._tls or self._socket
        self._loop.unwatch(sock)
        sock.close()
        self._finish(None)

    def _detect(self) -> None:
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)  # the byte stays in the socket: it is part of what follows
        except (BlockingIOError, InterruptedError):
            return
        if not first:
            self.fail("closed", is_bad=False)
        elif first[0] == FIRST_TLS_BYTE:
            self._timer.cancel()
            self._timer = self._loop.call_later(
                self._timeout_ms,
                lambda: self.fail(f"the TLS handshake is not complete after {format_ms(self._timeout_ms)}"),
            )
            self._loop.unwatch(self._socket)  # wrap_socket() moves its file descriptor to the new socket
            self._tls = self._context.wrap_socket(
                self._socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        elif self._mode is TlsMode.ENFORCING:
            self.fail("the client does not use TLS, which this server enforces")
        else:
            self._loop.unwatch(self._socket)
            self._finish(PlainStream(self._socket))

    def _handshake(self, tls: ssl.SSLSocket) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.watch(tls, READ, self)
        except ssl.SSLWantWriteError:
            self._loop.watch(tls, WRITE, self)
        else:
            self._loop.unwatch(tls)
            self._finish(TlsStream(tls))

    def _finish(self, stream: Stream | None) -> None:
        self._is_done = True
        self._timer.cancel()
        self._on_done(stream)

"""Server of any protocol over TCP: listener socket, TLS, limits of connections, worker threads, and its life."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from operator import attrgetter
from typing import Generic, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerClosedError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.metrics import Counter
from mqtemplate.processes import usable_processors
from mqtemplate.remoting.io_loop import READ, TURN_S, WRITE, IoLoop
from mqtemplate.remoting.settings import (
    FIRST_TLS_BYTE,
    ConnectionLimit,
    ConnectionLimits,
    LoadedTls,
    MemoryLimit,
    RemotingServerSettings,
    TlsMode,
    load_tls,
)
from mqtemplate.remoting.sockets import PlainStream, Stream, TlsStream, listen_at, peer_address, set_tcp_options
from mqtemplate.remoting.transport import SocketConnection
from mqtemplate.remoting.worker_pool import HeavyWork, WorkerPool

_log = get_logger("mqtemplate.remoting")

ALPN_HTTP2 = "h2"
"""Name of HTTP/2 in the handshake of TLS. RFC 9113, 3.3."""


# --- listener socket ------------------------------------------------------------------------------


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
        end_s = time.monotonic() + TURN_S  # the open connections wait meanwhile
        while not self._is_closed:
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
            if time.monotonic() >= end_s:
                return

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


# --- detection of TLS, handshake ------------------------------------------------------------------


@dataclass(eq=False)
class Handshake:
    """Detection of TLS, and the handshake if the client uses it, without blocking the I/O thread.

    The detection looks at the first byte. The key exchange takes about a millisecond, so each step of the handshake
    waits for the open connections, and addresses take turns. The socket is not watched while a step waits: with
    hundreds that wait, each wait of the loop would report them all.

    Args:
        tls: None: no client uses TLS.
        limits: Longest time until the first byte, and then for the handshake.
        on_done: Called with the stream when it is ready; the socket is not watched then. None: the connection failed
            and is closed.
    """

    sock: socket.socket
    remote: HostAddress
    loop: IoLoop
    tls: LoadedTls | None
    limits: ConnectionLimits
    on_done: Callable[[Stream | None], None]
    peer_log: LimitedLog

    def __post_init__(self) -> None:
        self._tls: ssl.SSLSocket | None = None
        self._is_done = self._is_in_line = False
        idle_ms = self.limits.idle_ms
        self._timer = self.loop.call_later(idle_ms, lambda: self.fail(f"idle for {format_ms(idle_ms)}", is_bad=False))

    def start(self) -> None:
        """Watch the socket."""
        self.loop.watch(self.sock, READ, self)

    def on_ready(self, events: int) -> None:
        if self._is_in_line or self._is_done:
            return
        if self._tls is None:
            self._try(self._detect)
        else:
            self._line_up(self._tls)

    def take_turn(self) -> None:
        self._is_in_line = False
        if not self._is_done and self._tls is not None:
            self._try(partial(self._handshake, self._tls))

    def _line_up(self, tls: ssl.SSLSocket) -> None:
        self._is_in_line = True
        self.loop.unwatch(tls)
        self.loop.turns.add(self.remote.ip, self)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
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
        log = self.peer_log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self.remote), reason=reason)
        sock = self._tls or self.sock
        self.loop.unwatch(sock)
        sock.close()
        self._finish(None)

    def _detect(self) -> None:
        try:
            first = self.sock.recv(1, socket.MSG_PEEK)  # the byte stays in the socket: it is part of what follows
        except (BlockingIOError, InterruptedError):
            return
        if not first:
            self.fail("closed", is_bad=False)
        elif self.tls is not None and first[0] == FIRST_TLS_BYTE:
            self._timer.cancel()
            timeout_ms = self.limits.frame_timeout_ms
            late = f"the TLS handshake is not complete after {format_ms(timeout_ms)}"
            self._timer = self.loop.call_later(timeout_ms, lambda: self.fail(late))
            self.loop.unwatch(self.sock)
            self._tls = self.tls.context.wrap_socket(
                self.sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
            self._line_up(self._tls)
        elif self.tls is not None and self.tls.mode is TlsMode.ENFORCING:
            self.fail("the client does not use TLS, which this server enforces")
        else:
            self.loop.unwatch(self.sock)
            self._finish(PlainStream(self.sock))

    def _handshake(self, tls: ssl.SSLSocket) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self.loop.watch(tls, READ, self)
        except ssl.SSLWantWriteError:
            self.loop.watch(tls, WRITE, self)
        else:
            self._finish(TlsStream(tls))

    def _finish(self, stream: Stream | None) -> None:
        self._is_done = True
        self._timer.cancel()
        on_done, self.on_done = self.on_done, _is_done_already  # it may refer to this object
        on_done(stream)


def _is_done_already(stream: Stream | None) -> None:
    """Take the place of a function that was called."""


def speaks_http2(stream: Stream) -> bool:
    """Return True if the client of a new connection, whose first byte has arrived, uses HTTP/2.

    With TLS it says so by ALPN, without by its first bytes, ``PRI``. A frame of RocketMQ's protocol that starts with
    the same byte would have more than a gigabyte.
    """
    sock = stream.socket
    if isinstance(sock, ssl.SSLSocket):
        return sock.selected_alpn_protocol() == ALPN_HTTP2
    try:
        return sock.recv(1, socket.MSG_PEEK) == b"P"
    except OSError:  # the client has disconnected already; reading reports that
        return False


# --- server ---------------------------------------------------------------------------------------


HandOver = Callable[[Stream, HostAddress], None]
"""Takes a connection of another protocol. Its socket is not watched."""

ConnectionT = TypeVar("ConnectionT", bound=SocketConnection)


class TcpServer(Generic[ConnectionT]):
    """Base class of servers: it accepts connections, and reads all of them in one I/O thread.

    - An error of one connection closes that connection and is logged. It does not affect the others.
    - The settings bound the memory: connections, incomplete requests, unread output.

    Args:
        name: Start of the names of its threads.
        heavy: The same one for all threads that process requests. None: one of its own.

    Attributes:
        address: Address of the listener socket; after `bind` or `start` with the real port.
        peer_log: Log of warnings about clients.
        tls: TLS of new connections; None without TLS.
        refused_connections: Counts the connections that were closed at once.
        request_count: Number of requests so far.
    """

    def __init__(
        self,
        listen: HostAddress,
        name: str,
        settings: RemotingServerSettings,
        clock: Clock,
        *,
        refused_connections: Counter | None = None,
        heavy: HeavyWork | None = None,
    ) -> None:
        self.refused_connections = refused_connections or Counter()
        self.address = listen
        self.limits = settings.limits
        # On one processor, polling would keep the client from sending.
        busy_poll_us = settings.busy_poll_us if usable_processors() > 1 else 0
        self.request_count = 0
        self._heavy = heavy or HeavyWork()
        self._inline_requests = 0  # its part of those of *heavy*
        self.loop = IoLoop(
            name,
            clock,
            busy_poll_s=busy_poll_us / 1_000_000,
            requests=lambda: self.request_count,
            other_requests=lambda: self._heavy.inline_requests - self._inline_requests,
        )
        self.partial_input = self._shared_limit(settings.max_partial_bytes, "partial_bytes", "of incomplete frames")
        self.peer_log = LimitedLog(_log, lambda: int(self.loop.now_ms()))
        self.unread_output = self._shared_limit(settings.max_unread_bytes, "unread_bytes", "of unread responses")
        self._settings = settings
        self._close_callbacks: list[Callable[[ConnectionT], None]] = []
        self._connections: dict[int, ConnectionT] = {}
        self._handshakes: set[Handshake] = set()
        self.tls = load_tls(settings.tls)
        self._acceptor: Acceptor | None = None
        self._workers = WorkerPool(
            f"{name}-worker",
            settings.slow_workers,
            settings.slow_queue + settings.slow_workers,
            settings.slow_queue_per_connection,
            settings.slow_queue_bytes,
            self._heavy,
        )
        self._close_callbacks.append(self._workers.forget)
        self._hand_over: HandOver | None = None
        self._is_started = False
        self._is_draining = False
        self._limit = ConnectionLimit(settings.max_connections, settings.max_connections_per_address)
        self._pid = os.getpid()

    # --- of the protocol ----------------------------------------------------------------------------

    def _new_connection(self, stream: Stream, remote: HostAddress) -> ConnectionT:
        """Return a new connection. Called in the I/O thread."""
        raise TypeError(f"{type(self).__name__} has no protocol")

    def _start_draining(self) -> None:
        """Tell the clients that the server stops."""
        raise TypeError(f"{type(self).__name__} has no protocol")

    def _is_busy(self, connection: ConnectionT) -> bool:
        """Return True if the server has to wait for responses of a connection before it stops."""
        raise TypeError(f"{type(self).__name__} has no protocol")

    # --- for its owner ------------------------------------------------------------------------------

    def on_close(self, callback: Callable[[ConnectionT], None]) -> None:
        """Call *callback* in the I/O thread with each connection that has ended."""
        self._close_callbacks = [*self._close_callbacks, callback]  # the I/O thread may be reading the other list

    def use_tls(self, tls: LoadedTls | None) -> None:
        """Use another certificate, or other settings of TLS, for new connections. The open ones stay as they are."""
        if tls is not None and self._hand_over is not None:
            tls.context.set_alpn_protocols([ALPN_HTTP2])
        self.tls = tls  # in one step: the I/O thread reads it

    def share_port(self, hand_over: HandOver) -> None:
        """Pass new connections of clients that use HTTP/2 to *hand_over*, such as `adopt` of another server.

        Call it before `start`.
        """
        self._hand_over = hand_over
        self.use_tls(self.tls)

    def adopt(self, stream: Stream, remote: HostAddress) -> None:
        """Serve a connection that another server has accepted. Any thread may call it."""
        self.loop.call_soon(partial(self._adopt, stream, remote))

    def connections(self) -> list[ConnectionT]:
        """Return the open connections."""
        return list(self._connections.values())

    def bind(self) -> None:
        """Listen, so that `address` has the real port. Clients that connect wait until `start`.

        Raises:
            BrokerError: The address is in use or is not one of this machine, or the server was stopped.
        """
        if self._is_draining:
            raise BrokerClosedError(f"the server at {self.address} was stopped; create another one")
        if self._acceptor is None:
            self._acceptor = Acceptor(self.address, self.loop, self._on_accept)
            self.address = self._acceptor.address

    def start(self) -> None:
        """Accept connections; `bind` first, if that was not done.

        Raises:
            BrokerError: As `bind`.
        """
        self.bind()
        acceptor = self._acceptor
        assert acceptor is not None
        self._is_started = True
        self._limit.start()
        self._workers.start()
        self.loop.start()
        self.loop.call_soon(acceptor.start)
        _log.debug("remoting.started", address=str(self.address), tls=self.tls.mode.value if self.tls else "disabled")

    def stop(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, wait for the responses in progress, close all connections, and join the threads.

        In a forked child this does nothing: connections and threads belong to the parent.

        Args:
            timeout_s: Longest time to wait for responses, whatever clients do; by default the setting ``drain_ms``.
        """
        acceptor = self._acceptor
        if os.getpid() != self._pid or self._is_draining or acceptor is None:
            return
        self._is_draining = True
        self._start_draining()
        if not self._is_started:
            acceptor.close()
            return
        deadline = time.monotonic() + (self._settings.drain_ms / 1_000 if timeout_s is None else timeout_s)
        self.loop.call_soon(acceptor.close)
        self._drain(deadline)
        self.loop.call_soon(self._close_all)
        self.loop.stop()
        self._workers.stop(max(deadline - time.monotonic(), 0))
        _log.debug("remoting.stopped", address=str(self.address))

    def on_closed(self, connection: ConnectionT, reason: str) -> None:
        """Remove a connection that has ended."""
        if self._connections.pop(connection.id, None) is None:
            return
        self._limit.leave(connection.remote)
        for callback in self._close_callbacks:
            try:
                callback(connection)
            except Exception as exc:
                self.peer_log.log(ERROR, "remoting.callback_failed", remote=str(connection.remote), exc_info=exc)

    # --- connections: in the I/O thread ---------------------------------------------------------------

    def _on_accept(self, sock: socket.socket, remote: HostAddress) -> None:
        if not self._accepts(sock, remote):
            return
        try:
            set_tcp_options(sock)
        except OSError:  # the client has disconnected already; reading reports that
            pass
        if self.tls is None and self._hand_over is None:
            self._connect(PlainStream(sock), remote)
        else:
            self._start_handshake(sock, remote)

    def _accepts(self, sock: socket.socket, remote: HostAddress) -> bool:
        """Count a new connection, or refuse it."""
        refusal = "the server is stopped" if self._is_draining else self._limit.refusal(sock, remote)
        if refusal is None:
            return True
        self.refused_connections.add()
        self.peer_log.warning("remoting.connection_refused", remote=str(remote), reason=refusal)
        sock.close()
        return False

    def _adopt(self, stream: Stream, remote: HostAddress) -> None:
        if self._accepts(stream.socket, remote):
            self._connect(stream, remote)

    def _start_handshake(self, sock: socket.socket, remote: HostAddress) -> None:
        def on_done(stream: Stream | None) -> None:
            self._handshakes.discard(handshake)
            if stream is None:
                self._limit.leave(remote)
            elif self._hand_over is not None and speaks_http2(stream):
                self._limit.leave(remote)
                self._hand_over(stream, remote)
            else:
                self._connect(stream, remote)

        handshake = Handshake(sock, remote, self.loop, self.tls, self.limits, on_done, self.peer_log)
        self._handshakes.add(handshake)
        handshake.start()

    def _connect(self, stream: Stream, remote: HostAddress) -> None:
        connection = self._new_connection(stream, remote)
        self._connections[connection.id] = connection
        connection.start()

    def _shared_limit(self, limit: int, attribute: str, what: str) -> MemoryLimit:
        """Return the limit of an attribute's sum over all connections.

        Above it, the largest connections are closed of the address that has most: one that opens many connections must
        not cause the end of the others.
        """
        size_of: Callable[[ConnectionT], int] = attrgetter(attribute)

        def close_largest() -> None:
            if not shared.is_exceeded:  # this was planned more than once
                return
            of_address: dict[str, int] = {}
            sizes = [(connection, size_of(connection)) for connection in self.connections()]
            for connection, size in sizes:
                of_address[connection.remote.ip] = of_address.get(connection.remote.ip, 0) + size
            sizes.sort(key=lambda each: (of_address[each[0].remote.ip], each[1]), reverse=True)
            for largest, size in sizes:
                if not size or not shared.is_exceeded:
                    return
                largest.end(f"all connections hold {shared.held} bytes {what}, this one {size} of them", is_bad=True)

        shared = MemoryLimit(limit, partial(self.loop.call_soon, close_largest))
        return shared

    # --- requests ---------------------------------------------------------------------------------

    def _count_inline(self, requests: int = 1) -> None:
        """Count requests that the I/O thread processes itself; -1: it passes one to another thread after all."""
        self._inline_requests += requests
        self._heavy.count_inline(requests)

    # --- stop -----------------------------------------------------------------------------------------

    def _drain(self, deadline: float) -> None:
        """Wait until no request is unanswered and no response is unread, but not longer than until *deadline*."""
        pause = threading.Event()
        while time.monotonic() < deadline:
            if not any(self._is_busy(connection) for connection in self.connections()):
                return
            pause.wait(0.005)

    def _close_all(self) -> None:
        for handshake in list(self._handshakes):
            handshake.fail("the server is stopped", is_bad=False)
        for connection in self.connections():
            connection.end("the server is stopped")

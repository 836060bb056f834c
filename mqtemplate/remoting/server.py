"""Server side of the remoting protocol: one I/O thread accepts connections, and reads all of them."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerClosedError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.metrics import Counter
from mqtemplate.processes import usable_processors
from mqtemplate.remoting.connection import CommandsOnly, Connection, RequestPipeline
from mqtemplate.remoting.io_loop import READ, WRITE, IoLoop
from mqtemplate.remoting.protocol.codes import ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand, not_supported, system_error
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
from mqtemplate.remoting.worker_pool import HeavyWork, WorkerPool

_log = get_logger("mqtemplate.remoting")


# --- listener socket ------------------------------------------------------------------------------


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


# --- detection of TLS, handshake ------------------------------------------------------------------


@dataclass(eq=False)
class Handshake:
    """Detection of TLS, and the handshake if the client uses it, without blocking the I/O thread.

    Args:
        limits: Longest time until the first byte, and then for the handshake.
        on_done: Called with the stream when it is ready; the socket is not watched then. None: the connection failed
            and is closed.
    """

    sock: socket.socket
    remote: HostAddress
    loop: IoLoop
    context: ssl.SSLContext
    mode: TlsMode
    limits: ConnectionLimits
    on_done: Callable[[Stream | None], None]
    peer_log: LimitedLog

    def __post_init__(self) -> None:
        self._tls: ssl.SSLSocket | None = None
        self._is_done = False
        idle_ms = self.limits.idle_ms
        self._timer = self.loop.call_later(idle_ms, lambda: self.fail(f"idle for {format_ms(idle_ms)}", is_bad=False))

    def start(self) -> None:
        """Watch the socket."""
        self.loop.watch(self.sock, READ, self)

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
        elif first[0] == FIRST_TLS_BYTE:
            self._timer.cancel()
            timeout_ms = self.limits.frame_timeout_ms
            late = f"the TLS handshake is not complete after {format_ms(timeout_ms)}"
            self._timer = self.loop.call_later(timeout_ms, lambda: self.fail(late))
            self.loop.unwatch(self.sock)  # wrap_socket() moves its file descriptor to the new socket
            self._tls = self.context.wrap_socket(
                self.sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        elif self.mode is TlsMode.ENFORCING:
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
            self.loop.unwatch(tls)
            self._finish(TlsStream(tls))

    def _finish(self, stream: Stream | None) -> None:
        self._is_done = True
        self._timer.cancel()
        self.on_done(stream)


# --- server ---------------------------------------------------------------------------------------


Processor = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Processor of requests with one code. It runs in the I/O thread and must not block, unless it is registered as slow.

It returns the response, or None if it responds by `Connection.reply` or the request is one-way."""

Guard = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Check of each request before its processor, in the I/O thread. It returns a response if it refuses the request."""

NewPipeline = Callable[[Connection, Callable[[int], None]], RequestPipeline]
"""Creates the pipeline of a connection, which passes the number of requests that it has processed to the callback."""

ErrorResponse = Callable[[RemotingCommand, Exception], RemotingCommand | None]
"""Conversion of an exception of a processor or of the guard to a response.

None: the exception is logged, and the response is SYSTEM_ERROR with the exception's text."""


_MAX_INLINE_BYTES = 16_384
"""Largest body that is parsed in the I/O thread."""


class _Registered(NamedTuple):
    processor: Processor
    is_slow: bool
    max_inline_bytes: int
    max_body_bytes: int


class RemotingServer:
    """Server that passes each request to the processor of its code.

    - Each request that is not one-way gets a response: REQUEST_CODE_NOT_SUPPORTED for an unknown code, SYSTEM_ERROR if
      the processor raises an exception, SYSTEM_BUSY above a limit.
    - An error of one connection closes that connection and is logged. It does not affect the others.
    - The settings bound the memory: connections, incomplete frames, unread output.

    Args:
        guard: None: every request reaches its processor.
        error_response: None: the response to each exception is SYSTEM_ERROR.
        heavy: The same one for all threads that process requests. None: one of its own.
        reasons: Request code -> why it has no processor, for the response.

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
        settings: RemotingServerSettings,
        clock: Clock,
        *,
        guard: Guard | None = None,
        error_response: ErrorResponse | None = None,
        refused_connections: Counter | None = None,
        heavy: HeavyWork | None = None,
        reasons: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._reasons = reasons
        self.refused_connections = refused_connections or Counter()
        self.address = listen
        self.limits = settings.limits
        # On one processor, polling would keep the client from sending.
        busy_poll_us = settings.busy_poll_us if usable_processors() > 1 else 0
        self.request_count = 0
        self.loop = IoLoop(
            "mqtemplate-server", clock, busy_poll_s=busy_poll_us / 1_000_000, requests=lambda: self.request_count
        )
        self.partial_input = self._shared_limit(settings.max_partial_bytes, "partial_bytes", "of incomplete frames")
        self.peer_log = LimitedLog(_log, lambda: int(self.loop.now_ms()))
        self.unread_output = self._shared_limit(settings.max_unread_bytes, "unread_bytes", "of unread responses")
        self._guard = guard
        self._new_pipeline: NewPipeline = lambda connection, count: CommandsOnly()
        self._error_response = error_response
        self._settings = settings
        self._processors: dict[int, _Registered] = {}
        self._close_callbacks: list[Callable[[Connection], None]] = []
        self._connections: dict[int, Connection] = {}
        self._heavy = heavy or HeavyWork()
        self._handshakes: set[Handshake] = set()
        self.tls = load_tls(settings.tls)
        self._acceptor: Acceptor | None = None
        self._workers = WorkerPool(
            "mqtemplate-server-worker",
            settings.slow_workers,
            settings.slow_queue + settings.slow_workers,
            settings.slow_queue_per_connection,
            settings.slow_queue_bytes,
            self._heavy,
        )
        self._close_callbacks.append(self._workers.forget)
        self._is_started = False
        self._is_draining = False
        self._limit = ConnectionLimit(settings.max_connections, settings.max_connections_per_address)
        self._pid = os.getpid()

    # --- for its owner ------------------------------------------------------------------------------

    def register(
        self, code: int, processor: Processor, *, slow: bool = False, max_body_bytes: int | None = None
    ) -> None:
        """Pass requests with *code* to *processor*.

        Args:
            slow: Call it in a worker thread, where it may block.
            max_body_bytes: Largest body, if the processor parses it. A large one is parsed in a worker thread, by the
                guard too. None: the processor does not parse it.
        """
        limits = (sys.maxsize, sys.maxsize) if max_body_bytes is None else (_MAX_INLINE_BYTES, max_body_bytes)
        self._processors[code] = _Registered(processor, slow, *limits)

    def use_pipelines(self, new_pipeline: NewPipeline) -> None:
        """Let *new_pipeline* create the pipeline of each new connection. By default each request is a command."""
        self._new_pipeline = new_pipeline

    def on_close(self, callback: Callable[[Connection], None]) -> None:
        """Call *callback* in the I/O thread with each connection that has ended."""
        self._close_callbacks.append(callback)

    def use_tls(self, tls: LoadedTls | None) -> None:
        """Use another certificate, or other settings of TLS, for new connections. The open ones stay as they are."""
        self.tls = tls  # in one step: the I/O thread reads it

    def connections(self) -> list[Connection]:
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

        Clients above V5_3_1 get GO_AWAY, after which they use another broker; requests of older ones are still
        processed. In a forked child this does nothing: connections and threads belong to the parent.

        Args:
            timeout_s: Longest time to wait for responses, whatever clients do; by default the setting ``drain_ms``.
        """
        acceptor = self._acceptor
        if os.getpid() != self._pid or self._is_draining or acceptor is None:
            return
        self._is_draining = True
        for connection in self.connections():
            connection.end_pipeline()  # a command gets GO_AWAY
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

    # --- interface of connections -------------------------------------------------------------------

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Refuse a request, or pass it to its processor."""
        self.request_count += 1
        if self._is_draining and request.version > Version.V5_3_1 and not request.is_one_way:
            connection.reply(request.response(ResponseCode.GO_AWAY, remark="the server is shutting down"))
            return
        found = self._processors.get(request.code)
        if found is None:
            connection.reply(not_supported(request, self._reasons.get(request.code)))
            return
        processor, is_slow, max_inline_bytes, max_body_bytes = found
        if len(request.body) > max_inline_bytes:
            self._on_large_request(connection, request, processor, max_body_bytes)
            return
        refusal = None if self._guard is None else self._call(self._guard, connection, request)
        if refusal is not None:
            connection.reply(refusal)
        elif is_slow:
            self._submit(partial(self._process, processor, connection, request), connection, request)
        else:
            self._heavy.count_inline()
            self._process(processor, connection, request)

    def _on_large_request(
        self, connection: Connection, request: RemotingCommand, processor: Processor, max_body_bytes: int
    ) -> None:
        """Check and process a request with a large body in a worker thread: parsing it takes milliseconds."""
        if len(request.body) > max_body_bytes:
            remark = (
                f"the body of this request has {len(request.body)} bytes, allowed are {max_body_bytes}; send several "
                "smaller requests"
            )
            connection.reply(request.response(ResponseCode.MESSAGE_ILLEGAL, remark=remark))
            return

        def check_and_process() -> None:
            refusal = None if self._guard is None else self._call(self._guard, connection, request)
            if refusal is None:
                self._process(processor, connection, request)
            else:
                connection.reply(refusal)

        self._submit(check_and_process, connection, request)

    def new_pipeline(self, connection: Connection) -> RequestPipeline:
        """Return the pipeline of a new connection. The guard checks commands, so with a guard there are only these."""
        return self._new_pipeline(connection, self._count) if self._guard is None else CommandsOnly()

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Remove a connection that has ended."""
        if self._connections.pop(connection.id, None) is None:
            return
        self._limit.leave(connection.remote)
        for callback in self._close_callbacks:
            try:
                callback(connection)
            except Exception as exc:
                self.peer_log.log(ERROR, "remoting.callback_failed", remote=str(connection.remote), exc_info=exc)

    def sign(self, request: RemotingCommand) -> None:
        """Leave the request as it is: brokers do not sign their requests to clients."""

    def _count(self, requests: int) -> None:
        self.request_count += requests
        self._heavy.count_inline(requests)

    # --- requests -----------------------------------------------------------------------------------

    def _process(self, processor: Processor, connection: Connection, request: RemotingCommand) -> None:
        response = self._call(processor, connection, request)
        if response is not None and not request.is_one_way:
            connection.reply(response)

    def _call(self, processor: Processor, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        try:
            return processor(connection, request)
        except Exception as exc:
            return self._response_to_error(connection, request, exc)

    def _response_to_error(self, connection: Connection, request: RemotingCommand, exc: Exception) -> RemotingCommand:
        response = None
        try:
            response = None if self._error_response is None else self._error_response(request, exc)
        except Exception as other:
            self.peer_log.log(ERROR, "remoting.error_response_failed", request=str(request), exc_info=other)
        if response is None:
            self.peer_log.log(
                ERROR, "remoting.processor_failed", request=str(request), remote=str(connection.remote), exc_info=exc
            )
            response = system_error(request, exc)
        return response

    def _submit(self, work: Callable[[], None], connection: Connection, request: RemotingCommand) -> None:
        """Pass a request to a worker thread, unless too many or too large ones are in the queue."""
        if not self._workers.submit(connection, work, len(request.body)):
            remark = "too many requests of this kind wait for a thread already; try again later"
            connection.reply(request.response(ResponseCode.SYSTEM_BUSY, remark=remark))

    # --- connections: in the I/O thread ---------------------------------------------------------------

    def _on_accept(self, sock: socket.socket, remote: HostAddress) -> None:
        refusal = self._limit.refusal(sock, remote)
        if refusal is not None:
            self.refused_connections.add()
            self.peer_log.warning("remoting.connection_refused", remote=str(remote), reason=refusal)
            sock.close()
            return
        try:
            set_tcp_options(sock)
        except OSError:  # the client has disconnected already; reading reports that
            pass
        if self.tls is None:
            self._connect(PlainStream(sock), remote)
        else:
            self._start_handshake(sock, remote, self.tls)

    def _start_handshake(self, sock: socket.socket, remote: HostAddress, tls: LoadedTls) -> None:
        def on_done(stream: Stream | None) -> None:
            self._handshakes.discard(handshake)
            if stream is None:
                self._limit.leave(remote)
            else:
                self._connect(stream, remote)

        handshake = Handshake(sock, remote, self.loop, tls.context, tls.mode, self.limits, on_done, self.peer_log)
        self._handshakes.add(handshake)
        handshake.start()

    def _connect(self, stream: Stream, remote: HostAddress) -> None:
        connection = Connection(stream, remote, self)
        self._connections[connection.id] = connection
        connection.start()

    def _shared_limit(self, limit: int, attribute: str, what: str) -> MemoryLimit:
        """Return the limit of an attribute's sum over all connections. Above it, the largest ones are closed."""
        size_of: Callable[[Connection], int] = attrgetter(attribute)

        def close_largest() -> None:
            while shared.is_exceeded and self._connections:
                largest = max(self._connections.values(), key=size_of)
                size = size_of(largest)
                if not size:
                    return
                largest.end(f"all connections hold {shared.held} bytes {what}, this one {size} of them", is_bad=True)

        shared = MemoryLimit(limit, partial(self.loop.call_soon, close_largest))
        return shared

    # --- stop -----------------------------------------------------------------------------------------

    def _drain(self, deadline: float) -> None:
        """Wait until no request is unanswered and no response is unread, but not longer than until *deadline*."""
        pause = threading.Event()
        while time.monotonic() < deadline:
            if not any(connection.unanswered or connection.unread_bytes for connection in self.connections()):
                return
            pause.wait(0.005)

    def _close_all(self) -> None:
        for handshake in list(self._handshakes):
            handshake.fail("the server is stopped", is_bad=False)
        for connection in self.connections():
            connection.end("the server is stopped")

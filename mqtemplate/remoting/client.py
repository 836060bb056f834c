"""Client side of the remoting protocol: one connection to each address, opened at its first use."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError, BrokerError, RemoteConnectError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.futures import Waiter
from mqtemplate.message import HostAddress
from mqtemplate.processes import OwnerProcess
from mqtemplate.remoting.connection import (
    CommandsOnly,
    Connection,
    InvokeCallback,
    RequestPipeline,
    call_safely,
    next_opaque,
)
from mqtemplate.remoting.io_loop import IoLoop
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.codec import encode_head
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand, not_supported, system_error
from mqtemplate.remoting.settings import MemoryLimit, RemotingClientSettings, client_context
from mqtemplate.remoting.sockets import Stream, connect, parse_address

# --- connections by address -----------------------------------------------------------------------


class ConnectionPool:
    """Thread-safe table of connections by address.

    Threads that need the same connection at the same time open one connection together. If that fails, all of them
    fail with one attempt.

    Args:
        start_connection: Called with a new stream and its remote address; it must not use the pool. A callback that
            removes the connection waits until the pool has added it.
        origin_of: See `RemotingClient`.
    """

    def __init__(
        self,
        timeout_ms: int,
        context: ssl.SSLContext | None,
        start_connection: Callable[[Stream, HostAddress], Connection],
        origin_of: Callable[[str], str | None] = lambda address: None,
    ) -> None:
        self._timeout_s = timeout_ms / 1_000
        self._context = context
        self._start_connection = start_connection
        self._origin_of = origin_of
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
        """Return the connection to *address*; open it if it is missing.

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
        try:
            stream, remote = connect(parse_address(address), timeout_s, self._context)
        except RemoteConnectError as exc:
            origin = self._origin_of(address)
            if origin is None:
                raise
            raise RemoteConnectError(f"{exc}; {origin}") from exc
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


# --- client ---------------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remoting")

OnRequest = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Processor of a broker's requests. It runs in a worker thread and may block.

It returns the response, or None if it responds by `Connection.reply` or the request is one-way."""

_CONNECT_THREADS = 8


class RemotingClient:
    """Client of servers, which may also send requests over the same connections. Thread-safe.

    - An address is a text: ``host:port`` or ``[::1]:port``. Each address has one connection. It is opened at its first
      use, and again at the next use after it was lost.
    - One I/O thread reads all connections; the calling thread sends. Callbacks run in the I/O thread: they must not
      block and may not call `invoke`. Requests of brokers have worker threads, which may do both.
    - All pending requests of a lost connection fail at once. The client repeats no request, with one exception: a
      request that a stopping server refused with GO_AWAY is repeated once, over a new connection.

    Args:
        on_close: Called in the I/O thread with the address of each connection that has ended.
        origin_of: Returns where an address came from, and what to do if it is wrong; errors of an attempt to connect
            end with it.

    Raises:
        ConfigurationError: A file of the TLS settings cannot be used.
    """

    def __init__(
        self,
        settings: RemotingClientSettings,
        clock: Clock,
        on_request: OnRequest | None = None,
        on_close: Callable[[str], None] = lambda address: None,
        *,
        origin_of: Callable[[str], str | None] = lambda address: None,
    ) -> None:
        self.limits = settings.limits
        self.partial_input = self.unread_output = MemoryLimit()
        self.loop = IoLoop("mqtemplate-client", clock)
        self.peer_log = LimitedLog(_log, lambda: int(self.loop.now_ms()))
        self._credentials = settings.credentials
        self._on_request = on_request
        context = None if settings.tls is None else client_context(settings.tls)
        self._pool = ConnectionPool(settings.connect_timeout_ms, context, self._start_connection, origin_of)
        self._on_close = on_close
        self._connectors = ThreadPoolExecutor(_CONNECT_THREADS, "mqtemplate-client-connect")
        self._workers = ThreadPoolExecutor(settings.request_workers, "mqtemplate-client-worker")
        self._is_started = False
        self._is_closed = False
        self._owner = OwnerProcess(
            "this client",
            "Create the client after the fork, for example in the worker's start-up hook (gunicorn: post_fork), or "
            "start workers by spawn",
        )

    # --- requests -----------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """False if the client is closed, or was created before a fork: then each request raises an error."""
        return not self._is_closed and self._owner.is_current

    def invoke(self, address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        """Send a request, wait for the response, and return it. The client sets the request's opaque and signature.

        Raises:
            RemoteConnectError: The connection cannot be opened, or was lost.
            RemoteTimeoutError: No response arrived in time.
            MessageError: The frame would be too large.
            BrokerClosedError: The client is closed.
            ForkedError: The client was created before a fork.
            ConfigurationError: *address* is not ``host:port``.
        """
        self._check_usable()
        if self.loop.is_current_thread:
            raise RuntimeError("invoke() in a callback would wait for the thread that it blocks; use invoke_async()")
        deadline = time.monotonic() + timeout_ms / 1_000
        request.flag = 0
        response = self._invoke_once(address, request, timeout_ms, deadline)
        if response.code == ResponseCode.GO_AWAY:
            response = self._invoke_once(address, request, timeout_ms, deadline)
        return response

    def invoke_async(self, address: str, request: RemotingCommand, timeout_ms: int, callback: InvokeCallback) -> None:
        """Send a request; *callback* is called once, with the response or with an error that `invoke` would raise.

        This method never blocks: a worker thread opens a missing connection. *callback* runs in the I/O thread, in that
        worker thread if connecting fails, or in this thread if the connection was lost just now.

        Raises:
            MessageError, BrokerClosedError, ForkedError, ConfigurationError: As `invoke`; *callback* is not called.
        """
        self._check_usable()
        request.flag = 0
        deadline = time.monotonic() + timeout_ms / 1_000

        def send(connection: Connection) -> None:
            def on_result(result: RemotingCommand | BrokerError) -> None:
                if isinstance(result, RemotingCommand) and result.code == ResponseCode.GO_AWAY:
                    self._pool.retire(address, connection)
                    self._connect_and(address, deadline, send_again, callback)
                else:
                    callback(result)

            connection.request(request, _ms_until(deadline), on_result)

        def send_again(connection: Connection) -> None:
            connection.request(request, _ms_until(deadline), callback)

        connection = self._pool.find(address)
        if connection is not None:
            send(connection)
        else:
            # Errors of the caller are raised here, not in the worker thread.
            parse_address(address)
            encode_head(request, len(request.body))
            self._connect_and(address, deadline, send, callback)

    def invoke_one_way(self, address: str, request: RemotingCommand) -> None:
        """Send a request without a response. Raise what `invoke` raises, as far as it is known without a response.

        In the I/O thread a worker thread opens a missing connection, and its errors are logged.
        """
        self._check_usable()
        request.flag = FLAG_ONE_WAY
        connection = self._pool.find(address)
        if connection is not None:
            connection.send_one_way(request)
        elif self.loop.is_current_thread:
            self._connect_and(address, None, lambda opened: opened.send_one_way(request), _log_lost)
        else:
            self._pool.get(address, None).send_one_way(request)

    def call_later(self, delay_ms: float, work: Callable[[], None]) -> None:
        """Call *work* after *delay_ms* in a worker thread, where it may block; drop it if the client is closed."""

        def submit() -> None:
            with contextlib.suppress(RuntimeError):  # the client was closed at this moment
                self._connectors.submit(work)

        self.loop.call_later(delay_ms, submit)

    def disconnect(self, address: str, reason: str) -> None:
        """Close the connection to *address*, if there is one; its pending requests fail."""
        connection = self._pool.find(address)
        if connection is not None:
            connection.close(reason)

    def close(self) -> None:
        """Close all connections, which fails their pending requests, and join the threads.

        In a forked child this does nothing: connections and threads belong to the parent.
        """
        if self._is_closed or not self._owner.is_current:
            return
        self._is_closed = True
        self._pool.close()
        is_own_thread = self.loop.is_current_thread or threading.current_thread().name.startswith("mqtemplate-client-")
        # Queued attempts to connect still run: each reports an error to its caller.
        self._connectors.shutdown(wait=not is_own_thread)
        self.loop.stop()
        self._workers.shutdown(wait=not is_own_thread, cancel_futures=True)

    # --- interface of connections -------------------------------------------------------------------

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Submit a broker's request to a worker thread."""
        if self._on_request is None:
            connection.reply(not_supported(request))
            return
        try:
            self._workers.submit(self._process, self._on_request, connection, request)
        except RuntimeError:  # the client was closed at this moment, and with it the connection
            _log.debug("remoting.request_dropped", request=str(request))

    def new_pipeline(self, connection: Connection) -> RequestPipeline:
        """Return a pipeline that accepts nothing: brokers send few requests."""
        return CommandsOnly()

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Remove a connection that has ended."""
        address = self._pool.remove(connection)
        if address is not None:
            try:
                self._on_close(address)
            except Exception:
                _log.exception("remoting.callback_failed", address=address)

    def sign(self, request: RemotingCommand) -> None:
        """Add access key and signature."""
        credentials = self._credentials
        if credentials is not None:
            sign_command(request, credentials.access_key, credentials.secret_key, credentials.security_token)

    # --- internals ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._owner.check()
        if self._is_closed:
            raise BrokerClosedError("this client is closed; create another one")

    def _start_connection(self, stream: Stream, remote: HostAddress) -> Connection:
        """Return the connection over a new stream. Called under the lock of the pool."""
        if not self._is_started:
            self._is_started = True
            self.loop.start()
        connection = Connection(stream, remote, self)
        self.loop.call_soon(connection.start)
        return connection

    def _invoke_once(self, address: str, request: RemotingCommand, timeout_ms: int, deadline: float) -> RemotingCommand:
        connection = self._pool.find(address) or self._pool.get(address, deadline)
        opaque = request.opaque = next_opaque()
        waiter: Waiter[RemotingCommand | BrokerError] = Waiter()
        connection.start_request(request, waiter.set_result)
        try:
            has_result = waiter.wait(deadline - time.monotonic())
        except BaseException:  # mostly KeyboardInterrupt
            connection.cancel_request(opaque)
            raise
        if not has_result:
            if connection.cancel_request(opaque):
                raise connection.timeout_error(request, timeout_ms)
            waiter.wait(-1)  # the I/O thread removed the request just now, and is about to set the result
        result = waiter.result
        if isinstance(result, BrokerError):
            raise result
        assert result is not None
        if result.code == ResponseCode.GO_AWAY:
            self._pool.retire(address, connection)
        return result

    def _connect_and(
        self, address: str, deadline: float | None, use: Callable[[Connection], None], callback: InvokeCallback
    ) -> None:
        """Open a connection in a worker thread and call *use* with it; on an error call *callback*."""

        def work() -> None:
            try:
                use(self._pool.get(address, deadline))
            except BrokerError as exc:
                call_safely(callback, exc)
            except Exception as exc:
                _log.exception("remoting.connect_failed", address=address)
                error = RemoteConnectError(f"cannot connect to {address} ({type(exc).__name__}: {exc})")
                call_safely(callback, error)

        try:
            self._connectors.submit(work)
        except RuntimeError:
            call_safely(callback, BrokerClosedError("this client is closed; create another one"))

    def _process(self, on_request: OnRequest, connection: Connection, request: RemotingCommand) -> None:
        try:
            response = on_request(connection, request)
        except Exception as exc:
            _log.exception("remoting.request_failed", request=str(request), remote=str(connection.remote))
            response = system_error(request, exc)
        if response is not None:
            connection.reply(response)


def _ms_until(deadline: float) -> int:
    return max(round((deadline - time.monotonic()) * 1_000), 0)


def _log_lost(result: RemotingCommand | BrokerError) -> None:
    _log.warning("remoting.one_way_lost", reason=str(result))

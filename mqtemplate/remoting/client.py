"""The client's side of the wire: a connection to each address, made when it is needed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError, RemoteConnectError
from mqtemplate.remoting.addresses import parse_address
from mqtemplate.remoting.budget import Budget
from mqtemplate.remoting.connection import Channel, Connection
from mqtemplate.remoting.io_loop import IoLoop
from mqtemplate.remoting.outstanding import Done, next_opaque, tell
from mqtemplate.remoting.peers import Peers
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode, encode_head
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY
from mqtemplate.remoting.refusals import not_supported, system_error
from mqtemplate.remoting.settings import RemotingClientSettings

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

OnRequest = Callable[[Channel, RemotingCommand], RemotingCommand | None]
"""Takes a request of a broker, in a worker thread (it may block); gives the answer, or None: it has answered, or will,
by `Connection.reply`, or never (one-way)."""

_DIALERS = 8
_UNLIMITED = 1 << 62


class RemotingClient:
    """Asks servers, and is asked by them over the same connections. Thread-safe.

    - Addresses are texts, ``host:port`` or ``[::1]:port``. Each has one connection, made when it is first used, and
      again when it is next used after it was lost.
    - One I/O thread reads all connections; whoever asks sends. So callbacks (*done*, `on_close`) must not block, and
      `invoke` may not be called in them; requests of brokers have worker threads, where both is allowed.
    - A lost connection fails at once whatever is outstanding on it. Nothing is repeated, except what a server that is
      shutting down refused with GO_AWAY: once, over a new connection.

    Raises:
        ConfigurationError: A file of the TLS settings cannot be used.
    """

    def __init__(self, settings: RemotingClientSettings, clock: Clock, on_request: OnRequest | None = None) -> None:
        self.limits = settings.limits
        self.partial_input = self.unread_output = Budget(_UNLIMITED, lambda: None)
        self.loop = IoLoop("mqtemplate-client", clock)
        self._credentials = settings.credentials
        self._on_request = on_request
        self._peers = Peers(self, settings)
        self._close_callbacks: list[Callable[[str], None]] = []
        self._dialers = ThreadPoolExecutor(_DIALERS, "mqtemplate-client-dial")
        self._workers = ThreadPoolExecutor(settings.request_workers, "mqtemplate-client-worker")
        self._is_closed = False
        self._pid = os.getpid()

    # --- for its owner ------------------------------------------------------------------------------

    def invoke(self, address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        """Ask, and wait for the answer. The request is the client's from now on: it gets an opaque and a signature.

        Raises:
            RemoteConnectError: No connection, or it was lost.
            RemoteTimeoutError: No answer in time.
            MessageError: The frame would be too large.
            BrokerClosedError: The client is closed.
            ForkedError: It was made before a fork.
            ConfigurationError: *address* is none.
        """
        self._check_usable()
        if self.loop.is_current_thread:
            raise RuntimeError("invoke() in a callback waits for the thread that it blocks; use invoke_async() there")
        deadline = time.monotonic() + timeout_ms / 1_000
        request.flag = 0
        response = self._ask_and_wait(address, request, timeout_ms, deadline)
        if response.code == ResponseCode.GO_AWAY:
            response = self._ask_and_wait(address, request, timeout_ms, deadline)
        return response

    def invoke_async(self, address: str, request: RemotingCommand, timeout_ms: int, done: Done) -> None:
        """Ask; *done* is called once: with the answer, or with an error as `invoke` raises it.

        It never blocks: a connection that is not there yet is made in a worker thread. *done* is called in the I/O
        thread, in that worker where the connection did not come about, or at once where it was lost just now.

        Raises:
            MessageError, BrokerClosedError, ForkedError, ConfigurationError: As `invoke`; then *done* is not called.
        """
        self._check_usable()
        request.flag = 0
        deadline = time.monotonic() + timeout_ms / 1_000

        def ask(connection: Connection) -> None:
            def on_answer(result: RemotingCommand | BrokerError) -> None:
                if isinstance(result, RemotingCommand) and result.code == ResponseCode.GO_AWAY:
                    self._peers.retire(address, connection)
                    self._dial_and(address, deadline, ask_again, done)
                else:
                    done(result)

            connection.request(request, _ms_until(deadline), on_answer)

        def ask_again(connection: Connection) -> None:
            connection.request(request, _ms_until(deadline), done)

        connection = self._peers.find(address)
        if connection is not None:
            ask(connection)
        else:
            parse_address(address)  # what is wrong with the call is said here, not in the worker
            encode_head(request, len(request.body))
            self._dial_and(address, deadline, ask, done)

    def invoke_one_way(self, address: str, request: RemotingCommand) -> None:
        """Send, and await nothing. Raises what `invoke` raises, as far as it is known without an answer.

        In the I/O thread it does not connect itself: what goes wrong then is logged.
        """
        self._check_usable()
        request.flag = FLAG_ONE_WAY
        connection = self._peers.find(address)
        if connection is not None:
            connection.send_one_way(request)
        elif self.loop.is_current_thread:
            self._dial_and(address, None, lambda made: made.send_one_way(request), _log_lost)
        else:
            self._peers.connect(address, None).send_one_way(request)

    def on_close(self, callback: Callable[[str], None]) -> None:
        """Call *callback* with the address, in the I/O thread, whenever a connection ended."""
        self._close_callbacks.append(callback)

    def close(self) -> None:
        """Close all connections, which fails what is outstanding, and join the threads.

        In a forked child nothing is done: connections and threads are the parent's.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._peers.close()
        is_ours = self.loop.is_current_thread or threading.current_thread().name.startswith("mqtemplate-client-")
        self._dialers.shutdown(wait=not is_ours)  # each of them ends with an error, which its caller is told
        self.loop.stop()
        self._workers.shutdown(wait=not is_ours, cancel_futures=True)

    # --- what connections ask of their owner ----------------------------------------------------------

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Hand it to a worker. In the I/O thread."""
        if self._on_request is None:
            connection.reply(not_supported(request))
            return
        try:
            self._workers.submit(self._answer, self._on_request, connection, request)
        except RuntimeError:  # closed at this moment, and so is the connection
            _log.debug("remoting.request_dropped", request=str(request))

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Forget it, and tell who wants to know. In the I/O thread."""
        address = self._peers.remove(connection)
        for callback in self._close_callbacks if address is not None else ():
            try:
                callback(str(address))
            except Exception:
                _log.exception("remoting.callback_failed", address=address)

    def sign(self, request: RemotingCommand) -> None:
        """Add access key and signature."""
        credentials = self._credentials
        if credentials is not None:
            sign_command(request, credentials.access_key, credentials.secret_key, credentials.security_token)

    # --- inside -------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this client was made by process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "connections and threads stayed behind. Make the client after the fork, for example in the worker's "
                "start-up hook (gunicorn: post_fork), or start workers by spawn"
            )
        if self._is_closed:
            raise BrokerClosedError("this client is closed; make another one")

    def _ask_and_wait(
        self, address: str, request: RemotingCommand, timeout_ms: int, deadline: float
    ) -> RemotingCommand:
        connection = self._peers.find(address) or self._peers.connect(address, deadline)
        opaque = request.opaque = next_opaque()
        waiter = _Waiter()
        connection.ask(request, waiter.done)
        try:
            is_answered = waiter.wait(deadline - time.monotonic())
        except BaseException:  # Ctrl-C, mostly
            connection.forget(opaque)
            raise
        if not is_answered:
            if connection.forget(opaque):
                raise connection.timeout_error(request, timeout_ms)
            waiter.wait(-1)  # it came just now
        result = waiter.result
        if isinstance(result, BrokerError):
            raise result
        assert result is not None
        if result.code == ResponseCode.GO_AWAY:
            self._peers.retire(address, connection)
        return result

    def _dial_and(self, address: str, deadline: float | None, use: Callable[[Connection], None], done: Done) -> None:
        """Make the connection in a worker thread, and use it; *done* is told when that fails."""

        def work() -> None:
            try:
                use(self._peers.connect(address, deadline))
            except BrokerError as exc:
                tell(done, exc)
            except Exception as exc:
                _log.exception("remoting.dial_failed", address=address)
                tell(done, RemoteConnectError(f"cannot connect to {address} ({type(exc).__name__}: {exc})"))

        try:
            self._dialers.submit(work)
        except RuntimeError:
            tell(done, BrokerClosedError("this client is closed; make another one"))

    def _answer(self, on_request: OnRequest, connection: Connection, request: RemotingCommand) -> None:
        try:
            response = on_request(connection, request)
        except Exception as exc:
            _log.exception("remoting.request_failed", request=str(request), remote=str(connection.remote))
            response = system_error(request, exc)
        if response is not None:
            connection.reply(response)


class _Waiter:
    """Waits for one answer."""

    __slots__ = ("_lock", "result")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.result: RemotingCommand | BrokerError | None = None

    def done(self, result: RemotingCommand | BrokerError) -> None:
        self.result = result
        self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """True when the answer, or an error, is there; -1 waits for ever, and less than 0 not at all."""
        return self._lock.acquire(timeout=timeout_s if timeout_s == -1 else max(timeout_s, 0.0))


def _ms_until(deadline: float) -> int:
    return max(round((deadline - time.monotonic()) * 1_000), 0)


def _log_lost(result: RemotingCommand | BrokerError) -> None:
    _log.warning("remoting.one_way_lost", reason=str(result))

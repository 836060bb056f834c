"""The server's side of the wire: one thread carries all connections."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.acceptor import Acceptor
from mqtemplate.remoting.budget import Budget
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.greeting import Greeting
from mqtemplate.remoting.io_loop import IoLoop
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode, Version
from mqtemplate.remoting.refusals import not_supported, system_error
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.streams import PlainStream, Stream
from mqtemplate.remoting.tls import TlsMode, server_context

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

Processor = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Takes a request; gives the answer, or None: it has answered, or will, by `Connection.reply`, or never (one-way).

It runs in the I/O thread and must not block, unless it was registered as slow."""

Guard = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Asked before each request, in the I/O thread; an answer means that it is refused."""

Problem = Callable[[RemotingCommand, Exception], RemotingCommand | None]
"""Makes the answer to a request whose processor or guard raised.

None: it is answered with SYSTEM_ERROR and the text of the exception, and logged."""


class RemotingServer:
    """Listens, and hands requests to processors by their code.

    - Every request that is not one-way is answered: an unknown code with REQUEST_CODE_NOT_SUPPORTED, one whose
      processor raised with SYSTEM_ERROR, one too many with SYSTEM_BUSY.
    - What is wrong with one connection ends that connection, with a line in the log; the others notice nothing.
    - Memory is bounded by the settings: connections, frames on their way, answers that nobody reads.

    Attributes:
        address: Where it listens; after `bind` or `start` with the real port.
        guard: Asked before each request.
        problem: Asked for the answer when a processor or the guard raises.
    """

    def __init__(self, listen: HostAddress, settings: RemotingServerSettings, clock: Clock) -> None:
        self.address = listen
        self.guard: Guard | None = None
        self.problem: Problem | None = None
        self.limits = settings.limits
        self.loop = IoLoop("mqtemplate-server", clock)
        self.partial_input = Budget(settings.max_partial_bytes, partial(self.loop.call_soon, self._shed_partial_input))
        self.unread_output = Budget(settings.max_unread_bytes, partial(self.loop.call_soon, self._shed_unread_output))
        self._settings = settings
        self._processors: dict[int, tuple[Processor, bool]] = {}
        self._close_callbacks: list[Callable[[Connection], None]] = []
        self._connections: dict[int, Connection] = {}
        self._greetings: set[Greeting] = set()
        self._tls: tuple[ssl.SSLContext, TlsMode] | None = None
        if settings.tls is not None and settings.tls.mode is not TlsMode.DISABLED:
            self._tls = server_context(settings.tls), settings.tls.mode
        self._acceptor: Acceptor | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._waiting_bodies = Budget(settings.slow_queue_bytes, lambda: None)
        self._waiting_for_worker = threading.Semaphore(settings.slow_queue + settings.slow_workers)
        self._is_draining = False
        self._is_full = False
        self._pid = os.getpid()

    # --- for its owner ------------------------------------------------------------------------------

    def register(self, code: int, processor: Processor, *, slow: bool = False) -> None:
        """Let *processor* take the requests of that code; *slow*: in a worker thread, where it may block."""
        self._processors[code] = (processor, slow)

    def on_close(self, callback: Callable[[Connection], None]) -> None:
        """Call *callback* in the I/O thread whenever a connection ended."""
        self._close_callbacks.append(callback)

    def connections(self) -> list[Connection]:
        """Those that are open now."""
        return list(self._connections.values())

    def bind(self) -> None:
        """Take the address, and learn the port where the system chooses it; who connects waits until `start`.

        Raises:
            BrokerError: The address cannot be listened at; or the server was stopped, and cannot be started again.
        """
        if self._is_draining:
            raise BrokerClosedError(f"the server at {self.address} was stopped; make another one")
        if self._acceptor is None:
            self._acceptor = Acceptor(self.address, self.loop, self._on_accept)
            self.address = self._acceptor.address

    def start(self) -> None:
        """Listen; `bind` first, if that was not done.

        Raises:
            BrokerError: As `bind`.
        """
        self.bind()
        acceptor = self._acceptor
        assert acceptor is not None
        self._workers = ThreadPoolExecutor(self._settings.slow_workers, "mqtemplate-server-worker")
        self.loop.start()
        self.loop.call_soon(acceptor.begin)
        _log.info("remoting.listening", address=str(self.address), tls=self._tls[1].value if self._tls else "disabled")

    def stop(self) -> None:
        """Refuse what is new, wait for answers under way, close, and join the threads.

        A peer above V5_3_1 is told GO_AWAY, by which it knows to ask elsewhere; older ones are answered to the end. In
        a forked child nothing is done: connections and threads are the parent's.
        """
        acceptor, workers = self._acceptor, self._workers
        if os.getpid() != self._pid or self._is_draining or acceptor is None:
            return
        self._is_draining = True
        if workers is None:
            acceptor.close()
            return
        self.loop.call_soon(acceptor.close)
        self._drain()
        workers.shutdown(wait=False, cancel_futures=True)
        self.loop.call_soon(self._close_all)
        self.loop.stop()
        workers.shutdown()
        _log.info("remoting.stopped", address=str(self.address))

    # --- what connections ask of their owner ----------------------------------------------------------

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Refuse it, or hand it to its processor. In the I/O thread."""
        if self._is_draining and request.version > Version.V5_3_1 and not request.is_one_way:
            connection.reply(request.response(ResponseCode.GO_AWAY, remark="the server is shutting down"))
            return
        found = self._processors.get(request.code)
        if found is None:
            connection.reply(not_supported(request))
            return
        processor, is_slow = found
        refusal = None if self.guard is None else self._call(self.guard, connection, request)
        if refusal is not None:
            connection.reply(refusal)
        elif is_slow:
            self._hand_to_worker(processor, connection, request)
        else:
            self._answer(processor, connection, request)

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Tell who wants to know. In the I/O thread."""
        if self._connections.pop(connection.id, None) is None:
            return
        for callback in self._close_callbacks:
            try:
                callback(connection)
            except Exception:
                _log.exception("remoting.callback_failed", remote=str(connection.remote))

    def sign(self, request: RemotingCommand) -> None:
        """A broker does not sign what it asks of its clients."""

    # --- requests -----------------------------------------------------------------------------------

    def _answer(self, processor: Processor, connection: Connection, request: RemotingCommand) -> None:
        response = self._call(processor, connection, request)
        if response is not None and not request.is_one_way:
            connection.reply(response)

    def _call(self, processor: Processor, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        try:
            return processor(connection, request)
        except Exception as exc:
            return self._problem_response(connection, request, exc)

    def _problem_response(
        self, connection: Connection, request: RemotingCommand, exc: Exception
    ) -> RemotingCommand | None:
        response = None
        try:
            response = None if self.problem is None else self.problem(request, exc)
        except Exception:
            _log.exception("remoting.problem_failed", request=str(request))
        if response is None:
            _log.error("remoting.processor_failed", request=str(request), remote=str(connection.remote), exc_info=exc)
            response = system_error(request, exc)
        return response

    def _hand_to_worker(self, processor: Processor, connection: Connection, request: RemotingCommand) -> None:
        workers = self._workers
        is_busy = self._waiting_bodies.is_exceeded or not self._waiting_for_worker.acquire(blocking=False)
        if workers is None or is_busy:
            remark = "too many requests of this kind wait for a thread already; try again later"
            connection.reply(request.response(ResponseCode.SYSTEM_BUSY, remark=remark))
            return
        self._waiting_bodies.add(len(request.body))
        try:
            workers.submit(self._work, processor, connection, request)
        except RuntimeError:  # stopped at this moment
            self._done_waiting(request)
            connection.reply(request.response(ResponseCode.SYSTEM_BUSY, remark="the server is shutting down"))

    def _work(self, processor: Processor, connection: Connection, request: RemotingCommand) -> None:
        try:
            if connection.is_open:
                self._answer(processor, connection, request)
        finally:
            self._done_waiting(request)

    def _done_waiting(self, request: RemotingCommand) -> None:
        self._waiting_bodies.add(-len(request.body))
        self._waiting_for_worker.release()

    # --- connections: in the I/O thread ---------------------------------------------------------------

    def _on_accept(self, sock: socket.socket, remote: HostAddress) -> None:
        if len(self._connections) + len(self._greetings) >= self._settings.max_connections:
            sock.close()
            if not self._is_full:  # once, until there is room again
                self._is_full = True
                _log.warning("remoting.full", max_connections=self._settings.max_connections, remote=str(remote))
            return
        self._is_full = False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # it has gone already; reading will tell
            pass
        if self._tls is None:
            self._connect(PlainStream(sock), remote, is_tls=False)
        else:
            self._greet(sock, remote, *self._tls)

    def _greet(self, sock: socket.socket, remote: HostAddress, context: ssl.SSLContext, mode: TlsMode) -> None:
        def on_done(stream: Stream | None, is_tls: bool) -> None:
            self._greetings.discard(greeting)
            if stream is not None:
                self._connect(stream, remote, is_tls=is_tls)

        greeting = Greeting(sock, remote, self.loop, context, mode, on_done)
        self._greetings.add(greeting)
        greeting.begin(self.limits.frame_timeout_ms, self.limits.idle_ms)

    def _connect(self, stream: Stream, remote: HostAddress, *, is_tls: bool) -> None:
        connection = Connection(stream, remote, self, is_tls=is_tls)
        self._connections[connection.id] = connection
        connection.begin()

    def _shed_partial_input(self) -> None:
        """All hold too much together: whoever holds most of it goes."""
        while self.partial_input.is_exceeded and self._connections:
            worst = max(self._connections.values(), key=lambda connection: connection.partial_bytes)
            held = self.partial_input.held
            if not worst.partial_bytes:
                return
            worst.end(
                f"{held} bytes of frames that are not complete are held, {worst.partial_bytes} of them for this one",
                is_bad=True,
            )

    def _shed_unread_output(self) -> None:
        """All leave too much unread together: whoever leaves most of it goes."""
        while self.unread_output.is_exceeded and self._connections:
            worst = max(self._connections.values(), key=lambda connection: connection.unread_bytes)
            held = self.unread_output.held
            if not worst.unread_bytes:
                return
            worst.end(f"{held} bytes of answers are unread, {worst.unread_bytes} of them by this one", is_bad=True)

    # --- the end --------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait until nobody waits for an answer, or for too long."""
        deadline = time.monotonic() + self._settings.drain_ms / 1_000
        pause = threading.Event()
        while time.monotonic() < deadline:
            if not any(connection.unanswered or connection.unread_bytes for connection in self.connections()):
                return
            pause.wait(0.005)

    def _close_all(self) -> None:
        for greeting in list(self._greetings):
            greeting.fail("the server is stopped", is_bad=False)
        for connection in self.connections():
            connection.end("the server is stopped")

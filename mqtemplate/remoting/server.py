"""Server side of the remoting protocol: requests to the processors of their codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from logging import ERROR
from types import MappingProxyType
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.message import HostAddress
from mqtemplate.metrics import Counter
from mqtemplate.remoting.connection import CommandsOnly, Connection, RequestPipeline
from mqtemplate.remoting.protocol.codes import ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand, not_supported, system_error
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.sockets import Stream
from mqtemplate.remoting.tcp_server import TcpServer
from mqtemplate.remoting.worker_pool import HeavyWork

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


class RemotingServer(TcpServer[Connection]):
    """Server that passes each request to the processor of its code.

    - Each request that is not one-way gets a response: REQUEST_CODE_NOT_SUPPORTED for an unknown code, SYSTEM_ERROR if
      the processor raises an exception, SYSTEM_BUSY above a limit.
    - When it stops, clients above V5_3_1 get GO_AWAY, after which they use another broker; requests of older ones are
      still processed.

    Args:
        guard: None: every request reaches its processor.
        error_response: None: the response to each exception is SYSTEM_ERROR.
        reasons: Request code -> why it has no processor, for the response.
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
        super().__init__(
            listen, "mqtemplate-server", settings, clock, refused_connections=refused_connections, heavy=heavy
        )
        self._reasons = reasons
        self._guard = guard
        self._new_pipeline: NewPipeline = lambda connection, count: CommandsOnly()
        self._error_response = error_response
        self._processors: dict[int, _Registered] = {}

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
            self._count_inline()
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

    def sign(self, request: RemotingCommand) -> None:
        """Leave the request as it is: brokers do not sign their requests to clients."""

    def _count(self, requests: int) -> None:
        self.request_count += requests
        self._count_inline(requests)

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

    # --- connections --------------------------------------------------------------------------------

    def _new_connection(self, stream: Stream, remote: HostAddress) -> Connection:
        return Connection(stream, remote, self)

    def _start_draining(self) -> None:
        for connection in self.connections():
            connection.end_pipeline()  # a command gets GO_AWAY

    def _is_busy(self, connection: Connection) -> bool:
        return bool(connection.unanswered or connection.unread_bytes)

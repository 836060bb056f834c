"""Threads in which processors work that must not block the I/O thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from logging import ERROR

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.worker_pool import HeavyWork, WorkerPool
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.response import problem_response

_log = get_logger("mqtemplate.server")

_THREADS = 2
_MAX_PENDING = 20_000
_MAX_PENDING_PER_CONNECTION = 10_000
"""The sends of one client that wait while a slow disk creates their topic: a second of an asynchronous producer.
One-way sends above it are lost without a word. RocketMQ: ``BrokerConfig.sendThreadPoolQueueCapacity``."""
_MAX_BYTES = 64 << 20

_Work = Callable[[], RemotingCommand | None]


class DeferredWork:
    """Threads for requests that write a table or need a long computation: most of them create a topic or a group.

    - Most requests with the same code create nothing and are answered in the I/O thread.
    - Connections take turns, see `WorkerPool`.
    - A request whose connection is closed before its turn is dropped, unless it is one-way: a producer may leave after
      its last message.
    - On a virtual clock the work runs at once, in the caller's thread.

    Args:
        heavy: Counts the heavy work of the server.
    """

    def __init__(self, clock: Clock, heavy: HeavyWork) -> None:
        self._is_closed = False
        self._peer_log = LimitedLog(_log, clock.now_ms)
        self._heavy = heavy
        self._pool: WorkerPool | None = None
        if not clock.is_virtual:
            self._pool = WorkerPool(
                "mqtemplate-server-deferred",
                _THREADS,
                _MAX_PENDING,
                _MAX_PENDING_PER_CONNECTION,
                _MAX_BYTES,
                heavy,
            )

    def run(self, connection: Connection, request: RemotingCommand, work: _Work) -> RemotingCommand | None:
        """Run *work* in a thread and reply with the response that it returns. It may raise what a processor may raise.

        Returns:
            None: the response follows later. On a virtual clock, the response.

        Raises:
            RefusedError: Too many requests are pending, or the server is stopping.
        """
        if self._is_closed:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping")
        if self._pool is None:
            return work()
        self._pool.start()  # with the first work: a server that is never started has no threads
        if not self._pool.submit(connection, partial(self._run, connection, request, work), len(request.body)):
            raise RefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"too many requests that create a topic or a group are pending already: {_MAX_PENDING}, or "
                f"{_MAX_PENDING_PER_CONNECTION} of this connection; try again later",
            )
        self._heavy.move_to_thread()  # the request was counted when the I/O thread passed it to its processor
        return None

    def _run(self, connection: Connection, request: RemotingCommand, work: _Work) -> None:
        if not connection.is_open and not request.is_one_way:
            return
        try:
            response = work()
        except Exception as exc:
            response = problem_response(request, exc)
            if response is None:
                self._peer_log.log(ERROR, "server.request_failed", request=str(request), exc_info=exc)
                response = request.response(ResponseCode.SYSTEM_ERROR, remark=f"{type(exc).__name__}: {exc}")
        if response is not None:
            connection.reply(response)

    def close(self, timeout_s: float) -> None:
        """Refuse more work, drop what is pending, and wait up to *timeout_s* for the work that runs."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.stop(timeout_s)

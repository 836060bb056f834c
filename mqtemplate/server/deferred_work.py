"""Threads in which processors work that must not block the I/O thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from mqtemplate.clock import Clock
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.response import RefusedError, problem_response

_log = get_logger("mqtemplate.server")

_MAX_PENDING = 10_000

_Work = Callable[[], RemotingCommand | None]


class DeferredWork:
    """Thread pool for requests that write a table: those that create a topic or a group.

    Most requests with the same code create nothing and are answered in the I/O thread. On a virtual clock the work runs
    at once, in the caller's thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._capacity = BoundedSemaphore(_MAX_PENDING)
        self._pool = None if clock.is_virtual else ThreadPoolExecutor(2, "mqtemplate-server-deferred")

    def run(self, connection: Connection, request: RemotingCommand, work: _Work) -> RemotingCommand | None:
        """Run *work* in the pool and reply with the response that it returns. It may raise what a processor may raise.

        Returns:
            None: the response follows later. On a virtual clock, the response.

        Raises:
            RefusedError: Too many requests are pending.
        """
        if self._pool is None:
            return work()
        if not self._capacity.acquire(blocking=False):
            raise RefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"{_MAX_PENDING} requests that create a topic or a group are pending already; try again later",
            )
        try:
            self._pool.submit(self._run, connection, request, work)
        except RuntimeError as exc:  # The server closed the pool after this request arrived.
            self._capacity.release()
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping") from exc
        return None

    def _run(self, connection: Connection, request: RemotingCommand, work: _Work) -> None:
        try:
            response = work()
        except Exception as exc:
            response = problem_response(request, exc)
            if response is None:
                _log.error("server.request_failed", request=str(request), exc_info=exc)
                response = request.response(ResponseCode.SYSTEM_ERROR, remark=f"{type(exc).__name__}: {exc}")
        finally:
            self._capacity.release()
        if response is not None:
            connection.reply(response)

    def close(self) -> None:
        """Finish the pending work and refuse more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

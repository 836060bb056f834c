"""The rare part of a request that takes a while: it runs beside the I/O thread, and answers from there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

import structlog

from mqtemplate.clock import Clock
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.server.response import RefusedError, problem_response

_log = structlog.stdlib.get_logger("mqtemplate.server")

_MOST_WAITING = 10_000


class DeferredWork:
    """Work that writes a table to the disk: a topic or a group that is made with its first request.

    On a virtual clock it is done at once, in the caller's thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._room = BoundedSemaphore(_MOST_WAITING)
        self._pool = None if clock.is_virtual else ThreadPoolExecutor(2, "mqtemplate-server-later")

    def answer(
        self, connection: Connection, request: RemotingCommand, work: Callable[[], RemotingCommand | None]
    ) -> RemotingCommand | None:
        """Let *work* make the answer; it may raise what a processor may. None: the answer comes later.

        Raises:
            RefusedError: Too much of this waits already.
        """
        if self._pool is None:
            return work()
        if not self._room.acquire(blocking=False):
            raise RefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"{_MOST_WAITING} requests that make a topic or a group wait already; try again later",
            )
        try:
            self._pool.submit(self._run, connection, request, work)
        except RuntimeError as exc:  # it was closed in between
            self._room.release()
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping") from exc
        return None

    def _run(
        self, connection: Connection, request: RemotingCommand, work: Callable[[], RemotingCommand | None]
    ) -> None:
        try:
            response = work()
        except Exception as exc:
            response = problem_response(request, exc)
            if response is None:
                _log.error("server.request_failed", request=str(request), exc_info=exc)
                response = request.response(ResponseCode.SYSTEM_ERROR, remark=f"{type(exc).__name__}: {exc}")
        finally:
            self._room.release()
        if response is not None:
            connection.reply(response)

    def close(self) -> None:
        """Do what waits, and take no more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

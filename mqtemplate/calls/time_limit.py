"""`TimeLimit`: it ends handlers that run too long, with an exception."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Generator

from mqtemplate.calls.handling import Delivery
from mqtemplate.durations import Duration, duration_ms, format_ms
from mqtemplate.errors import ConfigurationError


class TimeLimitError(TimeoutError):
    """A handler ran longer than its `TimeLimit`. Its message fails, and is retried as after any exception."""


class TimeLimit:
    """Middleware that raises `TimeLimitError` in a handler that runs too long.

    - ``async def``: the task is cancelled where it awaits, as by ``asyncio.timeout``. On a virtual clock the time is
      that of the clock.
    - Plain: the exception is raised in the thread, between two steps of Python. A call that does not return to Python,
      such as a read from a socket without a timeout, ends first; ``consume_timeout`` of the listener finds such a
      handler. On a virtual clock a plain handler takes no time, and has no limit.

    Args:
        limit: Time, such as ``"30s"``, a timedelta, or seconds. Middlewares further inside count too.

    Raises:
        ConfigurationError: *limit* is not allowed.
    """

    def __init__(self, limit: Duration) -> None:
        try:
            self._limit_ms = duration_ms(limit, 1_000)
        except ValueError as error:
            raise ConfigurationError(f"TimeLimit: limit must be {error}") from None
        if self._limit_ms < 1:
            raise ConfigurationError(f"TimeLimit: limit must be 1 ms or longer, got {limit!r}")

        self._interruptions = _Interruptions(self._limit_ms / 1_000)

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Limit one call of the handler."""
        if delivery.listener.is_async:
            yield from self._cancelling(delivery)
        elif delivery.listener.clock.is_virtual:
            yield delivery
        else:
            yield from self._interrupting(delivery)

    def _cancelling(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        task = asyncio.current_task()
        assert task is not None  # an async handler and its middlewares run in one
        cancelling, is_over = task.cancelling(), False

        def expire() -> None:
            nonlocal is_over
            is_over = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._limit_ms / 1_000, expire)
        try:
            yield delivery
        except asyncio.CancelledError as error:
            if is_over and task.uncancel() <= cancelling:
                raise self._error() from error
            raise
        else:
            if is_over:  # the handler caught the cancellation and returned
                task.uncancel()
        finally:
            timer.cancel()

    def _interrupting(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        call = _Call()
        try:
            try:
                self._interruptions.start(call)
                yield delivery
            finally:
                self._interruptions.finish(call)
        except TimeLimitError:
            raise self._error() from None

    def _error(self) -> TimeLimitError:
        return TimeLimitError(f"the handler ran longer than {format_ms(self._limit_ms)}")


class _Call:
    """One call of a handler in a thread."""

    __slots__ = ("due", "is_interrupted", "thread_id")

    def __init__(self) -> None:
        self.due = 0.0
        self.is_interrupted = False
        self.thread_id = threading.get_ident()


class _Interruptions:
    """Calls with one time limit. A thread raises the exception in those that are too long; it ends when there are none.

    All calls have the same limit, so they are due in the order in which they started.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._calls: dict[_Call, None] = {}
        self._is_watched = False

    def start(self, call: _Call) -> None:
        """Note that this thread calls a handler. From now on the exception may be raised in it."""
        with self._lock:
            call.due = time.monotonic() + self._limit_s
            self._calls[call] = None
            starts, self._is_watched = not self._is_watched, True
        if starts:
            threading.Thread(target=self._watch, name="mqtemplate-time-limit", daemon=True).start()

    def finish(self, call: _Call) -> None:
        """Note that the handler of this thread returned. No exception is raised in the thread after this."""
        with self._lock:
            self._calls.pop(call, None)
        if call.is_interrupted:
            _raise_in_thread(call.thread_id, None)

    def _watch(self) -> None:
        while (wait_s := self._interrupt_due(time.monotonic())) is not None:
            time.sleep(wait_s)

    def _interrupt_due(self, now: float) -> float | None:
        """Interrupt the calls that are due. Return the time until the next one; None if there are none."""
        with self._lock:
            while self._calls:
                call = next(iter(self._calls))
                if call.due > now:
                    return call.due - now
                del self._calls[call]
                call.is_interrupted = True
                _raise_in_thread(call.thread_id, TimeLimitError)
            self._is_watched = False
            return None


def _raise_in_thread(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next step of Python; None takes one away that it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), None if error is None else ctypes.py_object(error)
    )

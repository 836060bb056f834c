"""Middlewares for the time of calls: `Timing` logs it, and `TimeLimit` ends handlers that run too long.

A module of its own: only applications that use one of them load it, and `ctypes` with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Generator
from typing import Any

from mqtemplate.calls.handling import Delivery
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.calls.send import Outgoing
from mqtemplate.clock import Clock
from mqtemplate.durations import Duration, format_ms, option_ms
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.user_code import type_name

_log = get_logger("mqtemplate.middlewares")
_LEVELS = ("DEBUG", "INFO", "WARNING")


class Timing:
    """Middleware that logs each call of a handler and each send, with its time.

    - ``message.handled``: *listener*, *topic*, *msg_id*, *attempt*, *count*, *took_ms*, *outcome* (``done``,
      ``not_done`` or the class of the exception).
    - ``message.sent``: *topic*, *tag*, *verb*, *count*, *took_ms*, *outcome*.
    - Both are warnings, ``handler.slow`` and ``send.slow``, from *slow* on.

    Args:
        level: Level of the events: ``DEBUG``, ``INFO`` or ``WARNING``.
        slow: Time from which a call counts as slow; None for no such events.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    def __init__(self, level: str = "DEBUG", slow: Duration | None = None) -> None:
        if level not in _LEVELS:
            raise ConfigurationError(f"Timing: level must be one of {', '.join(_LEVELS)}, got {level!r}")
        self._level = getattr(logging, level)
        self._slow_ms = float("inf") if slow is None else option_ms("Timing: slow", slow, ConfigurationError)

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Log the call of a handler."""
        clock = delivery.listener.clock
        started_ms = _now_ms(clock)
        try:
            result = yield delivery
        except PauseListener:
            raise  # the message is handled later
        except BaseException as error:
            self._handled(delivery, _now_ms(clock) - started_ms, type_name(error))
            raise
        took_ms = _now_ms(clock) - started_ms
        if took_ms >= self._slow_ms or _log.is_enabled_for(self._level):
            self._handled(delivery, took_ms, "done" if delivery.listener.is_done(result) else "not_done")

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object, None]:
        """Log a send."""
        started_ms = _now_ms(outgoing.clock)
        try:
            yield outgoing
        except BaseException as error:
            self._sent(outgoing, _now_ms(outgoing.clock) - started_ms, type_name(error))
            raise
        self._sent(outgoing, _now_ms(outgoing.clock) - started_ms, "done")

    def _handled(self, delivery: Delivery, took_ms: float, outcome: str) -> None:
        message = delivery.message
        own = {"listener": delivery.listener.id, "msg_id": message.msg_id, "attempt": delivery.attempt}
        self._write(("message.handled", "handler.slow"), delivery, took_ms, outcome, own)

    def _sent(self, outgoing: Outgoing, took_ms: float, outcome: str) -> None:
        own = {"tag": outgoing.message.tags, "verb": outgoing.verb}
        self._write(("message.sent", "send.slow"), outgoing, took_ms, outcome, own)

    def _write(
        self,
        events: tuple[str, str],
        call: Delivery | Outgoing,
        took_ms: float,
        outcome: str,
        own: dict[str, Any],
    ) -> None:
        is_slow = took_ms >= self._slow_ms
        _log.log(
            max(logging.WARNING, self._level) if is_slow else self._level,
            events[is_slow],
            topic=call.message.topic,
            count=len(call.messages),
            took_ms=round(took_ms, 3),
            outcome=outcome,
            **own,
        )


def _now_ms(clock: Clock) -> float:
    """Return a time to compare with a later one. The wall clock of the machine may jump."""
    return clock.now_ms() if clock.is_virtual else time.perf_counter() * 1_000


# --- limits ------------------------------------------------------------------------------------------


class TimeLimitError(TimeoutError):
    """A handler ran longer than its `TimeLimit`. Its message fails, and is retried as after any exception."""


class TimeLimit:
    """Middleware that raises `TimeLimitError` in a handler that runs too long.

    - ``async def``: the task is cancelled where it awaits, as by ``asyncio.timeout``. On a virtual clock the time
      of the clock counts.
    - Plain: the exception is raised in the thread, between two steps of Python. A call that does not return to Python,
      such as a read from a socket without a timeout, ends first; ``consume_timeout`` of the listener finds such a
      handler. On a virtual clock a plain handler takes no time, and has no limit.

    Args:
        limit: Time: ``"30s"`` or a timedelta. Middlewares further inside count too.

    Raises:
        ConfigurationError: *limit* is not allowed.
    """

    def __init__(self, limit: Duration) -> None:
        self._limit_ms = option_ms("TimeLimit: limit", limit, ConfigurationError)
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
    """Calls with one time limit. A thread raises the exception in calls that are too long; it ends with the last call.

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
        """Interrupt the calls that are due. Return the time until the next one; None without further calls."""
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

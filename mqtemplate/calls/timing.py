"""`Timing`: log events with the time of each call."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import Any

from mqtemplate.calls.handling import Delivery
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.calls.send import Outgoing
from mqtemplate.clock import Clock
from mqtemplate.durations import Duration, duration_ms
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
        try:
            self._slow_ms = float("inf") if slow is None else duration_ms(slow, 1_000)
        except ValueError as error:
            raise ConfigurationError(f"Timing: slow must be {error}") from None

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
        is_slow = took_ms >= self._slow_ms
        message = delivery.message
        self._write(
            "handler.slow" if is_slow else "message.handled",
            is_slow,
            listener=delivery.listener.id,
            topic=message.topic,
            msg_id=message.msg_id,
            attempt=delivery.attempt,
            count=len(delivery.messages),
            took_ms=round(took_ms, 3),
            outcome=outcome,
        )

    def _sent(self, outgoing: Outgoing, took_ms: float, outcome: str) -> None:
        is_slow = took_ms >= self._slow_ms
        message = outgoing.message
        self._write(
            "send.slow" if is_slow else "message.sent",
            is_slow,
            topic=message.topic,
            tag=message.tags,
            verb=outgoing.verb,
            count=len(outgoing.messages),
            took_ms=round(took_ms, 3),
            outcome=outcome,
        )

    def _write(self, event: str, is_slow: bool, **fields: Any) -> None:
        _log.log(max(logging.WARNING, self._level) if is_slow else self._level, event, **fields)


def _now_ms(clock: Clock) -> float:
    """Return a time to compare with a later one. The wall clock of the machine may jump."""
    return clock.now_ms() if clock.is_virtual else time.perf_counter() * 1_000

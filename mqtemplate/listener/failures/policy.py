"""Failure policy of one listener: whether and when a message that failed is retried, and its way back to the broker."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mqtemplate.broker import Broker, Capability, Consumer
from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.errors import MessageError, SendError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.settings import Backoff, ListenerSettings, retry_delay_ms
from mqtemplate.listener.failures.failure import (
    DeadLetter,
    Decision,
    InvalidBodyError,
    NextStep,
    RetryLater,
    is_kind,
    raise_if_not_of_handler,
)
from mqtemplate.listener.failures.failure_log import short_stack
from mqtemplate.message import MessageExt
from mqtemplate.record.dead_letter import FIRST_FAILED_AT, cause_of, dead_letter_properties, iso_time
from mqtemplate.user_code import error_text

_log = get_logger("mqtemplate.listener")
_BROKERS_CHOICE = 0  # as a delay level


class FailurePolicy:
    """Decisions for the messages of one listener.

    - A failure that a retry cannot help is never retried: an invalid body, `DeadLetter`, an exception of
      ``not_retry_for`` or outside of ``retry_for``.
    - ``CONCURRENTLY``: with the exact delay where the broker can, else with the level whose delay is nearest and not
      shorter. Without a schedule the broker chooses the delay.
    - ``ORDERLY``: the queue is suspended for the delay.
    - By POP a delay is the invisible time, so it is exact.
    - ``BROADCASTING``: dropped, since the members of the group have no common retry topic.
    """

    def __init__(self, settings: ListenerSettings, broker: Broker) -> None:
        self._settings = settings
        self._broker = broker
        # On a virtual clock a test gives the same result each time.
        self._random = Random(settings.id) if broker.clock.is_virtual else Random()

    @property
    def _is_exact(self) -> bool:
        return self._settings.is_pop or Capability.RETRY_DELAY in self._broker.capabilities  # brokers may be upgraded

    def decide(self, message: MessageExt, error: BaseException | None) -> Decision:
        """Return the decision about a message.

        Args:
            error: Exception of the handler; None if it returned ``RECONSUME_LATER``, or hangs.
        """
        try:
            return self._decided(message, error)
        except BaseException as raised:  # by an exception of the application: its class, or what it has as its delay
            raise_if_not_of_handler(raised)
            _log.error(
                "listener.decision_failed",
                listener=self._settings.id,
                msg_id=message.msg_id,
                error=error_text(raised),
                hint="the message is treated as if the handler had returned RECONSUME_LATER",
            )
            return self._decided(message, None)

    def _decided(self, message: MessageExt, error: BaseException | None) -> Decision:
        settings, retries = self._settings, message.reconsume_times
        attempt, attempts = retries + 1, settings.attempts
        if settings.is_broadcasting:
            return Decision(NextStep.DROPPED, attempt, 1)
        if not self.can_retry_help(error) or retries >= settings.retry_limit:
            return Decision(NextStep.DEAD_LETTER, attempt, attempts)
        requested_ms = _requested_ms(error) if is_kind(error, RetryLater) else None
        if settings.is_orderly:
            delay_ms = self._scheduled_ms(attempt, settings.suspend_current_queue_time_millis)
            delay_ms = delay_ms if requested_ms is None else requested_ms
            return Decision(NextStep.RETRY_IN_PLACE, attempt, attempts, delay_ms)
        return self._redelivery(attempt, attempts, requested_ms)

    def can_retry_help(self, error: BaseException | None) -> bool:
        """Return True unless the exception says that a retry fails too."""
        settings = self._settings
        if settings.delay_level_when_next_consume < 0 and not settings.is_orderly:
            return False
        if error is None or is_kind(error, RetryLater):
            return True
        kind = type(error)  # as in `is_kind`
        if issubclass(kind, (InvalidBodyError, DeadLetter, *settings.not_retry_for)):
            return False
        return not settings.retry_for or issubclass(kind, settings.retry_for)

    def _scheduled_ms(self, retry: int, default_ms: int) -> int:
        schedule = self._settings.retry
        return default_ms if schedule is None else schedule.delay_ms(retry, self._random)

    def _redelivery(self, attempt: int, attempts: int | None, requested_ms: int | None) -> Decision:
        schedule, level = self._settings.retry, self._settings.delay_level_when_next_consume
        delay_ms = requested_ms
        if delay_ms is None and level > 0:
            delay_ms = _item(self._broker.delay_levels_ms, level)
        elif delay_ms is None and schedule is None:
            delay_ms, level = _item(self._broker.retry_delays_ms, attempt), _BROKERS_CHOICE
        else:
            delay_ms = self._scheduled_ms(attempt, 0) if delay_ms is None else delay_ms
            level = nearest_level(self._broker.delay_levels_ms, delay_ms)
            if self._is_exact:
                return Decision(NextStep.REDELIVERY, attempt, attempts, delay_ms, None, level)
            delay_ms = self._broker.delay_levels_ms[level - 1]
        return Decision(NextStep.REDELIVERY, attempt, attempts, delay_ms, level)

    def describe(self) -> str:
        """Return the retries for the log: their delays, and who keeps them."""
        schedule, settings = self._settings.retry, self._settings
        if settings.is_broadcasting:
            return "none"
        if settings.is_pop:
            default = format_ms(settings.suspend_current_queue_time_millis)
            return f"{schedule or (default if settings.is_orderly else _show(self._broker.retry_delays_ms))}, exact"
        if settings.is_orderly:
            return f"{schedule or format_ms(settings.suspend_current_queue_time_millis)}, in place"
        if schedule is None:
            return "by the broker"
        return f"{schedule}, {'exact' if self._is_exact else 'by level'}"

    def replaced_delays(self) -> str | None:
        """Return the delays of a broker that has levels only, for the log; None if the schedule's own are exact."""
        schedule, settings = self._settings.retry, self._settings
        if schedule is None or self._is_exact or settings.is_orderly or settings.is_broadcasting:
            return None
        levels_ms = self._broker.delay_levels_ms
        if isinstance(schedule, Backoff):
            return f"each as the next longer one of {_show(levels_ms)}"
        return _show([levels_ms[nearest_level(levels_ms, each) - 1] for each in schedule.delays_ms])


def _requested_ms(error: RetryLater) -> int | None:
    """Return the delay that a handler requested. A class of the application may have left it out."""
    delay_ms = getattr(error, "delay_ms", None)
    return None if delay_ms is None else retry_delay_ms(f"{delay_ms}ms")


def nearest_level(delays_ms: Sequence[int], delay_ms: int) -> int:
    """Return the level with the shortest delay that is not shorter than *delay_ms*; else that with the longest."""
    differences_ms = [each_ms - delay_ms for each_ms in delays_ms]
    return 1 + min(range(len(delays_ms)), key=lambda at: (differences_ms[at] < 0, abs(differences_ms[at])))


def _item(delays_ms: Sequence[int], number: int) -> int:
    """Return the delay with this number, counted from 1; the last one for a higher number."""
    return delays_ms[min(number, len(delays_ms)) - 1]


def _show(delays_ms: Sequence[int]) -> str:
    return ", ".join(map(format_ms, delays_ms))


_TO_DEAD_LETTERS = -1  # as a delay level


def properties_of_dead_letter(
    listener: str, message: MessageExt, error: BaseException | None, now_ms: int
) -> dict[str, str]:
    """Return the properties that a dead letter gets.

    Args:
        error: Its cause.
    """
    is_invalid = is_kind(error, InvalidBodyError)
    cause = (cause_of(error) or error) if is_invalid and error is not None else error
    # The stack of an invalid body is in this library, and explains nothing.
    stack = "" if is_invalid or error is None else short_stack(error)
    return dead_letter_properties(listener, message, cause, now_ms, stack=stack)


class FailureSender:
    """Sender of retries and dead letters for one member of a group."""

    def __init__(self, listener: str, consumer: Consumer, clock: Clock) -> None:
        self._listener = listener
        self._consumer = consumer
        self._now_ms = clock.now_ms

    def send(self, message: MessageExt, decision: Decision, error: BaseException | None) -> None:
        """Send a message to the dead-letter topic, or to the retry topic with its delay.

        Args:
            error: Cause, for the properties of a dead letter.

        Raises:
            MQTemplateError: The broker did not take the message.
        """
        now_ms = self._now_ms()
        if decision.next_step is NextStep.DEAD_LETTER:
            properties = properties_of_dead_letter(self._listener, message, error, now_ms)
            self._consumer.send_back(message, _TO_DEAD_LETTERS, properties=properties)
        elif decision.delay_level is not None:
            self._consumer.send_back(message, decision.delay_level)
        else:
            first_failed_at = message.properties.get(FIRST_FAILED_AT) or iso_time(now_ms)
            try:
                self._consumer.send_back(
                    message, delay_ms=decision.delay_ms, properties={FIRST_FAILED_AT: first_failed_at}
                )
            except (MessageError, SendError, UnsupportedError) as refusal:
                self._consumer.send_back(message, decision.fallback_level)
                _log.warning(
                    "listener.retry_delay_refused",
                    listener=self._listener,
                    msg_id=message.msg_id,
                    delay_ms=decision.delay_ms,
                    delay_level=decision.fallback_level,
                    reason=str(refusal),
                )

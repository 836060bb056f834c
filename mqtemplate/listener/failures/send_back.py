"""Messages that failed, sent back to the broker as the policy decided."""

from __future__ import annotations

from mqtemplate.broker import Consumer
from mqtemplate.clock import Clock
from mqtemplate.errors import MessageError, SendError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.failures.failure import Decision, NextStep, is_kind
from mqtemplate.listener.failures.outcomes import InvalidBodyError
from mqtemplate.message import MessageExt
from mqtemplate.record.dead_letter import FIRST_FAILED_AT, cause_of, dead_letter_properties, iso_time

_log = get_logger("mqtemplate.listener")

_TO_DEAD_LETTERS = -1  # as a delay level


class SendBack:
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
            is_invalid = is_kind(error, InvalidBodyError)
            cause = (cause_of(error) or error) if is_invalid and error is not None else error
            properties = dead_letter_properties(self._listener, message, cause, now_ms, has_stack=not is_invalid)
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

"""Exceptions by which a handler decides what happens to its message, and the one for a body that cannot be read."""

from __future__ import annotations

from mqtemplate.durations import Duration
from mqtemplate.errors import ConversionError
from mqtemplate.listener.failures.schedule import retry_delay_ms
from mqtemplate.user_code import Picklable


class RetryLater(Picklable):  # a request of the handler, not an error of the library
    """Raised by a handler: retry this message later. No error is logged.

    It counts as a retry: after the last one the message is a dead letter.

    Args:
        delay: Time until the retry, such as ``"10m"``, a timedelta, or seconds; None: that of the listener's schedule.
        reason: Cause for the log.

    Raises:
        ValueError: *delay* is not allowed.
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        try:
            self.delay_ms = None if delay is None else retry_delay_ms(delay)
        except ValueError as error:
            raise ValueError(f"RetryLater: delay must be {error}") from None
        super().__init__(reason or "the handler requested a retry")


class DeadLetter(Picklable):  # a request of the handler, not an error of the library
    """Raised by a handler: send this message to the dead-letter topic now, without a retry.

    Args:
        reason: Cause, for the log and the properties of the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class InvalidBodyError(ConversionError):
    """The body of a message cannot be converted to the type that the handler declares. A retry cannot help.

    Its cause is the error of the converter.
    """

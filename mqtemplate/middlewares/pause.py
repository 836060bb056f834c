"""`PauseListener`: the exception by which a middleware or a handler pauses its listener."""

from __future__ import annotations

from mqtemplate.durations import Duration, duration_ms
from mqtemplate.user_code import Picklable


class PauseListener(Picklable):  # a request, not an error of the library
    """Raised by a middleware or a handler: pause the listener, and handle this message first after it.

    It does not count as an attempt, and no error is logged. It is for a cause that other messages share, such as a
    database that is down. Messages that were fetched stay in this process.

    Args:
        duration: Time until the listener continues, such as ``"30s"``, a timedelta, or seconds.
        reason: Cause for the log.

    Raises:
        ValueError: *duration* is not allowed.
    """

    def __init__(self, duration: Duration, reason: str = "") -> None:
        try:
            self.duration_ms = max(1, duration_ms(duration, 1_000))
        except ValueError as error:
            raise ValueError(f"PauseListener: duration must be {error}") from None
        super().__init__(reason or "a middleware or handler requested a pause")

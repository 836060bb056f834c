"""`RateLimit`: a limit of the messages that a listener handles in a time."""

from __future__ import annotations

import threading
from collections.abc import Generator

from mqtemplate.durations import Duration, duration_ms
from mqtemplate.errors import ConfigurationError
from mqtemplate.middlewares.delivery import Delivery
from mqtemplate.middlewares.pause import PauseListener
from mqtemplate.user_code import shown


class RateLimit:
    """Middleware that pauses its listener when it has handled *count* messages in a time.

    A token bucket: it holds *burst* tokens, a message takes one, and they come back evenly. No thread and no event loop
    waits for a token. One object is one limit, for all listeners of this process that have it.

    Args:
        count: Messages per *per*, retries included.
        per: Time, such as ``"1s"``, a timedelta, or seconds.
        burst: Messages that may be handled at once after a quiet time; by default *count*.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    def __init__(self, count: int, per: Duration = "1s", burst: int | None = None) -> None:
        for name, value in (("count", count), ("burst", count if burst is None else burst)):
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigurationError(f"RateLimit: {name} must be a whole number, 1 or more, got {shown(value)}")
        try:
            per_ms = duration_ms(per, 1_000)
        except ValueError as error:
            raise ConfigurationError(f"RateLimit: per must be {error}") from None
        if per_ms < 1:
            raise ConfigurationError(f"RateLimit: per must be 1 ms or longer, got {shown(per)}")
        self._tokens_per_ms = count / per_ms
        self._burst = float(count if burst is None else burst)
        self._tokens = self._burst
        self._filled_ms = 0
        self._lock = threading.Lock()

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Pause the listener if no token is left."""
        missing_ms = self._take(len(delivery.messages), delivery.listener.clock.steady_ms())
        if missing_ms:
            raise PauseListener(f"{missing_ms}ms", "the rate limit is reached")
        yield delivery

    def _take(self, count: int, now_ms: int) -> int:
        """Take tokens and return 0; or return the time until there are enough."""
        # A batch may be larger than the bucket. It waits for a full one, and leaves a debt.
        needed = min(float(count), self._burst)
        with self._lock:
            gained = max(0, now_ms - self._filled_ms) * self._tokens_per_ms
            self._tokens = min(self._burst, self._tokens + gained)
            self._filled_ms = now_ms
            if self._tokens >= needed - 1e-9:
                self._tokens -= count
                return 0
            return -int(-(needed - self._tokens) // self._tokens_per_ms) or 1

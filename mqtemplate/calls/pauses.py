"""Pauses of listeners: the exception `PauseListener`, and the middlewares that raise it.

`RateLimit` limits the messages that listeners handle in a time. `CircuitBreaker` pauses listeners while a dependency is
down. `Deduplication` drops repeats of messages that this process has handled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from mqtemplate.calls.handling import Delivery
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import ConfigurationError, Picklable
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt
from mqtemplate.user_code import error_text, shown

_log = get_logger("mqtemplate.middlewares")


class PauseListener(Picklable):  # a request, not an error of the library
    """Raised by a middleware or a handler: pause the listener, and handle this message first after it.

    It does not count as an attempt, and no error is logged. It is for a cause that other messages share, such as a
    database that is down. Messages that were fetched stay in this process.

    Args:
        duration: Time until the listener continues: ``"30s"`` or a timedelta.
        reason: Cause for the log.

    Raises:
        ValueError: *duration* is not allowed.
    """

    def __init__(self, duration: Duration, reason: str = "") -> None:
        self.duration_ms = max(1, option_ms("PauseListener: duration", duration, ValueError))
        super().__init__(reason or "a middleware or handler requested a pause")


class RateLimit:
    """Middleware that pauses its listener when it has handled *count* messages in a time.

    A token bucket: it holds *burst* tokens, a message takes one, and they come back evenly. No thread and no event loop
    waits for a token. One object is one limit, for all listeners of this process that have it.

    Args:
        count: Messages per *per*, retries included.
        per: Time: ``"1s"`` or a timedelta.
        burst: Messages that may be handled at once after a quiet time; by default *count*.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    def __init__(self, count: int, per: Duration = "1s", burst: int | None = None) -> None:
        for name, value in (("count", count), ("burst", count if burst is None else burst)):
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigurationError(f"RateLimit: {name} must be a whole number, 1 or more, got {shown(value)}")
        per_ms = option_ms("RateLimit: per", per, ConfigurationError)
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


class CircuitBreaker:
    """Middleware that pauses its listeners after failures in a row, so that an outage uses up no retries.

    - Closed: it counts failures in a row. Other exceptions than *errors* do not count, and do not end the row.
    - Open, from *failures* on: the listeners that have it are paused. The message that opened it, and those that run
      meanwhile and fail, do not count as attempts: they are handled first after the pause.
    - Half-open, after *pause*: one message is tried. If it succeeds, the breaker closes and all listeners continue;
      if it fails, they are paused again.

    One object is one dependency, for all listeners of this process that have it.

    Args:
        failures: Number of failures in a row.
        pause: Time for which the listeners are paused.
        errors: Classes of exceptions that mean that the dependency is down, such as ``(OSError,)``.
        name: Name in log events.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    def __init__(
        self,
        failures: int = 5,
        pause: Duration = "30s",
        errors: type[Exception] | tuple[type[Exception], ...] = Exception,
        name: str = "",
    ) -> None:
        if type(failures) is not int or failures < 1:
            given = shown(failures)
            raise ConfigurationError(f"CircuitBreaker: failures must be a whole number, 1 or more, got {given}")
        self._pause_ms = max(1, option_ms("CircuitBreaker: pause", pause, ConfigurationError))
        kinds: tuple[Any, ...] = errors if isinstance(errors, tuple) else (errors,)
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise ConfigurationError(f"CircuitBreaker: errors must be classes of exceptions, got {shown(errors)}")
        self._limit = failures
        self._errors: tuple[type[Exception], ...] = kinds
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_ms: int | None = None  # None: closed
        self._is_trying = False
        self._paused: dict[str, Callable[[], None]] = {}  # listener -> function that resumes it

    @property
    def is_open(self) -> bool:
        """True while the listeners are paused, or one message is tried."""
        return self._open_until_ms is not None

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Call the handler if the breaker is closed; or as a try, if its time has come."""
        is_try = self._admit(delivery)
        try:
            yield delivery
        except PauseListener:
            self._end_try(is_try)
            raise
        except self._errors as error:
            if self._fail(delivery, is_try, error):
                raise self._request(delivery) from error
            raise
        except BaseException:
            self._end_try(is_try)
            raise
        self._succeed(is_try)

    def _admit(self, delivery: Delivery) -> bool:
        """Return True for the one message that is tried while the breaker is open."""
        with self._lock:
            if self._open_until_ms is None:
                return False
            is_due = delivery.listener.clock.steady_ms() >= self._open_until_ms
            if is_due and not self._is_trying:
                self._is_trying = True
                return True
        raise self._request(delivery)

    def _request(self, delivery: Delivery) -> PauseListener:
        """Return the exception that pauses a listener, which `_succeed` resumes."""
        listener = delivery.listener
        with self._lock:
            rest_ms = (self._open_until_ms or 0) - listener.clock.steady_ms()
            self._paused[listener.id] = listener.resume
        return PauseListener(f"{rest_ms if rest_ms > 0 else self._pause_ms}ms", f"circuit breaker {self._name} is open")

    def _end_try(self, is_try: bool) -> None:
        if is_try:
            with self._lock:
                self._is_trying = False

    def _fail(self, delivery: Delivery, is_try: bool, error: Exception) -> bool:
        """Count a failure. Return True if the breaker is open now."""
        with self._lock:
            self._failures += 1
            was_open = self._open_until_ms is not None
            if not was_open and self._failures < self._limit:
                return False
            if is_try or not was_open:
                self._is_trying = False
                self._open_until_ms = delivery.listener.clock.steady_ms() + self._pause_ms
                _log.warning(
                    "breaker.opened",
                    breaker=self._name,
                    listener=delivery.listener.id,
                    pause_ms=self._pause_ms,
                    reason=error_text(error),
                )
            return True

    def _succeed(self, is_try: bool) -> None:
        if not is_try and not self._failures:
            return
        with self._lock:
            if self._open_until_ms is not None and not is_try:
                return  # it was admitted before the breaker opened
            self._failures = 0
            self._is_trying = False
            was_open, self._open_until_ms = self._open_until_ms is not None, None
            paused, self._paused = list(self._paused.values()), {}
        if was_open:
            _log.info("breaker.closed", breaker=self._name)
        for resume in paused:
            resume()


_IN_FLIGHT_PAUSE_MS = 100
_Key = tuple[str, str]


def _message_id(message: MessageExt) -> str | None:
    return message.msg_id


class Deduplication:
    """Middleware that drops messages whose key this process has handled already.

    It keeps keys in memory, so it is an optimisation and no guarantee: after a restart, in another process of the
    group, and for keys that were forgotten, a repeat is handled again. Effects that must happen once need an inbox in
    the transaction of the effect; see ``docs/effect-once.md``.

    - A key counts as handled when the handler has succeeded, and in a batch if all of its messages have.
    - While a message is being handled, a repeat of it pauses its listener for a moment.
    - Consumer groups do not share keys.

    Args:
        key: Function that returns the key of a message, None for a message that is always handled. By default the id
            that the producer created, which is equal for repeats of one send; ``lambda message: message.keys`` also
            finds a second send.
        keep: Time for which a key is kept.
        max_keys: Most keys that are kept; the oldest are forgotten first.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    def __init__(
        self,
        key: Callable[[MessageExt], str | None] = _message_id,
        *,
        keep: Duration = "10m",
        max_keys: int = 100_000,
    ) -> None:
        if type(max_keys) is not int or max_keys < 1:
            given = shown(max_keys)
            raise ConfigurationError(f"Deduplication: max_keys must be a whole number, 1 or more, got {given}")
        self._keep_ms = option_ms("Deduplication: keep", keep, ConfigurationError)
        self._key = key
        self._max_keys = max_keys
        self._handled: OrderedDict[_Key, int] = OrderedDict()  # key -> time, oldest first
        self._in_flight: set[_Key] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._handled)

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Drop the messages that are repeats."""
        info = delivery.listener
        keys = [None if (key := self._key(each)) is None else (info.group, key) for each in delivery.messages]
        new = self._reserve(keys, info.clock.steady_ms())
        try:
            if all(new):
                result = yield delivery
            elif any(new):
                kept = iter(new)
                result = yield delivery.filter(lambda _: next(kept))
            else:
                return
            if info.is_done(result):
                self._record(keys, info.clock.steady_ms())
        finally:
            with self._lock:
                self._in_flight.difference_update(key for key, is_new in zip(keys, new, strict=True) if is_new and key)

    def _reserve(self, keys: Sequence[_Key | None], now_ms: int) -> list[bool]:
        """Return for each key True if it is new, and note that it is being handled."""
        new: list[bool] = []
        with self._lock:
            self._forget(now_ms)
            if not self._in_flight.isdisjoint(keys):
                raise PauseListener(f"{_IN_FLIGHT_PAUSE_MS}ms", "a message with the same key is being handled")
            for key in keys:
                is_new = key is None or (key not in self._handled and key not in self._in_flight)
                new.append(is_new)
                if is_new and key is not None:
                    self._in_flight.add(key)
        return new

    def _record(self, keys: Iterable[_Key | None], now_ms: int) -> None:
        with self._lock:
            for key in keys:
                if key is not None:
                    self._handled.setdefault(key, now_ms)
            while len(self._handled) > self._max_keys:
                self._handled.popitem(last=False)

    def _forget(self, now_ms: int) -> None:
        while self._handled:
            key, handled_ms = next(iter(self._handled.items()))
            if now_ms - handled_ms < self._keep_ms:
                return
            del self._handled[key]

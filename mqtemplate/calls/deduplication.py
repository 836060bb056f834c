"""`Deduplication`: it drops repeats of messages that this process has handled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence

from mqtemplate.calls.handling import Delivery
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.durations import Duration, duration_ms
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import MessageExt
from mqtemplate.user_code import shown

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
        try:
            self._keep_ms = duration_ms(keep, 1_000)
        except ValueError as error:
            raise ConfigurationError(f"Deduplication: keep must be {error}") from None
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

"""Limits for each key of a consumer group, such as a tenant, and queues that are fair to keys."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mqtemplate.message import FAIR_BY_HASH_KEY, Property

__all__ = ["MAX_IN_FLIGHT_PER_KEY", "MAX_RATE", "KeyLimits", "KeyRates", "KeyedQueue", "parse_rate"]

MAX_RATE = 10_000_000
MAX_IN_FLIGHT_PER_KEY = 100_000
_MOST_IDLE_KEYS = 1_024


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Keys take turns, and each has its limits.

    Attributes:
        fair_by: Name of the property whose values are the keys, or ``hash_key``.
        max_in_flight: Most messages of a key that are handled at a time; None without a limit.
        max_rate: Most messages of a key that begin in a second; None without a limit.
    """

    fair_by: str
    max_in_flight: int | None = None
    max_rate: float | None = None

    @property
    def property_name(self) -> str:
        """Name of the property that has the key."""
        return Property.SHARDING_KEY if self.fair_by == FAIR_BY_HASH_KEY else self.fair_by

    def key_of(self, properties: Mapping[str, str]) -> str:
        """Return the key of a message; messages without the property are one key."""
        return properties.get(self.property_name, "")

    @property
    def step_ms(self) -> float:
        """Time between two messages of a key; 0 without a limit."""
        return 1_000 / self.max_rate if self.max_rate else 0.0


def parse_rate(text: str | None) -> float | None:
    """Return a number a second; None for None, and for a text that is not a number above 0."""
    try:
        rate = float(text or "")
    except ValueError:
        return None
    return rate if 0 < rate <= MAX_RATE else None


class KeyRates:
    """The time from which on each key may have its next message.

    If a message begins late, the next ones catch up with it, up to the time of one message. So a second has at most one
    message more than the limit. Keys that may have a message at once are forgotten.
    """

    def __init__(self) -> None:
        self._next_ms: dict[str, float] = {}

    def next_ms(self, key: str) -> float:
        """Return the time of the next message of a key; 0 if it has had none lately."""
        return self._next_ms.get(key, 0.0)

    def spend(self, key: str, now_ms: int, step_ms: float) -> None:
        """Count a message of a key."""
        self._next_ms[key] = max(self._next_ms.get(key, 0.0), now_ms - step_ms) + step_ms
        if len(self._next_ms) > _MOST_IDLE_KEYS and self._next_ms.get(next(iter(self._next_ms)), 0.0) <= now_ms:
            self._next_ms = {each: at_ms for each, at_ms in self._next_ms.items() if at_ms > now_ms - step_ms}

    def refund(self, key: str, step_ms: float) -> None:
        """Take back `spend` for a message that does not begin."""
        self._next_ms[key] = self._next_ms.get(key, 0.0) - step_ms


_Item = TypeVar("_Item")


class _KeyLine(Generic[_Item]):
    """Items of one key."""

    __slots__ = ("in_flight", "is_limited", "is_ready", "items")

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        self.in_flight = 0
        self.is_ready = False
        self.is_limited = False


class KeyedQueue(Generic[_Item]):
    """A queue whose keys take turns, within their limits. It has the methods of a deque that consume services use.

    An item is in flight from `popleft` until `end`. Thread-safe.

    Args:
        key_of: Returns the key of an item.
        now_ms: Returns the time that rates count.
        on_limited: Called when a key has to wait for its rate: `next_due_ms` may be earlier.
    """

    def __init__(
        self,
        limits: KeyLimits,
        key_of: Callable[[_Item], str],
        now_ms: Callable[[], int],
        on_limited: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._key_of = key_of
        self._now_ms = now_ms
        self._on_limited = on_limited
        self._lock = threading.Lock()
        self._lines: dict[str, _KeyLine[_Item]] = {}
        self._ready: deque[str] = deque()
        self._limited: list[tuple[float, int, str]] = []  # heap: time, number, key
        self._numbers = itertools.count()
        self._rates = KeyRates()

    def __len__(self) -> int:
        """Return the number of keys that may have their next item now."""
        return len(self._ready)

    @property
    def next_due_ms(self) -> int | None:
        """Time at which a key may have its next item by its rate; None if none waits for it."""
        with self._lock:
            return -int(-self._limited[0][0] // 1) if self._limited else None

    def append(self, item: _Item) -> None:
        """Add an item after the others of its key."""
        self.extend((item,))

    def extend(self, items: Iterable[_Item]) -> None:
        """Add items after the others of their keys."""
        with self._lock:
            waits = [self._add(item, is_first=False) for item in items]
        if any(waits):
            self._on_limited()

    def extendleft(self, items: Iterable[_Item]) -> None:
        """Add items before the others of their keys, the last one first."""
        with self._lock:
            waits = [self._add(item, is_first=True) for item in items]
        if any(waits):
            self._on_limited()

    def _add(self, item: _Item, *, is_first: bool) -> bool:
        key = self._key_of(item)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _KeyLine()
        (line.items.appendleft if is_first else line.items.append)(item)
        return self._refresh(key, line)

    def _refresh(self, key: str, line: _KeyLine[_Item]) -> bool:
        """Let a key have a turn if it may. Return True if it has to wait for its rate."""
        limits = self._limits
        if not line.items:
            if not line.in_flight and not line.is_ready and not line.is_limited:
                del self._lines[key]
            return False
        is_full = limits.max_in_flight is not None and line.in_flight >= limits.max_in_flight
        if line.is_ready or line.is_limited or is_full:
            return False
        at_ms = self._rates.next_ms(key)
        if limits.max_rate is not None and at_ms > self._now_ms():
            line.is_limited = True
            heapq.heappush(self._limited, (at_ms, next(self._numbers), key))
            return True
        line.is_ready = True
        self._ready.append(key)
        return False

    def release_due(self, now_ms: int) -> None:
        """Let the keys have a turn whose rate allows it."""
        with self._lock:
            while self._limited and self._limited[0][0] <= now_ms:
                key = heapq.heappop(self._limited)[2]
                line = self._lines[key]
                line.is_limited = False
                self._refresh(key, line)

    def popleft(self) -> _Item:
        """Return the next item of the key whose turn it is. `end` it then.

        Raises:
            IndexError: No key may have an item now.
        """
        with self._lock:
            while True:
                key = self._ready.popleft()
                line = self._lines[key]
                line.is_ready = False
                if line.items:
                    break
                self._refresh(key, line)
            item = line.items.popleft()
            line.in_flight += 1
            if self._limits.max_rate is not None:
                self._rates.spend(key, self._now_ms(), self._limits.step_ms)
            is_limited = self._refresh(key, line)
        if is_limited:
            self._on_limited()
        return item

    def end(self, item: _Item) -> None:
        """Note that an item of `popleft` is not handled any more."""
        key = self._key_of(item)
        with self._lock:
            line = self._lines.get(key)
            if line is None:
                return  # the queue was cleared
            line.in_flight = max(line.in_flight - 1, 0)
            is_limited = self._refresh(key, line)
        if is_limited:
            self._on_limited()

    def clear(self) -> None:
        """Forget all items."""
        with self._lock:
            self._lines.clear()
            self._ready.clear()
            self._limited.clear()

"""Cache of values that take long to read."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mqtemplate.errors import MQTemplateError

T = TypeVar("T")

_MAX_KEYS = 64
_LEAST_AGE_S = 2.0
_COST_FACTOR = 20
"""A value is used at least this many times as long as it took to read."""
_PAUSE_S = 0.3
"""Time before an old value is read again: the page that shows the old one is sent first, which takes processor time."""


@dataclass(frozen=True, slots=True)
class Cached(Generic[T]):
    """A value, and its age in seconds."""

    value: T
    age_s: float


class _Entry:
    def __init__(self) -> None:
        self.is_read = threading.Event()
        self.is_reading = False
        self.value: Any = None
        self.error: MQTemplateError | None = None
        self.at_s = 0.0
        self.expires_s = 0.0


class BackgroundCache:
    """Values by key. A value that is too old is returned all the same, while a thread reads it again.

    So only the first reader of a key waits, and no longer than it wants to.

    Args:
        in_background: False: values are read by the caller, each time. For a virtual clock.
    """

    def __init__(self, *, in_background: bool = True) -> None:
        self._in_background = in_background
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], T], wait_s: float) -> Cached[T] | None:
        """Return the value of a key; None if it was never read and reading takes longer than *wait_s*.

        Raises:
            MQTemplateError: The last read raised it.
        """
        if not self._in_background:
            return Cached(read(), 0.0)
        entry = self._entry(key, read)
        if not entry.is_read.wait(wait_s):
            return None
        if entry.error is not None:
            raise entry.error
        return Cached(entry.value, time.monotonic() - entry.at_s)

    def clear(self) -> None:
        """Forget all values: after a change."""
        with self._lock:
            self._entries.clear()

    def _entry(self, key: Hashable, read: Callable[[], object]) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > _MAX_KEYS:
                self._entries.popitem(last=False)
            must_read = not entry.is_reading and time.monotonic() >= entry.expires_s
            entry.is_reading = entry.is_reading or must_read
        if must_read:
            thread = threading.Timer(_PAUSE_S if entry.is_read.is_set() else 0.0, self._read, (entry, read))
            thread.name, thread.daemon = "mqtemplate-dashboard", True
            thread.start()
        return entry

    def _read(self, entry: _Entry, read: Callable[[], object]) -> None:
        start_s = time.monotonic()
        try:
            entry.value, entry.error = read(), None
        except MQTemplateError as exc:
            entry.error = exc
        except Exception as exc:
            entry.error = MQTemplateError(f"{type(exc).__name__}: {exc}")
        entry.at_s = time.monotonic()
        entry.expires_s = entry.at_s + max(_LEAST_AGE_S, _COST_FACTOR * (entry.at_s - start_s))
        entry.is_reading = False
        entry.is_read.set()

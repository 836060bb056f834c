"""Connections of this process: Spark uses its Python processes for many tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar


class _Connection(Protocol):
    def close(self) -> None:
        """Close the connection."""


_ConnectionT = TypeVar("_ConnectionT", bound=_Connection)
_MOST = 8
_kept: dict[Hashable, Any] = {}
_connecting = threading.Lock()


def kept_connection(key: Hashable, connect: Callable[[], _ConnectionT]) -> _ConnectionT:
    """Return the connection of this process with this key, or a new one. The oldest of many is closed.

    Args:
        key: All that the connection depends on, also access key and TLS settings, and its kind.
    """
    key = os.getpid(), key  # a forked process has none
    with _connecting:
        found: _ConnectionT | None = _kept.get(key)
        if found is None:
            found = connect()
            while len(_kept) >= _MOST:
                _kept.pop(next(iter(_kept))).close()
            _kept[key] = found
        return found


def close_connections() -> None:
    """Close the connections of this process. New ones are opened when they are needed."""
    with _connecting:
        while _kept:
            _kept.popitem()[1].close()

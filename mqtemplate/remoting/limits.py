"""Limits of memory and time: for one connection, and for all connections together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.remoting.protocol.codes import MAX_FRAME_BYTES

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection. Sizes are in bytes.

    Attributes:
        max_frame_bytes: Size of the largest accepted frame, including its first four bytes.
        frame_timeout_ms: Longest time from the first byte of a frame to its last; also for a TLS handshake.
        idle_ms: A connection without a byte in either direction for this time is closed. RocketMQ: 120 s.
        pause_reading_bytes: With more unread output than this, the connection does not read from the peer.
        max_unread_bytes: With more unread output than this, the connection is closed.
        max_unanswered: With this many requests unanswered, the next one is refused with SYSTEM_BUSY.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    frame_timeout_ms: int = 30_000
    idle_ms: int = 120_000
    pause_reading_bytes: int = 4 * _MIB
    max_unread_bytes: int = 64 * _MIB
    max_unanswered: int = 50_000


class MemoryLimit:
    """Thread-safe counter of bytes that several connections hold together.

    Args:
        limit: Largest allowed sum.
        on_exceeded: Called by the adding thread after each addition while the sum is larger.

    Attributes:
        held: Current sum.
    """

    __slots__ = ("_limit", "_lock", "_on_exceeded", "held")

    def __init__(self, limit: float = math.inf, on_exceeded: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._lock = threading.Lock()
        self.held = 0

    @property
    def is_exceeded(self) -> bool:
        """True while the sum is larger than the limit."""
        return self.held > self._limit

    def add(self, count: int) -> None:
        """Add *count* bytes; a negative number releases them."""
        with self._lock:
            self.held += count
        if count > 0 and self.is_exceeded:
            self._on_exceeded()

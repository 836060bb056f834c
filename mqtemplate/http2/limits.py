"""Limits of a gRPC server: what its clients may make it hold and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from mqtemplate.http2.frames import ErrorCode, Http2Error
from mqtemplate.remoting.settings import RemotingServerSettings

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """Limits of one connection. Sizes are in bytes.

    A control frame is one that carries no call: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, an empty one, a frame of a
    closed stream or of an unknown type. Each call and each larger DATA frame permits some more of them.

    Attributes:
        max_streams: Largest number of open streams. A further one is refused.
        stream_window_bytes: Receive window of a stream. It is refilled when half of it is used.
        connection_window_bytes: Receive window of all streams together.
        max_header_bytes: Largest size of a list of fields, and of its encoded block.
        max_control_frames: With more control frames than this at once, the connection is closed.
        control_frames_per_s: Number of them that is permitted all the time.
        max_resets: With more streams than this that end by RST_STREAM at once, the connection is closed. The next
            connections of its address have together what is left of this number; see `AddressBudgets`.
        resets_per_s: Number of them that is permitted all the time.
    """

    max_streams: int = 1_000
    stream_window_bytes: int = _MIB
    connection_window_bytes: int = 4 * _MIB
    max_header_bytes: int = 16_384
    max_control_frames: int = 10_000
    control_frames_per_s: int = 1_000
    max_resets: int = 1_000
    resets_per_s: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits(RemotingServerSettings):
    """Limits and settings of a `GrpcServer`; those of all servers over TCP are inherited.

    A connection without a call for ``limits.idle_ms`` is closed. One with calls gets a PING after half of that time
    without a byte of the client, and is closed after the whole of it.

    Attributes:
        http2: Limits of one connection.
        max_message_bytes: Size of the largest message of a client. RocketMQ: 130 MiB.
        stall_ms: A call whose client does not permit to send the next part of its response for this time is cancelled.
    """

    http2: Http2Limits = field(default_factory=Http2Limits)
    max_message_bytes: int = 130 * _MIB
    max_partial_bytes: int = 160 * _MIB
    stall_ms: int = 60_000


# --- budgets --------------------------------------------------------------------------------------


class Budget:
    """Number of events that a peer may cause: *burst* at once, and *per_s* all the time."""

    __slots__ = ("_now_ms", "_per_ms", "_since_ms", "burst", "left")

    def __init__(self, burst: int, per_s: int, now_ms: Callable[[], float]) -> None:
        self.left: float = burst
        self.burst = burst
        self._per_ms = per_s / 1_000
        self._now_ms = now_ms
        self._since_ms = now_ms()

    def spend(self, count: int, what: str) -> None:
        """Count events, or raise `Http2Error` if there are too many."""
        self.left -= count
        if self.left < 0 and self.refill() < 0:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def earn(self, count: int) -> None:
        """Permit more events."""
        if self.left < self.burst:
            self.left += count

    def refill(self) -> float:
        """Add the events that the time since the last call permits. Return the number that is left."""
        now = self._now_ms()
        self.left = min(self.left + (now - self._since_ms) * self._per_ms, self.burst)
        self._since_ms = now
        return self.left


_KEPT_BELOW = 0.9
"""A budget with less than this part of its burst outlives its connection. RocketMQ's clients reset some calls when they
close, each a few."""
_MAX_KEPT = 1_000


class AddressBudgets:
    """Budgets of connections. What a connection has used counts for the next ones of its address, too.

    Without that, a client whose connection is closed for too many events opens another one, and has the whole burst
    again. The connections that are opened until the budget is full again share it.

    Not thread-safe.
    """

    def __init__(self, burst: int, per_s: int, now_ms: Callable[[], float]) -> None:
        self._new = partial(Budget, burst, per_s, now_ms)
        self._kept: dict[str, Budget] = {}  # the oldest first

    def __len__(self) -> int:
        """Return the number of budgets that outlive their connections."""
        return len(self._kept)

    def of(self, address: str) -> Budget:
        """Return the budget of a new connection."""
        kept = self._kept.get(address)
        if kept is not None and kept.refill() < kept.burst:
            return kept
        self._kept.pop(address, None)
        return self._new()

    def keep(self, address: str, budget: Budget) -> None:
        """Keep the budget of a connection that has ended, if much of it is used."""
        if budget.refill() >= budget.burst * _KEPT_BELOW:
            return
        kept = self._kept.get(address)
        if kept is None or budget.left < kept.refill():
            self._kept[address] = budget
        if len(self._kept) > _MAX_KEPT:
            self._kept = {each: kept for each, kept in self._kept.items() if kept.refill() < kept.burst}
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]

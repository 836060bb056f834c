"""Requests of this side to which the peer has not responded yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from mqtemplate.errors import BrokerError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.io_loop import Timer
from mqtemplate.remoting.protocol.command import RemotingCommand

_log = get_logger("mqtemplate.remoting")

InvokeCallback = Callable[[RemotingCommand | BrokerError], None]
"""Called once per request, with its response or with the error; it must not block."""

_counter = itertools.count()


def next_opaque() -> int:
    """Return the next opaque; all connections of this process share the count. It wraps as Java's: 32 bits, signed."""
    return ((next(_counter) + 0x8000_0000) & 0xFFFF_FFFF) - 0x8000_0000


class _Pending:
    __slots__ = ("callback", "timer")

    def __init__(self, callback: InvokeCallback) -> None:
        self.callback = callback
        self.timer: Timer | None = None


class PendingInvocations:
    """Callbacks of pending requests by opaque.

    Thread-safe: the thread that removes an entry calls its callback, so each callback is called once.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, opaque: int, callback: InvokeCallback, start_timer: Callable[[], Timer] | None = None) -> None:
        """Add a request. Its timer starts after that, so that even the shortest one finds the entry."""
        pending = self._pending[opaque] = _Pending(callback)
        if start_timer is not None:
            pending.timer = start_timer()

    def complete(self, opaque: int, result: RemotingCommand | BrokerError) -> bool:
        """Call the callback of a request; return False if the request is not pending any more."""
        pending = self._pending.pop(opaque, None)
        if pending is None:
            return False
        if pending.timer is not None:
            pending.timer.cancel()
        call_safely(pending.callback, result)
        return True

    def remove(self, opaque: int) -> bool:
        """Remove a request without a call; return False if it is not pending any more."""
        return self._pending.pop(opaque, None) is not None

    def fail_all(self, error: Callable[[], BrokerError]) -> None:
        """Call all callbacks, each with an error of its own: several threads must not raise the same exception."""
        while self._pending:
            try:
                opaque = next(iter(self._pending))
            except (StopIteration, RuntimeError):  # another thread changed the dictionary at this moment
                continue
            self.complete(opaque, error())


def call_safely(callback: InvokeCallback, result: RemotingCommand | BrokerError) -> None:
    """Call *callback*, and log its exception."""
    try:
        callback(result)
    except BaseException:  # this is the I/O thread: all connections need it
        _log.exception("remoting.callback_failed", result=str(result))

"""Requests of this side that the peer has not answered yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import structlog

from mqtemplate.errors import BrokerError
from mqtemplate.remoting.protocol import RemotingCommand
from mqtemplate.remoting.timers import Timer

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

Done = Callable[[RemotingCommand | BrokerError], None]
"""Takes the answer, or why there is none; called once, and must not block."""

_counter = itertools.count()


def next_opaque() -> int:
    """The next number of this process, as Java counts: all connections share them; after 2**31 - 1 comes -2**31."""
    return ((next(_counter) + 0x8000_0000) & 0xFFFF_FFFF) - 0x8000_0000


class _Waiting:
    __slots__ = ("done", "timer")

    def __init__(self, done: Done) -> None:
        self.done = done
        self.timer: Timer | None = None


class Outstanding:
    """By opaque, who waits for the answer.

    Thread-safe: whoever takes an entry out tells its owner, so it is told once.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, opaque: int, done: Done, start_timer: Callable[[], Timer] | None = None) -> None:
        """Keep *done*; the timer is started afterwards, so that it finds an entry however short it is."""
        waiting = self._waiting[opaque] = _Waiting(done)
        if start_timer is not None:
            waiting.timer = start_timer()

    def finish(self, opaque: int, result: RemotingCommand | BrokerError) -> bool:
        """Tell whoever waits; False if nobody does, or no more."""
        waiting = self._waiting.pop(opaque, None)
        if waiting is None:
            return False
        if waiting.timer is not None:
            waiting.timer.cancel()
        tell(waiting.done, result)
        return True

    def forget(self, opaque: int) -> bool:
        """Nobody waits any more; False if it was answered before."""
        return self._waiting.pop(opaque, None) is not None

    def fail_all(self, error: Callable[[], BrokerError]) -> None:
        """Tell all who wait that there will be no answer, each by an error of its own."""
        while self._waiting:
            try:
                opaque = next(iter(self._waiting))
            except (StopIteration, RuntimeError):  # somebody gave up at this moment
                continue
            self.finish(opaque, error())


def tell(done: Done, result: RemotingCommand | BrokerError) -> None:
    """Call *done*; what it raises is logged."""
    try:
        done(result)
    except Exception:
        _log.exception("remoting.callback_failed", result=str(result))

"""Signatures that were used lately, so that a recorded request cannot be sent again."""

from __future__ import annotations

from mqtemplate.clock import Clock
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.protocol.acl import SIGNATURE
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.rights import CHANGES

_log = get_logger("mqtemplate.acl")

_MAX_SIGNATURES = 200_000


class RepeatedSignatures:
    """Valid signatures of the last *window_ms*, of requests with any code.

    A signature of RocketMQ covers the fields and the body of a request, and neither its code nor a time. So a recorded
    request stays valid, and with another code too: the fields of a query for a route are those of a deletion. Requests
    that change something are refused if their signature was used before. Clients repeat the others unchanged.

    Args:
        max_signatures: Bound of the memory, some 200 bytes each. Above it the oldest ones are forgotten.
    """

    def __init__(self, clock: Clock, window_ms: int, max_signatures: int = _MAX_SIGNATURES) -> None:
        self._clock = clock
        self._window_ms = window_ms
        self._max = max_signatures
        self._used: dict[str, int] = {}  # signature -> time of its last use (ms); the oldest first
        self._is_shortened = False

    def refuses(self, request: RemotingCommand) -> bool:
        """Note the signature of a request whose signature is valid. Return True if the request must be refused."""
        signature, now_ms = request.ext_fields[SIGNATURE], self._clock.steady_ms()
        self._forget(now_ms - self._window_ms)
        was_used = self._used.pop(signature, None) is not None
        self._used[signature] = now_ms
        return was_used and request.code in CHANGES

    def _forget(self, limit_ms: int) -> None:
        used = self._used
        while used and used[oldest := next(iter(used))] <= limit_ms:
            del used[oldest]
        if len(used) >= self._max:
            del used[next(iter(used))]
            if not self._is_shortened:
                self._is_shortened = True
                _log.warning("acl.replay_window_shortened", max_signatures=self._max, window_ms=self._window_ms)

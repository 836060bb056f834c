"""Tokens that clients present: their least length, their comparison, and a limit for wrong ones."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import threading
import time
from collections import OrderedDict, deque
from enum import Enum

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.errors import ConfigurationError

MIN_TOKEN_LENGTH = 16
_MIN_DIFFERENT = 6

_MAX_FAILURES = 10
_MINUTE_MS = 60_000
_MAX_ADDRESSES = 1_000


def weakness_of(token: str) -> str | None:
    """Return the reason why a token can be guessed; None for one that is long enough."""
    if len(token) < MIN_TOKEN_LENGTH or len(set(token)) < _MIN_DIFFERENT:
        return (
            f"must have at least {MIN_TOKEN_LENGTH} characters, {_MIN_DIFFERENT} of them different, since it can be "
            "guessed otherwise; create one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    if not token.isascii() or not token.isprintable() or token != token.strip():
        return "must consist of printable ASCII characters, without spaces at its ends, since it is sent in a header"
    return None


def checked_token(token: str, name: str) -> str:
    """Return a token.

    Raises:
        ConfigurationError: It can be guessed.
    """
    weakness = weakness_of(token)
    if weakness is not None:
        raise ConfigurationError(f"{name} {weakness}")
    return token


class TokenAnswer(Enum):
    """Result of a comparison."""

    RIGHT = "right"
    WRONG = "wrong"
    TOO_MANY = "too many wrong ones"


class TokenCheck:
    """Comparison of given tokens with the right one.

    After ten wrong tokens in a minute from one address, further wrong ones get `TokenAnswer.TOO_MANY`. The right one
    always passes: users of one machine, or of one proxy, share an address, and one of them must not lock out the
    others. A token of the least length cannot be guessed at any rate.
    """

    def __init__(self, token: str, clock: Clock = SystemClock()) -> None:
        self._digest = _digest(token)
        self._clock = clock
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, given: str, remote: str) -> TokenAnswer:
        """Compare a token.

        Args:
            remote: Address of the client.
        """
        if hmac.compare_digest(_digest(given), self._digest):
            return TokenAnswer.RIGHT
        now_ms = monotonic_ms(self._clock)
        with self._lock:
            failures = self._failures.setdefault(_network_of(remote), deque(maxlen=_MAX_FAILURES))
            self._failures.move_to_end(_network_of(remote))
            while len(self._failures) > _MAX_ADDRESSES:
                self._failures.popitem(last=False)
            if len(failures) == _MAX_FAILURES and failures[0] > now_ms - _MINUTE_MS:
                return TokenAnswer.TOO_MANY
            failures.append(now_ms)
        return TokenAnswer.WRONG


def monotonic_ms(clock: Clock) -> int:
    """Return milliseconds that only grow: an adjustment of the wall clock must not end or prolong a session."""
    return clock.now_ms() if clock.is_virtual else time.monotonic_ns() // 1_000_000


def _digest(token: str) -> bytes:
    # Digests have one length, so the time of the comparison does not tell the length of the token.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _network_of(remote: str) -> str:
    """Return the address; for IPv6 its network, since one client has all addresses of it."""
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote[:64]
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))

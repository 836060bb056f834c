"""Tokens that clients present: their least length, their comparison, and a limit for wrong ones."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
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
_MAX_ADDRESSES = 5_000
_NAME_BITS = 12


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


class FailureLimit:
    """Failures by the address of the client, and by a further name: ten in a minute. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._lock = threading.Lock()

    def is_reached(self, remote: str, name: str = "") -> bool:
        """Return True after ten failures in the last minute."""
        with self._lock:
            return self._is_full(self._failures.get(_limit_key(remote, name)))

    def add(self, remote: str, name: str = "") -> bool:
        """Count a failure. Return False if there were ten already."""
        key = _limit_key(remote, name)
        with self._lock:
            failures = self._failures.setdefault(key, deque(maxlen=_MAX_FAILURES))
            self._failures.move_to_end(key)
            while len(self._failures) > _MAX_ADDRESSES:
                self._failures.popitem(last=False)
            if self._is_full(failures):
                return False
            failures.append(monotonic_ms(self._clock))
        return True

    def _is_full(self, failures: deque[int] | None) -> bool:
        if failures is None or len(failures) < _MAX_FAILURES:
            return False
        return failures[0] > monotonic_ms(self._clock) - _MINUTE_MS


def _limit_key(remote: str, name: str) -> str:
    # Few bits of the name: a client that tries many names must not push its own failures out of the memory.
    bits = int.from_bytes(_digest(name)[:2]) >> (16 - _NAME_BITS)
    return f"{_network_of(remote)} {bits if name else ''}"


class TokenCheck:
    """Comparison of given tokens with the right one.

    After ten wrong tokens in a minute from one address, further wrong ones get `TokenAnswer.TOO_MANY`. The right one
    always passes: users of one machine, or of one proxy, share an address, and one of them must not lock out the
    others. A token of the least length cannot be guessed at any rate.
    """

    def __init__(self, token: str, clock: Clock = SystemClock()) -> None:
        self._digest = _digest(token)
        self._failures = FailureLimit(clock)

    def check(self, given: str, remote: str) -> TokenAnswer:
        """Compare a token.

        Args:
            remote: Address of the client.
        """
        if hmac.compare_digest(_digest(given), self._digest):
            return TokenAnswer.RIGHT
        return TokenAnswer.WRONG if self._failures.add(remote) else TokenAnswer.TOO_MANY


class SecretCheck:
    """Comparison of given secret keys with the one of an account.

    After ten wrong secret keys in a minute for one access key from one address, all get `TokenAnswer.TOO_MANY`, the
    right one too: unlike a token, a secret key may be short enough to be guessed. Other addresses are not affected.
    """

    def __init__(self, clock: Clock) -> None:
        self._failures = FailureLimit(clock)
        self._unknown = secrets.token_hex()

    def check(self, access_key: str, given: str, secret_key: str | None, remote: str) -> TokenAnswer:
        """Compare a secret key.

        Args:
            secret_key: The right one; None if there is no such account. The answer takes as long as for one that is.
            remote: Address of the client.
        """
        if self._failures.is_reached(remote, access_key):
            return TokenAnswer.TOO_MANY
        is_right = hmac.compare_digest(_digest(given), _digest(secret_key or self._unknown))
        if is_right and secret_key is not None:
            return TokenAnswer.RIGHT
        return TokenAnswer.WRONG if self._failures.add(remote, access_key) else TokenAnswer.TOO_MANY


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

"""Limit of the topics and groups that clients create by using them: how many, and how fast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.metrics import Counter
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.quota import Owner


class CreationRate(NamedTuple):
    """The rate at which the clients of one address, or of one account, may create objects.

    Attributes:
        burst: So many at once.
        per_second: So many in each second after that.
    """

    burst: int
    per_second: float


@dataclass(slots=True)
class _Creator:
    """The objects that one address or account has created.

    Attributes:
        tokens: How many it may create now.
        updated_ms: Time to which *tokens* belongs.
        created: Number since the server started.
    """

    tokens: float
    updated_ms: int
    created: int = 0


class CreationLimit:
    """Limits what clients create without an administrator. Thread-safe.

    One address, or one account, may create a share of the total. Its rate is limited too, since each new object
    writes a file.

    Args:
        what: The objects in the plural, for the error.
        settings: Names of the settings to change, for the error.
        count: Returns the number of objects that exist.
        max_total: With so many objects, clients may create no more.
        share: Part of *max_total* that one address or account may create.
        refused: Counts the refused requests.
    """

    def __init__(
        self,
        what: str,
        settings: str,
        clock: Clock,
        count: Callable[[], int],
        max_total: int,
        share: float,
        rate: CreationRate,
        refused: Counter,
    ) -> None:
        self._what = what
        self._settings = settings
        self._clock = clock
        self._count = count
        self._max_total = max_total
        self._max_created = max(int(max_total * share), 1)
        self._rate = rate
        self._refused = refused
        self._lock = threading.Lock()
        self._creators: dict[str | tuple[str], _Creator] = {}  # address, (account,) -> what it created

    def take(self, owner: Owner, count: int = 1) -> None:
        """Let a client create *count* objects: all of them or none.

        Raises:
            RefusedError: A limit would be exceeded.
        """
        total = self._count() + count
        with self._lock:
            creators = [self._creator(owner.address)]
            if owner.account is not None:
                creators.append(self._creator((owner.account,)))
            reason = self._reason(creators, count, total)
            if reason is None:
                for creator in creators:
                    creator.tokens -= count
                    creator.created += count
                return
            self._refused.add()
        raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{reason}; create them with mqadmin, or raise {self._settings}")

    def _reason(self, creators: list[_Creator], count: int, total: int) -> str | None:
        if total > self._max_total:
            return f"clients may create {self._what} until there are {self._max_total}, and there are {total - count}"
        if any(creator.created + count > self._max_created for creator in creators):
            return f"the clients of one address or account may create {self._max_created} {self._what}"
        if any(creator.tokens < count for creator in creators):
            burst, per_second = self._rate
            return (
                f"the clients of one address or account may create {burst} {self._what} at once, and {per_second:g} "
                "per second after that"
            )
        return None

    def _creator(self, key: str | tuple[str]) -> _Creator:
        """Return the entry of an address or an account, with its tokens of now."""
        now_ms = self._clock.steady_ms()
        creator = self._creators.get(key)
        if creator is None:
            creator = self._creators[key] = _Creator(self._rate.burst, now_ms)
        gained = max(now_ms - creator.updated_ms, 0) * self._rate.per_second / 1_000
        creator.tokens = min(self._rate.burst, creator.tokens + gained)
        creator.updated_ms = now_ms
        return creator

    def sweep(self) -> None:
        """Forget the addresses that have created nothing: each refused client left one."""
        with self._lock:
            self._creators = {key: creator for key, creator in self._creators.items() if creator.created}

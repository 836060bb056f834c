"""Brokers whose connection was lost or refused: they are looked for once a second, until they are back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.clock import Clock

FOLLOW_MS = 600_000
"""Time for which a broker that is in no route any more is looked for."""


@dataclass(frozen=True, slots=True)
class _Lost:
    broker_name: str
    broker_id: int
    since_ms: int


class LostBrokers:
    """The brokers of a client that are away. Thread-safe.

    A broker is back when it is in a route at this address, and has answered a heartbeat. It is forgotten when the
    routes have another address for it, or after some minutes without a route.

    Attributes:
        is_empty: True if no broker is away. Hot paths read it.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_empty = True
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: dict[str, _Lost] = {}

    def add(self, address: str, brokers: Mapping[str, Mapping[int, str]]) -> str | None:
        """Note that the connection to *address* was lost or refused.

        Args:
            brokers: Brokers of the routes: name -> id -> address.

        Returns:
            The name of the broker, or None if it is no broker, or is known to be away.
        """
        if address in self._lost:
            return None
        for name, by_id in brokers.items():
            for broker_id, at in by_id.items():
                if at == address:
                    with self._lock:
                        self._lost[address] = _Lost(name, broker_id, self._clock.steady_ms())
                        self.is_empty = False
                    return name
        return None

    def update(self, brokers: Mapping[str, Mapping[int, str]], answered: frozenset[str]) -> None:
        """Remove the brokers that are back, and those that need not be looked for any more.

        Args:
            answered: Addresses that have answered a heartbeat since they were lost.
        """
        with self._lock:
            self._lost = {
                address: lost
                for address, lost in self._lost.items()
                if self._is_away(address, lost, brokers.get(lost.broker_name, {}), answered)
            }
            self.is_empty = not self._lost

    def _is_away(self, address: str, lost: _Lost, by_id: Mapping[int, str], answered: frozenset[str]) -> bool:
        current = by_id.get(lost.broker_id)
        if current is None:
            return self._clock.steady_ms() - lost.since_ms < FOLLOW_MS
        return current == address and address not in answered

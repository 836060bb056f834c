"""Servers that do not answer: the log of an outage, and the brokers that are looked for until they are back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.errors import RemoteConnectError, RemoteTimeoutError
from mqtemplate.event_log import EventLogger, get_logger
from mqtemplate.services import wall_time

# --- log of outages -------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

SUMMARY_MS = 30_000
UNANSWERED = (RemoteConnectError, RemoteTimeoutError)
"""Errors of a request that got no response."""


def log_failure(log: EventLogger, event: str, error: object, *, always: bool = False, **fields: Any) -> None:
    """Log a failed action as a warning; at level DEBUG if no server answered, since `Outages` has logged that.

    Args:
        always: Write a warning in any case.
    """
    write = log.debug if isinstance(error, UNANSWERED) and not always else log.warning
    write(event, reason=str(error), **fields)


@dataclass(slots=True)
class _SilentServer:
    """One server that does not answer.

    Attributes:
        reason: Why the first request failed.
        recent: Requests without a response since the last line of the log.
    """

    reason: str
    recent: int = 0


class Outages:
    """The brokers and name servers of a cluster that do not answer. A `Service`, for the line each half minute.

    An outage starts when the first server does not answer and ends when all of them answer. A server to which no
    request is sent any more, such as a removed broker, does not count longer than a minute.

    Attributes:
        is_open: True during an outage. Hot paths read it before they report a response.
    """

    name = "remote.outages"

    def __init__(self, clock: Clock) -> None:
        self.is_open = False
        self._clock = clock
        self._lock = threading.Lock()
        self._silent: dict[str, _SilentServer] = {}
        self._failures = 0
        self._started_ms = 0
        self._summary_ms = 0
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def failed(self, address: str, error: Exception) -> None:
        """Report a request to *address* that got no response."""
        with self._lock:
            starts = not self._silent
            silent = self._silent.setdefault(address, _SilentServer(str(error)))
            silent.recent += 1
            if starts:
                self.is_open, self._failures = True, 0
                self._started_ms = self._clock.steady_ms()
                self._summary_ms = self._started_ms + SUMMARY_MS
            self._failures += 1
        if starts:
            _log.warning("remote.outage_started", server=address, reason=str(error))
            self._wake()

    def answered(self, address: str) -> None:
        """Report a response from *address*."""
        with self._lock:
            if self._silent.pop(address, None) is None or self._silent:
                return
            self.is_open = False
            outage_ms, failures = self._clock.steady_ms() - self._started_ms, self._failures
        _log.info("remote.reconnected", server=address, outage_ms=outage_ms, failed_requests=failures)

    def describe(self) -> str | None:
        """Return the servers that do not answer, each with the reason; None if all do."""
        with self._lock:
            silent = [f"{address}: {each.reason}" for address, each in sorted(self._silent.items())]
        return "; ".join(silent) or None

    def step(self) -> int | None:
        """Log the outage if half a minute has passed; return the time of the next line."""
        with self._lock:
            if not self.is_open:
                return None
            if self._clock.steady_ms() < self._summary_ms:
                return wall_time(self._clock, self._summary_ms)
            self._silent = {address: silent for address, silent in self._silent.items() if silent.recent}
            self.is_open = bool(self._silent)
            self._summary_ms += SUMMARY_MS
            outage_ms, failures = self._clock.steady_ms() - self._started_ms, self._failures
            silent = {address: each.reason for address, each in self._silent.items()}
            for each in self._silent.values():
                each.recent = 0
        if silent:
            _log.warning(
                "remote.outage_continued",
                servers=sorted(silent),
                outage_ms=outage_ms,
                failed_requests=failures,
                reason=next(iter(silent.values())),
            )
            return wall_time(self._clock, self._summary_ms)
        _log.info("remote.outage_dropped", outage_ms=outage_ms, reason="no request is sent to these servers any more")
        return None


# --- lost brokers ---------------------------------------------------------------------------------


FOLLOW_MS = 600_000
"""Time for which a broker that is in no route any more is looked for."""


@dataclass(frozen=True, slots=True)
class _LostBroker:
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
        self._lost: dict[str, _LostBroker] = {}

    def add(self, address: str, brokers: Mapping[str, Mapping[int, str]]) -> str | None:
        """Note that the connection to *address* was lost or refused.

        Args:
            brokers: Brokers of the routes: name -> id -> address.

        Returns:
            The name of the broker, or None if no broker has this address, or it is known to be away.
        """
        if address in self._lost:
            return None
        for name, by_id in brokers.items():
            for broker_id, at in by_id.items():
                if at == address:
                    with self._lock:
                        self._lost[address] = _LostBroker(name, broker_id, self._clock.steady_ms())
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

    def _is_away(self, address: str, lost: _LostBroker, by_id: Mapping[int, str], answered: frozenset[str]) -> bool:
        current = by_id.get(lost.broker_id)
        if current is None:
            return self._clock.steady_ms() - lost.since_ms < FOLLOW_MS
        return current == address and address not in answered

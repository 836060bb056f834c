"""Servers that do not answer: the log of an outage, and until when lost brokers are looked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers.remote.cluster.failures import LostBrokers, Outages
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import RemoteConnectError, RemoteTimeoutError
from tests.golden import check_script, scripts_in

ADDRESSES = {"A": "10.0.0.1:10911", "B": "10.0.0.2:10911", "C": "10.0.0.9:10911"}


class Losses:
    """The commands of the scripts. Broker A has address A, and B has B."""

    def __init__(self) -> None:
        self._clock = VirtualClock()
        self._lost = LostBrokers(self._clock)
        self.outages()

    def outages(self) -> None:
        """Start without an outage."""
        self._outages = Outages(self._clock, 3_000)

    def move(self, ms: str) -> None:
        self._clock.move_ms(int(ms))

    def sent(self) -> None:
        """Send a request, whose result is reported as a late one."""
        self._seen = self._outages.changes

    def failed(self, name: str, late: str = "") -> Iterator[str]:
        with capture_logs() as logs:
            seen = self._seen if late else self._outages.changes
            self._outages.report(ADDRESSES[name], RemoteConnectError("connection refused"), seen)
        yield from _lines(logs)

    def unanswered(self, name: str, timeout: str) -> Iterator[str]:
        """Report a request that got no response within its time limit, in milliseconds."""
        with capture_logs() as logs:
            error = RemoteTimeoutError("no response")
            self._outages.report(ADDRESSES[name], error, self._outages.changes, int(timeout))
        yield from _lines(logs)

    def answered(self, name: str, late: str = "") -> Iterator[str]:
        with capture_logs() as logs:
            self._outages.report(ADDRESSES[name], None, self._seen if late else self._outages.changes)
        yield from _lines(logs)

    def step(self) -> Iterator[str]:
        with capture_logs() as logs:
            due_ms = self._outages.step()
        yield from _lines(logs)
        yield "no step" if due_ms is None else f"next step in {due_ms - self._clock.now_ms()} ms"

    def lost(self, name: str) -> Iterator[str]:
        """Lose the connection to an address."""
        yield f"lost: {self._lost.add(ADDRESSES[name], _brokers())}"

    def update(self, answered: str = "", without: str = "", moved: str = "") -> Iterator[str]:
        """Compare with the routes, and with the addresses that have answered a heartbeat."""
        brokers = {name: by_id for name, by_id in _brokers(moved).items() if name[-1].upper() not in without}
        self._lost.update(brokers, lambda: frozenset(ADDRESSES[name] for name in answered))
        yield "all are back" if self._lost.is_empty else "away"


def _brokers(moved: str = "") -> dict[str, dict[int, str]]:
    return {f"broker-{name.lower()}": {0: ADDRESSES["C" if name in moved else name]} for name in "AB"}


def _lines(logs: object) -> Iterator[str]:
    for log in logs:  # type: ignore[attr-defined]
        fields = " ".join(f"{name}={value}" for name, value in log.items() if name not in ("event", "log_level"))
        yield f"{log['log_level']} {log['event']} {fields}"


@pytest.mark.parametrize("script", scripts_in(Path(__file__).with_name("scripts")), ids=lambda path: path.stem)
def test_losses_are_handled_as_the_script_says(script: Path) -> None:
    check_script(script, Losses())


def test_a_broker_that_is_lost_while_it_is_found_to_be_back_is_looked_for() -> None:
    """Else nothing would register the members there soon."""
    lost, brokers = LostBrokers(VirtualClock()), _brokers()
    lost.add(ADDRESSES["A"], brokers)
    losing = Thread(target=lost.add, args=(ADDRESSES["A"], brokers))

    def answered() -> frozenset[str]:
        found = frozenset(ADDRESSES.values())
        losing.start()
        return found

    lost.update(brokers, answered)
    losing.join()

    assert not lost.is_empty

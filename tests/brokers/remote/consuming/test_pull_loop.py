"""Prefetching: one pull for each queue, limits, turns, seeks, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers.remote.consuming.pulls import Pulled, PullFailed, PullLoop, PullOutcome
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.message import MessageQueue
from tests.brokers.remote.clients import message_ext
from tests.golden import check_script, scripts_in

QUEUES = {"A": MessageQueue("orders", "broker-a", 0), "B": MessageQueue("orders", "broker-a", 1)}
NAMES = {queue: name for name, queue in QUEUES.items()}


class Loop:
    """The commands of the script: a loop, and the pulls that it has sent."""

    def __init__(self) -> None:
        self.loop()

    def loop(self, messages: str = "100", size: str = "1000") -> None:
        """Create another loop with these limits."""
        self._clock = VirtualClock()
        self._pulls: list[tuple[MessageQueue, int, int, bool, Callable[[PullOutcome], None]]] = []
        self._events: list[str] = []
        self._logs: list[str] = []
        self._is_refused = False
        self._loop = PullLoop(
            self._pull,
            self._clock,
            int(messages),
            int(size),
            on_arrival=lambda: self._events.append("arrival"),
            on_retry=lambda: self._events.append("retry"),
        )

    def _pull(
        self, queue: MessageQueue, at: int, broker_id: int, may_wait: bool, done: Callable[[PullOutcome], None], /
    ) -> None:
        if self._is_refused:
            raise RemoteConnectError("refused")
        self._pulls.append((queue, at, broker_id, may_wait, done))

    def pulls(self) -> Iterator[str]:
        """Print the pulls that have no outcome yet."""
        for queue, queue_offset, broker_id, may_wait, _ in self._pulls:
            yield f"{NAMES[queue]} from {queue_offset}, broker {broker_id}{', waits' if may_wait else ''}"
        if not self._pulls:
            yield "no pull"

    def add(self, name: str, queue_offset: str) -> None:
        self._loop.add(QUEUES[name], int(queue_offset))

    def remove(self, name: str) -> None:
        self._loop.remove(QUEUES[name])

    def seek(self, name: str, queue_offset: str) -> None:
        self._loop.seek(QUEUES[name], int(queue_offset))

    def position(self, name: str) -> Iterator[str]:
        yield f"position {self._loop.position(QUEUES[name])}"

    def deliver(self, count: str, body: str = "x") -> None:
        """Answer the oldest pull with messages."""
        queue, at, *_ = self._pulls[0]
        queue_id, text = queue.queue_id, body.encode()
        found = [message_ext(body=text, queue_id=queue_id, queue_offset=at + number) for number in range(int(count))]
        self._answer(Pulled(found, at + len(found)))

    def answer(self, next: str, broker: str = "0", lags: str = "") -> None:  # noqa: A002 (a word of the script)
        """Answer the oldest pull without messages."""
        self._answer(Pulled([], int(next), int(broker), bool(lags)))

    def fail(self, ms: str, needs_heartbeat: str = "") -> None:
        """Fail the oldest pull."""
        self._answer(PullFailed(BrokerError("busy"), int(ms), bool(needs_heartbeat)))

    def _answer(self, outcome: PullOutcome) -> None:
        with capture_logs() as logs:
            self._pulls.pop(0)[-1](outcome)
        self._logs += [f"{log['log_level']} {log['event']}" for log in logs]

    def refuse(self, whether: str) -> None:
        self._is_refused = whether == "yes"

    def take(self, max_count: str, without: str = "") -> Iterator[str]:
        taken = self._loop.take(int(max_count), frozenset(QUEUES[name] for name in without))
        yield " ".join(f"{'AB'[each.queue_id]}{each.queue_offset}" for each in taken) or "nothing"

    def settling(self, without: str = "") -> Iterator[str]:
        yield "settling" if self._loop.is_settling(frozenset(QUEUES[name] for name in without)) else "settled"

    def events(self) -> Iterator[str]:
        """Print the events since the last time."""
        yield "events: " + (", ".join(self._events) or "none")
        self._events.clear()

    def move(self, ms: str) -> None:
        self._clock.move_ms(int(ms))

    def retry(self) -> Iterator[str]:
        due_ms = self._loop.retry()
        yield "nothing to repeat" if due_ms is None else f"next in {due_ms - self._clock.steady_ms()} ms"

    def logs(self) -> Iterator[str]:
        yield from self._logs


@pytest.mark.parametrize("script", scripts_in(Path(__file__).with_name("scripts")), ids=lambda path: path.stem)
def test_the_loop_does_what_the_script_says(script: Path) -> None:
    check_script(script, Loop())

"""Transactions of an engine as golden scripts: records, ends, checks and restarts. See `tests.golden`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import Registration
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.half_messages import TRANSACTION_GROUP
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import HalfMessage, TransactionState
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC
from tests.golden import check_script, scripts_in

SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2_000, max_message_size=1 << 14
)


class TransactionCommands:
    """The commands, and the broker that they use. A message has the id and the body that the script names.

    Args:
        logs: All log events.
    """

    def __init__(self, path: Path, logs: list[Any]) -> None:
        self._path = path
        self._logs = logs
        self._number = 0
        self._clock = VirtualClock()
        self.broker()

    def broker(self) -> None:
        """Start a broker with an empty store directory."""
        self.close()
        self._number += 1
        self._halves: dict[str, HalfMessage] = {}
        self._checked: list[str] = []
        self._checker: Registration | None = None
        self._open()

    def close(self) -> None:
        """Close the broker."""
        if self._number:
            self._broker.close()

    def restart(self) -> None:
        """Close the broker, and open its store directory again."""
        self.close()
        self._open()

    def _open(self) -> None:
        self._broker = EmbeddedBroker(self._path / str(self._number), SMALL, self._clock)
        self._broker.start()
        self._start_ms = self._clock.now_ms()

    def advance(self, span: str) -> None:
        """Advance the clock, and step the services."""
        Harness(self._broker).advance(span)

    # --- transactions --------------------------------------------------------------------------

    def half(self, name: str, **properties: str) -> list[str]:
        """Send a half message to *orders*. Print its error."""
        message = Message("orders", name.encode(), {"UNIQ_KEY": f"ID-{name}", **properties})
        return _error_of(lambda: self._halves.update({name: self._broker.sends.send_half(message, "shop")}))

    def end(self, name: str, state: str, group: str = "shop") -> list[str]:
        """End a transaction. Print its error."""
        half = HalfMessage(self._halves[name].message, group, self._halves[name].send_result)
        return _error_of(lambda: self._broker.transactions.end_transaction(half, TransactionState[state]))

    def end_at(self, queue_offset: str, physical_offset: str) -> list[str]:
        """Commit the half message at these offsets. Print its error."""
        end = self._broker.engine.transactions.end
        return _error_of(lambda: end(int(queue_offset), int(physical_offset), "shop", TransactionState.COMMIT))

    def checker(self, state: str) -> None:
        """Register a checker that returns this state, or another value."""
        members = TransactionState.__members__

        def check(message: MessageExt) -> Any:
            at_s = (self._clock.now_ms() - self._start_ms) / 1_000
            times = message.properties["TRANSACTION_CHECK_TIMES"]
            self._checked.append(f"{message.body.decode()} check {times} after {at_s:g} s")
            return members.get(state, state)

        self._checker = self._broker.transactions.check_transactions("shop", check)

    def close_checker(self) -> None:
        """Close the checker."""
        assert self._checker is not None
        self._checker.close()

    # --- what is left --------------------------------------------------------------------------

    def checks(self) -> list[str]:
        """Print the checks since the last time."""
        checked, self._checked = self._checked, []
        return checked or ["no checks"]

    def send(self, topic: str) -> list[str]:
        """Send an ordinary message. Print its error."""
        return _error_of(lambda: self._broker.sends.send(Message(topic, b"plain", {"UNIQ_KEY": "ID-plain"})))

    def read(self, topic: str) -> list[str]:
        """Print the messages of queue 0, also of a system topic."""
        queue = MessageQueue(topic, self._broker.name, 0)
        found = self._broker.reader.pull(queue, self._broker.reader.min_offset(queue), 1_000).messages
        return [line for each in found for line in _shown(each)] or ["nothing"]

    def delivered(self) -> list[str]:
        """Print the messages of *orders*."""
        found = sorted(messages_in(self._broker, "orders"), key=lambda each: each.physical_offset)
        return [line for each in found for line in _shown(each)] or ["nothing"]

    def open(self) -> list[str]:
        """Print the number of open transactions."""
        return [f"{self._broker.engine.transactions.open_count} open"]

    def metrics(self) -> list[str]:
        """Print the metrics of transactions."""
        values = self._broker.metrics.snapshot()
        names = ("open", "committed", "rolled_back", "checked", "discarded")
        return [" ".join(f"{name} {values[f'transaction.{name}']}" for name in names)]

    def progress(self) -> list[str]:
        """Print the offsets that the broker has committed in the topics of transactions."""
        offset = self._broker.engine.offsets.offset
        return [f"half {offset(TRANSACTION_GROUP, HALF_TOPIC, 0)} op {offset(TRANSACTION_GROUP, OP_TOPIC, 0)}"]

    def tables(self, name: str) -> list[str]:
        """Print the files in ``config`` whose text has a name, after a checkpoint."""
        self._broker.close()
        files = sorted((self._path / str(self._number) / "config").glob("*.json"))
        return [path.name for path in files if name in path.read_text()] or ["none"]

    def events(self) -> list[str]:
        """Print the log events about transactions since the last time, each once."""
        entries = [entry for entry in self._logs if entry["event"].startswith("transaction.")]
        self._logs.clear()
        hidden = ("event", "log_level", "half_offset", "physical_offset", "checks")
        lines = [
            " ".join([each["event"], *(f"{name}={value}" for name, value in each.items() if name not in hidden)])
            for each in entries
        ]
        return list(dict.fromkeys(lines)) or ["no events"]


def _error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except MQTemplateError as exc:
        return [f"{type(exc).__name__}: {exc}"]
    return []


def _shown(message: MessageExt) -> list[str]:
    properties = {name: value if len(value) < 30 else "<new>" for name, value in message.properties.items()}
    head = f"{message.body.decode()} sys {message.sys_flag:#x} of half at {message.prepared_transaction_offset}"
    return [
        f"{head} transaction {message.transaction_id}",
        *(f"  {name}={value}" for name, value in properties.items()),
    ]


@pytest.mark.parametrize("path", scripts_in(Path(__file__).parent / "scripts"), ids=lambda path: path.stem)
def test_transactions_are_as_the_script_says(path: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        commands = TransactionCommands(tmp_path, logs)
        try:
            check_script(path, commands)
        finally:
            commands.close()

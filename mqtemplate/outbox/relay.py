"""Relay: it sends the rows of an outbox to the broker, in their order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from mqtemplate.broker import Broker
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import ConfigurationError, MessageError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.outbox.database import Execute, OutboxRow, delete_rows, end_lease, read_rows, refuse_row, take_lease
from mqtemplate.services import Service, ServiceThread, wall_time
from mqtemplate.template.options import select_queue_by_hash
from mqtemplate.user_code import error_text

_log = get_logger("mqtemplate.outbox")
BATCH = 100
POLL_MS = 1_000
LEASE = "10s"

Transaction = Callable[[], AbstractContextManager[Execute]]
"""Function that opens a transaction on the user's database; the end of the block commits it."""


@dataclass(slots=True)
class RelayOutcome:
    """Result of sending rows.

    Attributes:
        sent: Ids of rows that the broker has.
        refused: Ids of rows that can never be sent, with the reason.
        error: Error that stopped the sending; the other rows are tried again.
    """

    sent: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    error: MQTemplateError | None = None


class RelaySteps:
    """The steps of a relay, each in one transaction or without one.

    Of several processes one relays at a time: it holds a lease in the database, and renews it with each batch. A row
    is deleted after the broker has stored its message. A process that dies between leaves the row to the next one,
    which sends the message again, with the same id.

    Args:
        lease: Time after which another process relays, if one dies. Clocks of machines may differ by less.

    Raises:
        ConfigurationError: *lease* is not a duration, or shorter than a second.
    """

    def __init__(self, broker: Broker, lease: Duration = LEASE) -> None:
        self._lease_ms = _read_lease(lease)
        self._broker = broker
        self.clock = broker.clock
        self._owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._is_down = False

    def peek(self, execute: Execute) -> bool:
        """Return True if there are rows to send. It takes no lock."""
        return bool(read_rows(execute, 1))

    def claim(self, execute: Execute) -> list[OutboxRow]:
        """Return the next rows; none if another process relays."""
        now_ms = self.clock.now_ms()
        return read_rows(execute, BATCH) if take_lease(execute, self._owner, now_ms, now_ms + self._lease_ms) else []

    def send(self, rows: Sequence[OutboxRow]) -> RelayOutcome:
        """Send rows one after the other, until one fails or the lease is nearly over."""
        outcome, stop_ms = RelayOutcome(), self.clock.steady_ms() + self._lease_ms // 2
        for row in rows:
            if self.clock.steady_ms() > stop_ms:
                break
            try:
                self._send(row)
                outcome.sent.append(row.id)
            except MessageError as error:
                outcome.refused[row.id] = str(error)
                _log.error("outbox.message_refused", msg_id=row.msg_id, topic=row.topic, id=row.id, reason=str(error))
            except MQTemplateError as error:
                outcome.error = error
                break
        self._log_state(outcome)
        return outcome

    def _send(self, row: OutboxRow) -> None:
        message = row.to_message()
        queue = (
            None
            if row.hash_key is None
            else select_queue_by_hash(self._broker.queues(row.topic), message, row.hash_key)
        )
        self._broker.sends.send(message, queue)

    def settle(self, execute: Execute, outcome: RelayOutcome) -> None:
        """Delete what was sent, and mark what was refused."""
        delete_rows(execute, outcome.sent)
        for row_id, reason in outcome.refused.items():
            refuse_row(execute, row_id, reason)

    def end(self, execute: Execute) -> None:
        """End the lease of this process."""
        end_lease(execute, self._owner)

    def _log_state(self, outcome: RelayOutcome) -> None:
        if outcome.error is not None and not self._is_down:
            _log.warning("outbox.relay_failed", reason=str(outcome.error), retry_ms=POLL_MS)
        elif outcome.error is None and self._is_down:
            _log.info("outbox.relay_continued")
        self._is_down = outcome.error is not None


class OutboxRelay:
    """Service that relays an outbox through blocking connections.

    It is woken after the commit of a transaction that added rows. It also looks for rows each second, since other
    processes add some too. On a virtual clock it has no thread and does not look by itself: a harness steps it.
    """

    name = "outbox.relay"

    def __init__(self, broker: Broker, transaction: Transaction, lease: Duration = LEASE) -> None:
        self._steps = RelaySteps(broker, lease)
        self._transaction = transaction
        self._wake: Callable[[], None] = lambda: None
        self._thread: ServiceThread | None = None
        self._retry_ms = 0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """See `Service.on_wake`."""
        self._wake = wake

    def wake(self) -> None:
        """Relay now: rows were committed."""
        self._wake()

    def step(self) -> int | None:
        """Send the next rows; see `Service.step`."""
        clock = self._steps.clock
        if clock.steady_ms() < self._retry_ms:
            return wall_time(clock, self._retry_ms)
        outcome = self._relay()
        if outcome is None:
            return None if clock.is_virtual else clock.now_ms() + POLL_MS
        if outcome.error is not None:
            self._retry_ms = clock.steady_ms() + POLL_MS  # commits during an outage do not repeat the send
        return max(clock.now_ms(), wall_time(clock, self._retry_ms) or 0)

    def _relay(self) -> RelayOutcome | None:
        """Send one batch; return None if there is nothing to send for this process."""
        with self._transaction() as execute:
            if not self._steps.peek(execute):
                return None
        with self._transaction() as execute:
            rows = self._steps.claim(execute)
        if not rows:
            return None
        outcome = self._steps.send(rows)
        with self._transaction() as execute:
            self._steps.settle(execute, outcome)
        return outcome

    def start(self) -> None:
        """Start the thread, unless the clock is virtual."""
        if self._thread is None and not self._steps.clock.is_virtual:
            self._thread = ServiceThread("mqtemplate-outbox", [self], self._steps.clock, _log_error)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Another process continues at once, or this one after the next start."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        try:
            with self._transaction() as execute:
                self._steps.end(execute)
        except Exception as error:  # the database is down: another process continues when the lease is over
            _log.warning("outbox.lease_kept", reason=error_text(error))


def _read_lease(lease: Duration) -> int:
    lease_ms = option_ms("lease", lease, ConfigurationError)
    if lease_ms < 1_000:
        raise ConfigurationError(f"lease must be one second or longer, got {lease!r}")
    return lease_ms


def _log_error(service: Service, error: Exception) -> None:
    """Log an error of the database; the step is repeated."""
    _log.warning("outbox.relay_failed", reason=error_text(error), retry_ms=POLL_MS)

"""Relay: it sends the messages of an outbox to the broker, and executes the changes there, in their order."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from mqtemplate.broker import Broker
from mqtemplate.clock import lease_time_ms
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import (
    ConfigurationError,
    MessageError,
    MQTemplateError,
    PendingKeyError,
    PendingKeyUnknownError,
    UnknownNameError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.message import Property
from mqtemplate.outbox.changes import PlannedRow, change_waiting, moved, names_of, plan, read_later
from mqtemplate.outbox.database import (
    Execute,
    OutboxChange,
    OutboxEntry,
    OutboxRow,
    check_columns,
    delete_rows,
    end_lease,
    first_waiting,
    let_wait,
    move_row,
    read_rows,
    refuse_row,
    revive,
    take_lease,
)
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.services import Service, ServiceRunner, wall_time
from mqtemplate.template.options import select_queue_by_hash
from mqtemplate.user_code import error_text

_log = get_logger("mqtemplate.outbox")
BATCH = 100
POLL_MS = 1_000
_PROBE_MS = 10_000
"""Time between two tries of the first row that waits for the end of a hand-over."""
_LAST_ID = (1 << 63) - 1
LEASE = "10s"

Transaction = Callable[[], AbstractContextManager[Execute]]
"""Function that opens a transaction on the user's database; the end of the block commits it."""


@dataclass(slots=True)
class RelayOutcome:
    """Result of relaying rows.

    Attributes:
        done: Ids of rows that the broker has, and of those that it shall not get.
        refused: Ids of rows that can never be relayed, with the reason.
        waiting: Ids of rows that cannot be relayed during a hand-over, with the reason.
        moved: Rows among these that a change has moved to another time.
        error: Error that stopped the relay; the other rows are tried again.
    """

    done: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    moved: list[OutboxRow] = field(default_factory=list)
    error: MQTemplateError | None = None


class RelaySteps:
    """The steps of a relay, each in one transaction or without one.

    Of several processes one relays at a time: it holds a lease in the database, and renews it with each batch. A row
    is deleted after the broker has stored its message, or has executed its change. A process that dies between leaves
    the row to the next one, which sends the message again, with the same id.

    During a hand-over no broker can decide about a pending key. So rows with one wait, in their order, while the others
    are relayed. The first one that waits is tried at times. When it is accepted, the others follow.

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
        self._claimed_ms = 0
        self._probe_ms = self.clock.steady_ms()
        self._probe: int | None = None  # id of the waiting row that is tried
        self._waits = False

    @property
    def next_ms(self) -> int | None:
        """Steady time at which a row that waits is tried again; None if none waits."""
        return self._probe_ms if self._waits else None

    def peek(self, execute: Execute) -> bool:
        """Return True if there are rows to send. It takes no lock."""
        if read_rows(execute, 1):
            return True
        return self.clock.steady_ms() >= self._probe_ms and first_waiting(execute) is not None

    def claim(self, execute: Execute) -> list[PlannedRow]:
        """Return the next rows; none if another process relays."""
        now_ms, self._claimed_ms = self.clock.now_ms(), lease_time_ms(self.clock)
        if not take_lease(execute, self._owner, now_ms, now_ms + self._lease_ms):
            return []
        if self.clock.steady_ms() >= self._probe_ms:
            self._probe, self._probe_ms = first_waiting(execute), self.clock.steady_ms() + _PROBE_MS
            if self._probe is not None:
                revive(execute, self._probe)
        self._waits = first_waiting(execute) is not None
        rows = read_rows(execute, BATCH)
        change_waiting(execute, rows)
        # Fewer rows are all that the table has, with their changes.
        return plan(rows, read_later(execute, rows, rows[-1].id) if len(rows) == BATCH else ())

    def send(self, rows: Sequence[PlannedRow]) -> RelayOutcome:
        """Relay rows one after the other, until one fails or the lease is nearly over."""
        outcome, stop_ms = RelayOutcome(), self._claimed_ms + self._lease_ms // 2
        changed: set[str] = set()
        for row in rows:
            entry = row.entry
            if lease_time_ms(self.clock) > stop_ms:
                break
            if isinstance(entry, OutboxRow) and changed and not changed.isdisjoint(names_of(entry)):
                # If this process dies, the next one repeats the change: it must not find a later message.
                break
            try:
                if not row.is_void and isinstance(entry, OutboxChange):
                    self._change(entry)
                    changed.add(entry.key)
                elif not row.is_void and isinstance(entry, OutboxRow):
                    self._send_in_order(entry, row.deliver_ms)
                outcome.done.append(entry.id)
            except PendingKeyUnknownError as error:
                outcome.waiting[entry.id] = str(error)
                if row.deliver_ms is not None and isinstance(entry, OutboxRow):
                    outcome.moved.append(moved(entry, row.deliver_ms))
            except MessageError as error:
                outcome.refused[entry.id] = str(error)
                _log_refused(entry, error)
            except MQTemplateError as error:
                outcome.error = error
                break
        self._log_state(outcome)
        return outcome

    def _change(self, change: OutboxChange) -> None:
        delayed = self._broker.delayed
        try:
            result = (
                delayed.cancel(key=change.key, topic=change.topic)
                if change.deliver_ms is None
                else delayed.reschedule(deliver_ms=change.deliver_ms, key=change.key, topic=change.topic)
            )
        except (UnknownNameError, UnsupportedError) as error:  # a retry cannot help
            raise MessageError(str(error)) from error
        log = _log.info if result.status is ScheduleChangeStatus.ALREADY_DELIVERED else _log.debug
        log(
            "outbox.change_relayed",
            key=change.key,
            topic=change.topic,
            deliver_ms=change.deliver_ms,
            status=result.status.value,
            count=result.count,
        )

    def _send_in_order(self, row: OutboxRow, deliver_ms: int | None) -> None:
        """Send a message, unless it has a pending key, and one with such a key waits before it."""
        if self._waits and row.id != self._probe and _has_pending_key(row):
            raise PendingKeyUnknownError("a message with a pending key waits before this one")
        try:
            self._send_moved(row, deliver_ms)
        except PendingKeyUnknownError as error:
            self._waits = True
            _log.info("outbox.message_waits", id=row.id, topic=row.topic, reason=str(error), retry_ms=_PROBE_MS)
            raise

    def _send_moved(self, row: OutboxRow, deliver_ms: int | None) -> None:
        if deliver_ms is None:
            self._send(row)
            return
        try:
            self._send(moved(row, deliver_ms))
        except MessageError:  # too far away: the broker refuses the change as well, and the message keeps its time
            self._send(row)

    def _send(self, row: OutboxRow) -> None:
        """Send a message. One with a pending key that the broker refuses is refused here: a retry cannot help."""
        try:
            self._store(row)
        except PendingKeyError as error:
            if error.msg_id != row.msg_id:  # else an earlier relay of this row stored it
                raise MessageError(str(error)) from error
        except UnsupportedError as error:
            if isinstance(error, PendingKeyUnknownError) or not _has_pending_key(row):
                raise
            raise MessageError(str(error)) from error

    def _store(self, row: OutboxRow) -> None:
        message = row.to_message()
        queue = (
            None
            if row.hash_key is None
            else select_queue_by_hash(self._broker.queues(row.topic), message, row.hash_key)
        )
        self._broker.sends.send(message, queue)

    def settle(self, execute: Execute, outcome: RelayOutcome) -> None:
        """Delete what was relayed, and mark what was refused."""
        delete_rows(execute, outcome.done)
        for row_id, reason in outcome.refused.items():
            refuse_row(execute, row_id, reason)
        for row_id, reason in outcome.waiting.items():
            let_wait(execute, row_id, reason)
        for row in outcome.moved:
            move_row(execute, row)
        if self._probe in outcome.waiting:
            self._probe = None
        elif self._probe in outcome.done or self._probe in outcome.refused:
            revive(execute, _LAST_ID)
            self._probe, self._waits = None, False

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
    processes add some too. On a virtual clock it has no thread and does not look by itself: a harness steps it,
    from the start to the stop.
    """

    name = "outbox.relay"

    def __init__(self, broker: Broker, transaction: Transaction, lease: Duration = LEASE) -> None:
        self._steps = RelaySteps(broker, lease)
        self._transaction = transaction
        self._wake: Callable[[], None] = lambda: None
        self._runner = ServiceRunner(self, broker.clock, "mqtemplate-outbox", _log_error)
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
            return wall_time(clock, self._steps.next_ms) if clock.is_virtual else clock.now_ms() + POLL_MS
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
        """Start the thread; on a virtual clock a harness steps the relay from now on.

        Raises:
            ConfigurationError: An older version created the table.
        """
        with ignored_database_errors(), self._transaction() as execute:
            check_columns(execute)
        self._runner.start()

    def stop(self) -> None:
        """Stop the thread. Another process continues at once, or this one after the next start."""
        self._runner.stop()
        try:
            with self._transaction() as execute:
                self._steps.end(execute)
        except Exception as error:  # the database is down: another process continues when the lease is over
            _log.warning("outbox.lease_kept", reason=error_text(error))


@contextmanager
def ignored_database_errors() -> Iterator[None]:
    """Ignore errors of the database at the start, such as a missing table: the relay logs them, and waits."""
    try:
        yield
    except MQTemplateError:
        raise
    except Exception as error:  # each driver has errors of its own
        _log.debug("outbox.not_checked", reason=error_text(error))


def _has_pending_key(row: OutboxRow) -> bool:
    return Property.PENDING_KEY in json.loads(row.properties)


def _log_refused(entry: OutboxEntry, error: MessageError) -> None:
    if isinstance(entry, OutboxRow):
        _log.error("outbox.message_refused", msg_id=entry.msg_id, topic=entry.topic, id=entry.id, reason=str(error))
    else:
        _log.error("outbox.change_refused", key=entry.key, topic=entry.topic, id=entry.id, reason=str(error))


def _read_lease(lease: Duration) -> int:
    lease_ms = option_ms("lease", lease, ConfigurationError)
    if lease_ms < 1_000:
        raise ConfigurationError(f"lease must be one second or longer, got {lease!r}")
    return lease_ms


def _log_error(service: Service, error: Exception, repeated: int) -> None:
    """Log an error of the database; the step is repeated."""
    _log.warning("outbox.relay_failed", reason=error_text(error), retry_ms=POLL_MS, repeated=repeated)

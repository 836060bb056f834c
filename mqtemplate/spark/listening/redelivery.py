"""Redelivery of single rows of a batch: through the retry topic of the group, or to its dead-letter topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mqtemplate.broker import Broker, ConsumerSpec
from mqtemplate.engine.group_rules import SentBack, sent_back_message
from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.failures.failure_log import short_stack
from mqtemplate.message import MessageExt, MessageQueue, SendSequence
from mqtemplate.metrics import Metrics
from mqtemplate.processes import write_private
from mqtemplate.record.dead_letter import dead_letter_properties
from mqtemplate.spark.listening.listener import SparkListenerSettings

_log = get_logger("mqtemplate.spark")

_FOLDER = "mqtemplate-redeliveries"
_ROWS_AT_ONCE = 1_000


class FailedRow(NamedTuple):
    """A row to send back.

    Attributes:
        is_dead: True: to the dead-letter topic now.
        delay_ms: Delay of the retry; None: as the broker chooses for the number of the retry.
        broker_name: Broker of the queue; empty for the only one.
    """

    topic: str
    queue_id: int
    queue_offset: int
    reason: str
    is_dead: bool = False
    delay_ms: int | None = None
    broker_name: str = ""

    @property
    def position(self) -> tuple[str, str, int, int]:
        """Topic, broker, queue and offset: they identify the row."""
        return self.topic, self.broker_name, self.queue_id, self.queue_offset


class RedeliveryPlan:
    """Rows of a batch that are sent back, in a file of the checkpoint folder. It is written before they are sent.

    A process that is killed afterwards leaves the file: the repeated batch sends the same rows with the same numbers,
    and its function does not get them again.
    """

    def __init__(self, checkpoint: Path, batch_id: int) -> None:
        self._folder = checkpoint / _FOLDER
        self._path = self._folder / f"{batch_id}.json"

    def rows(self) -> list[FailedRow]:
        """Return the planned rows, in order.

        Raises:
            SparkError: The file is damaged.
        """
        try:
            return [FailedRow(*values) for values in _list(json.loads(self._path.read_text()))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as exc:
            raise SparkError(
                f"{self._path} cannot be read ({exc}); delete it to let the listener handle the whole batch again"
            ) from exc

    def write(self, rows: Sequence[FailedRow]) -> None:
        """Write the rows, durably and atomically. Delete the plans of earlier batches, which are committed."""
        write_private(self._path, json.dumps(rows).encode())
        for other in self._folder.glob("*.json"):
            if other != self._path:
                other.unlink(missing_ok=True)


SendBackRows = Callable[[Sequence[SentBack], SendSequence], None]
"""Function that sends messages back for a group, to the broker that stores them.

The sequence numbers the messages; a broker in this process stores each number once.
"""


class Redelivery:
    """Sends rows of one listener back.

    - A retry has a delay, and ``reconsumeTimes`` one higher. After *max_redeliveries* the row is a dead letter.
    - Dead letters have the properties ``dead_letter_*`` with their cause, as with message listeners.

    Args:
        listener: Name of the listener, for dead letters.
        checkpoint: Checkpoint folder of the query.
    """

    def __init__(
        self,
        broker: Broker,
        send_back: SendBackRows,
        metrics: Metrics,
        listener: str,
        settings: SparkListenerSettings,
        checkpoint: Path,
    ) -> None:
        group = settings.consumer_group
        self._broker, self._send_back = broker, send_back
        self._listener, self._checkpoint = listener, checkpoint
        self._spec = ConsumerSpec(group=group, subscriptions={}, max_reconsume_times=settings.max_redeliveries)
        self._log = _log.bind(listener=listener, group=group)
        self.redelivered = metrics.counter(f"spark.{group}.redelivered")
        self.dead_letters = metrics.counter(f"spark.{group}.dead_letters")

    def resume(self, query_id: str, batch_id: int) -> list[FailedRow]:
        """Send the planned rows of a repeated batch, except those that are stored already; return all of them."""
        rows = self._named(RedeliveryPlan(self._checkpoint, batch_id).rows())
        self._send(query_id, batch_id, rows, 0)
        return rows

    def send(self, query_id: str, batch_id: int, rows: Iterable[FailedRow], error: Exception | None = None) -> int:
        """Send further rows of a batch back, and return their number.

        Args:
            error: The exception of the listener, for dead letters.

        Raises:
            SparkError: A row is not a message of the topics any more.
        """
        plan = RedeliveryPlan(self._checkpoint, batch_id)
        known = self._named(plan.rows())
        positions = {row.position for row in known}
        fresh = {row.position: row for row in self._named(rows) if row.position not in positions}
        added = [row for _, row in sorted(fresh.items())]
        if added:
            plan.write([*known, *added])
            self._send(query_id, batch_id, added, len(known), error)
        return len(added)

    def _named(self, rows: Iterable[FailedRow]) -> list[FailedRow]:
        """Return the rows with the name of their broker."""
        return [row if row.broker_name else row._replace(broker_name=self._broker.name) for row in rows]

    def _send(
        self, query_id: str, batch_id: int, rows: Sequence[FailedRow], first: int, error: Exception | None = None
    ) -> None:
        sequence = SendSequence(f"{query_id}/redelivery", batch_id, 0, first)
        dead: list[FailedRow] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            copies = [self._sent_back(message, row, error) for message, row in zip(self._read(part), part, strict=True)]
            self._send_back(copies, sequence.after(start))
            dead += [row for row, copy in zip(part, copies, strict=True) if copy.is_dead]
        self._report(batch_id, dead)

    def _report(self, batch_id: int, dead: Sequence[FailedRow]) -> None:
        """Log one event for the dead letters of a batch, which may be thousands. Each has its cause as a property."""
        if dead:
            row = dead[0]
            self._log.warning(
                "spark.dead_letters",
                batch=batch_id,
                count=len(dead),
                first=f"{row.topic}, queue {row.queue_id}, offset {row.queue_offset}",
                reason=row.reason,
                other_reasons=len({each.reason for each in dead}) - 1,
            )

    def _sent_back(self, message: MessageExt, row: FailedRow, error: Exception | None) -> SentBack:
        sent_back = sent_back_message(self._spec, message, -1 if row.is_dead else 0, row.delay_ms)
        if not sent_back.is_dead:
            self.redelivered.add()
            return sent_back
        self.dead_letters.add()
        cause = error or SparkError(row.reason)
        now_ms = self._broker.clock.now_ms()
        properties = dead_letter_properties(self._listener, message, cause, now_ms, stack=short_stack(cause))
        return replace(sent_back, properties=properties)

    def _read(self, rows: Sequence[FailedRow]) -> Iterator[MessageExt]:
        for run in _runs(rows):
            queue = MessageQueue(run[0].topic, run[0].broker_name, run[0].queue_id)
            offset, end = run[0].queue_offset, run[-1].queue_offset + 1
            while offset < end:
                try:
                    found = self._broker.reader.pull(queue, offset, end - offset).messages
                except OffsetOutOfRangeError as exc:
                    raise SparkError(f"{_gone(queue, offset)} ({exc})") from exc
                if not found:
                    raise SparkError(_gone(queue, offset))
                yield from found
                offset = found[-1].queue_offset + 1


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"it is {type(value).__name__}, not a list of rows")
    return value


def _gone(queue: MessageQueue, offset: int) -> str:
    return (
        f"{queue.topic}, queue {queue.queue_id}, offset {offset} cannot be sent back: the queue has no such "
        "message. Return rows of the batch with their columns topic, queueId and queueOffset unchanged"
    )


def _runs(rows: Sequence[FailedRow]) -> Iterator[list[FailedRow]]:
    """Yield adjacent rows of one queue together."""
    run: list[FailedRow] = []
    for row in rows:
        if run and (row.position[:3] != run[-1].position[:3] or row.queue_offset != run[-1].queue_offset + 1):
            yield run
            run = []
        run.append(row)
    if run:
        yield run

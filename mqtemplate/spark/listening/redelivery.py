"""Redelivery of single rows of a batch: through the retry topic of the group, or to its dead-letter topic."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers.retry import send_back_of
from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, MessageQueue, SendSequence
from mqtemplate.record.dead_letter import dead_letter_properties
from mqtemplate.topics import RETRY_TOPIC_PREFIX

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

_log = get_logger("mqtemplate.spark")

_FOLDER = "mqtemplate-redeliveries"
_ROWS_AT_ONCE = 1_000


class FailedRow(NamedTuple):
    """A row to send back.

    Attributes:
        is_dead: True: to the dead-letter topic now.
        delay_ms: Delay of the retry; None: as the broker chooses for the number of the retry.
    """

    topic: str
    queue_id: int
    queue_offset: int
    reason: str
    is_dead: bool = False
    delay_ms: int | None = None


class RedeliveryPlan:
    """Rows of a batch that are sent back, in a file of the checkpoint folder. It is written before they are sent.

    A process that is killed afterwards leaves the file: the repeated batch sends the same rows with the same numbers,
    so each is stored once, and its function does not get them again.
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
            return [FailedRow(*values) for values in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as exc:
            raise SparkError(
                f"{self._path} cannot be read ({exc}); delete it to let the listener handle the whole batch again"
            ) from exc

    def write(self, rows: Sequence[FailedRow]) -> None:
        """Write the rows, durably and atomically. Delete the plans of earlier batches, which are committed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(rows, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        for other in self._folder.glob("*.json"):
            if other != self._path:
                other.unlink(missing_ok=True)


class Redelivery:
    """Sends rows of one listener back.

    - A retry has a delay, and ``reconsumeTimes`` one higher. After *max_redeliveries* the row is a dead letter.
    - Dead letters have the properties ``dead_letter_*`` with their cause, as those of message listeners.

    Args:
        listener: Name of the listener, for dead letters.
        checkpoint: Checkpoint folder of the query.
    """

    def __init__(
        self, broker: EmbeddedBroker, group: str, listener: str, checkpoint: Path, max_redeliveries: int
    ) -> None:
        self._broker, self._listener, self._checkpoint = broker, listener, checkpoint
        self._spec = ConsumerSpec(group=group, subscriptions={}, max_reconsume_times=max_redeliveries)
        self._log = _log.bind(listener=listener, group=group)
        self.retry_topic = RETRY_TOPIC_PREFIX + group
        self.redelivered = broker.metrics.counter(f"spark.{group}.redelivered")
        self.dead_letters = broker.metrics.counter(f"spark.{group}.dead_letters")

    def resume(self, query_id: str, batch_id: int) -> list[FailedRow]:
        """Send the planned rows of a repeated batch, except those that are stored already; return all of them."""
        rows = RedeliveryPlan(self._checkpoint, batch_id).rows()
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
        known = plan.rows()
        positions = {row[:3] for row in known}
        added = sorted({row[:3]: row for row in rows if row[:3] not in positions}.values())
        if added:
            plan.write([*known, *added])
            self._send(query_id, batch_id, added, len(known), error)
        return len(added)

    def _send(
        self, query_id: str, batch_id: int, rows: Sequence[FailedRow], first: int, error: Exception | None = None
    ) -> None:
        sequence = SendSequence(f"{query_id}/redelivery", batch_id, 0, first)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            copies = [self._copy(message, row, error) for row, message in zip(part, self._read(part), strict=True)]
            self._broker.send_sequenced([(copy, self._queue(copy.topic)) for copy in copies], sequence.after(start))

    def _queue(self, topic: str) -> MessageQueue:
        self._broker.create_topic(topic, 1)
        return self._broker.queues(topic)[0]

    def _copy(self, message: MessageExt, row: FailedRow, error: Exception | None) -> Message:
        level = -1 if row.is_dead else 0
        sent_back = send_back_of(self._spec, message, level, row.delay_ms)
        if sent_back.is_dead:
            now_ms = self._broker.clock.now_ms()
            cause = error or SparkError(row.reason)
            properties = dead_letter_properties(self._listener, message, cause, now_ms)
            copy = replace(sent_back, properties=properties).dead_letter()
            self.dead_letters.add()
            self._log.warning(
                "spark.dead_letter", topic=row.topic, queue=row.queue_id, offset=row.queue_offset, reason=row.reason
            )
        else:
            copy = self._broker.drafts.delayed_retry(sent_back)
            self.redelivered.add()
        return replace(
            message, topic=copy.topic, properties=copy.properties, reconsume_times=message.reconsume_times + 1
        )

    def _read(self, rows: Sequence[FailedRow]) -> Iterator[MessageExt]:
        for run in _runs(rows):
            queue = MessageQueue(run[0].topic, self._broker.name, run[0].queue_id)
            offset, end = run[0].queue_offset, run[-1].queue_offset + 1
            while offset < end:
                try:
                    found = self._broker.pull(queue, offset, end - offset).messages
                except OffsetOutOfRangeError as exc:
                    raise SparkError(f"{self._gone(queue, offset)} ({exc})") from exc
                if not found:
                    raise SparkError(self._gone(queue, offset))
                yield from found
                offset = found[-1].queue_offset + 1

    def _gone(self, queue: MessageQueue, offset: int) -> str:
        return (
            f"{queue.topic}, queue {queue.queue_id}, offset {offset} cannot be sent back: the queue has no such "
            "message. Return rows of the batch with their columns topic, queueId and queueOffset unchanged"
        )


def _runs(rows: Sequence[FailedRow]) -> Iterator[list[FailedRow]]:
    """Yield adjacent rows of one queue together."""
    run: list[FailedRow] = []
    for row in rows:
        if run and (row[:2] != run[-1][:2] or row.queue_offset != run[-1].queue_offset + 1):
            yield run
            run = []
        run.append(row)
    if run:
        yield run

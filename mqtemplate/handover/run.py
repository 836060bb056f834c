"""Hand-over of a stopped application: everything in its store directory moves to a new broker.

`HandOverRun` copies topics, the messages that some group has not consumed, and the committed offsets of groups. The
mover of a live hand-over then moves the pending messages. A run that was stopped or killed continues where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import HandOverError, HandOverPhase
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import Clock
from mqtemplate.errors import ConfigurationError, MessageError
from mqtemplate.event_log import get_logger
from mqtemplate.handover.mover import HandOverProgress, Mover, MoverSettings
from mqtemplate.handover.plan import UnreadQueue, create_missing, limits_of, unread_queues
from mqtemplate.message import ORIGIN_PROPERTIES, Message, MessageExt, MessageQueue, Property
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import OnProgress, no_progress
from mqtemplate.operations.dead_letters import LetterMarks, LetterState
from mqtemplate.operations.messages import read_queue, sent_again_properties
from mqtemplate.pending import PendingQuery
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import format_errors, read_table, write_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.hand_over")

_FILE = "config/handOverRun.json"
_BATCH = 100
_BATCH_BYTES = 512 << 10
_SAVE_AFTER = 1_000
_SEND_TIMEOUT_MS = 10_000
_SETTLE_S = 0.5
_SOON_MS = 500

DEFAULT_RATE = 5_000.0
"""Messages per second."""


# --- durable progress -----------------------------------------------------------------------------


@dataclass(slots=True)
class QueueCopy:
    """Progress of one queue. Its messages go to one queue of the new broker, in their order.

    Attributes:
        broker: Name of the broker of the new queue.
        queue_id: Number of the new queue.
        next: Queue offset of the first message that is not known to be copied.
        end: One past the queue offset of the last copied message in the new queue. What is stored from there on may be
            a copy that was not recorded, or a message of another producer.
        unread: Group -> queue offset of the first message that it has not consumed, in the old queue.
        positions: Group -> queue offset of that message in the new queue.
        foreign: Queue offset of the first message of another producer in the new queue; None if there is none.
        is_complete: The offsets of the groups are set at the new broker.
    """

    broker: str
    queue_id: int
    next: int
    end: int
    unread: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    foreign: int | None = None
    is_complete: bool = False

    def note(self, old_offset: int, new_offset: int) -> None:
        """Note that the message at *old_offset* is stored at *new_offset*."""
        if new_offset > self.end and self.foreign is None:
            self.foreign = self.end
        for group, unread in self.unread.items():
            if unread <= old_offset and group not in self.positions:
                self.positions[group] = new_offset
        self.next, self.end = old_offset + 1, new_offset + 1

    def position(self, group: str) -> int:
        """Return the new queue offset at which a group continues: it skips no message of another producer."""
        found = self.positions.get(group, self.end)
        return found if self.foreign is None else min(found, self.foreign)


class RunProgress:
    """Progress of a run, in a file of the old store directory.

    Attributes:
        target: The new broker.
        queues: Topic -> queue id of the old broker -> progress.
        was_clean: The run before this one has stored all that it did.
    """

    def __init__(self, store_files: StoreFiles, target: str) -> None:
        self._files = store_files
        self.target = target
        self.queues: dict[str, dict[int, QueueCopy]] = {}
        table = read_table(store_files, _FILE)
        self.was_clean = bool(table.get("isClean", True))
        with format_errors(_FILE):
            for topic, queues in table.get("queues", {}).items():
                self.queues[topic] = {int(queue_id): QueueCopy(**values) for queue_id, values in queues.items()}
        if table.get("target", target) != target:
            raise ConfigurationError(
                f"an earlier run has moved messages of this directory to {table['target']}, and this one names "
                f"{target}; go on with --to {table['target']}, or delete {_FILE} to send all messages again"
            )

    def save(self, *, is_clean: bool = False) -> None:
        """Write the file."""
        queues = {
            topic: {str(queue_id): asdict(each) for queue_id, each in found.items()}
            for topic, found in self.queues.items()
        }
        write_table(self._files, _FILE, {"target": self.target, "isClean": is_clean, "queues": queues})


# --- ready messages -------------------------------------------------------------------------------


@dataclass(slots=True)
class RunReport:
    """Result of a run.

    Attributes:
        topics: Topics that were created at the new broker, or got more queues.
        groups: Groups whose offsets were set there.
        copied: Number of messages of topics that were sent.
        repeated: Number of messages that an earlier run had sent without recording it: they were not sent again.
        moved: Number of pending messages that moved.
        left: Number of pending messages that stay for now.
        in_range_ms: Time (epoch ms) from which on the next one of them can move; None if it never can.
        refused: Message id -> reason, for messages that the new broker refuses. They stay in the old directory.
        is_stopped: The run was stopped before its end.
    """

    topics: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    copied: int = 0
    repeated: int = 0
    moved: int = 0
    left: int = 0
    in_range_ms: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    is_stopped: bool = False

    def document(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return asdict(self)


class ReadyCopier:
    """Copies the messages of topics that some group has not consumed, and the offsets of the groups.

    - The messages of one old queue are in one new queue, in their order.
    - Each message keeps its id. A message that an earlier run has sent is found in the new queue, and not sent again.
    - A group continues at the first message that it has not consumed.

    Args:
        stop: Set to stop after the current batch.
    """

    def __init__(
        self,
        old: EmbeddedBroker,
        new: Broker,
        progress: RunProgress,
        report: RunReport,
        *,
        rate: float = DEFAULT_RATE,
        stop: threading.Event | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self._old, self._new = old, new
        self._progress, self._report = progress, report
        self._pace = _Pace(rate, old.clock, stop or threading.Event())
        self._stop = stop or threading.Event()
        self._on_progress = on_progress
        self._unsaved = 0
        self._uncertain = not progress.was_clean

    def prepare(self) -> None:
        """Create the topics and groups that the new broker lacks.

        Raises:
            ConfigurationError: The new broker has fewer queues of a topic, and creates no more.
        """
        self._report.topics += create_missing(self._old.admin(), self._new)
        if self._uncertain:
            self._wait_until_settled()

    def copy(self) -> int:
        """Copy what was stored since the last call; at the first call all. Return the number of messages."""
        before = self._report.copied
        for unread in unread_queues(self._old.admin()):
            if self._stop.is_set():
                break
            copy = self._queue_copy(unread)
            if copy is None:
                continue
            if self._uncertain:
                self._find_sent(unread.queue, copy)
            self._copy_queue(unread.queue, copy, unread.end)
            if not self._stop.is_set():
                self._complete(unread.queue, copy)
        self._uncertain = self._uncertain and self._stop.is_set()
        self._progress.save(is_clean=True)
        return self._report.copied - before

    # --- queues --------------------------------------------------------------------------------

    def _queue_copy(self, unread: UnreadQueue) -> QueueCopy | None:
        """Return the progress of a queue; None if nothing of it moves."""
        queue = unread.queue
        queues = self._progress.queues.setdefault(queue.topic, {})
        if queue.queue_id not in queues:
            is_empty = not unread.count and queue.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
            if is_empty:
                return None
            target = self._target_queue(queue)
            end = self._new.reader.max_offset(target)
            queues[queue.queue_id] = QueueCopy(
                target.broker_name, target.queue_id, unread.start, end, dict(unread.groups)
            )
            self._progress.save()
        return queues[queue.queue_id]

    def _target_queue(self, queue: MessageQueue) -> MessageQueue:
        targets = sorted(self._new.queues(queue.topic), key=lambda each: (each.queue_id, each.broker_name))
        if queue.queue_id >= len(targets):
            self._new.create_topic(queue.topic, queue.queue_id + 1)
            targets = sorted(self._new.queues(queue.topic), key=lambda each: (each.queue_id, each.broker_name))
        if queue.queue_id >= len(targets):
            raise ConfigurationError(
                f"topic {queue.topic!r} has {len(targets)} queues at the new broker, and queue {queue.queue_id} at the "
                "old one; each queue needs one of its own, so that its messages keep their order: create "
                f"{queue.queue_id + 1} queues there, then run again"
            )
        return targets[queue.queue_id]

    def _copy_queue(self, queue: MessageQueue, copy: QueueCopy, end: int) -> None:
        target = MessageQueue(queue.topic, copy.broker, copy.queue_id)
        messages = read_queue(self._old, queue, copy.next, end)
        for batch in _batches(self._open_letters(queue.topic, messages)):
            self._pace.wait(len(batch))
            if self._stop.is_set():
                return
            self._send(batch, target, copy)
            self._on_progress(len(batch))
            self._unsaved += len(batch)
            if self._unsaved >= _SAVE_AFTER:
                self._progress.save()
                self._unsaved = 0
        copy.next = max(copy.next, end)

    def _open_letters(self, topic: str, messages: Iterator[MessageExt]) -> Iterator[MessageExt]:
        """Yield messages; of a dead-letter topic only those that no operator has sent again or purged."""
        if not topic.startswith(DLQ_TOPIC_PREFIX):
            yield from messages
            return
        marks = LetterMarks(BrokerAccess(self._old)).of(topic.removeprefix(DLQ_TOPIC_PREFIX))
        for message in messages:
            mark = marks.get(message.offset_msg_id)
            if mark is None or mark.state is LetterState.OPEN:
                yield message

    def _send(self, batch: Sequence[MessageExt], target: MessageQueue, copy: QueueCopy) -> None:
        copies = [copy_of(message) for message in batch]
        try:
            if len(copies) == 1:
                result = self._new.sends.send(copies[0], target, _SEND_TIMEOUT_MS)
            else:
                result = self._new.sends.send_batch(copies, target, _SEND_TIMEOUT_MS)
        except MessageError as exc:
            if len(batch) > 1:  # one of them is refused
                for message in batch:
                    self._send([message], target, copy)
                return
            self._report.refused[batch[0].msg_id] = str(exc)
            copy.next = batch[0].queue_offset + 1
            self._progress.save()  # the search after a kill would stop at this message
            _log.warning("hand_over.message_refused", topic=target.topic, msg_id=batch[0].msg_id, reason=str(exc))
            return
        for number, message in enumerate(batch):
            copy.note(message.queue_offset, result.queue_offset + number)
        self._report.copied += len(batch)

    def _complete(self, queue: MessageQueue, copy: QueueCopy) -> None:
        """Set the offsets of the groups at the new broker, and then their ends at the old one."""
        target = MessageQueue(queue.topic, copy.broker, copy.queue_id)
        if not copy.is_complete:
            for group in copy.unread:
                existing = self._new.groups.committed_offset(group, target)
                position = copy.position(group)
                # A group that reads the new broker already must not skip what it has not consumed there.
                self._new.admin().set_offsets(
                    group, {target: position if existing is None else min(existing, position)}
                )
                if group not in self._report.groups:
                    self._report.groups.append(group)
            copy.is_complete = True
            self._progress.save()
        for group in copy.unread:
            self._old.groups.commit_offset(group, queue, copy.next)

    # --- after a kill --------------------------------------------------------------------------

    def _wait_until_settled(self) -> None:
        """Wait until requests of the killed run have arrived, and the new broker shows all that it has stored."""
        before = -1
        while not self._stop.is_set():
            ends = sum(
                self._new.reader.max_offset(MessageQueue(topic, each.broker, each.queue_id))
                for topic, queues in self._progress.queues.items()
                for each in queues.values()
            )
            if ends == before or self._old.clock.is_virtual:
                return
            before = ends
            self._stop.wait(_SETTLE_S)

    def _find_sent(self, queue: MessageQueue, copy: QueueCopy) -> None:
        """Find the messages that a killed run has sent without recording it. They are the next ones, in their order."""
        target = MessageQueue(queue.topic, copy.broker, copy.queue_id)
        end = self._new.reader.max_offset(target)
        found = [(each.msg_id, each.queue_offset) for each in read_queue(self._new, target, copy.end, end)]
        messages = read_queue(self._old, queue, copy.next, self._old.reader.max_offset(queue))
        for message in self._open_letters(queue.topic, messages):
            at = next((index for index, (msg_id, _) in enumerate(found) if msg_id == message.msg_id), None)
            if at is None:
                return
            copy.note(message.queue_offset, found[at][1])
            del found[: at + 1]
            self._report.repeated += 1
            self._on_progress(1)


def copy_of(message: MessageExt) -> Message:
    """Return a message as it is sent to the new broker: with its id, keys, tags, properties and number of retries."""
    properties = sent_again_properties(message)
    properties[Property.UNIQ_KEY] = message.msg_id
    if message.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        properties |= {name: value for name, value in message.properties.items() if name in ORIGIN_PROPERTIES}
    if message.topic.startswith(RETRY_TOPIC_PREFIX):
        properties[Property.RECONSUME_TIME] = str(message.reconsume_times)
        # The limit of this one check: the listener has its own.
        properties[Property.MAX_RECONSUME_TIMES] = str(message.reconsume_times + 1)
    return Message(message.topic, message.body, properties, message.flag)


def _batches(messages: Iterable[MessageExt]) -> Iterator[list[MessageExt]]:
    """Yield messages in batches. A broker takes no batch of retries."""
    rest, batch, size = iter(messages), list[MessageExt](), 0
    for message in rest:
        is_alone = message.topic.startswith(RETRY_TOPIC_PREFIX)
        if batch and (is_alone or len(batch) == _BATCH or size + len(message.body) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message.body)
    if batch:
        yield batch


class _Pace:
    """Limits the rate of messages."""

    def __init__(self, rate: float, clock: Clock, stop: threading.Event) -> None:
        self._rate, self._clock, self._stop = rate, clock, stop
        self._free_ms = 0.0

    def wait(self, count: int) -> None:
        """Wait until *count* messages may be sent, or the run is stopped. On a virtual clock it does not wait."""
        now_ms = self._clock.steady_ms()
        wait_ms = self._free_ms - now_ms
        self._free_ms = max(self._free_ms, now_ms) + count * 1_000 / self._rate
        if wait_ms > 0 and not self._clock.is_virtual:
            self._stop.wait(wait_ms / 1_000)


# --- the run --------------------------------------------------------------------------------------


class HandOverRun:
    """Moves everything of a store directory to a new broker: first what is ready, then what is pending.

    A message that falls due meanwhile is released by the old broker, and copied with the ready ones.

    Args:
        old: The owner of the store directory, started.
        new: The new broker, started.
        target: The new broker for a reader; a run that continues must have the same.
        stop: Set to stop after the current batch.
        on_error: Called with the reason when the new broker does not take messages; the run tries again.

    Raises:
        ConfigurationError: An earlier run has moved messages to another broker.
    """

    def __init__(
        self,
        old: EmbeddedBroker,
        new: Broker,
        target: str,
        *,
        rate: float = DEFAULT_RATE,
        stop: threading.Event | None = None,
        on_progress: OnProgress = no_progress,
        on_error: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._old, self._new, self._target = old, new, target
        self._stop = stop or threading.Event()
        self._on_progress, self._on_error = on_progress, on_error
        self.report = RunReport()
        progress = RunProgress(old.store.store_files, target)
        self._ready = ReadyCopier(old, new, progress, self.report, rate=rate, stop=self._stop, on_progress=on_progress)
        self._settings = MoverSettings(rate=max(1, round(rate)), busy_share=1, with_retries=True)
        self._mover = Mover(old, new, self._settings)
        self._is_prepared = False
        self._moved_before = 0
        self._error: str | None = None

    def run(self) -> RunReport:
        """Move all that can move now, or until the run is stopped."""
        try:
            while not self._stop.is_set():
                next_ms = self.step()
                if next_ms is None:
                    break
                self._stop.wait(max(0, next_ms - self._old.clock.now_ms()) / 1_000)
        finally:
            self._mover.close()
        self.report.is_stopped = self._stop.is_set()
        self._finish()
        return self.report

    def step(self) -> int | None:
        """Move a bounded number of pending messages, and copy what is ready. Return the time of the next step.

        Returns:
            None if nothing is left that can move now.
        """
        if not self._is_prepared:
            self._prepare()
        next_ms = self._mover.step()
        moving = self._mover.progress()
        self._note(moving)
        if not moving.is_idle:
            return next_ms
        now_ms = self._old.clock.now_ms()
        if self._ready.copy() or self._are_due_soon(now_ms):
            return now_ms + _SOON_MS
        return None

    def _prepare(self) -> None:
        self._ready.prepare()
        admin = self._old.admin()
        state = self._old.hand_over.begin(self._target, admin.readable_topics(), admin.group_names())
        if state.phase is not HandOverPhase.RUNNING:
            raise HandOverError(
                f"the hand-over of this directory to {state.target} is {state.phase.value}, so nothing moves; "
                "mqtemplate hand-over resume lets it go on"
            )
        self._moved_before = self._old.hand_over.counts().moved
        self._ready.copy()
        self._is_prepared = True

    def _note(self, moving: HandOverProgress) -> None:
        if moving.error is not None and moving.error != self._error:
            self._on_error(moving.error)
        self._error = moving.error
        moved = 0 if moving.counts is None else moving.counts.moved - self._moved_before
        self._on_progress(max(0, moved - self.report.moved))
        self.report.moved = moved

    def _are_due_soon(self, now_ms: int) -> bool:
        """Return True if messages are due too soon to move: the old broker releases them, and they are copied then."""
        query = PendingQuery(before_ms=now_ms + self._settings.lead_ms + _SOON_MS)
        return bool(self._old.delayed.pending(query, 1).messages)

    def _finish(self) -> None:
        first = self._old.delayed.pending(PendingQuery(), 1).messages
        counts = self._old.hand_over.counts()
        self.report.left = counts.pending
        limits = limits_of(self._new)
        if first and limits is not None and limits.max_delay_ms:
            self.report.in_range_ms = first[0].deliver_ms - limits.max_delay_ms

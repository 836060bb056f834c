"""State of delayed messages before a change: found by handle or key in the index of a RocketMQ cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.delayed.backlog import Backlog, timer_handle
from mqtemplate.brokers.remote.delayed.recall import Recalls
from mqtemplate.brokers.remote.delayed.timer_records import TimerId, TimerRecords
from mqtemplate.brokers.remote.queries import Queries
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle
from mqtemplate.errors import UnsupportedError
from mqtemplate.message import MessageExt, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageState:
    """State of one message.

    Attributes:
        status: Result of a change if no timer of the message is pending.
        pending: Its pending timers with their records. There are two if a client stopped during a reschedule.
        handles: Handles of the pending timers. A message that is not in the index may have one without a record.
        deleted: Its timers that were recalled.
    """

    status: ScheduleChangeStatus
    pending: dict[TimerId, MessageExt] = field(default_factory=dict)
    handles: tuple[RecallHandle, ...] = ()
    deleted: frozenset[TimerId] = frozenset()

    @property
    def newest(self) -> MessageExt | None:
        """The record of the pending timer that was stored last."""
        return max(self.pending.values(), key=lambda record: record.store_timestamp, default=None)


class MessageStates:
    """Finds delayed messages by handle or key."""

    def __init__(self, context: ClientContext, queries: Queries, backlog: Backlog, recalls: Recalls) -> None:
        self._context = context
        self._queries = queries
        self._backlog = backlog
        self._recalls = recalls

    def find(self, handle: str | None, key: str | None, topic: str | None) -> list[MessageState]:
        """Return the messages that the arguments of `DelayedMessages.cancel` name.

        Raises:
            MessageError: As `DelayedMessages.cancel`.
            UnsupportedError: One of the messages has a delay level, or no broker recalls messages.
        """
        key = check_selection(handle, key)
        if handle is not None:
            return [self._by_handle(decode_handle(text)) for text in handle.split(",")]
        assert key is not None
        self._recalls.check_versions()
        wire_topic = None if topic is None else self._context.namespace.wrap(topic)
        ids = self._backlog.ids_with_key(key)
        if ids is None:
            ids = [message.msg_id for _, message in self._backlog.pending(PendingQuery(key=key, topic=topic))]
        states = [self._by_id(msg_id, wire_topic) for msg_id in ids]
        return [state for state in states if state is not None]

    def _by_handle(self, handle: RecallHandle) -> MessageState:
        state = self._by_id(handle.msg_id, handle.topic)
        if state is not None:
            return state
        if handle.deliver_ms <= self._context.clock.now_ms():
            return MessageState(status=ScheduleChangeStatus.ALREADY_DELIVERED)
        # The broker has no index, or has not yet added the message to it. A recall needs no index.
        return MessageState(status=ScheduleChangeStatus.UNKNOWN, handles=(handle,))

    def _by_id(self, msg_id: str, wire_topic: str | None) -> MessageState | None:
        """Return the state of a message; None if the index has no delayed message with this id and real topic."""
        records = [record for record in self._backlog.timers_of(msg_id) if _is_for(record, wire_topic)]
        if not records:
            return self._level(msg_id, wire_topic)
        timers = TimerRecords[MessageExt](lambda record: record)
        for record in records:
            timers.add(record)
        now_ms = self._context.clock.now_ms()
        remaining = {
            timer: record for timer, record in timers.remaining().items() if not self._recalls.is_recent(timer)
        }
        pending = {timer: record for timer, record in remaining.items() if timer.slot_ms > now_ms}
        is_delivered = bool(remaining) or self._is_stored(records[0], msg_id)
        return MessageState(
            status=ScheduleChangeStatus.ALREADY_DELIVERED if is_delivered else ScheduleChangeStatus.CANCELLED,
            pending=pending,
            handles=tuple(decode_handle(timer_handle(record)) for record in pending.values()),
            deleted=frozenset(timers.deleted),
        )

    def _is_stored(self, record: MessageExt, msg_id: str) -> bool:
        """Return True if the message is in its real topic."""
        topic = self._context.namespace.unwrap(record.properties[Property.REAL_TOPIC])
        return bool(self._queries.by_key(topic, msg_id, 1, 0, None, unique=True))

    def _level(self, msg_id: str, wire_topic: str | None) -> MessageState | None:
        found = [(record, due_ms) for record, due_ms in self._backlog.levels_of(msg_id) if _is_for(record, wire_topic)]
        if not found:
            return None
        now_ms = self._context.clock.now_ms()
        levels = [record.queue_id + 1 for record, due_ms in found if due_ms > now_ms]
        if levels:
            raise UnsupportedError(
                f"message {msg_id} has delay level {levels[0]}, and RocketMQ recalls only messages with a timer; send "
                "it with delay= or deliver_at=, or use the embedded broker or our server"
            )
        return MessageState(status=ScheduleChangeStatus.ALREADY_DELIVERED)


def _is_for(record: MessageExt, wire_topic: str | None) -> bool:
    return wire_topic is None or record.properties.get(Property.REAL_TOPIC) == wire_topic

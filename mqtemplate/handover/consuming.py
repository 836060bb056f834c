"""Consumer groups that read two brokers during a hand-over: the old one until it is drained, and the new one.

- ``CONCURRENTLY``, broadcasting and ``receive``: both at once, in turns.
- ``ORDERLY``: a queue of the new broker is read only while the group, over all its members, has consumed what the old
  broker has of the topic and of the group's retry topic. After an abort, what is sent to the old broker then waits for
  the new one. See `QueueOrder`.
- A message that fails goes back to the broker that it came from: so do its retries, and its dead letter.

To the application a queue of the old broker has the broker name ``old:NAME``: both brokers often have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mqtemplate.broker import (
    Broker,
    ConsumeFromWhere,
    Consumer,
    ConsumerGroups,
    ConsumerSpec,
    MessageModel,
    QueueLock,
)
from mqtemplate.errors import BrokerError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.handover.old_broker import (
    PollThread,
    QueueOrder,
    SendDirection,
    inner_message,
    inner_queue,
    is_old,
    queues_of,
    shown_keys,
    shown_messages,
    shown_queue,
    spec_at_old,
)
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.handover")


class HandOverConsumer(Consumer):
    """A member of a group at both brokers.

    ``poll`` gives each broker the first turn alternately. If neither has messages, it waits for both at once: a second
    thread waits for the old one.

    Args:
        old: Member of the group at the old broker.
        new: Member of the group at the new broker.
        order: Says how far queues may be read that are locked, which ``ORDERLY`` does before it reads them.
    """

    def __init__(
        self, spec: ConsumerSpec, old: Consumer, new: Consumer, order: QueueOrder, *, is_virtual: bool
    ) -> None:
        self.spec = spec
        self._old, self._new = old, new
        self._order = order
        self._is_virtual = is_virtual
        self._is_woken = False
        self._new_is_first = False
        self._error: CorruptRecordError | None = None
        self._assigned: tuple[frozenset[MessageQueue], frozenset[MessageQueue], frozenset[MessageQueue]] | None = None
        self._without: tuple[frozenset[MessageQueue], frozenset[MessageQueue]] = frozenset(), frozenset()
        self._locked: set[MessageQueue] = set()  # queues of both brokers that the caller has locked

    # --- routing -------------------------------------------------------------------------------

    def _of(self, queue: MessageQueue) -> tuple[Consumer, MessageQueue]:
        return (self._old, inner_queue(queue)) if is_old(queue.broker_name) else (self._new, queue)

    def assignment(self) -> frozenset[MessageQueue]:
        old, new = self._old.assignment(), self._new.assignment()
        assigned = self._assigned
        if assigned is None or assigned[0] != old or assigned[1] != new:
            assigned = self._assigned = (old, new, new.union(map(shown_queue, old)))
        return assigned[2]

    def position(self, queue: MessageQueue) -> int:
        member, inner = self._of(queue)
        return member.position(inner)

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        member, inner = self._of(queue)
        member.seek(inner, queue_offset)

    def move(self, queue: MessageQueue, queue_offset: int) -> None:
        member, inner = self._of(queue)
        member.move(inner, queue_offset)

    def committed(self, queue: MessageQueue) -> int | None:
        member, inner = self._of(queue)
        return member.committed(inner)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        member, inner = self._of(queue)
        member.commit(inner, queue_offset)

    def send_back(
        self,
        message: MessageExt,
        delay_level: int = 0,
        *,
        delay_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        member, inner = (self._old, inner_message(message)) if is_old(message.broker_name) else (self._new, message)
        member.send_back(inner, delay_level, delay_ms=delay_ms, properties=properties)

    def take_resets(self) -> Mapping[MessageQueue, int]:
        return {**shown_keys(self._old.take_resets()), **self._new.take_resets()}

    def close(self) -> None:
        try:
            self._old.close()
        finally:
            self._new.close()

    # --- order ---------------------------------------------------------------------------------

    def _may_read(self, queue: MessageQueue) -> bool:
        """Return True if the next message of a queue need not wait for messages of the other broker."""
        limit = self._order.limit(queue)
        return limit is None or (limit > 0 and self.position(queue) < limit)

    def lock(self, queue: MessageQueue) -> bool:
        member, inner = self._of(queue)
        return self._may_read(queue) and member.lock(inner) and self._has_locked(queue)

    def lock_soon(self, queue: MessageQueue) -> bool:
        member, inner = self._of(queue)
        return self._may_read(queue) and member.lock_soon(inner) and self._has_locked(queue)

    def _has_locked(self, queue: MessageQueue) -> bool:
        self._locked.add(queue)
        return True

    def unlock(self, queue: MessageQueue) -> None:
        member, inner = self._of(queue)
        self._locked.discard(queue)
        member.unlock(inner)

    def unlock_soon(self, queue: MessageQueue) -> None:
        member, inner = self._of(queue)
        self._locked.discard(queue)
        member.unlock_soon(inner)

    def lost_locks(self) -> frozenset[MessageQueue]:
        return self._new.lost_locks().union(map(shown_queue, self._old.lost_locks()))

    def has_lock(self, queue: MessageQueue) -> bool:
        member, inner = self._of(queue)
        return member.has_lock(inner)

    def _must_wait(self) -> frozenset[MessageQueue]:
        """Return the locked queues whose next messages wait for messages of the other broker."""
        return frozenset([queue for queue in self._locked if not self._may_read(queue)])

    def _read_in_order(self, messages: list[MessageExt]) -> list[MessageExt]:
        """Return the messages that may be read now; let the others of locked queues be read again."""
        if not self._locked:
            return messages
        allowed = []
        for message in messages:
            queue = MessageQueue(message.topic, message.broker_name, message.queue_id)
            limit = self._order.limit(queue) if queue in self._locked else None
            if limit is None or message.queue_offset < limit:
                allowed.append(message)
            else:
                self._return(message)
        return allowed

    # --- reading -------------------------------------------------------------------------------

    def wake(self) -> None:
        self._is_woken = True
        self._old.wake()
        self._new.wake()

    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        waiting = self._must_wait()
        excluded = without | waiting
        self._without = frozenset([inner_queue(queue) for queue in excluded if is_old(queue.broker_name)]), excluded
        messages = self._poll_in_turn(max_count)
        if not messages and not self._is_woken and wait_ms > 0 and not self._is_virtual:
            messages = self._wait_for_both(max_count, min(wait_ms, self._order.interval_ms) if waiting else wait_ms)
        self._is_woken = False
        return self._read_in_order(messages)

    def _poll_old(self, max_count: int, wait_ms: int = 0) -> list[MessageExt]:
        return shown_messages(self._old.poll(max_count, wait_ms, without=self._without[0]))

    def _poll_new(self, max_count: int, wait_ms: int = 0) -> list[MessageExt]:
        return self._new.poll(max_count, wait_ms, without=self._without[1])

    def _poll_in_turn(self, max_count: int) -> list[MessageExt]:
        """Read both without waiting: one of them first, and from the other what is left of *max_count*."""
        self._new_is_first = not self._new_is_first
        polls = (self._poll_new, self._poll_old) if self._new_is_first else (self._poll_old, self._poll_new)
        messages: list[MessageExt] = []
        for poll in polls:
            if len(messages) < max_count:
                try:
                    messages += poll(max_count - len(messages))
                except CorruptRecordError as error:
                    if not messages:
                        raise
                    self._error = error  # the read position is after the record already
        return messages

    def _wait_for_both(self, max_count: int, wait_ms: int) -> list[MessageExt]:
        """Wait for the first message of either broker, or until one of the members is woken.

        A member wakes its caller itself, such as after a rebalance.
        """
        is_waiting = True

        def poll_old() -> list[MessageExt]:
            try:
                return self._poll_old(max_count, wait_ms)
            finally:
                if is_waiting:  # otherwise the wake would end the next poll
                    self._new.wake()

        thread = PollThread(self.spec.group, poll_old)
        messages: list[MessageExt] = []
        error: BaseException | None = None
        try:
            messages = self._poll_new(max_count, wait_ms)
        except BaseException as exc:  # raised below, after the other thread has ended its poll
            error = exc
        is_waiting = False
        found = thread.end(self._old.wake)
        if isinstance(found, list):
            messages += self._returned_excess(found, max_count - len(messages))
        else:
            error = error or found
        if error is None or (messages and isinstance(error, CorruptRecordError)):
            self._error = error
            return messages
        for message in messages:
            self._return(message)
        raise error

    def _returned_excess(self, found: list[MessageExt], count: int) -> list[MessageExt]:
        """Return the first messages of the old broker; let the others be read again."""
        for message in reversed(found[count:]):
            self._return(message)
        return found[:count]

    def _return(self, message: MessageExt) -> None:
        """Let a polled message be read again."""
        is_retry = message.properties.get(Property.RETRY_TOPIC) == message.topic
        topic = RETRY_TOPIC_PREFIX + self.spec.group if is_retry else message.topic
        queue = MessageQueue(topic, message.broker_name, message.queue_id)
        self.seek(queue, min(message.queue_offset, self.position(queue)))


@dataclass(frozen=True, slots=True)
class _LocksOfBoth:
    """Locks of one queue at both brokers, as one. A `QueueLock`."""

    each: Sequence[QueueLock]

    @property
    def is_held(self) -> bool:
        return all(lock.is_held for lock in self.each)

    def release(self) -> None:
        """Release all of them, also if one fails."""
        for released, lock in enumerate(self.each, 1):
            try:
                lock.release()
            except BaseException:
                _LocksOfBoth(self.each[released:]).release()
                raise


def _same_queue(broker: Broker, queue: MessageQueue) -> MessageQueue | None:
    """Return the queue with the same number at another broker; None if the topic does not exist there."""
    queues = queues_of(broker, queue.topic)
    return next((each for each in sorted(queues) if each.queue_id == queue.queue_id), None)


_VALUE_SUFFIXES = ("-done", "-paused")


def is_value_group(group: str, topic: str) -> bool:
    """Return True for a group whose committed offset is a value of a schedule, and not a position in a queue."""
    return group.startswith(f"{topic}-") and group.endswith(_VALUE_SUFFIXES)


@dataclass(eq=False)
class HandOverGroups(ConsumerGroups):
    """The consumer groups of both brokers: a member reads both.

    Args:
        started_ms: Start of the hand-over: a broadcasting member reads the new broker from there on, unless it has read
            it before.
        check_order: Raises an error if the order of an ordered member would be lost.
        direction: Says which broker the application sends to.
    """

    old: Broker
    new: Broker
    waits_for_pending: bool
    started_ms: int
    check_order: Callable[[ConsumerSpec], None]
    direction: SendDirection

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        if spec.is_ordered:
            self.check_order(spec)
        is_broadcast = spec.message_model is MessageModel.BROADCASTING
        of_new = spec
        if is_broadcast and spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            start = ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
            of_new = replace(spec, consume_from_where=start, consume_timestamp=self.started_ms)
        if (of_old := spec_at_old(self.old, spec)) is None:
            return self.new.groups.subscribe(of_new)
        old = self.old.groups.subscribe(of_old)
        try:
            new = self.new.groups.subscribe(of_new)
        except BaseException:
            old.close()
            raise
        order = QueueOrder(self.old, self.new, spec.group, self.direction, waits_for_pending=self.waits_for_pending)
        return HandOverConsumer(spec, old, new, order, is_virtual=self.new.clock.is_virtual)

    def _of(self, queue: MessageQueue) -> tuple[ConsumerGroups, MessageQueue]:
        return (self.old.groups, inner_queue(queue)) if is_old(queue.broker_name) else (self.new.groups, queue)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        groups, inner = self._of(queue)
        return groups.committed_offset(group, inner)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `ConsumerGroups`. A value of a schedule is stored at both brokers: it is read at either one."""
        groups, inner = self._of(queue)
        groups.commit_offset(group, inner, queue_offset)
        if is_value_group(group, queue.topic):
            other = self.new if groups is self.old.groups else self.old
            try:
                for each in queues_of(other, queue.topic):
                    other.groups.commit_offset(group, each, queue_offset)
            except BrokerError as exc:
                _log.warning("hand_over.value_not_stored", group=group, broker=other.name, reason=str(exc))

    def lock_queue(self, group: str, queue: MessageQueue) -> QueueLock | None:
        """Lock a queue at the broker that has it, and the one with its number at the other broker.

        Schedules are locked so: run messages of one schedule may be in both brokers, and processes without the setting
        of the hand-over lock at one of them. A broker that does not answer, and does not have the queue, is left out.
        """
        locks: list[QueueLock] = []
        for broker in (self.old, self.new):  # in one order everywhere
            is_own = is_old(queue.broker_name) is (broker is self.old)
            try:
                inner = inner_queue(queue) if is_own else _same_queue(broker, queue)
                lock = None if inner is None else broker.groups.lock_queue(group, inner)
            except BrokerError as exc:
                if is_own:
                    _LocksOfBoth(locks).release()
                    raise
                _log.debug("hand_over.lock_at_one_broker", group=group, broker=broker.name, reason=str(exc))
                continue
            if lock is not None:
                locks.append(lock)
            elif inner is not None:
                _LocksOfBoth(locks).release()
                return None
        return _LocksOfBoth(locks)

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        old, new = self.old.groups.consumed_topics(), self.new.groups.consumed_topics()
        if old is None or new is None:
            return None
        return {group: {*old.get(group, ()), *new.get(group, ())} for group in {*old, *new}}

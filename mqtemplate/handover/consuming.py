"""Consumer groups that read two brokers during a hand-over: the old one until it is drained, and the new one.

- ``CONCURRENTLY``, broadcasting and ``receive``: both at once, in turns.
- ``ORDERLY``: a queue of the new broker is read only while the group, over all its members, has consumed what the old
  broker has of the topic and of the group's retry topic. See `OldQueues`.
- A message that fails goes back to the broker that it came from: so do its retries, and its dead letter.

To the application a queue of the old broker has the broker name ``old:NAME``: both brokers often have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from mqtemplate.errors import CorruptRecordError
from mqtemplate.handover.old_broker import (
    OldQueues,
    PollThread,
    inner_message,
    inner_queue,
    is_old,
    shown_keys,
    shown_messages,
    shown_queue,
    spec_at_old,
)
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.topics import RETRY_TOPIC_PREFIX


class HandOverConsumer(Consumer):
    """A member of a group at both brokers.

    ``poll`` gives each broker the first turn alternately. If neither has messages, it waits for both at once: a second
    thread waits for the old one.

    Args:
        old: Member of the group at the old broker.
        new: Member of the group at the new broker.
        old_queues: Says when queues of the new broker may be locked, which ``ORDERLY`` does before it reads them.
    """

    def __init__(
        self, spec: ConsumerSpec, old: Consumer, new: Consumer, old_queues: OldQueues, *, is_virtual: bool
    ) -> None:
        self.spec = spec
        self._old, self._new = old, new
        self._old_queues = old_queues
        self._is_virtual = is_virtual
        self._is_woken = False
        self._new_is_first = False
        self._error: CorruptRecordError | None = None
        self._thread: PollThread[MessageExt] | None = None
        self._assigned: tuple[frozenset[MessageQueue], frozenset[MessageQueue], frozenset[MessageQueue]] | None = None
        self._without: tuple[frozenset[MessageQueue], frozenset[MessageQueue]] = frozenset(), frozenset()
        self._locked: set[MessageQueue] = set()  # queues of the new broker that the caller has locked

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
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.stop()

    # --- order ---------------------------------------------------------------------------------

    def _may_lock(self, queue: MessageQueue) -> bool:
        return is_old(queue.broker_name) or self._old_queues.are_drained(queue.topic)

    def lock(self, queue: MessageQueue) -> bool:
        member, inner = self._of(queue)
        return self._may_lock(queue) and member.lock(inner) and self._has_locked(queue)

    def lock_soon(self, queue: MessageQueue) -> bool:
        member, inner = self._of(queue)
        return self._may_lock(queue) and member.lock_soon(inner) and self._has_locked(queue)

    def _has_locked(self, queue: MessageQueue) -> bool:
        if not is_old(queue.broker_name):
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
        """Return the locked queues of the new broker whose topics have messages in the old one again."""
        return frozenset([queue for queue in self._locked if not self._old_queues.are_drained(queue.topic)])

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
        of_old = frozenset([inner_queue(queue) for queue in without if is_old(queue.broker_name)])
        self._without = of_old, without | self._must_wait()
        messages = self._poll_in_turn(max_count)
        if not messages and not self._is_woken and wait_ms > 0 and not self._is_virtual:
            messages = self._wait_for_both(max_count, wait_ms)
        self._is_woken = False
        return messages

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
        """Wait for the first message of either broker."""
        if self._thread is None:
            self._thread = PollThread(f"mqtemplate-hand-over-{self.spec.group}")

        def poll_old() -> list[MessageExt]:
            found: list[MessageExt] | None = None
            try:
                found = self._poll_old(max_count, wait_ms)
            finally:
                if found != []:
                    self._new.wake()
            return found

        self._thread.begin(poll_old)
        messages: list[MessageExt] = []
        error: BaseException | None = None
        try:
            messages = self._poll_new(max_count, wait_ms)
        except BaseException as exc:  # raised below, after the other thread has ended its poll
            error = exc
        found = self._thread.end(self._old.wake)
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


@dataclass(eq=False)
class HandOverGroups(ConsumerGroups):
    """The consumer groups of both brokers: a member reads both.

    Args:
        started_ms: Start of the hand-over: a broadcasting member reads the new broker from there on, unless it has read
            it before.
        check_order: Raises an error if the order of an ordered member would be lost.
    """

    old: Broker
    new: Broker
    waits_for_pending: bool
    started_ms: int
    check_order: Callable[[ConsumerSpec], None]

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
        queues = OldQueues(self.old, spec.group, waits_for_pending=self.waits_for_pending)
        return HandOverConsumer(spec, old, new, queues, is_virtual=self.new.clock.is_virtual)

    def _of(self, queue: MessageQueue) -> tuple[ConsumerGroups, MessageQueue]:
        return (self.old.groups, inner_queue(queue)) if is_old(queue.broker_name) else (self.new.groups, queue)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        groups, inner = self._of(queue)
        return groups.committed_offset(group, inner)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        groups, inner = self._of(queue)
        groups.commit_offset(group, inner, queue_offset)

    def lock_queue(self, group: str, queue: MessageQueue) -> QueueLock | None:
        groups, inner = self._of(queue)
        return groups.lock_queue(group, inner)

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        old, new = self.old.groups.consumed_topics(), self.new.groups.consumed_topics()
        if old is None or new is None:
            return None
        return {group: {*old.get(group, ()), *new.get(group, ())} for group in {*old, *new}}

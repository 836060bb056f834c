"""Consumer groups that read two brokers during a hand-over: the old one until it is drained, and the new one.

- ``CONCURRENTLY``, broadcasting and ``receive``: both at once, in turns.
- ``ORDERLY``: a queue of the new broker is read only while the group, over all its members, has consumed what the old
  broker has of the topic and of the group's retry topic. See `OldQueues`.
- A message that fails goes back to the broker that it came from: so do its retries, and its dead letter.

To the application a queue of the old broker has the broker name ``old:NAME``: both brokers often have one name.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from mqtemplate.broker import (
    Broker,
    ConsumeFromWhere,
    Consumer,
    ConsumerGroups,
    ConsumerSpec,
    MessageModel,
    PopConsumers,
    ReceivedMessage,
    Registration,
)
from mqtemplate.errors import BrokerError, CorruptRecordError, MQTemplateError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.selectors.tags import Selector
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from mqtemplate.user_code import safe_text

_log = get_logger("mqtemplate.handover")
_T = TypeVar("_T")

OLD_PREFIX = "old:"
"""Prefix of the name of the old broker, as the application sees it."""


# --- names of the old broker ----------------------------------------------------------------------


def is_old(name: str) -> bool:
    """Return True if a broker name, or a receipt handle, is of the old broker."""
    return name.startswith(OLD_PREFIX)


def shown_queue(queue: MessageQueue) -> MessageQueue:
    """Return a queue of the old broker as the application sees it."""
    return MessageQueue(queue.topic, OLD_PREFIX + queue.broker_name, queue.queue_id)


def inner_queue(queue: MessageQueue) -> MessageQueue:
    """Return a queue of the old broker as that broker knows it."""
    return MessageQueue(queue.topic, queue.broker_name.removeprefix(OLD_PREFIX), queue.queue_id)


def shown_messages(messages: list[MessageExt]) -> list[MessageExt]:
    """Give messages that were read from the old broker the name of that broker which the application sees."""
    for message in messages:
        message.broker_name = OLD_PREFIX + message.broker_name
    return messages


def inner_message(message: MessageExt) -> MessageExt:
    """Return a copy of a message of the old broker as that broker knows it."""
    inner = copy.copy(message)
    inner.broker_name = message.broker_name.removeprefix(OLD_PREFIX)
    return inner


def shown_keys(found: Mapping[MessageQueue, _T]) -> dict[MessageQueue, _T]:
    """Return values by queues of the old broker, with the queues as the application sees them."""
    return {shown_queue(queue): value for queue, value in found.items()}


# --- order across both brokers --------------------------------------------------------------------

_CHECK_EMBEDDED_MS = 100
_CHECK_REMOTE_MS = 1_000  # the check sends two requests for each queue


class OldQueues:
    """Says whether a group has consumed what the old broker has of a topic, over all members of the group.

    A topic is drained if the committed offset of each of its queues, and of the group's retry topic, is the maximum.
    So the old broker must have the commits of all members: those of other processes too.

    - A delayed message that the old broker releases later closes the topic again until it is consumed. What the new
      broker had delivered before stays delivered.
    - While the old broker cannot be reached, the last result counts.

    Args:
        waits_for_pending: True: a topic with pending messages in the old broker is not drained either.
    """

    def __init__(self, old: Broker, group: str, *, waits_for_pending: bool) -> None:
        self._old = old
        self._group = group
        self._retry_topic = RETRY_TOPIC_PREFIX + group
        self._waits_for_pending = waits_for_pending
        self._checked: dict[str, tuple[int, bool]] = {}  # topic -> steady time of the next check, result of the last
        self._lock = threading.Lock()
        self._log = LimitedLog(_log, old.clock.steady_ms, burst=1)

    def are_drained(self, topic: str) -> bool:
        """Return True if queues of *topic* at the new broker may be read in their order."""
        now_ms = self._old.clock.steady_ms()
        with self._lock:
            next_ms, was_drained = self._checked.get(topic, (now_ms, False))
            if now_ms < next_ms:
                return was_drained
            is_drained = self._check(topic, was_drained)
            interval_ms = _CHECK_EMBEDDED_MS if self._old.is_embedded else _CHECK_REMOTE_MS
            self._checked[topic] = now_ms + (0 if self._old.clock.is_virtual else interval_ms), is_drained
        if is_drained != was_drained:
            _log.info("hand_over.topic_drained" if is_drained else "hand_over.topic_read_again", topic=topic)
        return is_drained

    def _check(self, topic: str, was_drained: bool) -> bool:
        old = self._old
        try:
            queues = [queue for each in (topic, self._retry_topic) for queue in _queues_of(old, each)]
            if not all(self._is_consumed(queue) for queue in queues):
                return False
            return not self._waits_for_pending or not old.delayed.count_pending(PendingQuery(topic=topic)).total
        except BrokerError as exc:
            self._log.warning("hand_over.old_broker_not_reached", topic=topic, group=self._group, reason=str(exc))
            return was_drained

    def _is_consumed(self, queue: MessageQueue) -> bool:
        high = self._old.reader.max_offset(queue)
        committed = self._old.groups.committed_offset(self._group, queue)
        if committed is None:
            return self._old.reader.min_offset(queue) >= high
        return committed >= high


def _has_topic(old: Broker, topic: str) -> bool:
    """Return False if the old broker does not have a topic, and would create it when it is read.

    A client does not create topics to read them, and other processes may create them at the server.
    """
    return not old.is_embedded or topic in old.admin().topic_kinds()


def _queues_of(old: Broker, topic: str) -> Sequence[MessageQueue]:
    """Return the queues of a topic of the old broker; none if it does not exist."""
    return old.queues(topic) if _has_topic(old, topic) else ()


def _spec_at_old(old: Broker, spec: ConsumerSpec) -> ConsumerSpec | None:
    """Return the subscriptions of a member at the old broker; None if there is nothing to read."""
    known = {topic: selector for topic, selector in spec.subscriptions.items() if _has_topic(old, topic)}
    if not known and not _has_topic(old, RETRY_TOPIC_PREFIX + spec.group):
        return None
    return replace(spec, subscriptions=known)


# --- members of groups that pull ------------------------------------------------------------------

_WAKE_S = 0.01
_GATE_MS = 50


class _PollThread(Generic[_T]):
    """A thread that waits for messages of the old broker, while the caller waits for those of the new one."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], list[_T]] | None] = SimpleQueue()
        self._results: SimpleQueue[list[_T] | BaseException] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, poll: Callable[[], list[_T]]) -> None:
        """Start a poll. `end` returns its messages."""
        self._jobs.put(poll)

    def end(self, wake: Callable[[], None]) -> list[_T] | BaseException:
        """Wait for the end of the poll; return its messages, or its error.

        Args:
            wake: Ends the wait of the poll. It is called again in case that the poll did not wait yet.
        """
        while True:
            wake()
            with contextlib.suppress(Empty):
                return self._results.get(timeout=_WAKE_S)

    def stop(self) -> None:
        """End the thread."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (poll := self._jobs.get()) is not None:
            try:
                self._results.put(poll())
            except BaseException as error:  # the thread that waits for the result raises it
                self._results.put(error)


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
        self._thread: _PollThread[MessageExt] | None = None
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
            self._thread = _PollThread(f"mqtemplate-hand-over-{self.spec.group}")

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
        check_order: Raises an error if an ordered member cannot be promised its order.
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
        if (of_old := _spec_at_old(self.old, spec)) is None:
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

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        old, new = self.old.groups.consumed_topics(), self.new.groups.consumed_topics()
        if old is None or new is None:
            return None
        return {group: {*old.get(group, ()), *new.get(group, ())} for group in {*old, *new}}


# --- members of groups that receive by POP --------------------------------------------------------


@dataclass(eq=False)
class Registrations:
    """Several registrations that are closed together. A `Registration`."""

    each: Sequence[Registration]

    def close(self) -> None:
        """Close all of them, also if one fails."""
        for closed, registration in enumerate(self.each, 1):
            try:
                registration.close()
            except BaseException:
                Registrations(self.each[closed:]).close()
                raise


def register_at_both(old: Callable[[], Registration], new: Callable[[], Registration]) -> Registration:
    """Register at both brokers, or at none."""
    first = old()
    try:
        return Registrations((first, new()))
    except BaseException:
        first.close()
        raise


@dataclass(eq=False)
class _PopMember:
    """One member of a group at both brokers. A `Registration`."""

    joined: Registration
    on_close: Callable[[], None]

    def close(self) -> None:
        """Leave the group at both."""
        self.on_close()
        self.joined.close()


class _Receive(Protocol):
    """Receives from one broker."""

    def __call__(self, wait_ms: int) -> list[ReceivedMessage]: ...


class HandOverPop(PopConsumers):
    """POP over both brokers. A receipt handle of the old one has the prefix ``old:``.

    While neither has messages, a second thread waits for the old one.
    """

    def __init__(self, old: Broker, new: Broker, *, waits_for_pending: bool) -> None:
        self._old, self._new = old, new
        self._waits_for_pending = waits_for_pending
        self._queues: dict[str, OldQueues] = {}
        self._threads: dict[tuple[str, str, int], _PollThread[ReceivedMessage]] = {}
        self._wakes: Counter[str] = Counter()
        self._new_is_first = False

    def join(self, spec: ConsumerSpec) -> Registration:
        self._queues.setdefault(spec.group, OldQueues(self._old, spec.group, waits_for_pending=self._waits_for_pending))
        of_old = _spec_at_old(self._old, spec)
        if of_old is None:
            return self._new.pop.join(spec)
        joined = register_at_both(lambda: self._old.pop.join(of_old), lambda: self._new.pop.join(spec))
        return _PopMember(joined, lambda: self._stop_threads(spec.group))

    def _stop_threads(self, group: str) -> None:
        """End the threads of a group. A member that stays starts its own again."""
        for key in [key for key in list(self._threads) if key[0] == group]:
            self._threads.pop(key).stop()

    def receive(
        self,
        group: str,
        topic: str,
        max_count: int,
        invisible_ms: int,
        wait_ms: int,
        selector: Selector | None,
        *,
        is_ordered: bool = False,
        attempt_id: str = "",
        auto_renew: bool = False,
    ) -> list[ReceivedMessage]:
        options: dict[str, Any] = {"is_ordered": is_ordered, "attempt_id": attempt_id, "auto_renew": auto_renew}

        def of_old(count: int, wait_ms: int = 0) -> list[ReceivedMessage]:
            found = self._old.pop.receive(group, topic, count, invisible_ms, wait_ms, selector, **options)
            shown_messages([each.message for each in found])
            return [replace(each, receipt=OLD_PREFIX + each.receipt) for each in found]

        def of_new(count: int, wait_ms: int = 0) -> list[ReceivedMessage]:
            if is_ordered and not self._queues[group].are_drained(topic):
                time.sleep(min(wait_ms, _GATE_MS) / 1_000)
                return []
            return self._new.pop.receive(group, topic, count, invisible_ms, wait_ms, selector, **options)

        if not _has_topic(self._old, topic):
            return of_new(max_count, wait_ms)
        messages: list[ReceivedMessage] = []
        self._new_is_first = not self._new_is_first
        for receive in (of_new, of_old) if self._new_is_first else (of_old, of_new):
            if len(messages) < max_count:
                messages += receive(max_count - len(messages))
        if messages or wait_ms <= 0 or self._new.clock.is_virtual:
            return messages
        found_old, found_new = self._wait_for_both(
            group, topic, partial(of_old, max_count), partial(of_new, max_count), wait_ms
        )
        excess = found_old[max(0, max_count - len(found_new)) :]
        if excess:
            self.change_all(group, topic, [each.receipt for each in excess], 0, counts=False)
        return found_new + found_old[: len(found_old) - len(excess)]

    def _wait_for_both(
        self, group: str, topic: str, of_old: _Receive, of_new: _Receive, wait_ms: int
    ) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Wait for the first messages of either broker. Return those of the old one, and those of the new one.

        A wake is for calls that wait already. So it is repeated until the other call has ended.
        """
        key = group, topic, threading.get_ident()
        thread = self._threads.get(key) or self._threads.setdefault(key, _PollThread(f"mqtemplate-hand-over-{group}"))
        wakes, deadline = self._wakes[group], time.monotonic() + wait_ms / 1_000
        is_found, has_ended = threading.Event(), threading.Event()

        def wait(receive: _Receive) -> list[ReceivedMessage]:
            while not is_found.is_set() and self._wakes[group] == wakes and (left := deadline - time.monotonic()) > 0:
                if found := receive(round(left * 1_000)):
                    return found
            return []

        def wait_for_old() -> list[ReceivedMessage]:
            try:
                return wait(of_old)
            finally:
                is_found.set()
                while not has_ended.is_set():
                    self._new.pop.wake(group)
                    has_ended.wait(_WAKE_S)

        thread.begin(wait_for_old)
        found_new: list[ReceivedMessage] = []
        try:
            found_new = wait(of_new)
        finally:
            is_found.set()
            has_ended.set()
            found_old = thread.end(lambda: self._old.pop.wake(group))
        if isinstance(found_old, BaseException):
            if not found_new:
                raise found_old
            _log.warning("hand_over.receive_failed", group=group, topic=topic, reason=safe_text(found_old))
            found_old = []
        return found_old, found_new

    def wake(self, group: str) -> None:
        self._wakes[group] += 1
        self._old.pop.wake(group)
        self._new.pop.wake(group)

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        return self._at_both(receipts, lambda broker, inner: broker.pop.ack_all(group, topic, inner))

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        def change(broker: Broker, inner: Sequence[str]) -> list[str | MQTemplateError]:
            changed = broker.pop.change_all(group, topic, inner, invisible_ms, counts=counts)
            return [OLD_PREFIX + each if broker is self._old and isinstance(each, str) else each for each in changed]

        return self._at_both(receipts, change)

    def _at_both(self, receipts: Sequence[str], call: Callable[[Broker, Sequence[str]], Sequence[_T]]) -> list[_T]:
        """Call each broker with its receipt handles. Return the results in the order of *receipts*."""
        results: dict[str, _T] = {}
        for broker, mine in (
            (self._old, [each for each in receipts if is_old(each)]),
            (self._new, [each for each in receipts if not is_old(each)]),
        ):
            if mine:
                results |= zip(mine, call(broker, [each.removeprefix(OLD_PREFIX) for each in mine]), strict=True)
        return [results[each] for each in receipts]

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        if is_old(received.receipt):
            inner = ReceivedMessage(
                inner_message(received.message), received.receipt.removeprefix(OLD_PREFIX), received.attempt
            )
            self._old.pop.dead_letter(group, topic, inner, properties)
        else:
            self._new.pop.dead_letter(group, topic, received, properties)

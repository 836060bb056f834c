"""Consumer groups of a broker: their members in this process, the assignment of queues, and the committed offsets."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import quote

from mqtemplate.broker import BrokerLifecycle, ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel, QueueLock
from mqtemplate.engine.clients import ConsumerGroupInfo
from mqtemplate.engine.group_rules import SentBack, allocate_averagely, check_same_group, sent_back_message
from mqtemplate.engine.reader import QueueReader
from mqtemplate.engine.topics import TopicRoutes
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, DeletedRecordError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.processes import OwnerProcess
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import AfterChangeService, WakeEvent
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import RETRY_TOPIC_PREFIX, is_system_group

_log = get_logger("mqtemplate.broker")

_DEFAULT_CONSUME_TIMESTAMP_MS = 1_800_000  # before now. Source: DefaultMQPushConsumer.consumeTimestamp


class LocalGroups:
    """The consumer groups that have members in this process, by name. The members pull, but for `join_pop`.

    The members of a group have one request mode: a message that is delivered by POP is not hidden from members that
    pull, so both would handle it. In RocketMQ an administrator sets the mode of a group and a topic.

    Attributes:
        joining: Held while a member joins: its mode is checked and noted in one step.
    """

    def __init__(self) -> None:
        self._groups: dict[str, ConsumerGroup] = {}
        self._pop_members: Counter[str] = Counter()
        self.joining = threading.Lock()

    def join_pop(self, group: str) -> None:
        """Note a member in this process that receives by POP.

        Raises:
            ListenerError: The group has members in this process that pull.
        """
        with self.joining:
            if self.has_members(group):
                raise _modes_error(group, "pulls")
            self._pop_members[group] += 1

    def leave_pop(self, group: str) -> None:
        """Note that a member of `join_pop` has left."""
        with self.joining:
            self._pop_members[group] -= 1
            self._pop_members += Counter()  # removes the groups without members

    def has_pop_members(self, group: str) -> bool:
        """Return True if *group* has members in this process that receive by POP."""
        return group in self._pop_members

    def check_pull(self, group: str) -> None:
        """Check that a member in this process may pull.

        Raises:
            ListenerError: The group has members in this process that receive by POP.
        """
        if self.has_pop_members(group):
            raise _modes_error(group, "receives by POP")

    def has_members(self, group: str) -> bool:
        """Return True if *group* has members in this process that pull."""
        found = self._groups.get(group)
        return found is not None and found.has_members

    def names(self) -> list[str]:
        """Return the groups that have members in this process."""
        return [name for name, group in list(self._groups.items()) if group.has_members]

    def members(self, group: str) -> list[tuple[str, ConsumerSpec]]:
        """Return id and settings of each member of a group in this process."""
        found = self._groups.get(group)
        return [] if found is None else found.members()

    def consumers(self) -> list[EmbeddedConsumer]:
        """Return the members of all groups."""
        return [member for group in list(self._groups.values()) for member in group.consumers()]

    def subscribed(self) -> set[tuple[str, str]]:
        """Return group and topic for each topic that members of clustering groups read."""
        return {key for member in self.consumers() if member.is_clustering for key in member.group_topics()}

    def broadcasting(self) -> set[str]:
        """Return the broadcasting groups that have members."""
        return {member.spec.group for member in self.consumers() if not member.is_clustering}

    def take_joined(self) -> set[tuple[str, str]]:
        """Return the same as `subscribed` for the members that have joined since the last call."""
        return {key for group in list(self._groups.values()) for key in group.take_joined()}

    def starts(self) -> Iterator[tuple[str, MessageQueue, int]]:
        """Yield group, queue and first unread queue offset for each queue of a member without a committed offset."""
        for member in self.consumers():
            for queue in member.assignment() if member.is_clustering else ():
                if member.committed(queue) is None:
                    yield member.spec.group, queue, member.start(queue)

    def group(self, name: str) -> ConsumerGroup:
        """Return the group of this name; create it if needed."""
        return self._groups.setdefault(name, ConsumerGroup())

    def rebalance(self) -> None:
        """Assign the queues of all groups again."""
        for group in list(self._groups.values()):
            group.rebalance()

    def close(self) -> None:
        """Close all members of all groups."""
        for group in list(self._groups.values()):
            group.close()


def _modes_error(group: str, does: str) -> ListenerError:
    return ListenerError(
        f"group {group!r} has a member in this process that {does}; the members of a group have one request mode, "
        "since both would handle each message. Give the second listener a group of its own, or the same request_mode"
    )


class ConsumerGroup:
    """The members of one group in this process, and the locks of its queues."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, EmbeddedConsumer] = {}
        self._joined = 0
        self._joined_topics: set[tuple[str, str]] = set()
        self._queue_locks: dict[MessageQueue, EmbeddedConsumer] = {}

    @property
    def has_members(self) -> bool:
        """True if the group has members."""
        return bool(self._members)

    def consumers(self) -> list[EmbeddedConsumer]:
        """Return the members."""
        with self._lock:
            return list(self._members.values())

    def take_joined(self) -> set[tuple[str, str]]:
        """Return group and topic for the topics of the clustering members that have joined since the last call."""
        with self._lock:
            joined, self._joined_topics = self._joined_topics, set()
            return joined

    def members(self) -> list[tuple[str, ConsumerSpec]]:
        """Return id and settings of each member."""
        with self._lock:
            return [(key, member.spec) for key, member in sorted(self._members.items())]

    def join(self, member: EmbeddedConsumer) -> None:
        """Add a member.

        Raises:
            ListenerError: Its subscriptions or its message model differ from the other members'.
        """
        with self._lock:
            for other in self._members.values():
                check_same_group(other.spec, member.spec)
            self._joined += 1
            if member.is_clustering:
                self._joined_topics.update(member.group_topics())
            self._members[f"{member.spec.instance_name}@{self._joined:06d}"] = member
        self.rebalance()

    def leave(self, member: EmbeddedConsumer) -> None:
        """Remove a member, and release its queue locks."""
        with self._lock:
            self._members = {key: other for key, other in self._members.items() if other is not member}
            self._queue_locks = {queue: owner for queue, owner in self._queue_locks.items() if owner is not member}
            member.assign(set())
        self.rebalance()

    def rebalance(self) -> None:
        """Assign the queues to the members. Called when a member joins or leaves, or a topic gets queues."""
        with self._lock:
            ids = sorted(self._members)
            for member_id, member in self._members.items():
                assigned: set[MessageQueue] = set()
                for queues in member.subscribed_queues():
                    is_clustering = member.spec.message_model is MessageModel.CLUSTERING
                    assigned.update(allocate_averagely(member_id, ids, queues) if is_clustering else queues)
                member.assign(assigned)

    def close(self) -> None:
        """Close all members."""
        for member in list(self._members.values()):
            member.close()

    def commit(self, queue: MessageQueue, member: EmbeddedConsumer, commit: Callable[[], None]) -> None:
        """Call *commit*, unless another member may have the queue: its commits must stay."""
        with self._lock:
            if queue in member.assignment() or self._queue_locks.get(queue) is member:
                commit()

    def lock(self, queue: MessageQueue, member: EmbeddedConsumer) -> bool:
        """Lock a queue for *member*; return False if another member has the lock."""
        with self._lock:
            return self._queue_locks.setdefault(queue, member) is member

    def unlock(self, queue: MessageQueue, member: EmbeddedConsumer) -> None:
        """Release the lock of a queue, if *member* has it."""
        with self._lock:
            if self._queue_locks.get(queue) is member:
                del self._queue_locks[queue]


@dataclass(eq=False)
class EmbeddedConsumer(Consumer):
    """A member of a group in the process of the broker. Its ``poll`` waits until the store wakes it.

    In a process that was forked later each use raises `ForkedError`, and `close` does nothing.
    """

    _store: MessageStore
    _queues: QueueReader
    _routes: TopicRoutes
    _group: ConsumerGroup
    spec: ConsumerSpec
    _offsets: ConsumerOffsets
    _send_back: Callable[[SentBack], None]

    def __post_init__(self) -> None:
        spec = self.spec
        self._owner = OwnerProcess(f"this member of group {spec.group!r}")
        self._wake_event = WakeEvent()
        self._lock = threading.Lock()
        self._assignment: frozenset[MessageQueue] = frozenset()
        self._turn: list[MessageQueue] = []
        self._positions: dict[MessageQueue, int] = {}
        self._starts: dict[MessageQueue, int] = {}  # first positions; they count until the first commit
        self._is_closed = False
        self._is_woken = False
        self._has_wake = False  # a poll that did not wait was woken: the next one that would wait does not
        self._has_skipped = False  # the last read only skipped messages that a selector did not match
        self._selectors: dict[str, Selector | None] = {
            topic: None if selector.selects_all else selector for topic, selector in spec.subscriptions.items()
        }
        self._retry_topic = RETRY_TOPIC_PREFIX + spec.group
        self.is_clustering = spec.message_model is MessageModel.CLUSTERING
        if self.is_clustering:
            self._selectors[self._retry_topic] = None
            self._routes.create(self._retry_topic, 1)
        for topic in self._selectors:
            self._store.watch(topic, self._wake_event.set)
        self._group.join(self)

    # --- membership ----------------------------------------------------------------------------

    def subscribed_queues(self) -> Iterable[list[MessageQueue]]:
        """Return the queues of each topic, including the retry topic."""
        return [sorted(self._routes.queues(topic)) for topic in self._selectors]

    def group_topics(self) -> Iterable[tuple[str, str]]:
        """Return the group and each topic that it reads, the retry topic included."""
        return [(self.spec.group, topic) for topic in self._selectors]

    def assign(self, queues: set[MessageQueue]) -> None:
        """Read these queues from now on. A queue that was not assigned before is read from the committed offset."""
        with self._lock:
            self._positions = {queue: at for queue, at in self._positions.items() if queue in queues}
            self._turn = sorted(queues)
            removed = self._assignment - queues
            self._assignment = frozenset(queues)
        if removed:
            self.wake()  # the caller of `poll` discards their messages
        self._wake_event.set()

    def assignment(self) -> frozenset[MessageQueue]:
        return self._assignment

    def lock(self, queue: MessageQueue) -> bool:
        self._owner.check()
        return self._group.lock(queue, self)

    def unlock(self, queue: MessageQueue) -> None:
        self._owner.check()
        self._group.unlock(queue, self)

    def close(self) -> None:
        if self._is_closed or not self._owner.is_current:
            return
        self._is_closed = True
        for topic in self._selectors:
            self._store.unwatch(topic, self._wake_event.set)
        self._group.leave(self)
        self._wake_event.set()

    # --- reading -------------------------------------------------------------------------------

    def wake(self) -> None:
        self._is_woken = True
        self._wake_event.set()

    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        deadline = time.monotonic() + wait_ms / 1_000
        is_virtual = self._store.clock.is_virtual
        while True:
            messages = self._read(max_count, without)
            left = deadline - time.monotonic()
            if not messages and self._has_skipped and not self._is_woken and (is_virtual or left > 0):
                continue  # matching messages may follow the skipped ones
            if messages or left <= 0 or self._is_woken or self._has_wake or is_virtual:
                self._end_wake(does_wait=wait_ms > 0)
                return messages
            self._wake_event.wait(left)

    def _end_wake(self, *, does_wait: bool) -> None:
        if self._is_woken or does_wait:
            self._is_woken, self._has_wake = False, not does_wait

    def _read(self, max_count: int, without: frozenset[MessageQueue]) -> list[MessageExt]:
        """Read without waiting. Each call starts with another queue, so that all queues are read."""
        self._has_skipped = False
        self._owner.check()
        if self._is_closed:
            raise BrokerClosedError(f"this member of group {self.spec.group!r} was closed")
        messages: list[MessageExt] = []
        with self._lock:
            turn = self._turn
            self._turn = turn[1:] + turn[:1]
            for queue in turn:
                if queue not in without and len(messages) < max_count:
                    self._read_queue(queue, max_count - len(messages), messages)
        return messages

    def _read_queue(self, queue: MessageQueue, max_count: int, messages: list[MessageExt]) -> None:
        at = self._positions.get(queue)
        if at is None:
            at = self._positions[queue] = self._starts[queue] = self._first_position(queue)
        reader = self._queues
        if at < (low := reader.min_offset(queue)):
            at = self._positions[queue] = self._skip_deleted(queue, at, low)
        selector = self._selectors[queue.topic]
        try:
            found, self._positions[queue] = reader.read(queue, at, max_count, selector)
            self._has_skipped |= not found and self._positions[queue] > at
        except DeletedRecordError:  # retention deleted the record after `min_offset` was read
            self._positions[queue] = self._skip_deleted(queue, at, max(reader.first_readable_offset(queue), at + 1))
            self._read_queue(queue, max_count, messages)
            return
        except CorruptRecordError as exc:
            if messages:
                return  # return the messages first; the next poll reads the corrupt record again and raises
            self._positions[queue] = (at if exc.queue_offset is None else exc.queue_offset) + 1
            raise
        if queue.topic == self._retry_topic:
            for message in found:
                message.topic = message.properties.get(Property.RETRY_TOPIC, message.topic)
        messages += found

    def _skip_deleted(self, queue: MessageQueue, queue_offset: int, next_offset: int) -> int:
        """Log that retention deleted messages that this group had not read, and return *next_offset*."""
        _log.warning(
            "consumer.messages_deleted",
            group=self.spec.group,
            topic=queue.topic,
            queue=queue.queue_id,
            offset=queue_offset,
            next_offset=next_offset,
            reason="retention deleted their file; see keep-unread-messages and file-reserved-time",
        )
        return next_offset

    def _first_position(self, queue: MessageQueue) -> int:
        committed = self.committed(queue)
        reader = self._queues
        low, high = reader.min_offset(queue), reader.max_offset(queue)
        if committed is not None:
            return min(committed, high)  # if it is below `low`, the read skips and logs the deleted messages
        start = self.spec.consume_from_where
        if queue.topic == self._retry_topic or start is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            return low
        if start is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            timestamp = self.spec.consume_timestamp
            default = self._store.clock.now_ms() - _DEFAULT_CONSUME_TIMESTAMP_MS
            return reader.search_offset(queue, default if timestamp is None else timestamp)
        return low if reader.is_young(queue) else high  # as RocketMQ

    def position(self, queue: MessageQueue) -> int:
        self._owner.check()
        with self._lock:
            at = self._positions.get(queue)
            return self._first_position(queue) if at is None else at

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        self._owner.check()
        with self._lock:
            if queue in self._assignment:  # else it would count when the queue is assigned again
                self._positions[queue] = self._starts[queue] = queue_offset
        self._wake_event.set()

    def start(self, queue: MessageQueue) -> int:
        """Return the first position in a queue, from which this member reads or will read."""
        with self._lock:
            at = self._starts.get(queue)
            return self._first_position(queue) if at is None else at

    # --- progress ------------------------------------------------------------------------------

    def committed(self, queue: MessageQueue) -> int | None:
        return self._offsets.offset(self.spec.group, queue.topic, queue.queue_id)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        self._owner.check()
        commit = partial(self._offsets.commit, self.spec.group, queue.topic, queue.queue_id, queue_offset)
        if self.is_clustering:
            self._group.commit(queue, self, commit)
        else:
            commit()

    def send_back(
        self,
        message: MessageExt,
        delay_level: int = 0,
        *,
        delay_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._send_back(sent_back_message(self.spec, message, delay_level, delay_ms, properties))


class _LocalQueueLock:
    """Lock of a queue for a caller in the process of the broker. A `QueueLock`; it needs no renewal."""

    is_held = True

    def __init__(self, locks: dict[tuple[str, MessageQueue], _LocalQueueLock], key: tuple[str, MessageQueue]) -> None:
        self._locks, self._key = locks, key

    def try_take(self) -> bool:
        """Take the lock; return False if another caller has it."""
        return self._locks.setdefault(self._key, self) is self

    def release(self) -> None:
        """See `QueueLock.release`."""
        if self._locks.get(self._key) is self:
            del self._locks[self._key]


class CommittedOffsets:
    """The offset tables of one broker: one for all clustering groups, and one for each member of a broadcasting group.

    Attributes:
        clustering: The table of all clustering groups, in RocketMQ's file.
        service: Writes changed tables after an interval.
    """

    def __init__(self, store: MessageStore, interval_ms: int) -> None:
        self._store = store
        self.service = AfterChangeService("broker.offsets", self.persist, store.clock, interval_ms)
        self.clustering = ConsumerOffsets(store.store_files, store.clock, flush=store.flush)
        self.clustering.on_change(self.service.changed)
        self._broadcasting: dict[tuple[str, str], ConsumerOffsets] = {}

    def table(self, spec: ConsumerSpec) -> ConsumerOffsets:
        """Return the table that a member of a group uses."""
        if spec.message_model is MessageModel.CLUSTERING:
            return self.clustering
        key = (spec.instance_name, spec.group)
        if key not in self._broadcasting:
            name = f"broadcast/{_file_name(spec.instance_name, '@+')}/{_file_name(spec.group, '%|')}.json"
            table = ConsumerOffsets(self._store.store_files, self._store.clock, name, self._store.flush)
            table.load()
            table.on_change(self.service.changed)
            self._broadcasting[key] = table
        return self._broadcasting[key]

    def persist(self) -> None:
        """Write the changed tables."""
        for table in (self.clustering, *self._broadcasting.values()):
            table.persist()


class PopProgressChanges(Protocol):
    """Changes of the progress of groups that read by POP; see `mqtemplate.engine.pop.pop.PopService`."""

    def reset(self, group: str, queue: MessageQueue, queue_offset: int) -> None: ...
    def forget_group(self, group: str) -> None: ...
    def forget_topic(self, topic: str) -> None: ...
    def retry_topics(self, topic: str) -> list[str]: ...


@dataclass(eq=False)
class Groups:
    """The consumer groups of one broker. All members of a group are in this process, or all are remote clients.

    Args:
        local: The members in this process.
        send_back: Stores a message that a member sends back; see `Consumer.send_back`.

    Attributes:
        local: The members in this process.
        committed: The committed offsets.
    """

    _store: MessageStore
    _queues: QueueReader
    _routes: TopicRoutes
    local: LocalGroups
    _send_back: Callable[[SentBack], None]
    committed: CommittedOffsets
    _pop: PopProgressChanges
    _lifecycle: BrokerLifecycle

    def __post_init__(self) -> None:
        self._has_remote_members: Callable[[str], bool] = lambda group: False
        self._remote_groups: Callable[[], Iterable[ConsumerGroupInfo]] = tuple
        self._queue_locks: dict[tuple[str, MessageQueue], _LocalQueueLock] = {}

    def connect_remote(
        self, has_members: Callable[[str], bool], groups: Callable[[], Iterable[ConsumerGroupInfo]]
    ) -> None:
        """Note how to find out whether a group has members that are remote clients, and how to find these groups."""
        self._has_remote_members, self._remote_groups = has_members, groups

    def has_remote_members(self, group: str) -> bool:
        """Return True if *group* has members that are clients of a server of this broker."""
        return self._has_remote_members(group)

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        """See `ConsumerGroups.subscribe`."""
        self._lifecycle.check()
        if self._has_remote_members(spec.group):
            raise ListenerError(
                f"group {spec.group!r} is read by remote clients of this broker, which share no queues with listeners "
                "in its own process; give the listener a group of its own"
            )
        self._routes.unknown.expect(spec.subscriptions)
        group, offsets = self.local.group(spec.group), self.committed.table(spec)
        with self.local.joining:
            self.local.check_pull(spec.group)
            return EmbeddedConsumer(self._store, self._queues, self._routes, group, spec, offsets, self._send_back)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """See `ConsumerGroups.committed_offset`."""
        self._lifecycle.check()
        return self.committed.clustering.offset(group, queue.topic, queue.queue_id)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `ConsumerGroups.commit_offset`."""
        self._lifecycle.check()
        self.committed.clustering.commit(group, queue.topic, queue.queue_id, queue_offset)

    def lock_queue(self, group: str, queue: MessageQueue) -> QueueLock | None:
        """See `ConsumerGroups.lock_queue`."""
        self._lifecycle.check()
        lock = _LocalQueueLock(self._queue_locks, (group, queue))
        return lock if lock.try_take() else None

    def reset_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Let a group continue at an offset that an administrator has chosen, also if it reads by POP."""
        self.commit_offset(group, queue, queue_offset)
        self._pop.reset(group, queue, queue_offset)

    def forget(self, group: str) -> None:
        """Forget the progress of a group that is deleted."""
        self._pop.forget_group(group)  # first: it ends deliveries that would commit an offset again
        self.committed.clustering.forget(group=group)

    def forget_topic(self, topic: str) -> None:
        """Forget the progress of all groups in a topic that is deleted, and delete the retry topics of their pops."""
        retry_topics = self._pop.retry_topics(topic)
        self._pop.forget_topic(topic)
        for name in retry_topics:
            self._routes.table.delete(name)
            self._routes.refresh(name)
        for name in (topic, *retry_topics):
            self.committed.clustering.forget(topic=name)

    def consumed_topics(self) -> Mapping[str, Collection[str]]:
        """See `ConsumerGroups.consumed_topics`."""
        offsets, known = self.committed.clustering, set(self._routes.table.names())
        groups = [group for group in offsets.groups() if not is_system_group(group)]  # their topics have no readers
        found = {group: offsets.topics_of(group) & known for group in groups}
        for info in self._remote_groups():
            if not info.is_broadcasting:
                found[info.group] = found.get(info.group, set()) | (set(info.subscriptions) & known)
        return found


def _file_name(name: str, safe: str) -> str:
    """Return *name* as the name of one file. The offsets of a remote broker have the same form."""
    quoted = quote(name, safe=safe)
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted

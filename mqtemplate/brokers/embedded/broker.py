"""The embedded broker: it stores messages in this process, in a store directory or in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from mqtemplate.broker import (
    Broker,
    BrokerAdmin,
    ConsumeFromWhere,
    ConsumerGroups,
    ConsumerSpec,
    DelayedMessages,
    GroupDeliveries,
    GroupInfo,
    GroupSubscription,
    Member,
    MessageReader,
    MessageSends,
    PopConsumers,
    QueueProgress,
    QueueSpan,
    ReceivedMessage,
    Registration,
    Requests,
    RetentionHold,
    StoreHealth,
    TopicKind,
    TopicMessageType,
    TopicSettings,
    Transactions,
    unknown_name,
)
from mqtemplate.clock import Clock
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.group_rules import check_same_group, sent_back_message
from mqtemplate.engine.pop.pop import (
    HeldPop,
    PoppedMessage,
    PopRequest,
    PopResult,
    PopService,
    ReceiptHandle,
    WhenDurable,
)
from mqtemplate.engine.pop.receipt_handle import NORMAL_TOPIC
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    CorruptRecordError,
    InvalidReceiptHandleError,
    MessageError,
    MQTemplateError,
    UnsupportedError,
)
from mqtemplate.message import MessageQueue, Property
from mqtemplate.metrics import Metrics
from mqtemplate.record.codec import to_message_ext
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import read_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_system_group

if TYPE_CHECKING:
    from mqtemplate.broker.hand_over import DelayLimits, FoundRecords
    from mqtemplate.engine.hand_over import LocalHandOver

_T = TypeVar("_T")
_GROUPS_FILE = "config/subscriptionGroup.json"
_TO_DEAD_LETTERS = -1  # as a delay level
_THIS_PROCESS = "this process"
"""Address of a listener in the process of the broker."""
_COPY_MS = 60_000
_FLUSH_S = 10


class EmbeddedBroker(Broker):
    """A broker in this process.

    - With a store directory, acknowledged messages survive the process. One process owns the directory.
    - In memory the same code uses anonymous memory, for tests and for messages that may be lost.
    - On a virtual clock it starts no thread: a harness steps ``services()``.
    - It is started once. To start again, create another broker.
    - It works in the process that starts it. In a process that was forked later, each use raises `ForkedError`, and
      `close` does nothing.

    Args:
        path: The store directory, created if missing; None for memory. A relative path is resolved here, once.
        store_files: Store files to use instead of a directory, for tests with a simulated disk.

    Attributes:
        engine: Does the work. A server uses it too.
        store: Commit log and consume queues of the engine.
        topics: The table of topics of the engine.
    """

    is_embedded = True

    def __init__(
        self,
        path: Path | str | None = None,
        settings: EmbeddedSettings | None = None,
        clock: Clock | None = None,
        *,
        store_files: StoreFiles | None = None,
    ) -> None:
        self.engine = engine = Engine(path, settings, clock, store_files=store_files)
        self.settings, self.clock, self.name, self.path = engine.settings, engine.clock, engine.name, engine.path
        self.capabilities = engine.capabilities
        self.store, self.topics = engine.store, engine.topics
        self._check_open = engine.lifecycle.check
        self._pop = EmbeddedPop(engine)

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self.engine.levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self.engine.drafts.retry_delays_ms

    @property
    def metrics(self) -> Metrics:
        """Metrics of this broker; docs/metrics.md has their names."""
        return self.store.metrics

    def start(self) -> None:
        """Open the files and recover; see `Engine.start` for the errors."""
        self.engine.start()

    def services(self) -> Sequence[Service]:
        return self.engine.services()

    def close(self) -> None:
        try:
            self.engine.close()
        finally:  # also if the disk refuses the last writes: no thread of POP would wake those that wait
            self._pop.wake_all()

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._check_open()
        return self.engine.routes.queues(topic)

    def topic_names(self) -> Sequence[str]:
        return sorted(self.topics.application_topics())

    def expect_topics(self, topics: Iterable[str]) -> None:
        self.engine.routes.unknown.expect(topics)

    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        self._check_open()
        self.engine.routes.create(topic, queue_count)
        if message_type is not None:
            attributes = (self.engine.topics.config(topic) or {}).get("attributes", {})
            self.engine.topics.update(topic, {"attributes": attributes | {"message.type": message_type.value}})

    # --- operators -----------------------------------------------------------------------------

    def admin(self) -> BrokerAdmin:
        return EmbeddedAdmin(self.engine, self._pop)

    def store_health(self) -> StoreHealth:
        flush = self.store.group_commit
        refusal = self.store.cleaning.why_refused
        error = self.engine.pop.journal.error or refusal if flush.error is None else str(flush.error)
        return StoreHealth(error, self.store.end_offset - flush.flushed, self.store.disk.space(), refusal)

    def retention_holds(self) -> Sequence[RetentionHold]:
        return tuple(self.engine.retention.holds())

    @property
    def hand_over(self) -> LocalHandOver:
        return self.engine.hand_over

    def delay_limits(self) -> DelayLimits:
        from mqtemplate.broker.hand_over import DelayLimits

        limits = self.settings.timer_limits()
        return DelayLimits(
            max_delay_ms=limits.max_delay_ms if limits.enabled else 0,
            precision_ms=1,
            levels_ms=tuple(self.engine.levels.delays_ms),
        )

    def find_records(self, topics: Sequence[str], msg_id: str) -> FoundRecords:
        from mqtemplate.broker.hand_over import FoundRecords

        found = [each for topic in topics for each in self.reader.messages_by_key(topic, msg_id, unique=True)]
        return FoundRecords(frozenset({self.name}), found)

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> MessageSends:
        return self.engine.sends

    @property
    def requests(self) -> Requests:
        return self.engine.requests

    @property
    def transactions(self) -> Transactions:
        return self.engine.transactions

    @property
    def reader(self) -> MessageReader:
        return self.engine.reader

    @property
    def groups(self) -> ConsumerGroups:
        return self.engine.groups

    @property
    def pop(self) -> PopConsumers:
        return self._pop

    @property
    def delayed(self) -> DelayedMessages:
        return self.engine.delayed

    def change_delay_levels(self, text: str) -> None:
        """Use another level table; see `Engine.change_delay_levels`."""
        self.engine.change_delay_levels(text)


class _BlockingReceive:
    """A `receive` that waits in a thread."""

    def __init__(self) -> None:
        self.results: SimpleQueue[PopResult] = SimpleQueue()  # the first one counts
        self._held: HeldPop | None = None
        self._is_woken = False

    def hold(self, pop: PopService, request: PopRequest, wait_ms: int) -> None:
        """Let the pop wait. It may be woken before."""
        self._held = pop.hold(request, wait_ms, self.results.put)
        if self._is_woken:
            self.wake()

    def wake(self) -> None:
        """Return without messages, unless some were delivered before."""
        self._is_woken = True
        if self._held is not None:
            self._held.cancel()
            self.results.put(PopResult(()))


@dataclass(eq=False)
class _PopMember:
    """One member of a group."""

    owner: EmbeddedPop
    spec: ConsumerSpec

    def close(self) -> None:
        """Leave the group."""
        self.owner.leave(self)


class EmbeddedPop(PopConsumers):
    """POP of this process, over the engine. On a virtual clock nothing waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._members: dict[str, list[_PopMember]] = {}
        self._receives: dict[str, set[_BlockingReceive]] = {}

    # --- members -------------------------------------------------------------------------------

    def join(self, spec: ConsumerSpec) -> Registration:
        self._engine.lifecycle.check()
        if spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            raise UnsupportedError(
                f"group {spec.group!r} cannot start at a time by POP; start it at the first or the last message, then "
                f"move it: mqtemplate offsets reset {spec.group} TOPIC --to TIME"
            )
        member = _PopMember(self, spec)
        with self._lock:
            members = self._members.get(spec.group, [])
            for other in members:
                check_same_group(other.spec, spec)
            self._engine.groups.local.join_pop(spec.group)
            if not members:  # a killed process may have left deliveries, which it cannot acknowledge any more
                self._engine.pop.end_session(_session_of(spec.group))
            self._members.setdefault(spec.group, []).append(member)
        for topic in spec.subscriptions:
            self._engine.routes.queues(topic)  # creates it
        return member

    def leave(self, member: _PopMember) -> None:
        """Remove a member. Deliveries that were to be renewed are visible soon if it was the last one."""
        group = member.spec.group
        with self._lock:
            members = self._members.get(group, [])
            if member not in members:
                return
            members.remove(member)
            self._engine.groups.local.leave_pop(group)
            if members:
                return
            del self._members[group]
            if self._engine.lifecycle.is_open:  # with the lock: the next member has the same session
                self._engine.pop.end_session(_session_of(group))

    def specs(self, group: str) -> list[ConsumerSpec]:
        """Return the settings of each member of a group."""
        with self._lock:
            return [member.spec for member in self._members.get(group, ())]

    def groups(self) -> list[str]:
        """Return the groups that have members."""
        with self._lock:
            return list(self._members)

    # --- messages ------------------------------------------------------------------------------

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
        specs = self.specs(group)
        if not specs:
            raise BrokerClosedError(f"group {group!r} has no member that receives by POP; join it first")
        request = PopRequest(
            group=group,
            topic=topic,
            max_count=max_count,
            invisible_ms=invisible_ms,
            selector=None if selector is None or selector.selects_all else selector,
            is_ordered=is_ordered,
            attempt_id=attempt_id,
            from_last=specs[0].consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
            max_attempts=specs[0].max_reconsume_times + 1,
            client=_THIS_PROCESS,
            session=_session_of(group) if auto_renew else "",
            key_limits=specs[0].key_limits,
        )
        return [self._received(popped) for popped in self._pop(request, wait_ms).messages]

    def _pop(self, request: PopRequest, wait_ms: int) -> PopResult:
        pop, group = self._engine.pop, request.group
        if self._engine.clock.is_virtual or wait_ms <= 0:
            return pop.pop(request)
        receive = _BlockingReceive()
        with self._lock:
            self._receives.setdefault(group, set()).add(receive)
        try:
            receive.hold(pop, request, wait_ms)
            return receive.results.get()
        finally:
            with self._lock:
                self._receives[group].discard(receive)

    def _received(self, popped: PoppedMessage) -> ReceivedMessage:
        engine = self._engine
        message = to_message_ext(popped.record, engine.name, engine.settings.max_body_bytes())
        if popped.handle.topic_type != NORMAL_TOPIC:
            message.topic = message.properties.get(Property.RETRY_TOPIC, message.topic)
        message.reconsume_times = popped.attempt - 1
        return ReceivedMessage(message, popped.handle.text, popped.attempt)

    def wake(self, group: str) -> None:
        with self._lock:
            receives = list(self._receives.get(group, ()))
        for receive in receives:
            receive.wake()

    def wake_all(self) -> None:
        """Let all calls of `receive` return, since the broker is closed."""
        for group in list(self._receives):
            self.wake(group)

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        ack = partial(self._engine.pop.ack_all, group, topic)
        results = self._when_durable(group, topic, receipts, ack)
        return [each if isinstance(each, MQTemplateError) else None for each in results]

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        change = partial(self._engine.pop.change_all, group, topic, counts=counts)
        results = self._when_durable(
            group, topic, receipts, lambda handles, durable: change(handles, invisible_ms, durable)
        )
        return [each.text if isinstance(each, ReceiptHandle) else each for each in results]

    def _when_durable(
        self,
        group: str,
        topic: str,
        receipts: Sequence[str],
        change: Callable[[list[ReceiptHandle], WhenDurable], Sequence[_T | None]],
    ) -> list[_T | MQTemplateError]:
        """Change deliveries, and wait until that is durable. Return each result, or the error instead."""
        parsed = [_parsed(receipt) for receipt in receipts]
        handles = [each for each in parsed if isinstance(each, ReceiptHandle)]
        durable: SimpleQueue[Exception | None] = SimpleQueue()
        results: list[_T | MQTemplateError | None] = []
        try:
            results += change(handles, durable.put)
            if any(results):
                self._wait_until(durable)
        except MQTemplateError as error:
            results = [error if is_changed else None for is_changed in results or handles]
        each_result = iter(results)
        return [
            each if isinstance(each, MQTemplateError) else next(each_result) or _delivered_again(group, topic)
            for each in parsed
        ]

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        # The message stays invisible until its copy is stored. So no other member has it, and nothing is copied twice.
        receipt = self.change_invisible(group, topic, received.receipt, _COPY_MS)
        spec = ConsumerSpec(group=group, subscriptions={})
        self._engine.sends.send_back(sent_back_message(spec, received.message, _TO_DEAD_LETTERS, None, properties))
        self.ack(group, topic, receipt)

    def _wait_until(self, durable: SimpleQueue[Exception | None]) -> None:
        """Wait until a change is durable. On a virtual clock the services make it durable later."""
        try:
            error = durable.get(not self._engine.clock.is_virtual, _FLUSH_S)
        except Empty:
            if self._engine.clock.is_virtual:
                return
            raise BrokerError(
                f"the delivery has changed, but the change was not flushed within {_FLUSH_S} s; see whether the disk "
                "is slow, and repeat the call: a repetition has no further effect"
            ) from None
        if error is not None:
            raise error


def _parsed(receipt: str) -> ReceiptHandle | MessageError:
    try:
        return ReceiptHandle.parse(receipt)
    except MessageError as error:
        return error


def _session_of(group: str) -> str:
    return f"embedded:{group}"


def _delivered_again(group: str, topic: str) -> InvalidReceiptHandleError:
    return InvalidReceiptHandleError(
        f"a message of topic {topic!r} was delivered to group {group!r} again, since its invisible time was over; the "
        "newer delivery counts. Give the listener a longer invisible_duration, or call message.extend in time"
    )


class EmbeddedAdmin(BrokerAdmin):
    """Topics, groups and offsets of a started engine.

    It knows the groups of this process, groups with offsets, and groups that a server has stored; and the members of
    this process.
    """

    def __init__(self, engine: Engine, pop: EmbeddedPop) -> None:
        self._engine = engine
        self._pop = pop

    # --- topics --------------------------------------------------------------------------------

    def topic_kinds(self) -> dict[str, TopicKind]:
        table = self._engine.topics
        configs = {name: table.config(name) or {} for name in sorted(table.names())}
        return {name: TopicKind.of(name, int(config.get("perm", 0))) for name, config in configs.items()}

    def topic_settings(self) -> dict[str, TopicSettings]:
        table = self._engine.topics
        configs = {name: table.config(name) or {} for name in sorted(table.names())}
        return {
            name: TopicSettings.of(name, len(self._queues(name)), int(config.get("perm", 0)))
            for name, config in configs.items()
        }

    def set_topic_rights(self, topic: str, *, is_readable: bool, is_writable: bool) -> None:
        if not self._engine.topics.has(topic):
            raise unknown_name("topic", topic, self.topic_names())
        perm = TopicSettings.perm_of(is_readable=is_readable, is_writable=is_writable)
        self._engine.topics.update(topic, {"perm": perm})

    def delay_levels_ms(self) -> Sequence[int]:
        return self._engine.levels.delays_ms

    def topic_shapes(self) -> Mapping[str, str]:
        return {topic: shape.describe() for topic, shape in self._engine.settings.topic_shapes.items()}

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        reader = self._engine.queues
        return [
            QueueSpan(queue, low, high, self._stored_ms(queue, high - 1) if high > low else None)
            for queue in self._queues(topic)
            for low, high in [(reader.min_offset(queue), reader.max_offset(queue))]
        ]

    def _queues(self, topic: str) -> list[MessageQueue]:
        config = self._engine.topics.config(topic)
        if config is None:
            raise unknown_name("topic", topic, self.topic_names())
        count = max(int(config.get("readQueueNums", 0)), int(config.get("writeQueueNums", 0)))
        return [MessageQueue(topic, self._engine.name, queue_id) for queue_id in range(count)]

    def _stored_ms(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it was deleted or is corrupt."""
        try:
            messages, _ = self._engine.queues.read(queue, queue_offset, 1, None)
        except CorruptRecordError:
            return None
        return messages[0].store_timestamp if messages else None

    def delete_topic(self, topic: str) -> None:
        engine = self._engine
        if not engine.topics.delete(topic):
            raise unknown_name("topic", topic, self.topic_names())
        engine.routes.refresh(topic)
        engine.groups.forget_topic(topic)

    def groups_of(self, topic: str) -> list[str]:
        subscribed = {
            name for name in self.group_names() if any(topic in spec.subscriptions for _, spec in self._members(name))
        }
        committed = {name for name in self._engine.offsets.groups_of(topic) if not is_system_group(name)}
        return sorted(subscribed | committed)

    # --- groups --------------------------------------------------------------------------------

    def _members(self, group: str) -> list[tuple[str, ConsumerSpec]]:
        """Return id and settings of each member of a group in this process."""
        by_pop = [(f"POP@{number:06d}", spec) for number, spec in enumerate(self._pop.specs(group), 1)]
        return [*self._engine.groups.local.members(group), *by_pop]

    def group_names(self) -> list[str]:
        engine = self._engine
        names = engine.offsets.groups() | {*engine.groups.local.names(), *self._pop.groups()} | self._named_by_topics()
        names |= set(_stored_groups(self._engine.store.store_files))
        return sorted(name for name in names if not is_system_group(name))

    def _named_by_topics(self) -> set[str]:
        prefixes = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)
        topics = self._engine.topics.names()
        return {topic.removeprefix(prefix) for topic in topics for prefix in prefixes if topic.startswith(prefix)}

    def group(self, name: str) -> GroupInfo:
        names = self.group_names()
        if name not in names:
            raise unknown_name("group", name, names)
        return self._group(name)

    def groups(self) -> list[GroupInfo]:
        # Not `group` of each: it looks for the name in all tables.
        return [self._group(name) for name in self.group_names()]

    def _group(self, name: str) -> GroupInfo:
        specs = self._members(name)
        subscriptions = {topic: selector for _, spec in specs for topic, selector in spec.subscriptions.items()}
        return GroupInfo(
            name,
            members=tuple(Member(client_id, _THIS_PROCESS, "PYTHON") for client_id, _ in specs),
            subscriptions=tuple(_subscription(topic, subscriptions[topic]) for topic in sorted(subscriptions)),
            progress=tuple(self._progress(name, {*subscriptions, RETRY_TOPIC_PREFIX + name})),
            message_model=specs[0][1].message_model.value if specs else None,
            consume_from_where=specs[0][1].consume_from_where.value if specs else None,
        )

    def _progress(self, group: str, subscribed: set[str]) -> list[QueueProgress]:
        offsets, reader = self._engine.offsets, self._engine.queues
        topics = sorted(offsets.topics_of(group) | subscribed)
        found = []
        for queue in (queue for topic in topics if self._engine.topics.config(topic) for queue in self._queues(topic)):
            committed = offsets.offset(group, queue.topic, queue.queue_id)
            consumed_ms = self._stored_ms(queue, committed - 1) if committed else None
            high, low = reader.max_offset(queue), reader.min_offset(queue)
            found.append(QueueProgress(queue, committed, high, low, consumed_ms))
        return found

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        if self._engine.groups.local.has_members(group):
            raise UnsupportedError(
                f"group {group!r} has listeners in this process, with read positions of their own; call seek of their "
                "containers (MQApplication.containers), or stop the application first"
            )
        if self._engine.groups.has_remote_members(group):
            raise UnsupportedError(
                f"group {group!r} has members that are clients of this broker's server; connect to the server, which "
                "notifies them"
            )
        for queue, queue_offset in offsets.items():
            self._engine.groups.reset_offset(group, queue, queue_offset)

    def create_group(self, name: str) -> None:
        """Do nothing: the first member or offset creates a group."""

    def deliveries(self, group: str) -> GroupDeliveries | None:
        return self._engine.pop.deliveries(group)

    def forget_group(self, group: str) -> None:
        groups = self._engine.groups
        if self._members(group) or groups.has_remote_members(group):
            raise UnsupportedError(
                f"group {group!r} has members now, so it is not gone; stop them first, or move its offsets instead "
                f"with: mqtemplate offsets reset {group} TOPIC --to latest"
            )
        groups.forget(group)


def _stored_groups(store_files: StoreFiles) -> list[str]:
    """Return the groups that a server has stored."""
    return list(read_table(store_files, _GROUPS_FILE).get("subscriptionGroupTable", {}))


def _subscription(topic: str, selector: Selector) -> GroupSubscription:
    kind = "SQL92" if isinstance(selector, Sql92Selector) else "TAG"
    return GroupSubscription(topic, selector.expression, kind)

"""The broker of an application during a hand-over: the old and the new broker as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from mqtemplate.broker import (
    Broker,
    BrokerAdmin,
    Capability,
    CheckTransaction,
    ConsumerGroups,
    ConsumerSpec,
    CopyHealth,
    DelayedMessages,
    MessageReader,
    MessageSends,
    PopConsumers,
    Registration,
    Requests,
    RetentionHold,
    StoreHealth,
    TopicMessageType,
    Transactions,
)
from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.errors import (
    BrokerError,
    ConfigurationError,
    ListenerError,
    MessageError,
    MQTemplateError,
    StoreLockedError,
    UnsupportedError,
    reworded,
)
from mqtemplate.event_log import get_logger
from mqtemplate.handover.admin import HandOverAdmin, copy_topics
from mqtemplate.handover.consuming import HandOverGroups, is_value_group
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.mover import Mover
from mqtemplate.handover.old_broker import (
    CLOCKS_DIFFER_MS,
    OLD_PREFIX,
    SendDirection,
    inner_message,
    inner_queue,
    is_old,
    register_at_both,
    shown_messages,
    shown_queue,
)
from mqtemplate.handover.pace import SendsInFlight
from mqtemplate.handover.pending import HandOverDelayed
from mqtemplate.handover.pop import HandOverPop
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.pending import PendingQuery
from mqtemplate.results import HalfMessage, PullResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service

_log = get_logger("mqtemplate.handover")

_NOT_OF_BOTH = frozenset(
    {
        Capability.LOCAL_FILES,
        Capability.RECORD_BLOCK,
        Capability.KEY_LIMITS,
        Capability.PENDING_KEYS,
        Capability.PENDING_KEY_STEPS,
    }
)
"""Capabilities of the files of one broker, and of what one broker counts."""


@dataclass(frozen=True, slots=True)
class HandOverOptions:
    """Options of a hand-over, most of them for messages of both brokers that meet.

    Attributes:
        target: The new broker as the settings name it.
        origin: The setting that names the old broker, for errors.
        mover: Settings of the mover; None: nothing moves messages, and the old broker releases them.
        orderly_waits_for_pending: ``ORDERLY`` listeners read a topic of the new broker only when the old one has no
            pending message of it either.
        allow_other_queue_count: ``ORDERLY`` listeners may read topics whose number of queues differs, although delayed
            messages with one ``hash_key`` then move to another queue than the messages that are sent now.
    """

    target: str = "the new broker"
    origin: str = "mqtemplate.hand-over.from"
    mover: MoverSettings | None = None
    orderly_waits_for_pending: bool = False
    allow_other_queue_count: bool = False


class HandOverBroker(Broker):
    """Two brokers as one: messages are sent to one of them, and read from both.

    - Sends, requests and half messages go to the new broker, and to the old one again once the hand-over is aborted.
      Half messages are checked where they are.
    - Sends with a pending key are refused: no broker knows all messages that may be pending under the key.
    - Changes and queries of pending messages concern both, and so do groups, topics, and what operators do.
    - To the application the old broker's name is ``old:NAME``.
    - If one of them cannot be reached, the other one works on.

    Args:
        old: The broker that is left. It is started and closed with this one.
        new: The broker that the application moves to. Its name, clock and capabilities are those of this broker.

    Attributes:
        mover: Moves pending messages; None before the start, and if the options have none.
    """

    def __init__(self, old: Broker, new: Broker, options: HandOverOptions | None = None) -> None:
        self.old, self.new = old, new
        self.options = options or HandOverOptions()
        self.clock = new.clock
        self.path = new.path or old.path
        self.is_embedded = new.is_embedded
        self.mover: Mover | None = None
        self._direction = SendDirection(old, has_state=self.options.mover is not None)
        self._groups = HandOverGroups(
            old, new, self.options.orderly_waits_for_pending, self.clock.now_ms(), self._check_order, self._direction
        )
        self._pop = HandOverPop(old, new, self._direction, waits_for_pending=self.options.orderly_waits_for_pending)
        self._delayed = HandOverDelayed(old, new, has_mover=self.options.mover is not None)
        self._sends = SendsInFlight(new, old, self._direction.is_to_old)
        self._opened = contextlib.ExitStack()
        self._is_started = False
        self._is_first_start = True

    @property
    def name(self) -> str:  # type: ignore[override]  # the brokers of this class have it as a field
        return self.new.name

    @property
    def capabilities(self) -> frozenset[Capability]:  # type: ignore[override]
        return self.new.capabilities - _NOT_OF_BOTH

    @property
    def metrics(self) -> Metrics | None:
        return self.new.metrics or self.old.metrics

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self.new.delay_levels_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self.new.retry_delays_ms

    # --- start and close -----------------------------------------------------------------------

    def start(self) -> None:
        """Start both brokers, create the topics of the old one at the new one, and start the mover.

        Raises:
            MQTemplateError: One of them cannot be started; the text says if it is the old one.
        """
        if self._is_started:
            return
        with contextlib.ExitStack() as opened:
            try:
                self.old.start()
            except MQTemplateError as exc:
                raise self._not_started(exc) from exc
            opened.callback(self.old.close)
            self.new.start()
            opened.callback(self.new.close)
            self._begin()
            self._direction.start()
            opened.callback(self._direction.close)
            self._take_over()
            if self.options.mover is not None:
                self.mover = Mover(self.old, self.new, self.options.mover, is_sending=self._sends.are_in_flight)
                self.mover.start()
                opened.callback(self.mover.close)
            self._opened = opened.pop_all()
            self._is_started = True

    def close(self) -> None:
        """Stop the mover, then close the new broker and the old one; each also if another one fails."""
        self._is_started = False
        self._opened.close()

    def services(self) -> Sequence[Service]:
        return (*self.old.services(), *self.new.services())  # the mover has a thread, or a place on the virtual clock

    def _not_started(self, error: MQTemplateError) -> MQTemplateError:
        """Return the error of the old broker's start, with the setting that names that broker and what to do."""
        advice = "start it, or remove mqtemplate.hand-over if that broker is empty"
        if isinstance(error, StoreLockedError):
            advice = (
                "stop that process, perhaps the application without the setting. If the application has several "
                "processes, run a server over the folder (mqtemplate broker), and give its host:port to each of them"
            )
        return reworded(
            error, f"the old broker of the hand-over ({self.options.origin}) does not start: {error}; {advice}"
        )

    def _begin(self) -> None:
        """Store the hand-over in the old broker, unless it is known there.

        Raises:
            UnsupportedError: Messages cannot move from the old broker.
            ConfigurationError: Both are one broker.
            HandOverError: A hand-over of the old broker to another one is under way.
        """
        if self.options.mover is None:
            self._groups = replace(self._groups, started_ms=self.clock.now_ms())
            return
        try:
            state = self.old.hand_over.state()
            self._is_first_start = state is None
            if state is None or state.target != self.options.target or state.phase is not HandOverPhase.ABORTED:
                state = self.old.hand_over.begin(self.options.target)
        except UnsupportedError as exc:
            raise reworded(
                exc, f"{self.options.origin}: {exc}. Let it deliver what it has, then change the address"
            ) from exc
        with contextlib.suppress(UnsupportedError):  # a cluster of RocketMQ, which is no old broker
            of_new = self.new.hand_over.state()
            if of_new is not None and of_new.hand_over_id == state.hand_over_id:
                for phase in (HandOverPhase.ABORTING, HandOverPhase.ABORTED):
                    self.old.hand_over.change(phase)
                raise ConfigurationError(
                    f"the old and the new broker of the hand-over are one: {self.options.target}. Name in "
                    "mqtemplate.hand-over.from the broker that the application leaves, and in rocketmq.name-server or "
                    "rocketmq.endpoints the one that it moves to"
                )
        self._groups = replace(self._groups, started_ms=state.started_ms)
        if state.phase is HandOverPhase.ABORTED:
            hint = (
                "messages are sent to the old broker; remove mqtemplate.hand-over and name that broker again; or: "
                "mqtemplate hand-over start"
            )
            _log.warning("hand_over.aborted", hint=hint)
        if state.phase is HandOverPhase.CONFIRMED:
            _log.warning("hand_over.confirmed", hint="the old broker is empty; remove mqtemplate.hand-over")

    def _take_over(self) -> None:
        """Prepare the new broker: topics of the old one, and the start of its groups.

        What an administrator must do, since this account may not, is logged: the hand-over works without.
        """
        steps: dict[str, Callable[[], None]] = {"topics": self._take_over_topics, "groups": self._take_over_groups}
        for what, step in steps.items():
            try:
                step()
            except (BrokerError, UnsupportedError) as exc:
                hint = "create the topics, with the same number of queues, and the groups at the new broker"
                _log.warning("hand_over.not_taken_over", what=what, reason=str(exc), hint=hint)

    def _take_over_topics(self) -> None:
        names = set(self.old.topic_names())
        wanted = {name: each for name, each in self.old.admin().topic_settings().items() if name in names}
        copy_topics(wanted, self.new, adds_queues=not self.options.allow_other_queue_count)

    def _take_over_groups(self) -> None:
        """Let each group of the old broker begin at the new one with what is sent from now on.

        It does not miss what is sent before its first member joins, and does not get what others sent before. Groups
        that have an offset at the new broker keep it.
        """
        for group in self.old.admin().groups():
            for topic in group.topics:
                progress = [each for each in group.progress if each.queue.topic == topic]
                committed = [each.committed for each in progress if each.committed is not None]
                if committed:
                    self._take_over_group(group.name, topic, max(committed))

    def _take_over_group(self, group: str, topic: str, latest: int) -> None:
        for queue in self.new.queues(topic):
            before = self.new.groups.committed_offset(group, queue)
            if is_value_group(group, topic):
                if before is None or before < latest:
                    self.new.groups.commit_offset(group, queue, latest)
            elif before is None:
                self.new.groups.commit_offset(group, queue, self._first_offset(queue))

    def _first_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the first message that was sent during the hand-over.

        At a later start the group has no offset if the new broker was killed before it had stored it. What has arrived
        since must not be skipped.
        """
        if self._is_first_start:
            return self.new.reader.max_offset(queue)
        return self.new.reader.search_offset(queue, self._groups.started_ms - CLOCKS_DIFFER_MS)

    def outage(self) -> str | None:
        brokers = {f"{OLD_PREFIX}{self.old.name}": self.old, self.new.name: self.new}
        reasons = {name: reason for name, broker in brokers.items() if (reason := broker.outage()) is not None}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or None

    def unreachable(self) -> Mapping[str, str | None]:
        found: dict[str, str | None] = {}
        for prefix, broker in ((OLD_PREFIX, self.old), ("", self.new)):
            try:
                found |= {prefix + name: reason for name, reason in broker.unreachable().items()}
            except BrokerError as exc:
                found[prefix + broker.name] = str(exc)
        return found

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of *topic* at the broker that is sent to. `admin` has those of both."""
        broker = self._sends.broker_of(topic)
        return tuple(broker.queues(topic) if broker is self.new else map(shown_queue, broker.queues(topic)))

    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        """Create a topic at the new broker, or add queues to it."""
        self.new.create_topic(topic, queue_count, message_type=message_type)
        _log.debug("hand_over.topic_created", topic=topic, queues=queue_count)

    def topic_names(self) -> Sequence[str]:
        return sorted({*self.old.topic_names(), *self.new.topic_names()})

    def expect_topics(self, topics: Iterable[str]) -> None:
        expected = tuple(topics)
        for broker in (self.old, self.new):
            broker.expect_topics(expected)

    # --- operators -----------------------------------------------------------------------------

    def admin(self) -> BrokerAdmin:
        return HandOverAdmin(self.old, self.new)

    def store_health(self) -> StoreHealth | None:
        found = [health for broker in (self.new, self.old) if (health := broker.store_health()) is not None]
        if len(found) < 2:
            return found[0] if found else None
        new, old = found
        return replace(
            new,
            error=new.error or old.error,
            not_flushed_bytes=new.not_flushed_bytes + old.not_flushed_bytes,
            disk=new.disk or old.disk,
            refusal=new.refusal or old.refusal,
        )

    def retention_holds(self) -> Sequence[RetentionHold]:
        return (*self.old.retention_holds(), *self.new.retention_holds())

    def copy_health(self) -> CopyHealth | None:
        return self.new.copy_health() or self.old.copy_health()

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> MessageSends:
        return self._sends

    @property
    def requests(self) -> Requests:
        return _Requests(self.old, self.new, self._sends)

    @property
    def transactions(self) -> Transactions:
        return _Transactions(self.old, self.new)

    @property
    def reader(self) -> MessageReader:
        return _Reader(self.old, self.new)

    @property
    def groups(self) -> ConsumerGroups:
        return self._groups

    @property
    def pop(self) -> PopConsumers:
        _ = self.new.pop  # raises if the new broker has none
        return self._pop

    @property
    def delayed(self) -> DelayedMessages:
        return self._delayed

    def _check_order(self, spec: ConsumerSpec) -> None:
        """Refuse an ordered member whose order would be lost when delayed messages move.

        Raises:
            ListenerError: A topic has another number of queues at the new broker, and pending messages in the old one.
        """
        known = set() if self.options.allow_other_queue_count else set(self.old.topic_names())
        for topic in sorted(known.intersection(spec.subscriptions)):
            old_count, new_count = len(self.old.queues(topic)), len(self.new.queues(topic))
            if old_count == new_count:
                continue
            if pending := self.old.delayed.count_pending(PendingQuery(topic=topic)).total:
                raise ListenerError(
                    f"group {spec.group!r} reads topic {topic!r} in its order (ORDERLY), and the topic has {old_count} "
                    f"queues in the old broker and {new_count} in the new one, while {pending} delayed messages of it "
                    "are pending in the old one: a moved message may be in another queue than later ones with its "
                    f"hash_key. Give the topic {old_count} queues at the new broker, or wait until these messages are "
                    "delivered; if the order of delayed messages does not matter, set "
                    "mqtemplate.hand-over.allow-other-queue-count: true"
                )


# --- parts that route by the broker of a message --------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Requests(Requests):
    """Requests go where messages are sent; a reply goes to the broker that the request came from."""

    old: Broker
    new: Broker
    sends: SendsInFlight

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        # Written in full: a broker's own object would reply to all requests there.
        broker, inner = self.sends.route(message.topic, queue)
        future: Future[MessageExt] = broker.requests.request(message, queue=inner, timeout_ms=timeout_ms)
        return future

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        if is_old(request.broker_name):
            self.old.requests.reply(inner_message(request), body, properties, timeout_ms)
        else:
            self.new.requests.reply(request, body, properties, timeout_ms)


@dataclass(frozen=True, slots=True)
class _Transactions(Transactions):
    """Transactions end at the broker where they began. Both brokers check theirs with the same function."""

    old: Broker
    new: Broker

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        result = half.send_result
        if not is_old(result.message_queue.broker_name):
            self.new.transactions.end_transaction(half, state, remark)
            return
        inner = replace(half, send_result=replace(result, message_queue=inner_queue(result.message_queue)))
        self.old.transactions.end_transaction(inner, state, remark)

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        def check_of_old(message: MessageExt) -> TransactionState:
            return check(*shown_messages([message]))

        return register_at_both(
            lambda: self.old.transactions.check_transactions(
                group, check_of_old, threads=threads, max_waiting=max_waiting
            ),
            lambda: self.new.transactions.check_transactions(group, check, threads=threads, max_waiting=max_waiting),
        )


@dataclass(frozen=True, slots=True)
class _Reader(MessageReader):
    """Reads the queues of both brokers. Searches return what either has."""

    old: Broker
    new: Broker

    def _of(self, queue: MessageQueue) -> tuple[MessageReader, MessageQueue]:
        return (self.old.reader, inner_queue(queue)) if is_old(queue.broker_name) else (self.new.reader, queue)

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        reader, inner = self._of(queue)
        result = reader.pull(inner, queue_offset, max_count, wait_ms, selector)
        if is_old(queue.broker_name):
            shown_messages(result.messages)
        return result

    def min_offset(self, queue: MessageQueue) -> int:
        reader, inner = self._of(queue)
        return reader.min_offset(inner)

    def max_offset(self, queue: MessageQueue) -> int:
        reader, inner = self._of(queue)
        return reader.max_offset(inner)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        reader, inner = self._of(queue)
        return reader.search_offset(inner, timestamp)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """Return the message of either broker; of the new one if both have one address, and a message there."""
        refusal: MQTemplateError | None = None
        try:
            if (found := self.new.reader.message_by_id(offset_msg_id)) is not None:
                return found
        except (MessageError, BrokerError) as exc:
            refusal = exc
        try:
            found = self.old.reader.message_by_id(offset_msg_id)
        except MessageError:
            if refusal is not None:
                raise refusal from None
            return None
        return None if found is None else shown_messages([found])[0]

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        options: dict[str, Any] = {"begin_ms": begin_ms, "end_ms": end_ms, "unique": unique}
        old = shown_messages(self.old.reader.messages_by_key(topic, key, max_count, **options))
        new = self.new.reader.messages_by_key(topic, key, max_count, **options)
        # A sort keeps the order of equal times: each broker returns the newest first.
        return sorted([*new, *old], key=lambda message: -message.store_timestamp)[:max_count]

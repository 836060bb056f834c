"""The service of POP: deliveries, acknowledgements, changes of the invisible time, and pops that wait for messages.

A group has no assignment of queues: each pop takes messages from any queue, and each message is acknowledged by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mqtemplate.engine.pop.holds import HeldPop, HeldPops, HoldKey
from mqtemplate.engine.pop.pop_queue import MAX_WAITING, AckResult, Delivery, Event, PopQueue, Waiting
from mqtemplate.engine.pop.progress import PopProgress, QueueKey, QueueSpans, TrackedQueue
from mqtemplate.engine.pop.receipt_handle import (
    NORMAL_TOPIC,
    ORDERED_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
    ReceiptHandle,
    retry_topic_v1,
    retry_topic_v2,
)
from mqtemplate.engine.pop.requests import PopInFlight, PoppedMessage, PopRequest, PopResult, RecordReader
from mqtemplate.engine.pop.revive import Reviver, StoreDeadLetter
from mqtemplate.errors import DestinationError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import SHARDING_KEY, find_property
from mqtemplate.services import Service, wall_time
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets, TopicTable
from mqtemplate.topics import check_topic

__all__ = [
    "HeldPop",
    "PopInFlight",
    "PopRequest",
    "PopResult",
    "PopService",
    "PoppedMessage",
    "ReceiptHandle",
    "WhenDurable",
]

_log = get_logger("mqtemplate.broker")

WhenDurable = Callable[[Exception | None], None]
"""Called when a change survives a crash, or with the error of the disk."""

_RETRY_FIRST = 0.2
"""Share of pops that read the retry topic before the queues. Source: ``BrokerConfig.popFromRetryProbability``."""
_MAX_RENEWED_MS = 3 * 3_600_000
"""A session renews a delivery for this time. Source: ``ProxyConfig.renewMaxTimeMillis``."""
_SESSION_ENDED_MS = 1_000
_RESTORED_SESSION_MS = 120_000
"""Time that a session of an earlier run has to use the broker again: the expiry of clients."""


class _PopTarget(NamedTuple):
    topic: str
    queue_id: int
    topic_type: int


class PopService:
    """POP for all groups. A `Service`: its step ends expired deliveries, and serves pops that wait.

    - A message is delivered to one client of its group at a time, until it is acknowledged, or its invisible time is
      over. Then it is copied to the retry topic of group and topic; an ordered one is delivered again from its queue.
    - Nothing is lost: a message is done only when it was acknowledged, was not selected, has a copy, or was deleted.
    - The committed offset of a group is the first one that is not done.

    All methods may be called by any thread. No lock is held while functions of others run.

    Args:
        dead_letter: Stores dead letters.
        create_topic: Creates a topic with a number of queues, unless it exists.
        max_in_flight: Most unacknowledged deliveries of a group in one queue; then it delivers no more from there.
        max_held: Most pops that wait.
        check_open: Raises an error if the broker is not open.
    """

    name = "broker.pop"

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        spans: QueueSpans,
        broker_name: str,
        dead_letter: StoreDeadLetter,
        create_topic: Callable[[str, int], None],
        *,
        max_in_flight: int,
        max_held: int,
        check_open: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = store.clock
        self._topics = topics
        self._spans = spans
        self._broker_name = broker_name
        self._dead_letter = dead_letter
        self._max_in_flight = max_in_flight
        self._check_open = check_open
        self._random = random.Random(0) if store.clock.is_virtual else random.Random()
        log = LimitedLog(_log, store.clock.steady_ms)
        self._progress = PopProgress(offsets, spans, broker_name, self._note)
        self._reader = RecordReader(store, log)
        self._holds = HeldPops(store, max_held)
        self._reviver = Reviver(store, self._progress, self._reader, self._holds, create_topic, dead_letter, log)
        self._sessions: dict[str, set[TrackedQueue]] = {}
        self._read_counts: tuple[object, dict[str, int]] = (None, {})
        metrics = store.metrics
        self._popped = metrics.counter("pop.popped")
        self._acked = metrics.counter("pop.acked")
        metrics.gauge("pop.in_flight", lambda: sum(len(tracked.state.in_flight) for tracked in self._progress))
        metrics.gauge("pop.held", lambda: len(self._holds))

    def _note(self, key: QueueKey, event: Event) -> None:
        """Note an event of a queue."""

    # --- pop -----------------------------------------------------------------------------------

    def pop(self, request: PopRequest) -> PopResult:
        """Deliver messages that are there now.

        Raises:
            DestinationError: The topic does not exist, or has no such queue.
        """
        return self._pop(request)[0]

    def _pop(self, request: PopRequest) -> tuple[PopResult, bool]:
        """Return the result, and True if another pop may find messages at once."""
        self._check_open()
        targets = self._targets(request)
        popped: list[PoppedMessage] = []
        busy: list[tuple[TrackedQueue, _PopTarget]] = []
        self._keep_session(request.session)
        is_cut = False
        for target in targets:
            if len(popped) >= request.max_count:
                break
            tracked = self._track(request, target)
            if tracked.lock.acquire(blocking=False):
                try:
                    is_cut |= self._pop_queue(tracked, request, target, popped)
                finally:
                    tracked.lock.release()
            else:
                busy.append((tracked, target))
        for tracked, target in busy if not popped else ():
            with tracked.lock:
                is_cut |= self._pop_queue(tracked, request, target, popped)
        self._popped.add(len(popped))
        return PopResult(popped, self._rest(request.group, targets)), is_cut

    def _targets(self, request: PopRequest) -> list[_PopTarget]:
        """Return the queues in the order of this pop: from a random one on, and the retry topics first or last."""
        topic, group, count = request.topic, request.group, self._read_count(request.topic)
        if count == 0:
            raise DestinationError(f"topic {topic!r} does not exist; create it, or send a message to it first")
        if request.queue_id >= count:
            raise DestinationError(f"topic {topic!r} has queues 0..{count - 1}, got {request.queue_id}")
        if request.queue_id >= 0:
            queues = [_PopTarget(topic, request.queue_id, NORMAL_TOPIC)]
        else:
            start = self._random.randrange(count)
            queues = [_PopTarget(topic, (start + number) % count, NORMAL_TOPIC) for number in range(count)]
        if request.is_ordered:
            return queues
        names = ((retry_topic_v1(topic, group), RETRY_V1), (retry_topic_v2(topic, group), RETRY_V2))
        retries = [_PopTarget(name, each, kind) for name, kind in names for each in range(self._read_count(name))]
        return [*retries, *queues] if self._random.random() < _RETRY_FIRST else [*queues, *retries]

    def _read_count(self, topic: str) -> int:
        state, counts = self._read_counts
        if state is not self._topics.state:
            state, counts = self._read_counts = (self._topics.state, {})
        count = counts.get(topic)
        if count is None:
            config = self._topics.config(topic)
            count = counts[topic] = 0 if config is None else int(config.get("readQueueNums", 0))
        return count

    def _track(self, request: PopRequest, target: _PopTarget) -> TrackedQueue:
        key = QueueKey(request.group, target.topic, target.queue_id)
        tracked = self._progress.find(key)
        if tracked is None:
            check_topic(retry_topic_v1(request.topic, request.group))  # it must be a legal name when it is needed
            tracked = self._progress.track(key, from_last=request.from_last)
        return tracked

    def _rest(self, group: str, targets: Sequence[_PopTarget]) -> int:
        rest = 0
        for target in targets:
            tracked = self._progress.find(QueueKey(group, target.topic, target.queue_id))
            if tracked is not None:
                rest += self._spans.max_offset(tracked.queue) - tracked.state.next + len(tracked.state.waiting)
        return rest

    # --- pop of one queue, with its lock -------------------------------------------------------

    def _pop_queue(
        self, tracked: TrackedQueue, request: PopRequest, target: _PopTarget, popped: list[PoppedMessage]
    ) -> bool:
        """Deliver messages of one queue. Return True if it may have more that were not looked at."""
        self._progress.begin(tracked, from_last=request.from_last)
        state = tracked.state
        state.limit_attempts(request.max_attempts)
        room = min(request.max_count - len(popped), self._max_in_flight - len(state.in_flight))
        if room <= 0 or tracked.is_gone:
            return False
        if request.session:
            self._sessions.setdefault(request.session, set()).add(tracked)
        pop = self._pop_ordered if request.is_ordered else self._pop_unordered
        next_offset = pop(tracked, request, target, room, popped)
        is_cut = next_offset > state.next
        state.read_to(next_offset)
        self._progress.settle(tracked)
        return is_cut and next_offset < self._spans.max_offset(tracked.queue)

    def _delivery(self, request: PopRequest, pop_ms: int) -> Delivery:
        """Return the delivery of a pop."""
        visible_ms = pop_ms + (_MAX_RENEWED_MS if request.session else request.invisible_ms)
        return Delivery(pop_ms, visible_ms, request.session, attempt_id=request.attempt_id)

    def _pop_unordered(
        self, tracked: TrackedQueue, request: PopRequest, target: _PopTarget, room: int, popped: list[PoppedMessage]
    ) -> int:
        """Deliver messages in any order. Return the next queue offset to read."""
        state, now_ms = tracked.state, self._clock.now_ms()
        found: list[tuple[int, StoredRecord, int]] = []
        for queue_offset in state.deliverable(room, is_ordered=False):
            earlier = state.waiting[queue_offset].earlier
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
            else:
                found.append((queue_offset, record, earlier))
        next_offset = self._first_offset(state, tracked.queue)
        if len(found) < room:
            count = room - len(found)
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, count, request.selector
            ):
                next_offset = queue_offset + 1
                if record is not None and self._is_new(state, queue_offset):
                    found.append((queue_offset, record, 0))
                    if len(found) == room:
                        break
        delivery, start = self._delivery(request, now_ms), state.next
        exhausted = [at for at, record, earlier in found if record.reconsume_times + earlier >= request.max_attempts]
        if exhausted:  # the next step copies them to the dead-letter topic
            state.deliver(exhausted, delivery._replace(visible_ms=now_ms, counts=False))
            found = [each for each in found if each[0] not in exhausted]
        redelivered = [each for each in found if each[2]]
        for queue_offset, _, earlier in redelivered:
            state.deliver([queue_offset], delivery._replace(earlier=earlier))
        state.deliver([at for at, _, earlier in found if not earlier], delivery)
        for _, record, earlier in found:
            popped.append(self._popped_message(request, target, start, now_ms, record, earlier))
        return next_offset

    def _pop_ordered(
        self, tracked: TrackedQueue, request: PopRequest, target: _PopTarget, room: int, popped: list[PoppedMessage]
    ) -> int:
        """Deliver messages whose message groups have no unacknowledged ones. Return the next queue offset to read."""
        state, pop_ms = tracked.state, self._clock.now_ms()
        found: list[tuple[int, str, int, StoredRecord]] = []
        repeated = state.same_attempt(request.attempt_id)
        for queue_offset in repeated or state.deliverable(room, is_ordered=True):
            before = state.in_flight.get(queue_offset) or state.waiting[queue_offset]
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
                continue
            pop_ms = max(pop_ms, before.pop_ms + 1)  # another one than before, since it identifies the delivery
            found.append((queue_offset, before.group or "", before.earlier, record))
        next_offset = self._first_offset(state, tracked.queue)
        if not repeated and len(found) < room and len(state.waiting) < MAX_WAITING:
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, room - len(found), request.selector
            ):
                next_offset = queue_offset + 1
                if record is not None and self._is_new(state, queue_offset):
                    group = find_property(record.properties_bytes, SHARDING_KEY) or ""
                    if state.is_blocked(group):
                        state.wait(queue_offset, Waiting(group))
                    else:
                        found.append((queue_offset, group, 0, record))
                if len(found) == room or len(state.waiting) >= MAX_WAITING:
                    break
        start = state.next
        state.deliver_ordered(
            [(at, group, earlier) for at, group, earlier, _ in found], self._delivery(request, pop_ms)
        )
        for _, _, earlier, record in found:
            popped.append(self._popped_message(request, target, start, pop_ms, record, earlier))
        return next_offset

    def _first_offset(self, state: PopQueue, queue: MessageQueue) -> int:
        """Return the next queue offset that exists; those that retention deleted are done."""
        return max(state.next, self._spans.min_offset(queue))

    def _is_new(self, state: PopQueue, queue_offset: int) -> bool:
        """Return False if a message after the known ones is done or delivered, as an earlier run noted."""
        return not (
            queue_offset in state.acked_ahead or queue_offset in state.in_flight or queue_offset in state.waiting
        )

    def _popped_message(
        self, request: PopRequest, target: _PopTarget, start: int, pop_ms: int, record: StoredRecord, earlier: int
    ) -> PoppedMessage:
        handle = ReceiptHandle(
            start,
            pop_ms,
            request.invisible_ms,
            ORDERED_REVIVE_QUEUE if request.is_ordered else 0,
            target.topic_type,
            self._broker_name,
            target.queue_id,
            record.queue_offset,
            record.physical_offset,
        )
        return PoppedMessage(record, handle, record.reconsume_times + earlier + 1)

    # --- pops that wait ------------------------------------------------------------------------

    def hold(self, request: PopRequest, wait_ms: int, on_result: Callable[[PopResult], None]) -> HeldPop:
        """Deliver messages as soon as there are some.

        Args:
            wait_ms: Time after which the result is empty.
            on_result: Called once, unless the pop is cancelled: in this thread if there is a result at once, else in
                the thread that steps this service. It may be called before this method returns.

        Raises:
            DestinationError: See `pop`.
        """
        held = HeldPop(self._holds, request, self._clock.steady_ms() + wait_ms, on_result)
        arrivals = self._holds.watch(held.key)
        result, has_more = self._pop(request)
        if not result.messages and wait_ms > 0:
            if self._holds.add(held, -1 if has_more else arrivals):
                return held
            result = PopResult((), result.rest, is_full=True)
        self._finish(held, result)
        return held

    def _finish(self, held: HeldPop, result: PopResult) -> None:
        """Pass a result to its pop. If that was cancelled meanwhile, the messages are put back."""
        callback = self._holds.end(held)
        if callback is not None:
            callback(result)
            return
        for message in result.messages:
            handle = message.handle
            key = QueueKey(held.key.group, message.record.topic, handle.queue_id)
            tracked = self._progress.find(key)
            if tracked is not None:
                with tracked.lock:
                    delivery = tracked.state.in_flight.get(handle.queue_offset)
                    if delivery is not None and delivery.pop_ms == handle.pop_ms:
                        tracked.state.wait_again(handle.queue_offset, counts=False)
                        self._progress.settle(tracked)
        if result.messages:
            self._holds.changed(held.key)

    def _serve(self, key: HoldKey) -> None:
        """Pop for the pops of a key, in turn, until there are no more messages."""
        for held in self._holds.waiting(key):
            try:
                result, has_more = self._pop(held.request)
            except DestinationError as exc:  # the topic was deleted
                _log.debug("pop.hold_ended", group=key.group, topic=key.topic, reason=str(exc))
                self._finish(held, PopResult(()))
                continue
            if result.messages:
                self._finish(held, result)
            elif has_more:
                self._holds.changed(key)
                return
            elif held.request.queue_id < 0:
                return

    # --- acknowledgements ----------------------------------------------------------------------

    def ack(self, group: str, topic: str, handle: ReceiptHandle, when_durable: WhenDurable) -> bool:
        """Acknowledge a message: it is not delivered to the group again.

        Args:
            topic: The topic of the pop.
            when_durable: Called when the acknowledgement survives a crash; at once with ``ASYNC_FLUSH``.

        Returns:
            False if there is a newer delivery of the message: nothing has changed.
        """
        self._check_open()
        tracked = self._of_handle(group, topic, handle)
        if tracked is None:
            return False
        with tracked.lock:
            state = tracked.state
            result = state.ack(handle.queue_offset, handle.pop_ms)
            if result is AckResult.UNKNOWN and self._is_credible(tracked, handle):
                state.ack_ahead(handle.queue_offset)
                result = AckResult.DONE
            self._progress.settle(tracked)
        if result not in (AckResult.DONE, AckResult.REPEATED):
            return False
        if result is AckResult.DONE:
            self._acked.add()
            if handle.is_ordered:
                self._holds.changed(HoldKey(group, topic))
        self._confirm(when_durable)
        return True

    def _of_handle(self, group: str, topic: str, handle: ReceiptHandle) -> TrackedQueue | None:
        """Return the queue of a handle; None if there is none."""
        key = QueueKey(group, handle.real_topic(topic, group), handle.queue_id)
        tracked = self._progress.find(key)
        if tracked is None and self._progress.has_offset(key):
            tracked = self._progress.track(key, from_last=True)
        return tracked

    def _is_credible(self, tracked: TrackedQueue, handle: ReceiptHandle) -> bool:
        """Return True if a handle can be of a delivery that a crash has lost."""
        if handle.expires_ms <= self._clock.now_ms() or len(tracked.state.acked_ahead) >= self._max_in_flight:
            return False
        units = self._store.consume_queue(tracked.key.topic, tracked.key.queue_id).unit_tuples(handle.queue_offset, 1)
        return bool(units) and handle.physical_offset in (None, units[0][0])

    def change_invisible(
        self,
        group: str,
        topic: str,
        handle: ReceiptHandle,
        invisible_ms: int,
        when_durable: WhenDurable,
        *,
        counts: bool = True,
    ) -> ReceiptHandle | None:
        """Deliver a message again after *invisible_ms* from now. No session renews it any more.

        Args:
            counts: False: this delivery is no attempt.

        Returns:
            The handle of the changed delivery, which replaces the other one; None if there is a newer delivery, or
            none.
        """
        self._check_open()
        tracked = self._of_handle(group, topic, handle)
        if tracked is None:
            return None
        now_ms = self._clock.now_ms()
        pop_ms = handle.pop_ms if handle.is_ordered else max(now_ms, handle.pop_ms + 1)
        with tracked.lock:
            changed = tracked.state.change(
                handle.queue_offset, handle.pop_ms, Delivery(pop_ms, now_ms + invisible_ms, counts=counts)
            )
            self._progress.settle(tracked)
        if changed is None:
            return None
        self._confirm(when_durable)
        return handle._replace(pop_ms=pop_ms, invisible_ms=max(now_ms + invisible_ms - pop_ms, 0))

    def dead_letter(self, group: str, topic: str, handle: ReceiptHandle, when_durable: WhenDurable) -> bool:
        """Copy a message to the dead-letter topic of the group, and acknowledge it.

        Returns:
            False if there is a newer delivery of the message, or the message was deleted.

        Raises:
            MessageError: The copy is not a valid message.
            StoreError: The copy was not stored; the delivery stays.
        """
        self._check_open()
        tracked = self._of_handle(group, topic, handle)
        if tracked is None:
            return False
        with tracked.lock:
            state, offset = tracked.state, handle.queue_offset
            found = state.in_flight.get(offset) or state.waiting.get(offset)
            if found is None or found.pop_ms != handle.pop_ms:
                return found is None and offset < state.next
            record = self._reader.record(tracked.key.topic, handle.queue_id, offset, None)
            copy = None if record is None else self._dead_letter(record, group)
            state.done([offset])
            self._progress.settle(tracked)
        if copy is not None:
            self._store.confirm_async(copy.end, copy.topics)
        if handle.is_ordered:
            self._holds.changed(HoldKey(group, topic))
        self._confirm(when_durable)
        return True

    def _confirm(self, when_durable: WhenDurable) -> None:
        when_durable(None)

    # --- sessions ------------------------------------------------------------------------------

    def end_session(self, session: str) -> None:
        """Deliver the messages again in a second that a session renews, since its client is gone."""
        visible_ms = self._clock.now_ms() + _SESSION_ENDED_MS
        self._change_session(session, lambda delivery: delivery._replace(visible_ms=visible_ms, session=""))
        self._sessions.pop(session, None)

    def _keep_session(self, session: str) -> None:
        """Renew the deliveries of a session of an earlier run whose client is here again."""

    def _change_session(self, session: str, change: Callable[[Delivery], Delivery]) -> None:
        for tracked in list(self._sessions.get(session, ())):
            with tracked.lock:
                state = tracked.state
                for queue_offset, delivery in list(state.in_flight.items()):
                    if delivery.session == session:
                        state.change(queue_offset, delivery.pop_ms, change(delivery))
                self._progress.settle(tracked)

    # --- administration ------------------------------------------------------------------------

    def in_flight(self, group: str, topic: str | None = None) -> list[PopInFlight]:
        """Return the progress of a group in each queue that it has read; in its retry topics, too.

        Args:
            topic: Only in this topic and its retry topics.
        """
        wanted = None if topic is None else {topic, retry_topic_v1(topic, group), retry_topic_v2(topic, group)}
        found = []
        for tracked in self._progress:
            if tracked.key.group == group and (wanted is None or tracked.key.topic in wanted):
                with tracked.lock:
                    state = tracked.state
                    oldest_ms = min((each.pop_ms for each in state.in_flight.values()), default=None)
                    count = len(state.in_flight)
                    found.append(PopInFlight(tracked.queue, state.base, state.next, count, state.expired, oldest_ms))
        return sorted(found, key=lambda each: each.queue)

    def forget_group(self, group: str) -> None:
        """Forget the deliveries of a group that is deleted."""
        self._progress.forget(lambda key: key.group == group)

    def forget_topic(self, topic: str) -> None:
        """Forget the deliveries of a topic that is deleted, and of its retry topics."""
        kinds = (retry_topic_v1, retry_topic_v2)
        self._progress.forget(lambda key: key.topic == topic or key.topic in [kind(topic, key.group) for kind in kinds])

    def reset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Let a group continue at *queue_offset*, and forget its deliveries of this queue."""
        tracked = self._progress.find(QueueKey(group, queue.topic, queue.queue_id))
        if tracked is None:
            return
        with tracked.lock:
            tracked.state.reset(queue_offset)
            tracked.committed = None
            self._progress.settle(tracked)
        self._holds.changed(HoldKey(group, queue.topic))

    # --- service -------------------------------------------------------------------------------

    def services(self) -> list[Service]:
        """Return the services that the owner has to step."""
        return [self]

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._progress.on_wake(wake)
        self._holds.on_wake(wake)

    def step(self) -> int | None:
        due_ms = self._reviver.step()
        for key in self._holds.take_ready():
            self._serve(key)
        for held in self._holds.take_timed_out(self._clock.steady_ms()):
            self._finish(held, PopResult(()))
        deadline_ms = wall_time(self._clock, self._holds.next_deadline_ms())
        return min((each for each in (due_ms, deadline_ms) if each is not None), default=None)

    def close(self) -> None:
        """End the pops that wait, with an empty result."""
        for held in self._holds.all():
            self._finish(held, PopResult(()))

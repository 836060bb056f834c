"""The service of POP: deliveries, acknowledgements, changes of the invisible time, and pops that wait for messages.

A group has no assignment of queues: each pop takes messages from any queue, and each message is acknowledged by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from mqtemplate.broker import MAX_IN_FLIGHT_SHOWN, GroupDeliveries
from mqtemplate.engine.pop.deliveries import MAX_RENEWED_MS, Deliverer, MakeDeadLetter, PopTarget, Reviver, TargetOrder
from mqtemplate.engine.pop.holds import HeldPop, HeldPops, HoldKey
from mqtemplate.engine.pop.journal import PopJournal, WhenDurable
from mqtemplate.engine.pop.pop_queue import AckResult, Delivery
from mqtemplate.engine.pop.progress import PopProgress, QueueKey, QueueSpans, TrackedQueue
from mqtemplate.engine.pop.receipt_handle import (
    ReceiptHandle,
    retry_topic_v1,
    retry_topic_v2,
)
from mqtemplate.engine.pop.requests import (
    PopBatch,
    PopInFlight,
    PoppedMessage,
    PopRequest,
    PopResult,
    RecordReader,
    bounded,
)
from mqtemplate.errors import DestinationError, StoreError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageQueue
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

_SESSION_ENDED_MS = 1_000
_RESTORED_SESSION_MS = 120_000
"""Time that a session of an earlier run has to use the broker again: the expiry of clients."""


class PopService:
    """POP for all groups. A `Service`: its step ends expired deliveries, and serves pops that wait.

    - A message is delivered to one client of its group at a time, until it is acknowledged, or its invisible time is
      over. Then it is copied to the retry topic of group and topic; an ordered one is delivered again from its queue.
    - Nothing is lost: a message is done only when it was acknowledged, was not selected, has a copy, or was deleted.
    - The committed offset of a group is the first one that is not done.

    All methods may be called by any thread. No lock is held while functions of others run.

    Args:
        make_dead_letter: Creates dead letters.
        create_topic: Creates a topic with a number of queues, unless it exists.
        max_in_flight: Most unacknowledged deliveries of a group in one queue; then it delivers no more from there.
        max_held: Most pops that wait.
        check_open: Raises an error if the broker is not open.

    Attributes:
        journal: Writes all changes to the log.
    """

    name = "broker.pop"

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        spans: QueueSpans,
        broker_name: str,
        make_dead_letter: MakeDeadLetter,
        create_topic: Callable[[str, int], None],
        journal: PopJournal,
        *,
        max_in_flight: int,
        max_held: int,
        check_open: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = store.clock
        self._topics = topics
        self._offsets = offsets
        self._spans = spans
        self._broker_name = broker_name
        self._make_dead_letter = make_dead_letter
        self._max_in_flight = max_in_flight
        self._check_open = check_open
        log = LimitedLog(_log, store.clock.steady_ms)
        self.journal = journal
        self._progress = PopProgress(offsets, spans, broker_name, journal.note)
        self._reader = RecordReader(store, log)
        self._holds = HeldPops(store, max_held)
        self._deliverer = Deliverer(store, self._progress, self._reader, spans, broker_name, max_in_flight)
        self._reviver = Reviver(
            *(store, self._progress, journal, self._reader, self._holds, create_topic, make_dead_letter, log)
        )
        journal.on_written(self._holds.all_changed)
        self._targets = TargetOrder(topics, self._progress, Random(0) if store.clock.is_virtual else Random())
        self._sessions: dict[str, set[TrackedQueue]] = {}
        self._restored_sessions: set[str] = set()
        metrics = store.metrics
        self._popped = metrics.counter("pop.popped")
        self._acked = metrics.counter("pop.acked")
        metrics.gauge("pop.in_flight", lambda: sum(len(tracked.state.in_flight) for tracked in self._progress))
        metrics.gauge("pop.held", lambda: len(self._holds))
        metrics.gauge("pop.waiting", lambda: sum(len(tracked.state.waiting) for tracked in self._progress))
        metrics.gauge("pop.oldest_ms", lambda: self._progress.oldest_ms(self._clock.now_ms()))

    def load(self) -> None:
        """Restore the progress of an earlier run, after the store was loaded.

        The sessions of that run have some time to continue: see `keep_session`. They renew no delivery that its client
        is not known to have, see `received`: it would be invisible for hours.
        """
        self.journal.load(self._progress)
        last_ms = self._clock.now_ms() + _RESTORED_SESSION_MS
        for tracked in self._progress:
            for delivery in tracked.state.in_flight.values():
                if delivery.session:
                    self._sessions.setdefault(delivery.session, set()).add(tracked)
            self._progress.settle(tracked)
        self._restored_sessions = set(self._sessions)
        for session in self._restored_sessions:
            self._change_session(session, lambda each: each._replace(visible_ms=min(each.visible_ms, last_ms)))

    # --- pop -----------------------------------------------------------------------------------

    def pop(self, request: PopRequest) -> PopResult:
        """Deliver messages that are there now.

        Raises:
            DestinationError: The topic does not exist, or has no such queue.
            StoreError: Too much progress of groups is not written; see `PopJournal.check`.
        """
        return self._pop(request)[0]

    def _pop(self, request: PopRequest) -> tuple[PopResult, bool]:
        """Return the result, and True if another pop may find messages at once."""
        self._check_open()
        self.journal.check()
        targets = self._targets.of(request)
        batch = PopBatch(request)
        busy: list[tuple[TrackedQueue, PopTarget]] = []
        if self._restored_sessions:
            self.keep_session(request.session)
        is_cut = False
        # Before the answer: a delivery that a kill could lose would be repeated before its time, and not counted.
        with self.journal.writing():
            for target in targets:
                if not batch.room:
                    break
                tracked = self._track(request, target)
                if request.session:
                    self._sessions.setdefault(bounded(request.session), set()).add(tracked)
                if tracked.lock.acquire(blocking=False):
                    try:
                        is_cut |= self._deliverer.deliver(tracked, request, target, batch)
                    finally:
                        tracked.lock.release()
                else:
                    busy.append((tracked, target))
            for tracked, target in busy if not batch.messages else ():
                with tracked.lock:
                    is_cut |= self._deliverer.deliver(tracked, request, target, batch)
        self._popped.add(len(batch.messages))
        return PopResult(batch.messages, self._rest(request.group, targets)), is_cut

    def _track(self, request: PopRequest, target: PopTarget) -> TrackedQueue:
        key = QueueKey(request.group, target.topic, target.queue_id)
        tracked = self._progress.find(key)
        if tracked is None:
            check_topic(retry_topic_v1(request.topic, request.group))  # it must be a legal name when it is needed
            tracked = self._progress.track(key, from_last=request.from_last)
        return tracked

    def _rest(self, group: str, targets: Sequence[PopTarget]) -> int:
        rest = 0
        for target in targets:
            tracked = self._progress.find(QueueKey(group, target.topic, target.queue_id))
            if tracked is not None:
                rest += self._spans.max_offset(tracked.queue) - tracked.state.next + len(tracked.state.waiting)
        return rest

    # --- pops that wait ------------------------------------------------------------------------

    def hold(self, request: PopRequest, wait_ms: int, on_result: Callable[[PopResult], None]) -> HeldPop:
        """Deliver messages as soon as there are some.

        Args:
            wait_ms: Time after which the result is empty.
            on_result: Called once, unless the pop is cancelled: in this thread if there is a result at once, else in
                the thread that steps this service. It may be called before this method returns.

        Raises:
            DestinationError, StoreError: See `pop`.
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

    def count_held(self, group: str, topic: str, queue_id: int = -1) -> int:
        """Return the number of pops of a group that wait for messages of a queue; -1 stands for all queues."""
        return self._holds.count(HoldKey(group, topic), queue_id)

    def _finish(self, held: HeldPop, result: PopResult) -> None:
        """Pass a result to its pop. If that was cancelled meanwhile, the messages are put back."""
        callback = self._holds.end(held)
        if callback is not None:
            try:
                callback(result)
            except Exception:  # of the caller of `hold`: other pops get their results
                _log.exception("pop.callback_failed", group=held.key.group, topic=held.key.topic)
            return
        for message in result.messages:
            handle = message.handle
            key = QueueKey(held.key.group, message.record.topic, handle.queue_id)
            tracked = self._progress.find(key)
            if tracked is not None:
                with tracked.lock:
                    delivery = tracked.state.in_flight.get(handle.queue_offset)
                    if delivery is not None and delivery.pop_ms == handle.pop_ms:
                        self._put_back(held.key, tracked, handle.queue_offset)
                        self._progress.settle(tracked)
        if result.messages:
            self._holds.changed(held.key)

    def _put_back(self, key: HoldKey, tracked: TrackedQueue, queue_offset: int) -> None:
        """Let a message wait that did not reach its client. The lock of the queue is held."""
        tracked.state.wait_again(queue_offset, counts=False, key=self._deliverer.key_of(key, tracked, queue_offset))

    def _serve(self, key: HoldKey) -> None:
        """Pop for the pops of a key, in turn, until there are no more messages."""
        for held in self._holds.waiting(key):
            try:
                result, has_more = self._pop(held.request)
            except DestinationError as exc:  # the topic was deleted
                _log.debug("pop.hold_ended", group=key.group, topic=key.topic, reason=str(exc))
                self._finish(held, PopResult(()))
                continue
            except StoreError:  # it waits until the progress is written, see `PopJournal.on_written`
                return
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
            True if the message is done, also if it was acknowledged before. False if there is a newer delivery, or the
            time of this one is over: the message may come again.
        """
        return self.ack_all(group, topic, [handle], when_durable)[0]

    def ack_all(
        self, group: str, topic: str, handles: Sequence[ReceiptHandle], when_durable: WhenDurable
    ) -> list[bool]:
        """Acknowledge several messages of a topic. Return the result of each as by `ack`.

        Args:
            when_durable: Called once for all, unless all results are False.
        """
        self._check_open()
        results = [False] * len(handles)
        done, was_full = 0, False
        for tracked, indexes in self._by_queue(group, topic, handles):
            with tracked.lock:
                state = tracked.state
                was_full |= len(state.in_flight) >= self._max_in_flight
                acked = state.ack_all([(handles[index].queue_offset, handles[index].pop_ms) for index in indexes])
                for index, result in zip(indexes, acked, strict=True):
                    handle = handles[index]
                    is_done = result is AckResult.DONE
                    if result is AckResult.UNKNOWN and len(state.acked_ahead) < self._max_in_flight:
                        is_done = self._is_credible(tracked.key, handle)
                        if is_done:
                            state.ack_ahead(handle.queue_offset)
                    done += is_done
                    is_repeated = result is AckResult.REPEATED and handle.expires_ms > self._clock.now_ms()
                    results[index] = is_done or is_repeated
                self._progress.settle(tracked)
        if done:
            self._acked.add(done)
            self._let_others_follow(group, topic, handles, was_full=was_full)
        if any(results):
            self.journal.confirm(when_durable)
        return results

    def _let_others_follow(self, group: str, topic: str, ended: Sequence[ReceiptHandle], *, was_full: bool) -> None:
        """Let pops that wait have the messages for which the end of deliveries makes room."""
        is_blocking = any(handle.is_ordered for handle in ended) or self._deliverer.has_turns(HoldKey(group, topic))
        if was_full or is_blocking:
            self._holds.changed(HoldKey(group, topic))

    def _by_queue(
        self, group: str, topic: str, handles: Sequence[ReceiptHandle]
    ) -> Iterable[tuple[TrackedQueue, list[int]]]:
        """Return each queue with the indexes of its handles. A handle of no queue is left out."""
        found: dict[TrackedQueue, list[int]] = {}
        for index, handle in enumerate(handles):
            tracked = self._of_handle(group, topic, handle)
            if tracked is not None:
                found.setdefault(tracked, []).append(index)
        return found.items()

    def _of_handle(self, group: str, topic: str, handle: ReceiptHandle) -> TrackedQueue | None:
        """Return the queue of a handle; None if there is none."""
        key = QueueKey(group, handle.real_topic(topic, group), handle.queue_id)
        tracked = self._progress.find(key)
        if tracked is None and (self._progress.has_offset(key) or self._is_credible(key, handle)):
            tracked = self._progress.track(key, from_last=True, start=handle.start_offset)
        return tracked

    def _is_credible(self, key: QueueKey, handle: ReceiptHandle) -> bool:
        """Return True if a handle can be of a delivery that a crash has lost."""
        if handle.expires_ms <= self._clock.now_ms() or not self._store.has_queue(key.topic, key.queue_id):
            return False
        units = self._store.consume_queue(key.topic, key.queue_id).unit_tuples(handle.queue_offset, 1)
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

        Raises:
            StoreError: See `pop`.
        """
        return self.change_all(group, topic, [handle], invisible_ms, when_durable, counts=counts)[0]

    def change_all(
        self,
        group: str,
        topic: str,
        handles: Sequence[ReceiptHandle],
        invisible_ms: int,
        when_durable: WhenDurable,
        *,
        counts: bool = True,
    ) -> list[ReceiptHandle | None]:
        """Deliver several messages of a topic again after *invisible_ms*. Return the result of each as by the above.

        Args:
            when_durable: Called once for all, unless all results are None.
        """
        self._check_open()
        self.journal.check()
        changed: list[ReceiptHandle | None] = [None] * len(handles)
        now_ms = self._clock.now_ms()
        is_released = invisible_ms <= 0 and not counts  # it was not handled: it needs no copy in the retry topic
        for tracked, indexes in self._by_queue(group, topic, handles):
            with tracked.lock:
                state = tracked.state
                for index in indexes:
                    handle = handles[index]
                    pop_ms = handle.pop_ms if handle.is_ordered else max(now_ms, handle.pop_ms + 1)
                    delivery = Delivery(pop_ms, now_ms + invisible_ms, counts=counts)
                    if state.change(handle.queue_offset, handle.pop_ms, delivery) is None:
                        continue
                    if is_released:
                        self._put_back(HoldKey(group, topic), tracked, handle.queue_offset)
                    changed[index] = handle._replace(pop_ms=pop_ms, invisible_ms=max(now_ms + invisible_ms - pop_ms, 0))
                self._progress.settle(tracked)
        if any(changed):
            if is_released:
                self._holds.changed(HoldKey(group, topic))
            self.journal.confirm(when_durable)
        return changed

    def dead_letter(self, group: str, topic: str, handle: ReceiptHandle, when_durable: WhenDurable) -> bool:
        """Copy a message to the dead-letter topic of the group, and acknowledge it.

        Returns:
            False as by `ack`.

        Raises:
            MessageError: The copy is not a valid message.
            StoreError: The copy was not stored; the delivery stays.
        """
        self._check_open()
        tracked = self._of_handle(group, topic, handle)
        if tracked is None:
            return False
        end, copy = 0, None
        with tracked.lock:
            state, offset = tracked.state, handle.queue_offset
            was_full = len(state.in_flight) >= self._max_in_flight
            found = state.in_flight.get(offset) or state.waiting.get(offset)
            if found is None:
                is_known = offset < state.next and handle.expires_ms > self._clock.now_ms()
            else:
                is_known = found.pop_ms == handle.pop_ms
            if found is not None and is_known:
                record = self._reader.record(tracked.key.topic, handle.queue_id, offset, None)
                if record is None:
                    state.done([offset])
                else:
                    copy = self._make_dead_letter(record, group)
                    end = self._reviver.append(tracked, offset, copy)
            self._progress.settle(tracked)
        if not is_known:
            return False
        if copy is not None:
            self._store.confirm_async(end, (copy.topic,))
        self._let_others_follow(group, topic, [handle], was_full=was_full)
        self.journal.confirm(when_durable)
        return True

    # --- sessions ------------------------------------------------------------------------------

    def received(self, group: str, topic: str, handles: Sequence[ReceiptHandle]) -> None:
        """Renew the messages of a pop, which `PopRequest.awaits_receipt`: its client has them."""
        for tracked, deliveries in self._deliveries_of(group, topic, handles).items():
            with tracked.lock:
                tracked.state.received(deliveries, MAX_RENEWED_MS)

    def is_awaiting_receipt(self, group: str, topic: str, handles: Sequence[ReceiptHandle]) -> bool:
        """Return True if a message of a pop is neither acknowledged, nor known to be with its client."""
        found = self._deliveries_of(group, topic, handles)
        return any(tracked.state.unreceived(deliveries) for tracked, deliveries in found.items())

    def _deliveries_of(
        self, group: str, topic: str, handles: Sequence[ReceiptHandle]
    ) -> dict[TrackedQueue, list[tuple[int, int]]]:
        """Return the queue offset and the pop_ms of each handle, by queue."""
        found: dict[TrackedQueue, list[tuple[int, int]]] = {}
        for handle in handles:
            tracked = self._progress.find(QueueKey(group, handle.real_topic(topic, group), handle.queue_id))
            if tracked is not None:
                found.setdefault(tracked, []).append((handle.queue_offset, handle.pop_ms))
        return found

    def end_session(self, session: str) -> None:
        """Deliver the messages again in a second that a session renews, since its client is gone."""
        session = bounded(session)
        visible_ms = self._clock.now_ms() + _SESSION_ENDED_MS
        self._restored_sessions.discard(session)
        self._change_session(session, lambda each: each._replace(visible_ms=visible_ms, session=""))
        self._sessions.pop(session, None)

    def keep_session(self, session: str) -> None:
        """Renew the deliveries of a session from before a restart, since its client is here again.

        A pop of the session does that too. Other sessions need no call.
        """
        session = bounded(session)
        if session in self._restored_sessions:
            self._restored_sessions.discard(session)
            self._change_session(session, lambda each: each._replace(visible_ms=each.pop_ms + MAX_RENEWED_MS))

    def _change_session(self, session: str, change: Callable[[Delivery], Delivery]) -> None:
        for tracked in list(self._sessions.get(session, ())):
            with tracked.lock:
                state = tracked.state
                for queue_offset, delivery in list(state.in_flight.items()):
                    if delivery.session == session:
                        state.change(queue_offset, delivery.pop_ms, change(delivery))
                self._progress.settle(tracked)

    # --- administration ------------------------------------------------------------------------

    def has_read(self, group: str, queue: MessageQueue) -> bool:
        """Return True if a group has read a queue, also if its topic has this queue no more."""
        return self._progress.find(QueueKey(group, queue.topic, queue.queue_id)) is not None

    def in_flight(self, group: str, topic: str | None = None) -> list[PopInFlight]:
        """Return the progress of a group in each queue that it has read; in its retry topics, too.

        Args:
            topic: Only in this topic and its retry topics.
        """
        wanted = None if topic is None else {topic, retry_topic_v1(topic, group), retry_topic_v2(topic, group)}
        found = []
        for tracked in self._progress.of_group(group):
            if wanted is None or tracked.key.topic in wanted:
                with tracked.lock:
                    state = tracked.state
                    oldest_ms = min((each.pop_ms for each in state.in_flight.values()), default=None)
                    count = len(state.in_flight)
                    found.append(PopInFlight(tracked.queue, state.base, state.next, count, state.expired, oldest_ms))
        return sorted(found, key=lambda each: each.queue)

    def deliveries(self, group: str) -> GroupDeliveries | None:
        """Return the messages that members of a group have; None if it has never read by POP."""
        rows, in_flight, waiting, expired = self._progress.deliveries(group, MAX_IN_FLIGHT_SHOWN)
        if not self._progress.of_group(group):
            return None
        messages = tuple(self._reader.in_flight(row) for row in rows)
        return GroupDeliveries(in_flight, messages, waiting, expired, self._holds.count_of(group))

    def forget_group(self, group: str) -> None:
        """Forget the deliveries of a group that is deleted, and end its pops that wait."""
        self._progress.forget(lambda key: key.group == group, self._clock.now_ms())
        self._write()
        self._end_holds(lambda key: key.group == group)

    def forget_topic(self, topic: str) -> None:
        """Forget the deliveries of a topic that is deleted, and of its retry topics, and end the pops that wait."""
        kinds = (retry_topic_v1, retry_topic_v2)
        self._progress.forget(
            lambda key: key.topic == topic or key.topic in [kind(topic, key.group) for kind in kinds],
            self._clock.now_ms(),
        )
        self._write()
        self._end_holds(lambda key: key.topic == topic)

    def retry_topics(self, topic: str) -> list[str]:
        """Return the retry topics of all groups for a topic: no group can pop them if the topic is deleted."""
        groups = self._offsets.groups_of(topic)
        names = [kind(topic, group) for group in sorted(groups) for kind in (retry_topic_v1, retry_topic_v2)]
        return [name for name in names if self._topics.has(name)]

    def reset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Let a group continue at *queue_offset*, and forget its deliveries of this queue.

        An acknowledgement of one of them has no effect any more, not even in the same millisecond.
        """
        key = QueueKey(group, queue.topic, queue.queue_id)
        tracked = self._progress.find(key)
        if tracked is None:
            if not self._progress.of_group(group):
                return
            tracked = self._progress.track(key, from_last=True)  # a crash may have lost its deliveries
        with tracked.lock:
            self._progress.reset(tracked, queue_offset, self._clock.now_ms())
        self._write()
        self._holds.changed(HoldKey(group, queue.topic))

    def _write(self) -> None:
        """Write a change of an administrator now: a kill must not make deliveries from before it valid again."""
        try:
            self.journal.write()
        except StoreError as exc:
            _log.warning("pop.progress_not_written", reason=str(exc), hint="it is written when the store accepts it")

    # --- service -------------------------------------------------------------------------------

    def services(self) -> list[Service]:
        """Return the services that the owner has to step; see also `PopJournal.snapshots`."""
        return [self.journal, self]

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._deliverer.on_wake(wake)
        self._progress.on_wake(wake)
        self._holds.on_wake(wake)

    def step(self) -> int | None:
        due_ms = self._reviver.step()
        for key in self._deliverer.take_due_turns(self._clock.now_ms()):
            self._holds.changed(key)
        for key in self._holds.take_ready():
            self._serve(key)
        for held in self._holds.take_timed_out(self._clock.steady_ms()):
            self._finish(held, PopResult(()))
        deadline_ms = wall_time(self._clock, self._holds.next_deadline_ms())
        dues_ms = (due_ms, deadline_ms, self._deliverer.next_turn_ms)
        return min([each for each in dues_ms if each is not None], default=None)

    def end_holds(self) -> None:
        """End the pops that wait, with an empty result."""
        self._end_holds(lambda key: True)

    def _end_holds(self, belongs: Callable[[HoldKey], bool]) -> None:
        self._deliverer.forget_turns(belongs)
        for held in self._holds.all():
            if belongs(held.key):
                self._finish(held, PopResult(()))

"""The mover: a service that moves pending messages from an old broker to a new one, each exactly once by its id.

A message takes four steps. Between any two of them a process may be killed: the mover, the old broker or the new one.

1. Reserve. The old broker appends, at once, the copy in its transit topic and the marker that ends the pending message,
   and flushes them. Before that the message is pending there; after it, no release and no cancel reaches it there.
2. Send. The new broker stores it, with the same message id and due time, and with the property ``__HAND_OVER``, which
   names this very transit.
3. Settle. The old broker appends how the transit ended, and flushes it.
4. Commit. The old broker moves the committed offset past the settled messages. It only shortens the search after a
   start: the record of step 3 decides.

Who decides after a kill: the old broker knows whether the message is pending (before 1), in transit (1 to 3) or
settled. For one in transit, the new broker decides: if it has a record with the id and the property, step 2 was done,
and the mover settles; if not, the mover sends. So it is never in neither, because the copy in transit stays until step
3; and never in both, because it is not pending after step 1, and is not sent before the new broker was asked.

Three things make the answer of the new broker reliable:

- A request may arrive after its sender was killed, and an index may lag. So the mover waits `MoverSettings.settle_ms`
  after the last possible send before it believes that a message is missing.
- A broker that is away has no answer. So all brokers to which messages were sent must answer; their names are in the
  state, stored before the first send to each.
- Two movers could send one message. So the mover has a lock in the old broker, with a lease, and sends only while the
  lease is longer than a send may take. The old broker accepts steps 1 and 3 from the owner of the lock only.

An abort is the same in the other direction: first the forward transit ends, then a mover with the two brokers exchanged
moves what is pending in the new broker for the topics of the hand-over, messages that were sent since included. Its
state, lock and transit are in the new broker. When nothing is left there, both hand-overs are ``ABORTED``. A message
that is due too soon, or that the old broker refuses, stays in the new broker, which releases it.

RocketMQ cannot reserve a message, but recall one. So a message comes back in four steps: the old broker stores it in
transit, while RocketMQ still has it; after `MoverSettings.settle_ms` the mover looks whether it is still pending there;
the old broker stores that it is recalled from now on; RocketMQ recalls it, and only then it is pending in the old one.
A kill before the third step changes nothing, and after it the recall is repeated, which has no further effect. A cancel
of the application in RocketMQ before the third step is seen by the second. One after it finds the message in transit,
and cancels it in the old broker. Levels cannot be recalled, and stay; so does what is due within `_RECALL_MS`.

Not in our hands: RocketMQ with ``ASYNC_FLUSH`` may lose a message that it acknowledged if its machine fails (a killed
process loses none), and may deliver a timer twice if it is killed between its delivery and its next checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from secrets import token_hex

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import (
    HandOverCounts,
    HandOverPhase,
    HandOverState,
    MovedMessage,
    ReserveFilter,
    TransitEnd,
    TransitMessage,
)
from mqtemplate.clock import lease_time_ms
from mqtemplate.errors import (
    BrokerError,
    DestinationError,
    MessageError,
    MQTemplateError,
    SendError,
    UnsupportedError,
)
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.hashes import queue_number
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult
from mqtemplate.services import Service, ServiceRunner
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_log = get_logger("mqtemplate.hand_over")

_FIRST_WINDOW, _LEAST_WINDOW, _MOST_WINDOW = 8, 4, 64
"""Messages that are sent at one time. As many may wait for the new broker if it stops."""
_BATCH = 256
_LOAD_MS = 5
"""A send of the application waits about this long, if it arrives while the mover works."""
_GIVE_WAY_MS, _GIVE_WAY_STEP_S = 10, 0.000_5
_SEND_MS = 3_000
_IDLE_MS = 1_000
_FAILED_MS = (500, 1_000, 2_000, 5_000)
_REFUSED_TOPIC_MS = 60_000
_MARGIN_MS = 60_000
"""The clocks of two machines differ, and a send takes time: stay this much below the longest delay."""
_MAX_SENDS = 3
"""Sends of one message that fail although the new broker answers queries: then the message stays in the old one."""
_RATE_MS = 10_000
_RECALL_MS = 10_000
"""A message that RocketMQ delivers sooner is not recalled: it answers a recall before it looks for the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSettings:
    """Settings of the mover.

    Attributes:
        rate: Most messages in a second.
        max_early_ms: Not used yet: a new broker without timers gets no messages, and the old one releases them.
        lead_ms: A message that is due sooner stays, and the old broker releases it.
        lease_ms: Time after which another process may take over, if this one does not renew its lock.
        busy_share: Most of the time that the mover works. In the rest the sends of the application have the processor,
            the disk and the connection for themselves. 1 for an application that is stopped.
        settle_ms: Time after a send without an answer, or after the start, until a message that the new broker does not
            have is sent again.
        topics: Only messages for these topics; None for all.
        with_retries: Retries too: for an application that is stopped.
    """

    rate: int = 1_000
    max_early_ms: int = 0
    lead_ms: int = 5_000
    lease_ms: int = 15_000
    busy_share: float = 0.5
    settle_ms: int = 10_000
    topics: frozenset[str] | None = None
    with_retries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverProgress:
    """Progress of a hand-over, as a mover sees it.

    Attributes:
        is_mover: True if this process moves the messages; another one may.
        is_idle: True if the last step of this mover found nothing in transit, and nothing that can move now.
        rate: Messages that this process moved in a second, over the last ten seconds.
        error: Why this process made no progress at its last attempt; None if it did.
    """

    state: HandOverState | None
    counts: HandOverCounts | None
    is_mover: bool
    is_idle: bool
    rate: float
    error: str | None


class Mover:
    """Moves the pending messages of *old* to *new*, as long as the hand-over is ``RUNNING``. A `Service`.

    `start` gives it a thread; on a virtual clock a harness steps it. Any number of processes may have one for the same
    old broker: the one with the lock works, the others wait for it.

    Args:
        old: An embedded broker, or a client of a server of this library. It is started.
        new: The new broker. It is started.
        owner: Name of this mover for the lock. The owner of a folder is the only one that can have a mover for it, so
            all its processes have one name: after a kill the next one works at once.
        is_sending: Returns True while the application sends: the mover waits until it does not, for a short time.
    """

    name = "hand_over.mover"

    def __init__(
        self,
        old: Broker,
        new: Broker,
        settings: MoverSettings | None = None,
        *,
        owner: str | None = None,
        is_sending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._old_broker = old
        self._old = old.hand_over
        self._new = new
        self._reverse: Mover | None = None
        self._settings = settings or MoverSettings()
        self._clock = old.clock
        self._owner = owner or ("embedded" if old.is_embedded else _process_name())
        self._leased_ms: int | None = None  # `lease_time_ms` of the last renewal; None without the lock
        self._uncertain: dict[int, int] = {}  # offset -> steady time of the last possible send
        self._failed_sends: dict[int, tuple[int, Exception]] = {}  # offset -> number of failures, and the last one
        self._took_over = (0, 0)  # the owner of the lock before may have sent those before this offset, until this time
        self._took_back_ms: int | None = None
        self._refused: dict[str, int] = {}  # topic -> steady time until which its messages stay
        self._is_sending = is_sending
        self._window = _FIRST_WINDOW
        self._answer_ms = 0  # time of this step until the first of its sends was answered: nothing was loaded then
        self._burst_ms = 0  # time from there to the last answer
        self._failures = 0
        self._error: str | None = None
        self._next_ms = 0
        self._is_idle = False
        self._moved_at: deque[tuple[int, int]] = deque()
        self._is_closing = False
        self._wake: Callable[[], None] = lambda: None
        self._failed_log = LimitedLog(_log, self._clock.steady_ms, burst=1)
        metrics = old.metrics or new.metrics
        self._moved = None if metrics is None else metrics.counter("hand_over.moved")
        self._returned = None if metrics is None else metrics.counter("hand_over.returned")
        self._runner = ServiceRunner(self, self._clock, "mqtemplate-hand-over", _report)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of the mover."""
        self._is_closing = False
        self._runner.start()

    def close(self) -> None:
        """Stop after the message that is being sent, and release the lock. A second call has no effect."""
        self._is_closing = True
        self._wake()
        self._runner.stop()
        reverse, self._reverse = self._reverse, None
        if reverse is not None:
            reverse.close()
        if self._leased_ms is not None:
            self._leased_ms = None
            try:
                self._old.unlock(self._owner)
            except MQTemplateError as exc:
                _log.debug("hand_over.lock_kept", reason=str(exc))  # its lease ends by itself

    def on_wake(self, wake: Callable[[], None]) -> None:
        """See `Service`."""
        self._wake = wake

    def progress(self) -> HandOverProgress:
        """Return the progress.

        Raises:
            BrokerError: The old broker does not answer.
        """
        state = self._old.state()
        counts = None if state is None else self._old.counts()
        now_ms = self._clock.steady_ms()
        moved = sum(count for at_ms, count in list(self._moved_at) if now_ms - at_ms <= _RATE_MS)
        rate = moved * 1_000 / _RATE_MS
        return HandOverProgress(
            state=state,
            counts=counts,
            is_mover=self._leased_ms is not None,
            is_idle=self._is_idle,
            rate=rate,
            error=self._error,
        )

    # --- steps ---------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Move a bounded number of messages. Return the time of the next step."""
        now_ms = self._clock.now_ms()
        if now_ms < self._next_ms <= now_ms + self._settings.lease_ms:
            return self._next_ms
        try:
            self._next_ms = now_ms + self._move()
        except MQTemplateError as exc:
            self._next_ms = now_ms + self._failed(exc)
        return self._next_ms

    def _failed(self, error: MQTemplateError) -> int:
        pause_ms = _FAILED_MS[min(self._failures, len(_FAILED_MS) - 1)]
        self._failures += 1
        self._failed_log.warning("hand_over.stalled", reason=str(error))
        self._note(str(error))
        return pause_ms

    def _note(self, error: str | None) -> None:
        if error == self._error:
            return
        self._error = error
        if self._leased_ms is not None:
            try:
                self._old.note_error(self._owner, error)
            except MQTemplateError as exc:
                _log.debug("hand_over.error_not_stored", reason=str(exc))  # the old broker is away, or the lock is

    def _move(self) -> int:
        """Do one step, and return the pause before the next one."""
        start_ms, used_s = self._clock.steady_ms(), time.thread_time()
        self._answer_ms = self._burst_ms = 0
        state = self._old.state()
        if state is None or state.phase in (HandOverPhase.ABORTED, HandOverPhase.CONFIRMED) or not self._renew():
            return _IDLE_MS
        in_transit = self._old.transit(_BATCH)
        count = len(in_transit)
        if not in_transit and state.phase is HandOverPhase.RUNNING:
            self._give_way()
            count = self._old.reserve(self._owner, min(self._window, self._settings.rate), self._filter())
            in_transit = self._old.transit(_BATCH) if count else []
        in_transit = [each for each in in_transit if not each.is_back]
        if not in_transit and state.phase is HandOverPhase.ABORTING:
            return self._move_back(state)
        self._is_idle = not in_transit
        settled = self._settle(in_transit, state)
        if settled == len(in_transit):
            self._failures = 0
            self._note(None)
        if not settled:
            return _IDLE_MS
        if not self._clock.is_virtual:
            self._fit_window(settled, (time.thread_time() - used_s) * 1_000 + self._burst_ms)
        busy_ms = self._clock.steady_ms() - start_ms - self._answer_ms
        rest_ms = round(busy_ms * (1 / self._settings.busy_share - 1))
        return max(1, settled * 1_000 // self._settings.rate, rest_ms)

    def _move_back(self, state: HandOverState) -> int:
        """Do one step of an abort, and return the pause before the next one."""
        try:
            back = self._new.hand_over
            back.state()
        except UnsupportedError:
            return self._recall_back(state)
        # The target names this hand-over: a second abort has a state of its own.
        back.begin(f"abort of {state.hand_over_id}", state.topics, state.groups)
        if self._reverse is None:
            settings = replace(self._settings, topics=self._topics(state), with_retries=False)
            self._reverse = Mover(self._new, self._old_broker, settings, owner=self._owner)
        pause_ms = self._reverse._move()
        self._note(self._reverse._error)
        self._is_idle = self._reverse._is_idle
        if self._is_idle:
            back.change(HandOverPhase.ABORTED)
            self._reverse.close()
            self._reverse = None
            self._old.change(HandOverPhase.ABORTED)
        return pause_ms

    def _topics(self, state: HandOverState) -> frozenset[str]:
        return frozenset(state.topics).union(self._old_broker.topic_names())

    def _recall_back(self, state: HandOverState) -> int:
        """Do one step of an abort by recalls, and return the pause before the next one."""
        backs = [each for each in self._old.transit(_BATCH) if each.is_back]
        self._is_idle = False
        if not backs:
            found = self._recallable(state)
            if not found:
                self._is_idle = True
                self._old.change(HandOverPhase.ABORTED)
                return _IDLE_MS
            self._old.take_back(self._owner, found)
            self._took_back_ms = self._clock.steady_ms()
            return self._settings.settle_ms
        if self._took_back_ms is None:  # of a mover before this one
            self._took_back_ms = self._clock.steady_ms()
        if self._clock.steady_ms() - self._took_back_ms < self._settings.settle_ms:
            return _IDLE_MS
        pending = [each for each in backs if not each.is_recalled]
        gone = [each for each in pending if not self._is_pending(each)]
        self._old.settle(self._owner, [_moved(each) for each in gone])
        missing = {each.offset for each in gone}
        recalled = [each for each in pending if each.offset not in missing]
        self._old.settle(self._owner, [replace(_moved(each), end=TransitEnd.RECALLED) for each in recalled])
        ended = [self._recalled(each) for each in backs if each.offset not in missing]
        self._old.settle(self._owner, ended)
        self._count(ended)
        self._note(None)
        return 1

    def _recallable(self, state: HandOverState) -> list[Message]:
        """Return the first pending timers of the new broker that can come back."""
        earliest_ms = self._clock.now_ms() + self._settings.settle_ms + _RECALL_MS
        found: list[Message] = []
        for topic in sorted(self._topics(state)):
            query = PendingQuery(topic=topic, after_ms=earliest_ms)
            for each in self._new.delayed.pending(query, _BATCH - len(found)).messages:
                records = [] if each.delay_level else self._new.find_records((TIMER_TOPIC,), each.msg_id).messages
                records = [record for record in records if Property.TIMER_DEL_UNIQKEY not in record.properties]
                if records:
                    newest = max(records, key=lambda record: record.store_timestamp)
                    found.append(Message(topic, newest.body, dict(newest.properties), newest.flag))
            if len(found) >= _BATCH:
                break
        return found

    def _is_pending(self, each: TransitMessage) -> bool:
        query = PendingQuery(topic=each.topic, key=each.msg_id)
        return bool(self._new.delayed.pending(query).messages) and each.deliver_ms > self._clock.now_ms() + _RECALL_MS

    def _recalled(self, each: TransitMessage) -> MovedMessage:
        """Recall a message, and return where it is then: this is known, since a recall has one effect however often."""
        status = self._new.delayed.cancel(key=each.msg_id, topic=each.topic).status
        is_back = status is ScheduleChangeStatus.CANCELLED
        end = TransitEnd.RETURNED if is_back else TransitEnd.MOVED
        return replace(_moved(each), end=end, may_move_again=True)

    def _renew(self) -> bool:
        """Take or renew the lock. A new owner does not know what the owner before it has sent."""
        now_ms, leased_ms = self._clock.steady_ms(), lease_time_ms(self._clock)
        had_it = self._leased_ms is not None and leased_ms - self._leased_ms < self._settings.lease_ms
        if not self._old.lock(self._owner, self._settings.lease_ms):
            self._leased_ms = None
            return False
        if not had_it:
            counts = self._old.counts()
            self._uncertain, self._took_over = {}, (counts.reserved, now_ms)
            _log.info("hand_over.mover_started", owner=self._owner, in_transit=counts.in_transit)
        self._leased_ms = leased_ms
        return True

    def _may_send(self) -> bool:
        """Return True if the lease is longer than a send may take: a step whose brokers are slow may outlast it."""
        return self._leased_ms is not None and (
            lease_time_ms(self._clock) - self._leased_ms + _SEND_MS < self._settings.lease_ms
        )

    def _filter(self) -> ReserveFilter:
        limits = self._new.delay_limits()
        now_ms, steady_ms = self._clock.now_ms(), self._clock.steady_ms()
        self._refused = {topic: until_ms for topic, until_ms in self._refused.items() if steady_ms < until_ms}
        limit_ms = limits.max_delay_ms
        margin_ms = min(_MARGIN_MS, limit_ms // 10)
        return ReserveFilter(
            after_ms=now_ms + self._settings.lead_ms,
            before_ms=now_ms + limit_ms - margin_ms,
            without_topics=frozenset(self._refused),
            topics=self._settings.topics,
            with_retries=self._settings.with_retries,
        )

    # --- messages in transit -------------------------------------------------------------------

    def _settle(self, in_transit: Sequence[TransitMessage], state: HandOverState) -> int:
        """Look up what may have been sent, send the rest, and store how each transit ended. Return how many ended."""
        count, window = 0, self._window
        known = set(state.brokers)
        for start in range(0, len(in_transit), window):
            if self._is_closing or (start and not self._renew()):
                break
            failures = self._failures
            try:
                ended = list(self._ends(in_transit[start : start + window], known))
            except MQTemplateError:
                self._return(in_transit[start:])
                raise
            self._end(ended)
            count += len(ended)
            if self._failures > failures:
                self._return(in_transit[start + window :])
                break
        return count

    def _end(self, ended: Sequence[MovedMessage]) -> None:
        if ended:
            self._give_way()
            self._old.settle(self._owner, ended)
        for each in ended:
            self._uncertain.pop(each.offset, None)
            self._failed_sends.pop(each.offset, None)
        self._count(ended)

    def _return(self, in_transit: Sequence[TransitMessage]) -> None:
        """End the transit of messages that were certainly not sent: the old broker releases them if they are due."""
        unsent = [each for each in in_transit if self._sent_ms(each) is None]
        returned = [replace(_moved(each), end=TransitEnd.RETURNED, may_move_again=True) for each in unsent]
        self._end(returned)

    def _sent_ms(self, each: TransitMessage) -> int | None:
        """Return the steady time until which a message may have been sent; None if it certainly was not."""
        reserved, took_over_ms = self._took_over
        return self._uncertain.get(each.offset, took_over_ms if each.offset < reserved else None)

    def _count(self, ended: Sequence[MovedMessage]) -> None:
        moved = sum(each.end is TransitEnd.MOVED for each in ended)
        now_ms = self._clock.steady_ms()
        self._moved_at.append((now_ms, moved))
        while now_ms - self._moved_at[0][0] > _RATE_MS:
            self._moved_at.popleft()
        if self._moved is not None and self._returned is not None:
            self._moved.add(moved)
            self._returned.add(len(ended) - moved)

    def _ends(self, in_transit: Sequence[TransitMessage], known: set[str]) -> Iterator[MovedMessage]:
        """Yield the ends of those whose transit ends now."""
        fresh: list[TransitMessage] = []
        for each in in_transit:
            sent_ms = self._sent_ms(each)
            if sent_ms is None:
                fresh.append(each)
                continue
            found = self._found(each, known)
            if found is not None:
                yield found
            elif self._clock.steady_ms() - sent_ms >= self._settings.settle_ms:
                failed = self._failed_sends.get(each.offset)
                if failed is not None and failed[0] >= _MAX_SENDS:
                    yield self._refuse(each, failed[1])  # RocketMQ fails for an empty body, and does not say why
                else:
                    fresh.append(each)
        yield from self._sent(fresh, known)

    def _found(self, each: TransitMessage, known: set[str]) -> MovedMessage | None:
        """Return the end of a transit if the new broker has the message.

        Raises:
            BrokerError: A broker to which messages were sent does not answer.
        """
        found = self._new.find_records((TIMER_TOPIC, SCHEDULE_TOPIC, each.topic), each.msg_id)
        for record in found.messages:
            if record.properties.get(Property.HAND_OVER) == each.move_id:
                return _moved(each, record.broker_name)
        if missing := known - found.brokers:
            raise BrokerError(
                f"message {each.msg_id} may have been sent to broker {', '.join(sorted(missing))}, which is not in the "
                "cluster now, so it is not sent again yet; start that broker"
            )
        return None

    def _sent(self, fresh: Sequence[TransitMessage], known: set[str]) -> Iterator[MovedMessage]:
        """Send messages, and yield the ends of those that the new broker has accepted or refused."""
        sends: list[tuple[TransitMessage, Future[SendResult]]] = []
        for each in fresh:
            try:
                queue = self._queue(each)
            except (DestinationError, UnsupportedError) as exc:
                yield self._refuse(each, exc)
                continue
            if queue.broker_name not in known:
                known.add(queue.broker_name)
                self._old.note_brokers(self._owner, [queue.broker_name])
            message = _delayed(each)
            self._give_way()
            if not self._may_send():
                break
            self._uncertain[each.offset] = self._clock.steady_ms()
            sends.append((each, self._new.sends.send_async([message], queue, _SEND_MS)))
        failure: Exception | None = None
        start_ms = self._clock.steady_ms()
        first_ms: int | None = None
        for each, future in sends:
            try:
                result = future.result()
            except (MessageError, UnsupportedError) as exc:
                yield self._refuse(each, exc)
            except (SendError, BrokerError) as exc:
                self._uncertain[each.offset] = self._clock.steady_ms()
                self._failed_sends[each.offset] = self._failed_sends.get(each.offset, (0, exc))[0] + 1, exc
                failure = exc
            else:
                yield _moved(each, result.message_queue.broker_name, result.handle)
            first_ms = self._clock.steady_ms() if first_ms is None else first_ms
        if first_ms is not None:
            self._answer_ms += first_ms - start_ms
            self._burst_ms += self._clock.steady_ms() - first_ms
        if failure is not None:
            self._failures += 1
            self._failed_log.warning("hand_over.send_failed", reason=str(failure))
            self._note(str(failure))

    def _give_way(self) -> None:
        """Wait until the application does not send, for at most `_GIVE_WAY_MS`."""
        end_ms = self._clock.steady_ms() + _GIVE_WAY_MS
        while not self._clock.is_virtual and self._is_sending() and self._clock.steady_ms() < end_ms:
            time.sleep(_GIVE_WAY_STEP_S)

    def _fit_window(self, count: int, load_ms: float) -> None:
        """Fit the number of messages of a step to the load that they are for the sends of the application.

        Args:
            count: Number of the messages of the last step.
            load_ms: Processor time of this thread, and the time in which the new broker stored the messages.
        """
        if load_ms > _LOAD_MS:
            self._window = max(_LEAST_WINDOW, self._window // 2)
        elif count >= self._window and load_ms < _LOAD_MS / 2:
            self._window = min(_MOST_WINDOW, self._window * 2)

    def _queue(self, each: TransitMessage) -> MessageQueue:
        """Return the queue of a message: the same number, or with a sharding key the one that producers choose."""
        queues = self._new.queues(each.topic)
        key = each.message.properties.get(Property.SHARDING_KEY)
        return queues[each.queue_id % len(queues) if key is None else queue_number(key, len(queues))]

    def _refuse(self, each: TransitMessage, error: Exception) -> MovedMessage:
        is_topic = isinstance(error, (DestinationError, UnsupportedError))
        if is_topic:
            self._refused[each.topic] = self._clock.steady_ms() + _REFUSED_TOPIC_MS
        self._failed_log.warning("hand_over.refused", topic=each.topic, msg_id=each.msg_id, reason=str(error))
        return replace(_moved(each), end=TransitEnd.RETURNED, reason=str(error), may_move_again=is_topic)


def _moved(each: TransitMessage, broker_name: str = "", handle: str | None = None) -> MovedMessage:
    return MovedMessage(
        msg_id=each.msg_id,
        topic=each.topic,
        deliver_ms=each.deliver_ms,
        offset=each.offset,
        broker_name=broker_name,
        handle=handle,
    )


def _delayed(each: TransitMessage) -> Message:
    properties = each.message.properties | {Property.TIMER_DELIVER_MS: str(each.deliver_ms)}
    return Message(each.topic, each.message.body, properties, each.message.flag)


def _process_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{token_hex(4)}"


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.error("hand_over.failed", service=service.name, repeated=repeated, exc_info=error)

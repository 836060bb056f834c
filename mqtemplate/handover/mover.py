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
state, lock and transit are in the new broker. The application sends to the old broker meanwhile. When nothing is left
in the new one, and nothing can arrive there any more (see `SettledSwitch`), both hand-overs are ``ABORTED``. A message
that is due too soon, or that the old broker refuses, stays in the new broker, which releases it.

RocketMQ cannot reserve a message, but recall one. So a message comes back in four steps: the old broker stores it in
transit, while RocketMQ still has it; after `MoverSettings.settle_ms` the mover looks whether it is still pending there;
the old broker stores that it is recalled from now on; RocketMQ recalls it, and only then it is pending in the old one.
A kill before the third step changes nothing, and after it the recall is repeated, which has no further effect. A cancel
of the application in RocketMQ before the third step is seen by the second. One after it finds the message in transit,
and cancels it in the old broker. Levels cannot be recalled, and stay; so does what is due within `_RECALL_MS`.

RocketMQ with ``ASYNC_FLUSH`` may lose an acknowledged message if its machine fails (a killed process loses none), and
may deliver a timer twice if it is killed before its next checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from secrets import token_hex

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import (
    HandOverError,
    HandOverPhase,
    HandOverProgress,
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
from mqtemplate.handover.limits import MoverSettings, delay_properties, free_time, movable_times
from mqtemplate.handover.old_broker import SettledSwitch
from mqtemplate.handover.pace import Pace
from mqtemplate.handover.pending import is_pending, recall_times, recallable
from mqtemplate.hashes import queue_number
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult
from mqtemplate.services import Service, ServiceRunner
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_log = get_logger("mqtemplate.hand_over")

_BATCH = 256
_SEND_MS, _IDLE_MS = 3_000, 1_000
_REST_MS, _VIRTUAL_REST_MS = 5_000, 60_000
"""Without work the mover waits this long for a signal of an old broker that gives one. A harness steps it often."""
_FAILED_MS = (500, 1_000, 2_000, 5_000)
_REFUSED_TOPIC_MS = 60_000
_MAX_SENDS = 3
"""Sends of one message that fail although the new broker answers queries: then the message stays in the old one."""
_RECALLS = 16
"""Messages that RocketMQ recalls between two renewals of the lock."""
_RECALL_MS = 10_000
"""A message that RocketMQ delivers sooner is not recalled: it answers a recall before it looks for the message."""


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
        self._owner = owner or (
            "embedded" if old.is_embedded else f"{socket.gethostname()}:{os.getpid()}:{token_hex(4)}"
        )
        self._leased_ms: int | None = None  # `lease_time_ms` of the last renewal; None without the lock
        self._uncertain: dict[int, int] = {}  # offset -> steady time of the last possible send
        self._failed_sends: dict[int, tuple[int, Exception]] = {}  # offset -> number of failures, and the last one
        self._took_over = (0, 0)  # the owner of the lock before may have sent those before this offset, until this time
        self._took_back_ms: int | None = None
        self._switch = SettledSwitch(self._clock, is_own_clock=old.is_embedded)
        self._refused: dict[str, int] = {}  # topic -> steady time until which its messages stay
        self._pace = Pace(self._clock, self._settings, is_sending)
        self._failures = 0
        self._error: str | None = None
        self._next_ms = 0
        self._is_idle = False
        self._idle_at: object = None  # what the old broker was like when nothing was left to do
        self._may_be_aborted = True  # messages may be on their way back
        self._is_closing = False
        self._gives_signals = False  # the old broker calls when its phase changes
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
        self._gives_signals = self._old.on_change(lambda: self._wake())  # noqa: PLW0108 (the runner sets it later)
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
        return HandOverProgress(
            state=state,
            counts=counts,
            is_mover=self._leased_ms is not None,
            is_idle=self._is_idle,
            rate=self._pace.rate,
            error=self._error,
        )

    # --- steps ---------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Move a bounded number of messages. Return the time of the next step."""
        now_ms = self._clock.now_ms()
        try:
            if now_ms < self._next_ms <= now_ms + _VIRTUAL_REST_MS and (
                self._idle_at is None or self._idle_at == self._seen()
            ):
                return self._next_ms
            self._idle_at = None
            self._next_ms = now_ms + self._move()
        except MQTemplateError as exc:
            self._next_ms = now_ms + self._failed(exc)
        return self._next_ms

    def _seen(self) -> object:
        state = self._old.state()
        return None if state is None else (state.hand_over_id, state.phase, self._old.counts())

    def _rest(self, state: HandOverState | None) -> int:
        """Return the pause of a mover that has nothing to do: until a message comes into the range of the new broker.

        A broker that gives signals, an embedded one, calls if the phase changes. Another one is asked at intervals.
        """
        if not self._gives_signals:
            return _IDLE_MS
        self._idle_at, pause_ms = self._seen(), _VIRTUAL_REST_MS if self._clock.is_virtual else _REST_MS
        if state is None or state.phase is not HandOverPhase.RUNNING:  # the new broker may be away
            return pause_ms
        for _, end_ms in movable_times(self._new.delay_limits(), self._clock.now_ms(), self._settings):
            for each in self._old_broker.delayed.pending(PendingQuery(after_ms=end_ms), 1).messages:
                pause_ms = min(pause_ms, each.deliver_ms - end_ms + 1)
        return max(1, pause_ms)

    def _failed(self, error: MQTemplateError) -> int:
        if self._is_closing:  # the lock is released, and what was being done is found out by the next mover
            _log.debug("hand_over.closed", reason=str(error))
            return _IDLE_MS
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
        self._pace.begin()
        state = self._old.state()
        if state is None or state.phase in (HandOverPhase.ABORTED, HandOverPhase.CONFIRMED):
            return self._rest(state)
        if not self._renew():
            return _IDLE_MS
        in_transit = self._old.transit(_BATCH)
        backs = [each for each in in_transit if each.is_back]
        if state.phase is not HandOverPhase.ABORTING and (pause_ms := self._end_abort(state, backs)) is not None:
            return pause_ms
        if not in_transit and state.phase is HandOverPhase.RUNNING and self._reserve():
            in_transit = self._old.transit(_BATCH)
        in_transit = [each for each in in_transit if not each.is_back]
        if not in_transit and state.phase is HandOverPhase.ABORTING:
            self._may_be_aborted = True
            return self._move_back(state, backs)
        self._is_idle = not in_transit
        settled = self._settle(in_transit, state)
        if settled == len(in_transit):
            self._failures = 0
            self._note(None)
        if not settled:
            return self._rest(state) if self._is_idle else _IDLE_MS
        return self._pace.rest_ms(settled)

    def _reserve(self) -> int:
        """Reserve the next messages that may move now, and return their number."""
        self._pace.give_way()
        most, count = min(self._pace.window, self._settings.rate), 0
        limits, now_ms = self._new.delay_limits(), self._clock.now_ms()
        for start_ms, end_ms in movable_times(limits, now_ms, self._settings):
            if count < most:
                try:
                    count += self._old.reserve(self._owner, most - count, self._filter(start_ms, end_ms))
                except HandOverError:
                    state = self._old.state()
                    if state is not None and state.phase is HandOverPhase.RUNNING:
                        raise
                    break  # an operator has changed the phase since this step has read it
        return count

    def _move_back(self, state: HandOverState, backs: Sequence[TransitMessage]) -> int:
        """Do one step of an abort, and return the pause before the next one."""
        try:
            back = self._new.hand_over
            back.state()
        except UnsupportedError:
            return self._recall_back(state, backs)
        back.begin(_abort_of(state), state.topics, state.groups)
        pause_ms, self._is_idle = self._step_reverse(state)
        if self._is_idle and self._switch.is_over(state.switches[-1]):
            self._end_reverse()
            self._old.change(HandOverPhase.ABORTED)
        return pause_ms

    def _end_abort(self, state: HandOverState, backs: Sequence[TransitMessage]) -> int | None:
        """End an abort that an operator has taken back: what is on its way back arrives, and no more comes.

        Returns:
            The pause before the next step; None if nothing is on its way back.
        """
        if backs:
            return self._recall_back(state, backs)
        if not self._may_be_aborted or (state.phase is HandOverPhase.PAUSED and self._reverse is None):
            return None
        with contextlib.suppress(UnsupportedError):
            back = self._new.hand_over
            found = back.state()
            if found is not None and found.target == _abort_of(state) and found.phase is not HandOverPhase.ABORTED:
                back.change(HandOverPhase.PAUSED)
                if back.counts().in_transit:
                    return self._step_reverse(state)[0]
                self._end_reverse()
        self._may_be_aborted = False
        return None

    def _step_reverse(self, state: HandOverState) -> tuple[int, bool]:
        """Let the mover of the other direction do a step. Return the pause, and True if it had nothing to do."""
        if self._reverse is None:
            settings = replace(self._settings, topics=self._topics(state), with_retries=False)
            self._reverse = Mover(self._new, self._old_broker, settings, owner=self._owner)
        pause_ms = self._reverse._move()
        self._note(self._reverse._error)
        return pause_ms, self._reverse._is_idle

    def _end_reverse(self) -> None:
        self._new.hand_over.change(HandOverPhase.ABORTED)
        reverse, self._reverse = self._reverse, None
        if reverse is not None:
            reverse.close()

    def _topics(self, state: HandOverState) -> frozenset[str]:
        return frozenset(state.topics).union(self._old_broker.topic_names())

    def _recall_back(self, state: HandOverState, backs: Sequence[TransitMessage]) -> int:
        """Do one step of an abort by recalls, and return the pause before the next one."""
        self._is_idle = False
        if not backs:
            earliest_ms = self._clock.now_ms() + self._settings.settle_ms + _RECALL_MS
            found = recallable(self._new, sorted(self._topics(state)), earliest_ms, _BATCH)
            if not found:
                self._is_idle = True
                if self._switch.is_over(state.switches[-1]):
                    self._old.change(HandOverPhase.ABORTED)
                return _IDLE_MS
            if not self._keep_lock():
                return _IDLE_MS
            self._old.take_back(self._owner, found)
            self._took_back_ms = self._clock.steady_ms()
            return self._settings.settle_ms
        if self._took_back_ms is None:  # of a mover before this one
            self._took_back_ms = self._clock.steady_ms()
        if self._clock.steady_ms() - self._took_back_ms < self._settings.settle_ms:
            return _IDLE_MS
        for start in range(0, len(backs), _RECALLS):
            if self._is_closing or not self._keep_lock():
                return _IDLE_MS
            self._recall(backs[start : start + _RECALLS])
        self._note(None)
        return 1

    def _recall(self, backs: Sequence[TransitMessage]) -> None:
        """Let messages come back whose copies are in transit, unless they were cancelled or delivered meanwhile."""
        pending = [each for each in backs if not each.is_recalled]
        safe_ms = self._clock.now_ms() + _RECALL_MS
        gone = [each for each in pending if each.deliver_ms <= safe_ms or not is_pending(self._new, each)]
        self._old.settle(self._owner, [_moved(each) for each in gone])
        missing = {each.offset for each in gone}
        recalled = [replace(_moved(each), end=TransitEnd.RECALLED) for each in pending if each.offset not in missing]
        self._old.settle(self._owner, recalled)
        self._end([self._recalled(each) for each in backs if each.offset not in missing])

    def _recalled(self, each: TransitMessage) -> MovedMessage:
        """Recall a message, and return where it is then: this is known, since a recall has one effect however often."""
        status = self._new.delayed.cancel(key=each.msg_id, topic=each.topic).status
        is_back = status is ScheduleChangeStatus.CANCELLED
        end = TransitEnd.RETURNED if is_back else TransitEnd.MOVED
        return replace(_moved(each), end=end, may_move_again=True)

    def _renew(self) -> bool:
        """Take or renew the lock. A new owner does not know what the owner before it has sent."""
        now_ms, leased_ms = self._clock.steady_ms(), lease_time_ms(self._clock)
        had_it = self._has_lock()
        if not self._old.lock(self._owner, self._settings.lease_ms):
            self._leased_ms = None
            return False
        if not had_it:
            counts, state = self._old.counts(), self._old.state()
            self._error = None if state is None else state.last_error  # of the owner before
            self._uncertain, self._took_over = {}, (counts.reserved, now_ms)
            _log.info("hand_over.mover_started", owner=self._owner, in_transit=counts.in_transit)
        self._leased_ms = leased_ms
        return True

    def _lease_left_ms(self) -> int:
        """Return the rest of the lease; negative without the lock."""
        return -1 if self._leased_ms is None else self._leased_ms + self._settings.lease_ms - lease_time_ms(self._clock)

    def _has_lock(self) -> bool:
        """Return True if this mover certainly has the lock. No other process takes that of an open folder."""
        return self._leased_ms is not None and (self._old_broker.is_embedded or self._lease_left_ms() > 0)

    def _keep_lock(self) -> bool:
        """Renew the lock if its lease may soon be over. Return False if another mover has it."""
        return self._lease_left_ms() > self._settings.lease_ms // 2 or self._renew()

    def _filter(self, after_ms: int, before_ms: int) -> ReserveFilter:
        now_ms = self._clock.steady_ms()
        self._refused = {topic: until_ms for topic, until_ms in self._refused.items() if now_ms < until_ms}
        return ReserveFilter(
            after_ms=after_ms,
            before_ms=before_ms,
            without_topics=frozenset(self._refused),
            topics=self._settings.topics,
            with_retries=self._settings.with_retries,
        )

    # --- messages in transit -------------------------------------------------------------------

    def _settle(self, in_transit: Sequence[TransitMessage], state: HandOverState) -> int:
        """Look up what may have been sent, send the rest, and store how each transit ended. Return how many ended."""
        count, window = 0, self._pace.window
        known = set(state.brokers)
        for start in range(0, len(in_transit), window):
            if self._is_closing:
                self._return(in_transit[start:])
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
            self._pace.give_way()
            if not self._has_lock():  # it took too long: another mover may have sent what this one would return
                ended = [each for each in ended if each.end is TransitEnd.MOVED]
            if not self._keep_lock():
                return
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
        self._pace.moved(moved)
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
        if not fresh or not self._keep_lock():  # the lookups before may have taken long
            return
        limits = self._new.delay_limits()
        for each in fresh:
            try:
                queue = self._queue(each)
            except (DestinationError, UnsupportedError) as exc:
                yield self._refuse(each, exc)
                continue
            deliver_ms = free_time(limits, each.deliver_ms, recall_times(self._new, each))
            delay = delay_properties(limits, deliver_ms, self._clock.now_ms(), self._settings)
            if delay is None:
                yield replace(_moved(each), end=TransitEnd.RETURNED, may_move_again=True)
                continue
            if queue.broker_name not in known:
                known.add(queue.broker_name)
                self._old.note_brokers(self._owner, [queue.broker_name])
            message = Message(each.topic, each.message.body, {**each.message.properties, **delay}, each.message.flag)
            self._pace.give_way()
            if self._lease_left_ms() <= _SEND_MS:  # a step whose brokers are slow may outlast the lease
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
            self._pace.answered(start_ms, first_ms)
        if failure is not None:
            self._failures += 1
            self._failed_log.warning("hand_over.send_failed", reason=str(failure))
            self._note(str(failure))

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


def _abort_of(state: HandOverState) -> str:
    """Return the target of the hand-over back. It names the hand-over, so a second abort has a state of its own."""
    return f"abort of {state.hand_over_id}"


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.error("hand_over.failed", service=service.name, repeated=repeated, exc_info=error)

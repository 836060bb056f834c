"""The old broker of a hand-over as the application sees it: its name, what groups have left there, and its thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from mqtemplate.broker import Broker, ConsumerSpec, Registration
from mqtemplate.broker.hand_over import HandOverState
from mqtemplate.clock import Clock, lease_time_ms
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.services import PeriodicService, Service, ServiceRunner
from mqtemplate.topics import RETRY_TOPIC_PREFIX

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


# --- the broker that the application sends to -----------------------------------------------------

SETTLED_MS = 10_000
"""Time after a change of the broker that is sent to, until which messages may still arrive at the other one."""
CLOCKS_DIFFER_MS = 60_000
"""Most by which the clocks of two brokers, or of a broker and this process, are taken to differ."""
_LEARN_MS = 1_000
_STALE_MS = 3_000
"""Age of the known state at which a send waits for a new one: this process, or its thread, stood still."""
_READ_S = 0.5
"""Longest wait of a send for the state: the old broker may be away."""


class SendDirection:
    """Says which broker the application sends to: the new one, or the old one once the hand-over is aborted.

    The state in the old broker decides. An embedded broker is asked at each send. A server is asked each second by a
    thread, and at once by a send if the process stood still. While it does not answer, the last known state counts.

    Args:
        has_state: False: the old broker has no state, and all sends go to the new one.

    Attributes:
        close: Stops reading.
    """

    def __init__(self, old: Broker, *, has_state: bool) -> None:
        self._old = old
        self._has_state = has_state
        self._known: HandOverState | None = None
        self._known_ms = 0  # `lease_time_ms` before the request that `_known` answers
        self._is_away = False
        self._is_read = threading.Event()  # set by the end of the next request
        self._log = LimitedLog(_log, old.clock.steady_ms, burst=1)
        self._service = PeriodicService("hand_over.state", self._read, old.clock, _LEARN_MS)
        self._runner = ServiceRunner(self._service, old.clock, "mqtemplate-hand-over-state", _report)
        self.close = self._runner.stop

    def start(self) -> None:
        """Read the state, and from then on each second."""
        if self._has_state and not self._old.is_embedded:
            self._read()
            self._runner.start()

    def _read(self) -> None:
        start_ms = lease_time_ms(self._old.clock)
        try:
            self._known, self._known_ms = self._old.hand_over.state(), start_ms
            self._is_away = False
        except MQTemplateError as exc:
            self._is_away = True
            self._log.warning("hand_over.old_broker_not_reached", reason=str(exc))
        finally:
            is_read, self._is_read = self._is_read, threading.Event()
            is_read.set()

    def state(self) -> HandOverState | None:
        """Return the state as this process knows it."""
        if not self._has_state:
            return None
        if self._old.is_embedded:
            return self._old.hand_over.state()
        if not self._is_away and lease_time_ms(self._old.clock) - self._known_ms > _STALE_MS:
            is_read = self._is_read
            self._service.trigger()
            if not is_read.wait(_READ_S):
                self._is_away = True
        return self._known

    def state_now(self) -> HandOverState | None:
        """Return the state that the old broker has at this moment.

        Raises:
            BrokerError: It does not answer.
        """
        return self._old.hand_over.state() if self._has_state else None

    def is_to_old(self) -> bool:
        """Return True if the application sends to the old broker now."""
        state = self.state()
        return state is not None and state.sends_to_old


class SettledSwitch:
    """Says when nothing arrives any more at the broker that the application does not send to.

    Args:
        is_own_clock: The clock is that of the old broker, which has noted the time of the change.
    """

    def __init__(self, clock: Clock, *, is_own_clock: bool) -> None:
        self._clock = clock
        self._settled_ms = SETTLED_MS if is_own_clock else SETTLED_MS + CLOCKS_DIFFER_MS
        self._seen: tuple[int, int] = (0, 0)  # the last change, and the steady time at which it was seen

    def is_over(self, switched_ms: int) -> bool:
        """Return True if all processes know of a change at *switched_ms*, and what they sent before has arrived."""
        if self._seen[0] != switched_ms:
            self._seen = (switched_ms, self._clock.steady_ms())
        return (
            self._clock.steady_ms() - self._seen[1] >= SETTLED_MS
            or self._clock.now_ms() - switched_ms >= self._settled_ms
        )


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.error("hand_over.failed", service=service.name, repeated=repeated, exc_info=error)


# --- order across both brokers --------------------------------------------------------------------

_CHECK_EMBEDDED_MS = 100
_CHECK_AWAY_MS = 10_000  # a request to a broker that is away may wait for its timeout
_CHECK_REMOTE_MS = 1_000  # the check sends two requests for each queue


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the queues of a topic at one broker, for members that read them in their order.

    Attributes:
        by_queue: First queue offset that may not be read yet, by queue of that broker; None: all may be read.
    """

    by_queue: Mapping[MessageQueue, int] | None = None

    def of(self, queue: MessageQueue) -> int | None:
        """Return the limit of a queue; None without one."""
        return None if self.by_queue is None else self.by_queue.get(queue, 0)


_NOTHING, _ALL = Limits({}), Limits()


class QueueOrder:
    """Says how far a group may read the queues of a topic in their order, over all members of the group.

    The sends of the application change from the old broker to the new one, and back if the hand-over is aborted. The
    messages between two changes are read when the group has consumed those before them, which the other broker has: so
    no key overtakes itself. A broker is drained up to a change if the committed offset of each queue of the topic, and
    of the group's retry topic, is that of the change. So the commits of all members count, in all processes.

    - Without an abort: the new broker is read when the old one is drained. A delayed message that the old broker
      releases later closes the topic again until it is consumed. What was delivered before stays delivered.
    - After a change back, the newest messages wait for `SETTLED_MS` too, in which the other broker may still get some.
    - While a broker cannot be reached, the last result counts.

    Args:
        waits_for_pending: True: a topic with pending messages in the old broker is not drained either.
    """

    def __init__(
        self, old: Broker, new: Broker, group: str, direction: SendDirection, *, waits_for_pending: bool
    ) -> None:
        self._old, self._new = old, new
        self._group = group
        self._direction = direction
        self._waits_for_pending = waits_for_pending
        self._switch = SettledSwitch(old.clock, is_own_clock=old.is_embedded)
        self._checked: dict[str, tuple[int, tuple[int, ...], tuple[Limits, Limits]]] = {}
        self._drained: dict[tuple[str, int], bool] = {}  # (topic, time of a change) -> last answer
        self._offsets: dict[tuple[bool, MessageQueue, int], int] = {}  # (is old, queue, time) -> its first offset
        self._lock = threading.Lock()
        self._is_any_away = False
        self._log = LimitedLog(_log, old.clock.steady_ms, burst=1)

    @property
    def interval_ms(self) -> int:
        """Time between two checks of a topic."""
        return _CHECK_EMBEDDED_MS if self._old.is_embedded else _CHECK_REMOTE_MS

    def limit(self, queue: MessageQueue) -> int | None:
        """Return the first offset of a queue that may not be read yet; None if all may be read.

        Args:
            queue: As the application sees it.
        """
        of_old, of_new = self.limits(queue.topic)
        return (of_old if is_old(queue.broker_name) else of_new).of(inner_queue(queue))

    def limits(self, topic: str) -> tuple[Limits, Limits]:
        """Return the limits of the queues of a topic at the old broker, and of those at the new one."""
        now_ms = self._old.clock.steady_ms()
        switches = _switches(self._direction.state())
        with self._lock:
            known = self._checked.get(topic)
            if known is not None and now_ms < known[0] and known[1] == switches:
                return known[2]
            before = (_ALL, _NOTHING) if known is None else known[2]
            limits = self._check(topic, known[2] if known is not None and known[1] == switches else None)
            interval_ms = 0 if self._old.clock.is_virtual else self.interval_ms
            interval_ms = _CHECK_AWAY_MS if self._is_any_away else interval_ms
            self._checked[topic] = now_ms + interval_ms, switches, limits
        is_closed, was_closed = (each[1] == _NOTHING for each in (limits, before))
        if is_closed is not was_closed:
            _log.info("hand_over.topic_read_again" if is_closed else "hand_over.topic_drained", topic=topic)
        return limits

    def _check(self, topic: str, last: tuple[Limits, Limits] | None) -> tuple[Limits, Limits]:
        """Return the limits of both brokers.

        Args:
            last: The last ones since the sends have changed; None without any. They count if a broker is away.
        """
        self._is_any_away = False
        before = _switches(self._direction.state())
        is_old_left = len(before) % 2 == 1
        ends = _ALL
        if not self._old.is_embedded:  # the sends may change back between two checks
            ends = self._or_last(
                lambda: self._ends(topic, is_old_left), _NOTHING if last is None else last[not is_old_left]
            )
        switches = self._or_last(lambda: _switches(self._direction.state_now()), before)
        if switches != before:
            ends = _NOTHING  # the next check is right
        found = []
        for is_of_old in (True, False):
            limits = ends if is_of_old is is_old_left else _ALL
            for turn in range(2 if is_of_old else 1, len(switches) + 1, 2):  # each change to this broker
                if not self._is_drained_before(topic, turn, switches):
                    otherwise = _NOTHING if last is None else last[not is_of_old]
                    limits = self._or_last(partial(self._limits_at, is_of_old, topic, turn - 1, switches), otherwise)
                    break
            found.append(limits)
        return found[0], found[1]

    def _or_last(self, ask: Callable[[], _T], last: _T) -> _T:
        """Return an answer; the last one if the broker is away."""
        try:
            return ask()
        except BrokerError as exc:
            self._is_any_away = True
            self._log.warning("hand_over.broker_not_reached", group=self._group, reason=str(exc))
            return last

    def _ends(self, topic: str, is_of_old: bool) -> Limits:
        broker = self._old if is_of_old else self._new
        return Limits({queue: broker.reader.max_offset(queue) for queue in queues_of(broker, topic)})

    def _is_drained_before(self, topic: str, turn: int, switches: tuple[int, ...]) -> bool:
        """Return True if the group has consumed what the other broker got before the change number *turn*."""
        if turn == len(switches) and turn > 1 and not self._switch.is_over(switches[-1]):
            return False
        key = topic, switches[turn - 1]
        self._drained[key] = self._or_last(
            lambda: self._is_consumed_before(topic, turn, switches), self._drained.get(key, False)
        )
        return self._drained[key]

    def _is_consumed_before(self, topic: str, turn: int, switches: tuple[int, ...]) -> bool:
        is_of_old, is_last = turn % 2 == 1, turn == len(switches)
        broker = self._old if is_of_old else self._new
        for each in (topic, RETRY_TOPIC_PREFIX + self._group):
            limits = self._ends(each, is_of_old) if is_last else self._limits_at(is_of_old, each, turn, switches)
            if not self.is_consumed(broker, limits):
                return False
        if not (is_last and is_of_old and self._waits_for_pending):
            return True
        return not broker.delayed.count_pending(PendingQuery(topic=topic)).total

    def _limits_at(self, is_of_old: bool, topic: str, index: int, switches: Sequence[int]) -> Limits:
        """Return the limits of the messages that a broker got before a change of the sends to it.

        Between the change away from it, and this one, it got none. So a time of the new broker, whose clock differs,
        is one between the two.
        """
        broker = self._old if is_of_old else self._new
        if index == 0:
            return _NOTHING
        time_ms = switches[index]
        if not is_of_old:
            time_ms -= max(0, time_ms - switches[index - 1] - SETTLED_MS) // 2
        return Limits({queue: self._first_offset(is_of_old, queue, time_ms) for queue in queues_of(broker, topic)})

    def _first_offset(self, is_of_old: bool, queue: MessageQueue, time_ms: int) -> int:
        key = is_of_old, queue, time_ms
        found = self._offsets.get(key)
        if found is None:
            reader = (self._old if is_of_old else self._new).reader
            found = self._offsets[key] = reader.search_offset(queue, time_ms)
        return found

    def is_consumed(self, broker: Broker, limits: Limits) -> bool:
        """Return True if the group has consumed all that it may read of a broker."""
        return all(self._is_consumed(broker, queue, end) for queue, end in (limits.by_queue or {}).items())

    def _is_consumed(self, broker: Broker, queue: MessageQueue, end: int) -> bool:
        committed = broker.groups.committed_offset(self._group, queue)
        if committed is None:
            return broker.reader.min_offset(queue) >= end
        return committed >= end


def _switches(state: HandOverState | None) -> tuple[int, ...]:
    """Return the times at which the sends have changed to the other broker; of a hand-over without a state, one."""
    return (0,) if state is None else state.switches


def has_topic(old: Broker, topic: str) -> bool:
    """Return False if the old broker does not have a topic, and would create it when it is read.

    A client does not create topics to read them, and other processes may create them at the server.
    """
    return not old.is_embedded or topic in old.admin().topic_kinds()


def queues_of(old: Broker, topic: str) -> Sequence[MessageQueue]:
    """Return the queues of a topic of the old broker; none if it does not exist."""
    return old.queues(topic) if has_topic(old, topic) else ()


def spec_at_old(old: Broker, spec: ConsumerSpec) -> ConsumerSpec | None:
    """Return the subscriptions of a member at the old broker; None if there is nothing to read."""
    known = {topic: selector for topic, selector in spec.subscriptions.items() if has_topic(old, topic)}
    if not known and not has_topic(old, RETRY_TOPIC_PREFIX + spec.group):
        return None
    return replace(spec, subscriptions=known)


# --- both at once ---------------------------------------------------------------------------------

WAKE_S = 0.01
"""Time between two wakes of a call that may not wait yet."""


class PollThread(Generic[_T]):
    """A thread that waits for messages of the old broker, while its starter waits for those of the new one.

    Each wait has its own: it costs little beside the wait, and no thread is left when its starter is gone.
    """

    def __init__(self, group: str, poll: Callable[[], list[_T]]) -> None:
        self._poll = poll
        self._result: list[_T] | BaseException = []
        self._thread = threading.Thread(target=self._run, name=f"mqtemplate-hand-over-{group}", daemon=True)
        self._thread.start()

    def end(self, wake: Callable[[], None]) -> list[_T] | BaseException:
        """Wait for the end of the poll; return its messages, or its error.

        Args:
            wake: Ends the wait of the poll. It is called again in case that the poll did not wait yet.
        """
        while self._thread.is_alive():
            wake()
            self._thread.join(WAKE_S)
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._poll()
        except BaseException as error:  # the thread that waits for the result raises it
            self._result = error


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

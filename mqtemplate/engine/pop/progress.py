"""The progress of all groups that read by POP, by group, topic and queue; the times at which deliveries expire."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mqtemplate.engine.pop.pop_queue import Delivery, Event, PopQueue
from mqtemplate.message import MessageQueue
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import RETRY_TOPIC_PREFIX

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

_MOST_KEYS = 4_096  # whose turns are in memory

FORGOTTEN = "F"
"""Event of a queue whose group or topic was deleted, with the earliest time of a later delivery; the others are in
`PopQueue`."""


class QueueKey(NamedTuple):
    """A queue, and a group that reads it by POP."""

    group: str
    topic: str
    queue_id: int


class InFlight(NamedTuple):
    """A delivery that is not acknowledged.

    Attributes:
        blocked: Number of messages that wait until it is done.
    """

    queue: MessageQueue
    queue_offset: int
    delivery: Delivery
    blocked: int

    @property
    def since_ms(self) -> int:
        """Time since which its client has it."""
        return self.delivery.since_ms or self.delivery.pop_ms


class QueueSpans(Protocol):
    """The offsets of the queues of a broker; see `mqtemplate.engine.reader.QueueReader`."""

    def min_offset(self, queue: MessageQueue) -> int: ...
    def max_offset(self, queue: MessageQueue) -> int: ...
    def is_young(self, queue: MessageQueue) -> bool: ...


class TrackedQueue:
    """Progress of a group in one queue, with its lock.

    Attributes:
        lock: Held during each use of *state*.
        due_ms: Time for which an expiry is scheduled; None without one.
        committed: The offset that was committed last; None before the first commit.
        is_gone: The group or the topic was deleted.
    """

    __slots__ = ("committed", "due_ms", "is_gone", "key", "lock", "queue", "state")

    def __init__(self, key: QueueKey, queue: MessageQueue, state: PopQueue, committed: int | None) -> None:
        self.key = key
        self.queue = queue
        self.state = state
        self.committed = committed
        self.lock = threading.Lock()
        self.due_ms: int | None = None
        self.is_gone = False


class KeyTurns:
    """The turns of the keys of a group in one topic, and what is in flight of each. Thread-safe.

    - The key that had no message for the longest time is next.
    - A message counts from its delivery until it is done, or waits for its next delivery. Only these are in memory, at
      most as many as the limit for each key, and the turns of the last few thousand keys.

    Args:
        on_earlier: Called when `next_ms` is earlier than before.

    Attributes:
        next_ms: Time at which a key may have a message that its rate holds now; None without one.
    """

    def __init__(self, on_earlier: Callable[[], None]) -> None:
        from mqtemplate.key_limits import KeyRates

        self._on_earlier = on_earlier
        self._lock = threading.Lock()
        self._rates = KeyRates()
        self._in_flight: dict[str, set[tuple[TrackedQueue, int]]] = {}
        self._new: set[tuple[TrackedQueue, int]] = set()  # chosen, and not delivered yet
        self._turns: dict[str, int] = {}
        self._turn = 0
        self.next_ms: int | None = None

    def count(self, key: str, tracked: TrackedQueue, queue_offset: int) -> None:
        """Count a delivery."""
        self._in_flight.setdefault(key, set()).add((tracked, queue_offset))

    def choose(
        self, waiting: Mapping[str, list[int]], tracked: TrackedQueue, limits: KeyLimits, now_ms: int
    ) -> Iterator[tuple[str, int]]:
        """Yield keys and queue offsets of messages to deliver, one of each key in a round.

        Deliver each one, or call `give_back`; call `delivered` at the end.
        """
        with self._lock:
            keys = sorted(waiting, key=lambda key: self._turns.get(key, 0))
        for number in itertools.count():
            kept = []
            for key in keys:
                if number < len(waiting[key]) and self._take(key, tracked, waiting[key][number], limits, now_ms):
                    kept.append(key)
                    yield key, waiting[key][number]
            if not kept:
                return
            keys = kept

    def _take(self, key: str, tracked: TrackedQueue, queue_offset: int, limits: KeyLimits, now_ms: int) -> bool:
        with self._lock:
            if limits.max_in_flight is not None and self._count(key) >= limits.max_in_flight:
                return False
            if limits.max_rate is not None:
                if (at_ms := math.ceil(self._rates.next_ms(key))) > now_ms:
                    if self.next_ms is None or at_ms < self.next_ms:
                        self.next_ms = at_ms
                        self._on_earlier()
                    return False
                self._rates.spend(key, now_ms, limits.step_ms)
            if limits.max_in_flight is not None:
                self._new.add((tracked, queue_offset))
                self.count(key, tracked, queue_offset)
            self._turn += 1
            self._turns[key] = self._turn
            if len(self._turns) > 2 * _MOST_KEYS:
                self._turns = {each: turn for each, turn in self._turns.items() if turn > self._turn - _MOST_KEYS}
            return True

    def _count(self, key: str) -> int:
        """Return how many messages of a key are in flight. Forget those that have ended."""
        found = {
            each for each in self._in_flight.get(key, ()) if each in self._new or each[1] in each[0].state.in_flight
        }
        if found:
            self._in_flight[key] = found
        else:
            self._in_flight.pop(key, None)
        return len(found)

    def give_back(self, key: str, tracked: TrackedQueue, queue_offset: int, limits: KeyLimits) -> None:
        """Note that a chosen message is not delivered."""
        with self._lock:
            self._new.discard((tracked, queue_offset))
            self._in_flight.get(key, set()).discard((tracked, queue_offset))
            if limits.max_rate is not None:
                self._rates.refund(key, limits.step_ms)

    def delivered(self, tracked: TrackedQueue) -> None:
        """Note that the chosen messages of a queue are delivered."""
        with self._lock:
            self._new = {each for each in self._new if each[0] is not tracked}
            if len(self._in_flight) > 2 * _MOST_KEYS:
                for key in list(self._in_flight):
                    self._count(key)

    def take_due(self, now_ms: int) -> bool:
        """Return True, once, if a key may have a message that its rate held."""
        with self._lock:
            is_due = self.next_ms is not None and self.next_ms <= now_ms
            if is_due:
                self.next_ms = None
            return is_due


class PopProgress:
    """The progress of groups in queues.

    The committed offset of a group is the first queue offset that is not done. Members that pull use the same table.

    Args:
        note: Notes an event of a queue; see `PopQueue`.

    Attributes:
        find: Returns the progress in a queue; None if the group has not read it by POP.
        least_pop_ms: Earliest time of a delivery since groups or topics were deleted; see `PopQueue`.
    """

    def __init__(
        self,
        offsets: ConsumerOffsets,
        spans: QueueSpans,
        broker_name: str,
        note: Callable[[QueueKey, Event], None],
    ) -> None:
        self._offsets = offsets
        self._spans = spans
        self._broker_name = broker_name
        self._note = note
        self._lock = threading.Lock()
        self._queues: dict[QueueKey, TrackedQueue] = {}
        self.find: Callable[[QueueKey], TrackedQueue | None] = self._queues.get
        self.least_pop_ms = 0
        self._of_group: dict[str, dict[QueueKey, TrackedQueue]] = {}
        self._due: list[tuple[int, int, TrackedQueue]] = []  # heap; an entry is stale if its queue has another time
        self._numbers = itertools.count()
        self._wake: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[TrackedQueue]:
        """Iterate over all queues."""
        return iter(list(self._queues.values()))

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when the first expiry is earlier than before."""
        self._wake = wake

    def track(self, key: QueueKey, *, from_last: bool, start: int | None = None) -> TrackedQueue:
        """Return the progress in a queue. If it is new, it starts at the first offset of the group.

        Args:
            start: First offset of a group without one; None for the rule of `PopRequest.from_last`.
        """
        tracked = self._queues.get(key)
        if tracked is None:
            queue = MessageQueue(key.topic, self._broker_name, key.queue_id)
            first = self._start(key, queue, from_last)
            if start is not None and self._offsets.offset(*key) is None:
                first = min(max(start, self._spans.min_offset(queue)), self._spans.max_offset(queue))
            with self._lock:
                tracked = self._queues.get(key)
                if tracked is None:
                    state = PopQueue(first, partial(self._note, key), self.least_pop_ms)
                    tracked = self._add(TrackedQueue(key, queue, state, None))
        return tracked

    def restore(self, key: QueueKey) -> PopQueue:
        """Return the state of a queue, to which events of an earlier run are applied. `settle` it then."""
        tracked = self._queues.get(key)
        if tracked is None:
            queue = MessageQueue(key.topic, self._broker_name, key.queue_id)
            state = PopQueue(0, partial(self._note, key))
            tracked = self._add(TrackedQueue(key, queue, state, self._offsets.offset(*key)))
        return tracked.state

    def _start(self, key: QueueKey, queue: MessageQueue, from_last: bool) -> int:
        """Return the first queue offset of a group. Source: ``PopMessageProcessor.getInitOffset``."""
        low, committed = self._spans.min_offset(queue), self._offsets.offset(*key)
        if committed is not None:
            return max(low, committed)
        if not from_last or key.topic.startswith(RETRY_TOPIC_PREFIX) or self._spans.is_young(queue):
            return low
        return max(low, self._spans.max_offset(queue) - 1)

    def _add(self, tracked: TrackedQueue) -> TrackedQueue:
        self._queues[tracked.key] = self._of_group.setdefault(tracked.key.group, {})[tracked.key] = tracked
        return tracked

    def of_group(self, group: str) -> list[TrackedQueue]:
        """Return all queues of a group."""
        return list(self._of_group.get(group, {}).values())

    def oldest_ms(self, now_ms: int) -> int:
        """Return for how long a client has had its message, of the message for which that is longest."""
        oldest_ms = now_ms
        for tracked in self:
            with tracked.lock:
                found = list(tracked.state.in_flight.values())
            oldest_ms = min([oldest_ms, *[each.since_ms or each.pop_ms for each in found]])
        return now_ms - oldest_ms

    def deliveries(self, group: str, count: int) -> tuple[list[InFlight], int, int, int]:
        """Return the oldest deliveries of a group; the numbers of all, of messages that wait, and of expired ones."""
        oldest: list[InFlight] = []
        in_flight = waiting = expired = 0
        for tracked in self.of_group(group):
            with tracked.lock:
                state = tracked.state
                in_flight, waiting = in_flight + len(state.in_flight), waiting + len(state.waiting)
                expired += state.expired
                found = [
                    InFlight(tracked.queue, at, delivery, state.waiting_in(delivery.group or ""))
                    for at, delivery in state.in_flight.items()
                ]
            oldest = heapq.nsmallest(count, [*oldest, *found], key=lambda each: each.since_ms)
        return oldest, in_flight, waiting, expired

    def drop(self, key: QueueKey) -> None:
        """Forget a queue."""
        with self._lock:
            self._queues.pop(key, None)
            of_group = self._of_group.get(key.group, {})
            of_group.pop(key, None)
            if not of_group:
                self._of_group.pop(key.group, None)

    def clear(self) -> None:
        """Forget all queues of an earlier run."""
        for tracked in self:
            self.drop(tracked.key)

    # --- with the lock of the queue ------------------------------------------------------------

    def begin(self, tracked: TrackedQueue, now_ms: int, *, from_last: bool) -> None:
        """Compare the state with the committed offset and with the queue, before a pop.

        The group may have been deleted, and a member that pulls may have committed an offset: that of the group is the
        higher one. After a power failure the queue may be shorter than before.
        """
        state, committed = tracked.state, self._offsets.offset(*tracked.key)
        if committed is None and tracked.committed is not None:
            state.reset(self._start(tracked.key, tracked.queue, from_last), now_ms)
        elif committed is not None and committed != tracked.committed and committed > state.next:
            state.read_to(min(committed, self._spans.max_offset(tracked.queue)))
        if state.next > (high := self._spans.max_offset(tracked.queue)):
            state.cut(high)
            self._offsets.commit(*tracked.key, state.base)
            committed = state.base
        tracked.committed = committed

    def settle(self, tracked: TrackedQueue) -> None:
        """Commit the offset, and schedule the next expiry, after a change.

        A higher offset is of a member that pulls, and stays. The state knows what is not done before it.
        """
        if tracked.is_gone:
            return
        state, committed = tracked.state, self._offsets.offset(*tracked.key)
        is_deleted = committed is None and tracked.committed is not None
        if not is_deleted and (committed is None or state.base > committed):
            tracked.committed = state.base
            self._offsets.commit(*tracked.key, state.base)
        due_ms = state.next_due_ms
        if due_ms is not None and (tracked.due_ms is None or due_ms < tracked.due_ms):
            tracked.due_ms = due_ms
            with self._lock:
                heapq.heappush(self._due, (due_ms, next(self._numbers), tracked))
                is_first = self._due[0][2] is tracked
            if is_first:
                self._wake()

    def has_offset(self, key: QueueKey) -> bool:
        """Return True if the group has a committed offset in a queue."""
        return self._offsets.offset(*key) is not None

    def reset(self, tracked: TrackedQueue, queue_offset: int, now_ms: int) -> None:
        """Forget the deliveries of a queue, and continue at *queue_offset*."""
        tracked.state.reset(queue_offset, now_ms)
        tracked.committed = queue_offset
        self._offsets.commit(*tracked.key, queue_offset)

    def is_forgotten(self, tracked: TrackedQueue) -> bool:
        """Return True if the offset of the group was deleted, as with its topic."""
        return tracked.committed is not None and self._offsets.offset(*tracked.key) is None

    # --- expiry --------------------------------------------------------------------------------

    def take_due(self, now_ms: int) -> TrackedQueue | None:
        """Return a queue with an expiry that is due. `settle` schedules its next one."""
        with self._lock:
            while self._due and self._due[0][0] <= now_ms:
                due_ms, _, tracked = heapq.heappop(self._due)
                if tracked.due_ms == due_ms:
                    tracked.due_ms = None
                    return tracked
        return None

    def next_due_ms(self) -> int | None:
        """Return the time of the next expiry; it may belong to a delivery that has ended."""
        with self._lock:
            return self._due[0][0] if self._due else None

    # --- forgetting ----------------------------------------------------------------------------

    def forget(self, belongs: Callable[[QueueKey], bool], now_ms: int) -> None:
        """Forget the queues for which *belongs* returns True. No acknowledgement of a delivery until now counts."""
        self.least_pop_ms = max(self.least_pop_ms, now_ms + 1)
        for tracked in self:
            if belongs(tracked.key):
                with tracked.lock:
                    self.least_pop_ms = max(self.least_pop_ms, tracked.state.newest_pop_ms + 1)
                    tracked.is_gone = True
                    tracked.state = PopQueue(0)
                    tracked.due_ms = None
                    self._note(tracked.key, [FORGOTTEN, self.least_pop_ms])
                self.drop(tracked.key)

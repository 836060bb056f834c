"""State of one queue for one group that reads it by POP. No store and no clock: times are arguments."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

Event: TypeAlias = list[Any]
"""A change of a queue, as JSON: its letter, then its values. See `PopQueue`."""
Note: TypeAlias = Callable[[Event], None]

MAX_WAITING = 4_096
"""Most messages of a queue that wait for earlier ones of their message groups; then no more are read."""

_STALE_ENTRIES = 64
_SPARSE = 4


def _ignore(event: Event) -> None:
    """Note nothing."""


class Delivery(NamedTuple):
    """A delivery that is not acknowledged. Messages that were delivered alike share one object.

    Attributes:
        pop_ms: Time of the delivery, which identifies it.
        visible_ms: Time from which the message is delivered again.
        session: Session that renews the delivery while it lasts; empty without one.
        group: Message group of an ordered delivery; None if it is not ordered.
        earlier: Earlier deliveries from the same queue offset that count as attempts.
        attempt_id: Id of an ordered pop; the client repeats it if it did not get the response.
        counts: The delivery counts as an attempt.
        client: The client that has the message, for operators; empty if it is not known, as after a restart.
        since_ms: Time since which that client has it. A change of the delivery keeps it; 0 if it is not known.
        is_received: The client is known to have the message: only then the session renews it, also after a restart.
    """

    pop_ms: int
    visible_ms: int
    session: str = ""
    group: str | None = None
    earlier: int = 0
    attempt_id: str = ""
    counts: bool = True
    client: str = ""
    since_ms: int = 0
    is_received: bool = True

    @property
    def attempts(self) -> int:
        """Number of deliveries that count, with this one."""
        return self.earlier + (1 if self.counts else 0)


class Waiting(NamedTuple):
    """A message that was read, and is neither delivered nor done.

    Attributes:
        group: Its message group. Messages without one form the group ``""``.
        earlier: Earlier deliveries that count.
        pop_ms: Time of the last delivery; 0 if there was none.
    """

    group: str
    earlier: int = 0
    pop_ms: int = 0


class AckResult(Enum):
    """Effect of an acknowledgement."""

    DONE = "done"
    REPEATED = "repeated"
    """The message was done before."""
    SUPERSEDED = "superseded"
    """There is a newer delivery, or none."""
    UNKNOWN = "unknown"
    """The queue offset was never delivered, as far as the queue knows."""


class _MessageGroup:
    """Messages of a message group.

    Attributes:
        delivered: Number of unacknowledged deliveries. While there are any, no other message is delivered.
        waiting: Queue offsets in order.
    """

    __slots__ = ("delivered", "waiting")

    def __init__(self) -> None:
        self.delivered = 0
        self.waiting: list[int] = []


class PopQueue:
    """Progress of a group in one queue.

    - ``base <= next``. Each queue offset between them is in flight, waiting or done; none before *base* is needed.
    - *base* and *next* grow, until `reset`.
    - A queue without unacknowledged messages takes some hundred bytes.
    - Not thread-safe.

    Each change is one of six events, which `apply` repeats: after the same events in the same order the state is the
    same. It also is if the first events are applied to a state that has them already, as after a snapshot.

    ===  =====================================================================  ========================================
    P    first and last queue offset, or all; pop_ms, visible_ms, session       a delivery that is not ordered
    O    [queue offset, message group, earlier] of each; pop_ms, visible_ms,    an ordered delivery
         session, attempt id; counts
    N    next                                                                   read to there
    W    queue offset, message group, earlier, pop_ms                           waits
    D    queue offsets                                                          done
    A    queue offset                                                           done before it is read
    R    queue offset, least_pop_ms                                             reset
    T    queue offset                                                           cut
    M    max_attempts                                                           set
    ===  =====================================================================  ========================================

    Args:
        note: Called with each event.

    Attributes:
        base: First queue offset that is not done: the committed offset.
        next: Next queue offset to read.
        in_flight: Unacknowledged deliveries by queue offset.
        waiting: Messages that were read and are to be delivered: those after an unacknowledged message of the same
            message group, and those whose delivery expired in order.
        acked_ahead: Queue offsets from *next* on that are done. A crash can lose a delivery but not its
            acknowledgement.
        max_attempts: Attempts after which a message is a dead letter.
        least_pop_ms: Earliest time of a delivery since the last reset. Deliveries before it have earlier times.
        newest_pop_ms: Time of the newest delivery.
        expired: Number of deliveries that expired.
    """

    __slots__ = (
        "_attempts",
        "_due",
        "_groups",
        "_note",
        "_ready",
        "acked_ahead",
        "base",
        "expired",
        "in_flight",
        "least_pop_ms",
        "max_attempts",
        "newest_pop_ms",
        "next",
        "waiting",
    )

    def __init__(self, start: int, note: Note = _ignore, least_pop_ms: int = 0) -> None:
        self._note = note
        self.least_pop_ms = self.newest_pop_ms = least_pop_ms
        self.max_attempts = 17
        self.expired = 0
        self._clear(start)

    def _clear(self, start: int) -> None:
        self.base = self.next = start
        self.in_flight: dict[int, Delivery] = {}
        self.waiting: dict[int, Waiting] = {}
        self.acked_ahead: set[int] | frozenset[int] = frozenset()
        self._due: list[tuple[int, int, int]] = []  # heap of visible_ms, first and last queue offset; may be stale
        self._groups: dict[str, _MessageGroup] = {}
        self._ready: list[tuple[int, str]] = []  # heap of first queue offset and message group; may be stale
        self._attempts: dict[str, list[int]] = {}

    # --- delivering ----------------------------------------------------------------------------

    def deliver(self, queue_offsets: Sequence[int], delivery: Delivery) -> None:
        """Note one delivery of these messages, in ascending order. It is not ordered."""
        if queue_offsets:
            first, last = queue_offsets[0], queue_offsets[-1]
            is_run = last - first + 1 == len(queue_offsets)
            offsets = [first, last] if is_run else [-1, *queue_offsets]
            self._note(["P", *_head(delivery), delivery.earlier, delivery.counts, *offsets])
            self._deliver(queue_offsets, delivery)

    def deliver_ordered(self, messages: Sequence[tuple[int, str, int]], delivery: Delivery) -> None:
        """Note one ordered delivery of messages: queue offset, message group, and earlier deliveries that count."""
        if messages:
            self._note(["O", *_head(delivery), delivery.attempt_id, delivery.counts, *messages])
            for queue_offset, group, earlier in messages:
                self._deliver([queue_offset], delivery._replace(group=group, earlier=earlier))

    def _deliver(self, queue_offsets: Sequence[int], delivery: Delivery) -> None:
        for queue_offset in queue_offsets:
            if self.waiting:
                self._remove_waiting(queue_offset)
            self._set(queue_offset, delivery)
        self.newest_pop_ms = max(self.newest_pop_ms, delivery.pop_ms)
        self._add_due(delivery.visible_ms, queue_offsets[0], queue_offsets[-1])

    def read_to(self, next_offset: int) -> None:
        """Note that all messages before *next_offset* were read: those not delivered and not waiting are done."""
        if next_offset > self.next:
            self._note(["N", next_offset])
            self.next = next_offset
            if self.acked_ahead:
                self.acked_ahead = {offset for offset in self.acked_ahead if offset >= next_offset}
            self._advance()

    def wait(self, queue_offset: int, waiting: Waiting) -> None:
        """Note that a message was read, and is delivered later. Its delivery ends, if there is one."""
        self._note(["W", queue_offset, *waiting])
        self._remove_in_flight(queue_offset)
        self._remove_waiting(queue_offset)
        self.waiting[queue_offset] = waiting
        group = self._group(waiting.group)
        insort(group.waiting, queue_offset)
        self._refresh(waiting.group, group)

    def same_attempt(self, attempt_id: str) -> list[int]:
        """Return the unacknowledged messages of an ordered pop that is repeated."""
        return sorted(self._attempts.get(attempt_id, ())) if attempt_id else []

    def has_attempt(self, attempt_id: str) -> bool:
        """Return True if an ordered pop has unacknowledged messages."""
        return attempt_id in self._attempts

    def waiting_in(self, group: str) -> int:
        """Return how many messages wait for the unacknowledged ones of a message group."""
        found = self._groups.get(group)
        return len(found.waiting) if found is not None and found.delivered else 0

    def is_blocked(self, group: str) -> bool:
        """Return True if an earlier message of a message group is unacknowledged."""
        found = self._groups.get(group)
        return found is not None and found.delivered > 0

    def deliverable(self, count: int, *, is_ordered: bool) -> list[int]:
        """Return up to *count* messages that wait and can be delivered now, in order."""
        if not self.waiting:
            return []
        if not is_ordered:
            return sorted(self.waiting)[:count]
        found: list[int] = []
        first_of: dict[str, int] = {}
        further: list[tuple[int, str, int]] = []  # heap of the next queue offset of each group that was taken
        while len(found) < count:
            ready = self._first_ready(first_of)
            if further and (ready is None or further[0][0] < ready[0]):
                at, name, index = heapq.heappop(further)
            elif ready is not None:
                at, name, index = *heapq.heappop(self._ready), 0
                first_of[name] = at
            else:
                break
            found.append(at)
            waiting = self._groups[name].waiting
            if index + 1 < len(waiting):
                heapq.heappush(further, (waiting[index + 1], name, index + 1))
        for name, at in first_of.items():  # they stay ready until they are delivered
            heapq.heappush(self._ready, (at, name))
        return found

    def waiting_by_group(self) -> dict[str, list[int]]:
        """Return the messages that wait, in order, by message group."""
        return {name: list(group.waiting) for name, group in self._groups.items() if group.waiting}

    def _first_ready(self, taken: Container[str]) -> tuple[int, str] | None:
        """Return the first message group that can be delivered and was not taken; drop stale entries before it."""
        while self._ready:
            at, name = self._ready[0]
            group = self._groups.get(name)
            if name not in taken and group is not None and not group.delivered and group.waiting[:1] == [at]:
                return at, name
            heapq.heappop(self._ready)
        return None

    # --- ending --------------------------------------------------------------------------------

    def ack(self, queue_offset: int, pop_ms: int) -> AckResult:
        """End a delivery. The message is never delivered again if the result is `AckResult.DONE`."""
        return self.ack_all([(queue_offset, pop_ms)])[0]

    def ack_all(self, deliveries: Sequence[tuple[int, int]]) -> list[AckResult]:
        """End deliveries, given by queue offset and pop_ms, with one event. Return the result of each as by `ack`."""
        ended: dict[int, None] = {}
        results = []
        for queue_offset, pop_ms in deliveries:
            # In `waiting` is a message whose delivery expired just now.
            found = self.in_flight.get(queue_offset) or self.waiting.get(queue_offset)
            if queue_offset in ended:
                results.append(AckResult.REPEATED)
            elif found is not None and pop_ms and found.pop_ms == pop_ms:
                ended[queue_offset] = None
                results.append(AckResult.DONE)
            elif found is not None:
                results.append(AckResult.SUPERSEDED)
            elif queue_offset < self.next or queue_offset in self.acked_ahead:
                results.append(AckResult.REPEATED)
            else:
                results.append(AckResult.UNKNOWN if pop_ms >= self.least_pop_ms else AckResult.SUPERSEDED)
        if ended:
            self.done(list(ended))
        return results

    def ack_ahead(self, queue_offset: int) -> None:
        """Note that a message is done that was not read yet."""
        self._note(["A", queue_offset])
        self.acked_ahead = {*self.acked_ahead, queue_offset}

    def done(self, queue_offsets: Sequence[int], *, is_noted: bool = False) -> None:
        """Note that these messages are done.

        Args:
            is_noted: The caller has noted the event.
        """
        if not is_noted:
            self._note(["D", *queue_offsets])
        for queue_offset in queue_offsets:
            self._remove_in_flight(queue_offset)
            if self.waiting:
                self._remove_waiting(queue_offset)
        if self.base in queue_offsets:
            self._advance()

    def change(self, queue_offset: int, pop_ms: int, changed: Delivery) -> Delivery | None:
        """Replace the delivery of *pop_ms*; its message group and its attempts stay.

        Returns:
            The new delivery; None if there is a newer one, or none.
        """
        delivery = self.in_flight.get(queue_offset)
        if delivery is None:
            waiting = self.waiting.get(queue_offset)
            if waiting is None or not pop_ms or waiting.pop_ms != pop_ms:
                return None
            delivery = Delivery(pop_ms, 0, group=waiting.group, earlier=max(waiting.earlier - 1, 0))
        elif delivery.pop_ms != pop_ms:
            return None
        changed = changed._replace(
            group=delivery.group,
            earlier=delivery.earlier,
            attempt_id=delivery.attempt_id,
            client=delivery.client,
            since_ms=delivery.since_ms,
        )
        if delivery.group is None:
            self.deliver([queue_offset], changed)
        else:
            self.deliver_ordered([(queue_offset, delivery.group, delivery.earlier)], changed)
        return changed

    def received(self, deliveries: Sequence[tuple[int, int]], renewed_ms: int) -> None:
        """Note that clients have messages, given by queue offset and pop_ms: their sessions renew the deliveries.

        Args:
            renewed_ms: Time for which a session renews a delivery.
        """
        alike: dict[Delivery, list[int]] = {}
        for queue_offset in self.unreceived(deliveries):
            alike.setdefault(self.in_flight[queue_offset], []).append(queue_offset)
        for delivery, offsets in alike.items():
            visible_ms = max(delivery.visible_ms, delivery.since_ms + renewed_ms)
            renewed = delivery._replace(visible_ms=visible_ms, is_received=True)
            if delivery.group is None:
                self.deliver(sorted(offsets), renewed)
            else:
                self.deliver_ordered([(at, delivery.group, delivery.earlier) for at in offsets], renewed)

    def unreceived(self, deliveries: Sequence[tuple[int, int]]) -> list[int]:
        """Return the queue offsets of those deliveries that their session does not renew yet."""
        return [
            queue_offset
            for queue_offset, pop_ms in deliveries
            if (found := self.in_flight.get(queue_offset)) is not None
            and found.pop_ms == pop_ms
            and found.session
            and not found.is_received
        ]

    def wait_again(self, queue_offset: int, *, counts: bool = True, key: str = "") -> None:
        """End a delivery, and let its message wait for the next one.

        Args:
            counts: False if the message did not reach its client.
            key: Key by which a message without an order takes turns.
        """
        delivery = self.in_flight[queue_offset]
        earlier = delivery.attempts if counts else delivery.earlier
        group = key if delivery.group is None else delivery.group
        self.wait(queue_offset, Waiting(group, earlier, delivery.pop_ms))

    def reset(self, queue_offset: int, now_ms: int = 0) -> None:
        """Forget all deliveries until *now_ms*, and continue at *queue_offset*. No acknowledgement of them counts."""
        self._reset(queue_offset, max(self.newest_pop_ms, now_ms) + 1)

    def _reset(self, queue_offset: int, least_pop_ms: int) -> None:
        self.least_pop_ms = max(self.least_pop_ms, least_pop_ms)
        self._note(["R", queue_offset, self.least_pop_ms])
        self._clear(queue_offset)

    def cut(self, end: int) -> None:
        """Forget all from *end* on, since the queue ends there after a power failure."""
        self._note(["T", end])
        for queue_offset in [at for at in (*self.in_flight, *self.waiting) if at >= end]:
            self._remove_in_flight(queue_offset)
            self._remove_waiting(queue_offset)
        self.acked_ahead = frozenset()
        self.next, self.base = min(self.next, end), min(self.base, end)
        self._advance()

    def limit_attempts(self, max_attempts: int) -> None:
        """Set the number of attempts after which a message is a dead letter."""
        if max_attempts != self.max_attempts:
            self._note(["M", max_attempts])
            self.max_attempts = max_attempts

    # --- expiry --------------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int | None:
        """Time of the next expiry; it may belong to a delivery that has ended."""
        return self._due[0][0] if self._due else None

    def take_due(self, now_ms: int, limit: int) -> list[tuple[int, Delivery]]:
        """Return up to *limit* expired deliveries, which stay in flight. End each of them, or call `schedule`."""
        found: dict[int, Delivery] = {}  # a changed delivery has two entries
        while self._due and self._due[0][0] <= now_ms and len(found) < limit:
            visible_ms, first, last = heapq.heappop(self._due)
            for queue_offset in range(first, last + 1):
                delivery = self.in_flight.get(queue_offset)
                if delivery is None or delivery.visible_ms > now_ms:
                    continue
                if len(found) == limit:
                    heapq.heappush(self._due, (visible_ms, queue_offset, last))
                    break
                found[queue_offset] = delivery
        return list(found.items())

    def schedule(self, queue_offset: int, due_ms: int) -> None:
        """Return an expired delivery from `take_due` again, at *due_ms*."""
        heapq.heappush(self._due, (due_ms, queue_offset, queue_offset))

    def _add_due(self, visible_ms: int, first: int, last: int) -> None:
        if len(self._due) > 2 * len(self.in_flight) + _STALE_ENTRIES:
            self._due = sorted((each.visible_ms, at, at) for at, each in self.in_flight.items())
        heapq.heappush(self._due, (visible_ms, first, last))

    # --- inside --------------------------------------------------------------------------------

    def _set(self, queue_offset: int, delivery: Delivery) -> None:
        if queue_offset in self.in_flight:
            self._remove_in_flight(queue_offset)
        self.in_flight[queue_offset] = delivery
        if delivery.group is not None:
            self._group(delivery.group).delivered += 1
            if delivery.attempt_id:
                self._attempts.setdefault(delivery.attempt_id, []).append(queue_offset)

    def _remove_in_flight(self, queue_offset: int) -> Delivery | None:
        delivery = self.in_flight.pop(queue_offset, None)
        if delivery is not None and delivery.group is not None:
            group = self._groups[delivery.group]
            group.delivered -= 1
            self._refresh(delivery.group, group)
            if (offsets := self._attempts.get(delivery.attempt_id)) is not None:
                offsets.remove(queue_offset)
                if not offsets:
                    del self._attempts[delivery.attempt_id]
        return delivery

    def _remove_waiting(self, queue_offset: int) -> None:
        waiting = self.waiting.pop(queue_offset, None)
        if waiting is not None:
            group = self._groups[waiting.group]
            del group.waiting[bisect_left(group.waiting, queue_offset)]
            self._refresh(waiting.group, group)

    def _group(self, name: str) -> _MessageGroup:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _MessageGroup()
        return group

    def _refresh(self, name: str, group: _MessageGroup) -> None:
        """Forget a message group without messages, or note that it can be delivered."""
        if group.delivered:
            return
        if not group.waiting:
            del self._groups[name]
            return
        if len(self._ready) > 2 * len(self._groups) + _STALE_ENTRIES:
            groups = self._groups.items()
            self._ready = sorted(
                (each.waiting[0], other) for other, each in groups if each.waiting and not each.delivered
            )
            return
        heapq.heappush(self._ready, (group.waiting[0], name))

    def _advance(self) -> None:
        in_flight, waiting = self.in_flight, self.waiting
        count = len(in_flight) + len(waiting)
        if not count:
            self.base = self.next
        elif self.next - self.base > _SPARSE * count + _STALE_ENTRIES:
            self.base = min(min(in_flight, default=self.next), min(waiting, default=self.next))
        else:
            while self.base < self.next and self.base not in in_flight and self.base not in waiting:
                self.base += 1

    # --- events and snapshots ------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Repeat an event. One of another form raises `ValueError`, `TypeError`, `IndexError` or `KeyError`."""
        match event:
            case ["P", pop_ms, visible_ms, session, earlier, counts, first, *rest]:
                delivery = Delivery(int(pop_ms), int(visible_ms), str(session), None, int(earlier), "", bool(counts))
                offsets = range(int(first), int(rest[0]) + 1) if first >= 0 else map(int, rest)
                self.deliver([at for at in offsets if at >= self.base], delivery)
            case ["O", pop_ms, visible_ms, session, attempt_id, counts, *messages]:
                delivery = Delivery(int(pop_ms), int(visible_ms), str(session), "", 0, str(attempt_id), bool(counts))
                found = [(int(at), str(group), int(earlier)) for at, group, earlier in messages]
                self.deliver_ordered([each for each in found if each[0] >= self.base], delivery)
            case ["N", next_offset]:
                self.read_to(int(next_offset))
            case ["W", at, group, earlier, pop_ms]:
                if at >= self.base:
                    self.wait(int(at), Waiting(str(group), int(earlier), int(pop_ms)))
            case ["D", *offsets]:
                self.done(list(map(int, offsets)))
            case ["A", at]:
                if at >= self.next:
                    self.ack_ahead(int(at))
            case ["R", at, *least]:
                self._reset(int(at), *map(int, least or (0,)))
            case ["T", at]:
                self.cut(int(at))
            case ["M", max_attempts]:
                self.limit_attempts(int(max_attempts))
            case _:
                raise ValueError(f"unknown event {event!r}"[:200])

    def snapshot(self) -> list[Event]:
        """Return events that lead from a new queue to this state."""
        events: list[Event] = [["R", self.base, self.least_pop_ms], ["M", self.max_attempts]]
        for at, delivery in self.in_flight.items():
            head, earlier, counts = _head(delivery), delivery.earlier, delivery.counts
            if delivery.group is None:
                events.append(["P", *head, earlier, counts, at, at])
            else:
                events.append(["O", *head, delivery.attempt_id, counts, [at, delivery.group, earlier]])
        events += [["W", at, *waiting] for at, waiting in self.waiting.items()]
        events.append(["N", self.next])  # after the deliveries: without them all before it would be done
        events += [["A", at] for at in sorted(self.acked_ahead)]
        return events


def _head(delivery: Delivery) -> tuple[int, int, str]:
    """Return the first values of an event. After a restart no session renews what its client may never have got."""
    return delivery.pop_ms, delivery.visible_ms, delivery.session if delivery.is_received else ""

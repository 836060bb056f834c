"""The progress of a group in one queue: no loss, no delivery of what is done, and the order of message groups."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtemplate.engine.pop.pop_queue import AckResult, Delivery, Event, PopQueue, Waiting
from tests.thirds import examples


def deliver(queue: PopQueue, *offsets: int, pop_ms: int = 1, visible_ms: int = 100) -> None:
    queue.deliver(offsets, Delivery(pop_ms, visible_ms))
    queue.read_to(max(offsets) + 1)


def deliver_ordered(queue: PopQueue, *messages: tuple[int, str], pop_ms: int = 1, attempt_id: str = "") -> None:
    queue.deliver_ordered(
        [(at, group, 0) for at, group in messages], Delivery(pop_ms, pop_ms + 100, attempt_id=attempt_id)
    )
    queue.read_to(max(at for at, _ in messages) + 1)


def contents(queue: PopQueue) -> tuple[object, ...]:
    """Return what a restart keeps: of a session, only the deliveries that its client is known to have."""
    in_flight = {
        at: each._replace(session=each.session if each.is_received else "", since_ms=0, is_received=True)
        for at, each in queue.in_flight.items()
    }
    return queue.base, queue.next, in_flight, queue.waiting, set(queue.acked_ahead), queue.max_attempts


def test_the_base_is_the_first_message_that_is_not_done() -> None:
    queue = PopQueue(10)
    deliver(queue, 10, 11, 12)

    queue.done([11])
    assert queue.base == 10
    queue.done([10])
    assert queue.base == 12
    queue.done([12])
    assert queue.base == queue.next == 13


def test_messages_that_are_read_and_not_delivered_are_done() -> None:
    queue = PopQueue(0)

    deliver(queue, 2, 5)

    assert queue.base == 2
    assert queue.ack(3, 1) is AckResult.REPEATED
    queue.done([2])
    assert queue.base == 5


def test_only_the_newest_delivery_can_be_acknowledged() -> None:
    queue = PopQueue(0)
    deliver(queue, 0, pop_ms=1)
    deliver(queue, 0, pop_ms=2)

    assert queue.ack(0, 1) is AckResult.SUPERSEDED
    assert queue.ack(0, 2) is AckResult.DONE
    assert queue.ack(0, 2) is AckResult.REPEATED
    assert queue.ack(1, 2) is AckResult.UNKNOWN


def test_expired_deliveries_are_taken_in_time_and_in_parts() -> None:
    queue = PopQueue(0)
    deliver(queue, 0, 1, 2, visible_ms=50)
    deliver(queue, 3, visible_ms=40)
    queue.done([1])

    assert queue.next_due_ms == 40
    assert queue.take_due(39, 10) == []
    assert [at for at, _ in queue.take_due(60, 2)] == [3, 0]
    assert [at for at, _ in queue.take_due(60, 2)] == [2]
    assert queue.take_due(60, 2) == []


def test_a_changed_delivery_expires_at_its_new_time() -> None:
    queue = PopQueue(0)
    deliver(queue, 0, pop_ms=1, visible_ms=50)

    assert queue.change(0, 2, Delivery(3, 80)) is None
    assert queue.change(0, 1, Delivery(3, 80)) == Delivery(3, 80)

    assert queue.take_due(79, 10) == []
    assert queue.take_due(80, 10) == [(0, Delivery(3, 80))]


def test_stale_times_do_not_accumulate() -> None:
    queue = PopQueue(0)
    for pop_ms in range(1, 2_000):
        deliver(queue, 0, pop_ms=pop_ms, visible_ms=10_000 + pop_ms)

    assert len(queue._due) < 100


# --- order -----------------------------------------------------------------------------------------


def test_a_message_group_waits_for_its_unacknowledged_message_and_no_other_group_does() -> None:
    queue = PopQueue(0)
    deliver_ordered(queue, (0, "a"))
    assert queue.is_blocked("a")
    assert not queue.is_blocked("b")
    queue.wait(1, Waiting("a"))
    queue.read_to(2)

    assert queue.deliverable(10, is_ordered=True) == []
    queue.done([0])

    assert queue.deliverable(10, is_ordered=True) == [1]
    assert queue.base == 1


def test_waiting_messages_of_several_groups_are_delivered_in_the_order_of_the_queue() -> None:
    queue = PopQueue(0)
    deliver_ordered(queue, (0, "a"), (1, "b"))
    for at, group in [(2, "b"), (3, "a"), (4, "b"), (5, "a")]:
        queue.wait(at, Waiting(group))
    queue.read_to(6)
    queue.done([0, 1])

    assert queue.deliverable(3, is_ordered=True) == [2, 3, 4]
    assert queue.deliverable(10, is_ordered=True) == [2, 3, 4, 5]


def test_an_expired_message_is_delivered_before_the_later_ones_of_its_group() -> None:
    queue = PopQueue(0)
    deliver_ordered(queue, (0, "a"), (1, "a"))
    queue.wait(2, Waiting("a"))
    queue.read_to(3)

    queue.wait_again(1)
    assert queue.deliverable(10, is_ordered=True) == []
    queue.wait_again(0)

    assert queue.deliverable(10, is_ordered=True) == [0, 1, 2]
    assert queue.waiting[0] == Waiting("a", 1, 1)


def test_an_expired_delivery_can_be_acknowledged_until_there_is_a_newer_one() -> None:
    queue = PopQueue(0)
    deliver_ordered(queue, (0, "a"), (1, "a"))
    queue.wait_again(0)
    queue.wait_again(1)

    assert queue.ack(0, 1) is AckResult.DONE
    queue.deliver_ordered([(1, "a", 1)], Delivery(7, 100))
    assert queue.ack(1, 1) is AckResult.SUPERSEDED


def test_a_repeated_attempt_names_its_unacknowledged_messages() -> None:
    queue = PopQueue(0)
    deliver_ordered(queue, (0, "a"), (1, "b"), (2, "a"), attempt_id="one")
    queue.done([1])

    assert queue.same_attempt("one") == [0, 2]
    assert queue.same_attempt("two") == []
    queue.done([0, 2])
    assert queue.same_attempt("one") == []


def test_after_a_power_failure_the_rest_of_a_shorter_queue_is_forgotten() -> None:
    queue = PopQueue(0)
    deliver(queue, 0, 1, 2, 3)
    queue.done([1])

    queue.cut(2)

    assert contents(queue)[:3] == (0, 2, {0: Delivery(1, 100)})


@pytest.mark.parametrize("event", [["X"], [], ["N"], ["P", 1], ["N", "x"]])
def test_an_unknown_event_is_refused(event: Event) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        PopQueue(0).apply(event)


# --- any sequence ----------------------------------------------------------------------------------

GROUPS = "abc"
RENEWED_MS = 1_000


class AnyProgress(RuleBasedStateMachine):
    """Pops, acknowledgements, changes, expiries, resets and restarts in any order, with and without message groups.

    The queue has one message in each group in turn. A message is delivered once at a time, never after it was
    acknowledged, and in the order of its group if all pops are ordered. After a reset all of that starts again, and no
    delivery from before counts.

    A client may get the response to its pop or not, which the queue finds out later, or never. A message that its
    client does not have comes again after its invisible time, whatever happens in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.queue = PopQueue(0, lambda event: self.events.append(json.loads(json.dumps(event))))
        self.now_ms = 1
        self.end = 0
        self.acked: set[int] = set()
        self.copied: set[int] = set()
        self.skipped: set[int] = set()
        self.base = 0
        self.before_reset: list[tuple[int, int]] = []
        self.latest: dict[tuple[int, int], int] = {}  # offset and pop_ms of what a client may not have -> visible_ms
        self.snapshot: tuple[list[Event], int] = ([], 0)

    @staticmethod
    def group(offset: int) -> str:
        return GROUPS[offset * 7 % 5 % 3]

    @rule(count=st.integers(1, 8))
    def send(self, count: int) -> None:
        self.end += count

    @rule(
        count=st.integers(1, 5),
        selected=st.integers(1, 3),
        invisible_ms=st.integers(1, 20),
        session=st.sampled_from(["", "one", "two"]),
    )
    def pop(self, count: int, selected: int, invisible_ms: int, session: str) -> None:
        found = self.queue.deliverable(count, is_ordered=False)
        at = self.queue.next
        while at < self.end and len(found) < count:
            if at not in self.queue.acked_ahead:
                if at % selected == 0:
                    found.append(at)
                else:
                    self.skipped.add(at)
            at += 1
        self.check_delivery(found)
        self.queue.deliver(found, self.delivery(found, invisible_ms, session))
        self.queue.read_to(at)
        self.now_ms += 1

    @rule(count=st.integers(1, 5), invisible_ms=st.integers(1, 20), session=st.sampled_from(["", "one", "two"]))
    def pop_in_order(self, count: int, invisible_ms: int, session: str) -> None:
        found = self.queue.deliverable(count, is_ordered=True)
        at = self.queue.next
        while at < self.end and len(found) < count:
            if at not in self.queue.acked_ahead:
                if self.queue.is_blocked(self.group(at)):
                    self.queue.wait(at, Waiting(self.group(at)))
                else:
                    found.append(at)
            at += 1
        self.check_delivery(found)
        messages = []
        for offset in found:
            earlier = [other for other in range(offset) if self.group(other) == self.group(offset)]
            pending = {*self.queue.waiting, *range(self.queue.next, self.end)}
            in_order = {other for other, each in self.queue.in_flight.items() if each.group == self.group(offset)}
            assert in_order.isdisjoint(earlier)
            assert pending.intersection(earlier) - self.queue.acked_ahead <= set(found)
            waiting = self.queue.waiting.get(offset, Waiting(self.group(offset)))
            messages.append((offset, waiting.group, waiting.earlier))
        self.queue.deliver_ordered(messages, self.delivery(found, invisible_ms, session))
        self.queue.read_to(at)
        self.now_ms += 1

    def delivery(self, found: list[int], invisible_ms: int, session: str) -> Delivery:
        pop_ms, visible_ms = max(self.now_ms, self.queue.least_pop_ms), self.now_ms + invisible_ms
        self.latest |= dict.fromkeys([(offset, pop_ms) for offset in found], visible_ms)
        return Delivery(pop_ms, visible_ms, session, since_ms=self.now_ms, is_received=not session)

    @precondition(lambda self: self.queue.in_flight)
    @rule(data=st.data())
    def find_receipt(self, data: st.DataObject) -> None:
        """Clients have some of the messages: their sessions renew them."""
        offsets = data.draw(st.sets(st.sampled_from(sorted(self.queue.in_flight)), min_size=1))
        found = [(offset, self.queue.in_flight[offset].pop_ms) for offset in offsets]
        for offset, pop_ms in found:
            if self.queue.in_flight[offset].session:
                self.latest.pop((offset, pop_ms), None)
        self.queue.received(found, RENEWED_MS)
        assert not self.queue.unreceived(found)

    @rule(session=st.sampled_from(["one", "two"]))
    def continue_session(self, session: str) -> None:
        """The client is here again after a restart, or is still here."""
        for offset, each in list(self.queue.in_flight.items()):
            if each.session == session and each.is_received:
                renewed = each._replace(visible_ms=each.pop_ms + RENEWED_MS)
                assert self.queue.change(offset, each.pop_ms, renewed) is not None
                self.latest.pop((offset, each.pop_ms), None)

    def check_delivery(self, found: list[int]) -> None:
        assert len(set(found)) == len(found)
        assert self.acked.isdisjoint(found)
        assert self.copied.isdisjoint(found)
        assert self.queue.in_flight.keys().isdisjoint(found)

    @precondition(lambda self: self.queue.in_flight)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.queue.in_flight)))
        assert self.queue.ack(offset, self.queue.in_flight[offset].pop_ms) is AckResult.DONE
        self.acked.add(offset)

    @precondition(lambda self: self.queue.in_flight)
    @rule(data=st.data(), visible=st.integers(-5, 20))
    def change(self, data: st.DataObject, visible: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.queue.in_flight)))
        pop_ms = self.queue.in_flight[offset].pop_ms
        changed = Delivery(max(self.now_ms, pop_ms + 1), self.now_ms + visible)
        assert self.queue.change(offset, pop_ms, changed) is not None
        self.latest.pop((offset, pop_ms), None)  # the client has it
        self.now_ms += 1

    @rule(passed_ms=st.integers(0, 15))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        for offset, delivery in self.queue.take_due(self.now_ms, 1_000):
            assert delivery.visible_ms <= self.now_ms
            if delivery.group is None:
                self.queue.done([offset])
                self.copied.add(offset)
            else:
                self.queue.wait_again(offset)
        assert all(each.visible_ms > self.now_ms for each in self.queue.in_flight.values())

    @precondition(lambda self: self.queue.next < self.end)
    @rule()
    def ack_of_a_lost_delivery(self) -> None:
        self.queue.ack_ahead(self.end - 1)
        self.acked.add(self.end - 1)

    @precondition(lambda self: self.end)
    @rule(data=st.data(), back_ms=st.integers(0, 3))
    def reset(self, data: st.DataObject, back_ms: int) -> None:
        """An administrator lets the group continue anywhere. The clock may go back a little before the next pop."""
        at = data.draw(st.integers(0, self.end))
        self.before_reset = [(offset, each.pop_ms) for offset, each in self.queue.in_flight.items()]
        self.queue.reset(at, self.now_ms)
        self.acked, self.copied = ({each for each in found if each < at} for found in (self.acked, self.copied))
        self.skipped = {*range(at)} - self.acked - self.copied
        self.base = at
        self.now_ms = max(1, self.now_ms - back_ms)

    @precondition(lambda self: self.before_reset)
    @rule(data=st.data())
    def ack_of_a_delivery_before_a_reset(self, data: st.DataObject) -> None:
        offset, pop_ms = data.draw(st.sampled_from(self.before_reset))
        assert self.queue.ack(offset, pop_ms) in (AckResult.SUPERSEDED, AckResult.REPEATED)
        assert self.queue.change(offset, pop_ms, Delivery(self.now_ms, self.now_ms + 10)) is None

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = json.loads(json.dumps(self.queue.snapshot())), len(self.events)

    @rule(lost=st.integers(0, 6))
    def restart(self, lost: int) -> None:
        """Events from before the snapshot are applied again, as far back as *lost*."""
        before = contents(self.queue)
        state, at = self.snapshot
        events, self.events = self.events, []
        queue = PopQueue(0)
        for event in [*state, *events[max(at - lost, 0) :]] if state else events:
            queue.apply(event)
        if not state or lost == 0:
            assert contents(queue) == before
        assert contents(queue)[:4] == before[:4]
        assert queue.least_pop_ms == self.queue.least_pop_ms
        self.queue = PopQueue(0, lambda event: self.events.append(json.loads(json.dumps(event))))
        for event in queue.snapshot():
            self.queue.apply(event)
        self.snapshot = ([], 0)

    @invariant()
    def each_message_is_in_one_state(self) -> None:
        queue = self.queue
        assert self.base <= queue.base <= queue.next <= self.end
        self.base = queue.base
        done = set(range(queue.next)) - queue.in_flight.keys() - queue.waiting.keys()
        assert done | queue.acked_ahead == self.acked | self.copied | (self.skipped & done)
        assert queue.in_flight.keys().isdisjoint(queue.waiting)
        assert queue.base == min([queue.next, *queue.in_flight, *queue.waiting])
        due = [first for _, first, _ in queue._due]
        assert not queue.in_flight or due
        for offset, each in queue.in_flight.items():
            assert each.visible_ms <= self.latest.get((offset, each.pop_ms), each.visible_ms)


TestAnyProgress = AnyProgress.TestCase
TestAnyProgress.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)

"""Pending messages of both brokers during a hand-over: one list, one count, and changes wherever a message is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, ReserveFilter, TransitMessage
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChangeStatus
from tests.handover.brokers import MOVES, TwoBrokers

SECOND, HOUR = 1_000, 3_600_000
ALL = PendingQuery(topic="orders")


@pytest.fixture
def brokers() -> Iterator[TwoBrokers]:
    brokers = TwoBrokers()
    brokers.both.start()
    yield brokers
    brokers.close()


@pytest.fixture
def moving() -> Iterator[TwoBrokers]:
    brokers = TwoBrokers(options=MOVES)
    yield brokers
    brokers.close()


def delay_new(brokers: TwoBrokers, body: str, delay_ms: int, key: str = "") -> str:
    properties = {Property.TIMER_DELAY_MS: str(delay_ms)} | ({Property.KEYS: key} if key else {})
    handle = brokers.both.sends.send(Message("orders", body.encode(), properties)).handle
    assert handle is not None
    return handle


def reserved(brokers: TwoBrokers) -> None:
    """Reserve all messages, as a mover does that is killed before it sends them."""
    part, now_ms = brokers.old.hand_over, brokers.clock.now_ms()
    part.begin(brokers.options.target)
    assert part.lock("killed", SECOND)
    part.reserve("killed", 100, ReserveFilter(after_ms=now_ms, before_ms=now_ms + 30 * HOUR))


# --- queries --------------------------------------------------------------------------------------


def test_pending_lists_both_brokers_in_order_of_due_time(brokers: TwoBrokers) -> None:
    brokers.delay_old("orders", "1", 1 * HOUR)
    delay_new(brokers, "2", 2 * HOUR)
    brokers.delay_old("orders", "3", 3 * HOUR)

    page = brokers.both.delayed.pending(ALL)

    start_ms = brokers.clock.now_ms()
    assert [message.deliver_ms - start_ms for message in page.messages] == [1 * HOUR, 2 * HOUR, 3 * HOUR]
    assert [message.broker for message in page.messages] == ["old:broker-a", "broker-a", "old:broker-a"]
    assert page.cursor is None


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 100])
def test_pages_of_any_size_have_each_message_once(brokers: TwoBrokers, page_size: int) -> None:
    """Equal due times at both brokers, and long runs at one of them."""
    delays = [1, 1, 1, 2, 5, 5, 6, 7, 8, 9, 9, 12]
    for number, delay in enumerate(delays):
        brokers.delay_old("orders", f"old {number}", delay * HOUR)
        if number % 3 == 0:
            delay_new(brokers, f"new {number}", delay * HOUR)

    found: list[PendingMessage] = []
    cursor: str | None = None
    while True:
        page = brokers.both.delayed.pending(ALL, page_size, cursor)
        assert len(page.messages) <= page_size
        found += page.messages
        if (cursor := page.cursor) is None:
            break

    assert len({message.msg_id for message in found}) == len(found) == 16
    assert [message.deliver_ms for message in found] == sorted(message.deliver_ms for message in found)


def test_counts_are_of_both_brokers(brokers: TwoBrokers) -> None:
    for delay in (1, 1, 2):
        brokers.delay_old("orders", "old", delay * HOUR)
        delay_new(brokers, "new", delay * HOUR)

    counts = brokers.both.delayed.count_pending(ALL, HOUR)

    assert counts.total == 6
    assert list(counts.buckets.values()) == [4, 2]


def test_a_message_in_transit_is_listed_and_counted(moving: TwoBrokers) -> None:
    """It is pending at neither broker: the mover that took it was killed."""
    moving.delay_old("orders", "in transit", 2 * HOUR, key="o-1")
    moving.delay_old("orders", "another", 2 * HOUR, key="o-2")
    reserved(moving)
    moving.both.start()
    delay_new(moving, "new", 1 * HOUR)

    pages = [moving.both.delayed.pending(ALL, 2)]
    pages.append(moving.both.delayed.pending(ALL, 2, pages[0].cursor))

    listed = [message for page in pages for message in page.messages]
    assert [message.keys for message in listed if message.broker == "old:broker-a"] == ["o-1", "o-2"]
    assert len(listed) == 3
    assert pages[1].cursor is None
    assert moving.both.delayed.count_pending(PendingQuery(key="o-1")).total == 1


def test_a_message_that_moves_while_it_is_listed_is_listed_once(moving: TwoBrokers) -> None:
    """The mover works after the old broker has been asked, and before the new one is."""
    moving.delay_old("orders", "moves", 2 * HOUR, key="o-1")
    moving.both.start()
    harness, list_transit = moving.harness(), moving.old.hand_over.transit
    calls: list[int] = []

    def transit(max_count: int = 1_000) -> list[TransitMessage]:
        calls.append(max_count)
        if len(calls) == 1:
            harness.advance("10s")
        return list_transit(max_count)

    moving.old.hand_over.transit = transit  # type: ignore[method-assign]
    page = moving.both.delayed.pending(ALL)

    assert [(message.keys, message.broker) for message in page.messages] == [("o-1", "broker-a")]


def test_the_error_of_a_cursor_says_which_one_to_pass(brokers: TwoBrokers) -> None:
    with pytest.raises(MessageError, match="is not a cursor of a page .* pass the cursor of the page before, or None"):
        brokers.both.delayed.pending(ALL, 10, "next")


def test_positions_in_files_are_refused(brokers: TwoBrokers) -> None:
    with pytest.raises(UnsupportedError, match="during a hand-over there are two; read one of them by its own address"):
        brokers.both.delayed.pending_positions(ALL, (-1, -1), 10)


# --- changes --------------------------------------------------------------------------------------


def test_a_handle_cancels_the_message_where_it_is(brokers: TwoBrokers) -> None:
    old, new = brokers.delay_old("orders", "old", HOUR), delay_new(brokers, "new", HOUR)

    of_old, of_new = brokers.both.delayed.cancel(old), brokers.both.delayed.cancel(new)

    assert (of_old.status, of_old.count, of_old.broker) == (ScheduleChangeStatus.CANCELLED, 1, "old:broker-a")
    assert (of_new.status, of_new.count, of_new.broker) == (ScheduleChangeStatus.CANCELLED, 1, "broker-a")
    assert brokers.both.delayed.count_pending(ALL).total == 0


def test_handles_of_both_brokers_may_be_in_one_call(brokers: TwoBrokers) -> None:
    handles = [brokers.delay_old("orders", "old", HOUR), delay_new(brokers, "new", HOUR)]

    change = brokers.both.delayed.cancel(",".join(handles))

    assert (change.count, change.broker) == (2, "old:broker-a, broker-a")


def test_a_key_cancels_the_messages_of_both_brokers(brokers: TwoBrokers) -> None:
    brokers.delay_old("orders", "old", HOUR, key="o-1")
    delay_new(brokers, "new", HOUR, key="o-1")
    delay_new(brokers, "another", HOUR, key="o-2")

    change = brokers.both.delayed.cancel(key="o-1")

    assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 2)
    assert change.broker == "old:broker-a, broker-a"
    assert brokers.both.delayed.count_pending(ALL).total == 1


def test_a_message_of_the_old_broker_is_rescheduled_there(brokers: TwoBrokers) -> None:
    handle = brokers.delay_old("orders", "old", HOUR)
    due_ms = brokers.clock.now_ms() + 5 * HOUR

    change = brokers.both.delayed.reschedule(handle, due_ms)

    assert (change.status, change.broker) == (ScheduleChangeStatus.RESCHEDULED, "old:broker-a")
    [message] = brokers.both.delayed.pending(ALL).messages
    assert (message.deliver_ms, message.broker) == (due_ms, "old:broker-a")
    assert brokers.both.delayed.cancel(change.handles[0]).count == 1


def test_a_message_that_neither_broker_has_is_unknown(brokers: TwoBrokers) -> None:
    handle = TwoBrokers().delay_old("orders", "of a third broker", HOUR)

    change = brokers.both.delayed.cancel(handle)

    assert (change.status, change.count, change.broker) == (ScheduleChangeStatus.UNKNOWN, 0, None)


def test_a_delivered_message_of_the_old_broker_was_delivered(brokers: TwoBrokers) -> None:
    handle = brokers.delay_old("orders", "old", SECOND)
    brokers.harness().advance("2s")

    change = brokers.both.delayed.cancel(handle)

    assert (change.status, change.broker) == (ScheduleChangeStatus.ALREADY_DELIVERED, "old:broker-a")


def test_the_handle_of_a_moved_message_changes_it_at_the_new_broker(moving: TwoBrokers) -> None:
    handles = [moving.delay_old("orders", body, HOUR) for body in ("cancelled", "moved again")]
    moving.both.start()
    harness = moving.harness()
    harness.advance("10s")
    due_ms = moving.clock.now_ms() + 5 * HOUR

    cancelled = moving.both.delayed.cancel(handles[0])
    rescheduled = moving.both.delayed.reschedule(handles[1], due_ms)

    assert (cancelled.status, cancelled.broker) == (ScheduleChangeStatus.CANCELLED, "broker-a")
    assert (rescheduled.status, rescheduled.broker) == (ScheduleChangeStatus.RESCHEDULED, "broker-a")
    [message] = moving.both.delayed.pending(ALL).messages
    assert (message.deliver_ms, message.broker) == (due_ms, "broker-a")


def test_a_key_finds_moved_messages(moving: TwoBrokers) -> None:
    moving.delay_old("orders", "moved", HOUR, key="o-1")
    moving.both.start()
    moving.harness().advance("10s")

    change = moving.both.delayed.cancel(key="o-1")

    assert (change.status, change.count, change.broker) == (ScheduleChangeStatus.CANCELLED, 1, "broker-a")


@pytest.mark.parametrize("by", ["handle", "key"])
def test_a_change_of_a_message_in_transit_waits_for_its_arrival(moving: TwoBrokers, by: str) -> None:
    """The mover of this process takes over from the one that was killed."""
    handle = moving.delay_old("orders", "in transit", 2 * HOUR, key="o-1")
    reserved(moving)
    moving.both.start()
    moving.harness()  # drives the clock while the call waits

    delayed = moving.both.delayed
    change = delayed.cancel(handle) if by == "handle" else delayed.cancel(key="o-1")

    assert (change.status, change.count, change.broker) == (ScheduleChangeStatus.CANCELLED, 1, "broker-a")
    assert delayed.count_pending(ALL).total == 0


def test_a_change_of_a_message_that_does_not_arrive_fails_with_the_reason(moving: TwoBrokers) -> None:
    handle = moving.delay_old("orders", "in transit", 2 * HOUR)
    reserved(moving)
    moving.new.start()

    with pytest.raises(HandOverError) as refused:  # the mover does not run
        moving.both.delayed.cancel(handle)

    assert "is on its way from broker 'broker-a' to 'broker-a', and has not arrived within 30 s" in str(refused.value)
    assert "Nothing is lost: try again when that broker answers (mqtemplate hand-over status" in str(refused.value)


@pytest.mark.parametrize("by", ["handle", "key"])
def test_a_message_that_came_back_is_changed_at_the_old_broker(moving: TwoBrokers, by: str) -> None:
    """The hand-over is aborted: the mover moves the pending messages back."""
    handle = moving.delay_old("orders", "there and back", 2 * HOUR, key="o-1")
    moving.both.start()
    harness = moving.harness()
    harness.advance("10s")
    moving.old.hand_over.change(HandOverPhase.ABORTING)
    harness.advance("1m")

    delayed = moving.both.delayed
    [listed] = delayed.pending(ALL).messages
    change = delayed.cancel(handle) if by == "handle" else delayed.cancel(key="o-1")

    assert listed.broker == "old:broker-a"
    assert (change.status, change.count, change.broker) == (ScheduleChangeStatus.CANCELLED, 1, "old:broker-a")
    assert delayed.count_pending(ALL).total == 0


def test_an_aborted_hand_over_does_not_start_again_by_itself(moving: TwoBrokers) -> None:
    """The setting may still be there when the application starts again."""
    part = moving.old.hand_over
    part.begin(moving.options.target)
    part.change(HandOverPhase.ABORTING)
    part.change(HandOverPhase.ABORTED)
    moving.delay_old("orders", "stays", 2 * HOUR)

    moving.both.start()
    moving.harness().advance("10s")

    state = part.state()
    assert state is not None
    assert state.phase is HandOverPhase.ABORTED
    assert moving.old.delayed.count_pending(ALL).total == 1

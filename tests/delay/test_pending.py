"""Looking at what waits: in the order of due times, over levels and timers, without reading all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.errors import MessageError
from mqtemplate.pending import PendingQuery
from tests.delay.waiting_room import WaitingRoom

HOUR_MS = 3_600_000
ALL = PendingQuery()


@pytest.fixture
def room(tmp_path: Path) -> WaitingRoom:
    return WaitingRoom(tmp_path / "store")


def shown(room: WaitingRoom, query: PendingQuery = ALL, page_size: int = 100) -> list[str]:
    """The ids of everything that a query shows, page by page."""
    ids: list[str] = []
    cursor = None
    while True:
        page = room.view.page(query, page_size, cursor)
        ids += [message.msg_id for message in page.messages]
        assert len(page.messages) <= page_size
        cursor = page.cursor
        if cursor is None:
            return ids


def fill(room: WaitingRoom) -> None:
    room.send_for(b"far", TIMER_DELAY_MS=5 * HOUR_MS, KEYS="4466")
    room.send_for(b"minute", DELAY=5, TAGS="paid")
    room.send_for(b"second", "invoices", TIMER_DELAY_MS=1_500)
    room.send_for(b"half", TIMER_DELAY_MS=30 * 60_000, TAGS="paid", KEYS="a 4466 b")
    room.send_for(b"ten", "invoices", DELAY=3)


def test_what_is_due_first_is_shown_first(room: WaitingRoom) -> None:
    fill(room)

    assert shown(room) == ["second", "ten", "minute", "half", "far"]


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_pages_go_on_where_the_one_before_ended(room: WaitingRoom, page_size: int) -> None:
    fill(room)

    assert shown(room, page_size=page_size) == ["second", "ten", "minute", "half", "far"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (PendingQuery(topic="invoices"), ["second", "ten"]),
        (PendingQuery(tag="paid"), ["minute", "half"]),
        (PendingQuery(key="4466"), ["half", "far"]),
        (PendingQuery(key="minute"), ["minute"]),
        (PendingQuery(key="4466", tag="paid"), ["half"]),
        (PendingQuery(topic="orders", tag="paid"), ["minute", "half"]),
        (PendingQuery(topic="nothing"), []),
    ],
)
def test_a_query_shows_what_agrees_with_all_of_it(room: WaitingRoom, query: PendingQuery, expected: list[str]) -> None:
    fill(room)

    assert shown(room, query) == expected
    assert room.view.count(query, 60_000).total == len(expected)


def test_a_span_of_time_begins_with_its_first_millisecond(room: WaitingRoom) -> None:
    start = room.clock.now_ms()
    for after_ms in (999, 1_000, 1_999, 2_000):
        room.send_for(b"%d" % after_ms, TIMER_DELAY_MS=after_ms)

    assert shown(room, PendingQuery(after_ms=start + 1_000, before_ms=start + 2_000)) == ["1000", "1999"]


def test_a_message_tells_all_about_itself_and_can_be_steered_by_it(room: WaitingRoom) -> None:
    now_ms = room.clock.now_ms()
    room.send_for(b"minute", DELAY=5, TAGS="paid", KEYS="4466")

    [message] = room.view.page(ALL, 10, None).messages

    assert (message.topic, message.tags, message.keys, message.delay_level) == ("orders", "paid", "4466", 5)
    assert message.deliver_ms == now_ms + 60_000
    assert message.deliver_at.timestamp() * 1_000 == now_ms + 60_000
    assert (message.roll_count, message.body_size, message.store_timestamp) == (0, 6, now_ms)
    assert room.steering.cancel(message.handle).count == 1


def test_a_message_that_was_rolled_shows_how_often_and_keeps_its_time(room: WaitingRoom) -> None:
    due_ms = room.clock.now_ms() + 5 * HOUR_MS
    room.send_for(b"far", TIMER_DELAY_MS=5 * HOUR_MS)
    room.advance(3 * HOUR_MS)

    [message] = room.view.page(ALL, 10, None).messages

    assert message.roll_count >= 1
    assert message.deliver_ms == due_ms


def test_what_was_delivered_cancelled_or_moved_is_not_shown_where_it_was(room: WaitingRoom) -> None:
    for name, delay in (("level", {"DELAY": 5}), ("timer", {"TIMER_DELAY_MS": 60_000})):
        room.send_for(name.encode() + b"-delivered", TIMER_DELAY_MS=1_000)
        room.steering.cancel(room.send_for(name.encode() + b"-cancelled", **delay))
        room.steering.reschedule(room.send_for(name.encode() + b"-moved", **delay), room.clock.now_ms() + HOUR_MS)
        room.send_for(name.encode() + b"-kept", **delay)
    room.advance(1_000)

    assert shown(room) == ["level-kept", "timer-kept", "level-moved", "timer-moved"]


def test_counts_are_by_span_of_time(room: WaitingRoom) -> None:
    start = room.clock.now_ms()  # a full minute
    for seconds in (10, 59, 61, 119, 300):
        room.send_for(b"%d" % seconds, TIMER_DELAY_MS=seconds * 1_000)
    room.send_for(b"level", DELAY=5)

    counts = room.view.count(ALL, 60_000)

    assert counts.total == 6
    assert counts.buckets == {start: 2, start + 60_000: 3, start + 300_000: 1}


def test_topics_with_one_hash_are_counted_apart(room: WaitingRoom) -> None:
    """The timer log keeps a hash of the topic; those of these two are equal."""
    room.view._topics = lambda: ["Aa", "BB"]
    room.send_for(b"1", "Aa", TIMER_DELAY_MS=1_000)
    room.send_for(b"2", "BB", TIMER_DELAY_MS=1_000)

    assert room.view.count(PendingQuery(topic="Aa"), 60_000).total == 1


def test_what_makes_no_sense_is_refused(room: WaitingRoom) -> None:
    with pytest.raises(MessageError, match="max_count must be 1 or more, got 0"):
        room.view.page(ALL, 0, None)
    with pytest.raises(MessageError, match="'x' is no cursor; pass PendingPage.cursor as it came"):
        room.view.page(ALL, 1, "x")
    with pytest.raises(MessageError, match="the span to count by must be 1 ms or more, got 0"):
        room.view.count(ALL, 0)


delays = st.one_of(
    st.sampled_from([1, 2, 3, 4, 5]).map(lambda level: {"DELAY": level}),
    st.integers(1, 5 * HOUR_MS).map(lambda delay_ms: {"TIMER_DELAY_MS": delay_ms}),
    st.integers(1, 3_000).map(lambda delay_ms: {"TIMER_DELAY_MS": delay_ms}),
)
LEVEL_MS = {1: 1_000, 2: 5_000, 3: 10_000, 4: 30_000, 5: 60_000}


@given(
    st.lists(
        st.tuples(delays, st.sampled_from(["keep", "keep", "cancel", "move"]), st.integers(0, 5_000)), max_size=30
    ),
    st.integers(1, 7),
    st.integers(0, HOUR_MS),
)
@settings(max_examples=40, deadline=None)
def test_pages_are_the_sorted_list_of_all_that_waits(
    plan: list[tuple[dict[str, int], str, int]], page_size: int, wait_ms: int
) -> None:
    """Against a plain list, with cancels and moves, at any moment."""
    room = WaitingRoom()
    due: dict[str, int] = {}
    for number, (delay, fate, pause_ms) in enumerate(plan):
        name = str(number)
        handle = room.send_for(name.encode(), **delay)
        due[name] = room.clock.now_ms() + (delay.get("TIMER_DELAY_MS") or LEVEL_MS[delay["DELAY"]])
        if fate == "cancel":
            room.steering.cancel(handle)
            del due[name]
        elif fate == "move":
            due[name] = room.clock.now_ms() + 7_000
            room.steering.reschedule(handle, due[name])
        room.advance(pause_ms)
    room.advance(wait_ms)
    now_ms = room.clock.now_ms()
    waiting = {name: due_ms for name, due_ms in due.items() if due_ms > now_ms}

    ids = shown(room, page_size=page_size)

    assert sorted(ids) == sorted(waiting)
    assert [waiting[name] for name in ids] == sorted(waiting.values())
    assert room.view.count(ALL, 1).total == len(waiting)

"""Queries of pending messages: in order of due time, over levels and timers, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.delay.delay_store import RecordLookup
from mqtemplate.delay.pending import ScanLimit
from mqtemplate.delay.pending_rows import PendingPiece
from mqtemplate.delay.timers import pending_timers
from mqtemplate.errors import MessageError
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from tests.delay.delay_engine import DelayEngine

HOUR_MS = 3_600_000
ALL = PendingQuery()


@pytest.fixture
def engine(tmp_path: Path) -> DelayEngine:
    return DelayEngine(tmp_path / "store")


def shown(engine: DelayEngine, query: PendingQuery = ALL, page_size: int = 100) -> list[str]:
    """Return the message ids of all pages of a query."""
    ids: list[str] = []
    cursor = None
    while True:
        page = engine.view.page(query, page_size, cursor)
        ids += [message.msg_id for message in page.messages]
        assert len(page.messages) <= page_size
        cursor = page.cursor
        if cursor is None:
            return ids


def test_a_pending_message_has_its_details_and_a_valid_handle(engine: DelayEngine) -> None:
    now_ms = engine.clock.now_ms()
    engine.send_for(b"minute", DELAY=5, TAGS="paid", KEYS="4466")

    [message] = engine.view.page(ALL, 10, None).messages

    assert (message.topic, message.tags, message.keys, message.delay_level) == ("orders", "paid", "4466", 5)
    assert message.deliver_ms == now_ms + 60_000
    assert message.deliver_at.timestamp() * 1_000 == now_ms + 60_000
    assert (message.roll_count, message.body_size, message.store_timestamp) == (0, 6, now_ms)
    assert engine.control.cancel(message.handle).count == 1


def test_a_rolled_message_has_its_roll_count_and_its_due_time(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() + 5 * HOUR_MS
    engine.send_for(b"far", TIMER_DELAY_MS=5 * HOUR_MS)
    engine.advance(3 * HOUR_MS)

    [message] = engine.view.page(ALL, 10, None).messages

    assert message.roll_count >= 1
    assert message.deliver_ms == due_ms


def test_topics_with_the_same_hash_are_counted_separately(engine: DelayEngine) -> None:
    """The timer log stores a hash of the topic. ``Aa`` and ``BB`` have the same hash."""
    engine.view._topics = lambda: ["Aa", "BB"]
    engine.send_for(b"1", "Aa", TIMER_DELAY_MS=1_000)
    engine.send_for(b"2", "BB", TIMER_DELAY_MS=1_000)

    assert engine.view.count(PendingQuery(topic="Aa"), 60_000).total == 1


@pytest.mark.parametrize("delay", [{"DELAY": 5}, {"TIMER_DELAY_MS": 60_000}, {"TIMER_DELAY_MS": 5 * HOUR_MS}])
def test_the_listing_has_each_message_that_is_counted_also_with_an_unreadable_record(
    engine: DelayEngine, delay: dict[str, int]
) -> None:
    """Only its times are known, and the hash of a timer's topic."""
    due_ms = engine.clock.now_ms() + delay.get("TIMER_DELAY_MS", 60_000)
    engine.damage(engine.send(b"damaged", **delay))
    engine.send_for(b"valid", **delay)

    [damaged, valid] = engine.view.page(ALL, 10, None).messages

    assert (damaged.msg_id, valid.msg_id, damaged.deliver_ms) == ("", "valid", due_ms)
    assert engine.control.cancel(damaged.handle).status is ScheduleChangeStatus.UNKNOWN
    for options in ({}, {"topic": "orders"}, {"topic": "offers"}, {"key": "valid"}, {"tag": "paid"}):
        for page_size in (1, 100):
            query = PendingQuery(**options)
            assert engine.view.count(query, 1).total == len(shown(engine, query, page_size))


def test_invalid_arguments_are_refused(engine: DelayEngine) -> None:
    with pytest.raises(MessageError, match="max_count must be 1 or more, got 0"):
        engine.view.page(ALL, 0, None)
    with pytest.raises(MessageError, match="'x' is not a cursor; pass PendingPage.cursor unchanged"):
        engine.view.page(ALL, 1, "x")
    with pytest.raises(MessageError, match="the span to count by must be 1 ms or more, got 0"):
        engine.view.count(ALL, 0)


# --- steps ----------------------------------------------------------------------------------------


@pytest.fixture
def mixed(engine: DelayEngine) -> DelayEngine:
    """An engine with 150 pending messages: levels and timers, some of one due time, a third of them with a tag."""
    for number in range(50):
        tag = {"TAGS": "rare"} if number % 3 == 0 else {}
        engine.send_for(b"level-%d" % number, DELAY=1 + number % 5, **tag)
        engine.send_for(b"timer-%d" % number, TIMER_DELAY_MS=1_000 * (1 + number % 10), **tag)
        engine.send_for(b"far-%d" % number, TIMER_DELAY_MS=5 * HOUR_MS + number, **tag)
    return engine


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The physical offsets of the records that are read."""
    offsets: list[int] = []
    read = RecordLookup.at

    def counted(self: RecordLookup, physical_offset: int, size: int = 0) -> object:
        offsets.append(physical_offset)
        return read(self, physical_offset, size)

    monkeypatch.setattr(RecordLookup, "at", counted)
    return offsets


FILTERS = [
    ALL,
    PendingQuery(tag="rare"),
    PendingQuery(topic="orders"),
    PendingQuery(topic="none"),
    PendingQuery(tag="x"),
]


@pytest.mark.parametrize("query", FILTERS)
@pytest.mark.parametrize("max_records", [1, 7, 1_000])
def test_steps_together_count_and_list_what_one_call_does(
    mixed: DelayEngine, reads: list[int], query: PendingQuery, max_records: int
) -> None:
    """No step reads more records than its limit, whatever matches."""
    limit, ids, cursor = ScanLimit(max_records), [], None
    while True:
        page = mixed.view.page(query, 10, cursor, limit)
        ids += [message.msg_id for message in page.messages]
        cursor = page.cursor
        assert len(reads) <= max_records
        reads.clear()
        if cursor is None:
            break
    counts: dict[int, int] = {}
    while True:
        part, cursor = mixed.view.count_step(query, 1_000, cursor, limit)
        counts = {start: counts.get(start, 0) + part.buckets.get(start, 0) for start in {*counts, *part.buckets}}
        assert len(reads) <= max_records
        reads.clear()
        if cursor is None:
            break

    assert ids == shown(mixed, query)
    assert counts == mixed.view.count(query, 1_000).buckets
    assert sum(counts.values()) == len(ids)


def test_a_count_that_needs_no_record_is_one_step(mixed: DelayEngine, reads: list[int]) -> None:
    """The rows of the wheel and of the levels have the times, so that a small limit of records ends nothing."""
    counts, cursor = mixed.view.count_step(ALL, 1_000, None, ScanLimit(2))

    assert (counts.total, cursor, reads) == (150, None, [])


def test_a_whole_scan_can_be_ended_while_it_reads(engine: DelayEngine, reads: list[int]) -> None:
    """A client that knows no steps may close its connection."""
    for number in range(700):
        engine.send_for(b"%d" % number, DELAY=5)

    def end(count: int) -> None:
        raise MessageError(f"ended after {count}")

    with pytest.raises(MessageError, match="ended after 256"):
        engine.view.count_step(PendingQuery(tag="rare"), 1_000, None, ScanLimit(None, end))
    with pytest.raises(MessageError, match="ended after 256"):
        engine.view.page(PendingQuery(tag="rare"), 10, None, ScanLimit(None, end))
    assert len(reads) <= 2 * 256


def test_a_page_of_positions_takes_no_more_of_the_backlog_than_it_needs(
    mixed: DelayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = mixed.view.positions(ALL, (-1, -1), 1_000)
    monkeypatch.setattr(pending_timers, "_FIRST_PIECE_COUNT", 4)
    pieces: list[int] = []
    pending = mixed.timer.pending

    def counted(after_ms: int, before_ms: int) -> Iterator[PendingPiece]:
        for piece in pending(after_ms, before_ms):
            pieces.append(len(piece.rows))
            yield piece

    monkeypatch.setattr(mixed.timer, "pending", counted)

    first = mixed.view.positions(ALL, (-1, -1), 5)

    assert sum(pieces) < 50, "of 100 timers"
    last = int(first["due_ms"][-1]), int(first["physical_offset"][-1])
    assert [*first.tolist(), *mixed.view.positions(ALL, last, 1_000).tolist()] == everything.tolist()


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
def test_all_pages_together_are_the_sorted_list_of_pending_messages(
    plan: list[tuple[dict[str, int], str, int]], page_size: int, wait_ms: int
) -> None:
    """Compare with a plain dictionary, with cancels and moves, at any moment."""
    engine = DelayEngine()
    due: dict[str, int] = {}
    for number, (delay, change, pause_ms) in enumerate(plan):
        name = str(number)
        handle = engine.send_for(name.encode(), **delay)
        due[name] = engine.clock.now_ms() + (delay.get("TIMER_DELAY_MS") or LEVEL_MS[delay["DELAY"]])
        if change == "cancel":
            engine.control.cancel(handle)
            del due[name]
        elif change == "move":
            due[name] = engine.clock.now_ms() + 7_000
            engine.control.reschedule(handle, due[name])
        engine.advance(pause_ms)
    engine.advance(wait_ms)
    now_ms = engine.clock.now_ms()
    pending = {name: due_ms for name, due_ms in due.items() if due_ms > now_ms}

    ids = shown(engine, page_size=page_size)

    assert sorted(ids) == sorted(pending)
    assert [pending[name] for name in ids] == sorted(pending.values())
    assert engine.view.count(ALL, 1).total == len(pending)

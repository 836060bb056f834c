"""The interface `DelayStore`: faults of both services, and pending messages of the level service with their removal."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.pending_rows import PENDING_DTYPE, PendingEntry
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.properties import encode_properties
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine, full_disk
from tests.waiting import PATIENCE_S, eventually

SECOND, MINUTE = 1_000, 60_000


def record_of(engine: DelayEngine, put: PutResult) -> StoredRecord:
    return engine.store.read(put.physical_offset, put.size)


def remove(engine: DelayEngine, put: PutResult) -> None:
    with engine.schedule.lock:
        engine.schedule.catch_up()
        engine.schedule.remove(record_of(engine, put))


def shown(engine: DelayEngine, after_ms: int = 0, before_ms: int = 1 << 62) -> list[int]:
    """Return the physical offsets of pending messages, in order of due time. Check the pieces' floors."""
    rows: list[tuple[int, int]] = []
    floors: list[int] = []
    for floor_ms, piece in engine.schedule.pending(after_ms, before_ms):
        floors.append(floor_ms)
        assert piece.dtype == PENDING_DTYPE
        assert all(due_ms >= max(floors) for due_ms in piece["due_ms"].tolist())
        rows += list(zip(piece["due_ms"].tolist(), piece["physical_offset"].tolist(), strict=True))
    assert floors == sorted(floors)
    return [physical_offset for _, physical_offset in sorted(rows)]


def test_a_message_is_pending_until_it_is_released_or_removed(engine: DelayEngine) -> None:
    first, second, third = (record_of(engine, engine.send(b"", DELAY=level)) for level in (1, 3, 3))
    engine.schedule.catch_up()
    assert [engine.schedule.find(record) is not None for record in (first, second, third)] == [True] * 3

    engine.advance(1 * SECOND)
    engine.schedule.remove(third)

    assert [engine.schedule.find(record) is not None for record in (first, second, third)] == [False, True, False]


def test_a_level_that_was_never_used_has_no_pending_messages(engine: DelayEngine) -> None:
    record = record_of(engine, engine.send(b"", DELAY=1))

    assert engine.schedule.find(record._replace(queue_id=9)) is None


def test_due_time_and_slot_come_from_the_queue(engine: DelayEngine) -> None:
    """RocketMQ looks for a delete marker in the slot before the message's time."""
    engine.clock.move_ms(300)
    record = record_of(engine, engine.send(b"", DELAY=3))
    engine.change_table("1m")
    engine.schedule.catch_up()

    due_ms = engine.clock.now_ms() + 10 * SECOND
    assert engine.schedule.find(record) == PendingEntry(due_ms, due_ms // SECOND * SECOND)


def test_pending_messages_of_all_levels_and_segments_are_returned(engine: DelayEngine) -> None:
    start = engine.clock.now_ms()
    late = engine.send(b"", DELAY=4)
    engine.change_table("1s 5s 10s 3s")
    soon, sooner = engine.send(b"", DELAY=4), engine.send(b"", DELAY=1)
    gone = engine.send(b"", DELAY=2)
    remove(engine, gone)

    assert shown(engine) == [sooner.physical_offset, soon.physical_offset, late.physical_offset]
    assert shown(engine, start + 3 * SECOND, start + 30 * SECOND) == [soon.physical_offset]
    assert shown(engine, start + 3 * SECOND + 1) == [late.physical_offset]

    engine.advance(1 * SECOND)
    assert shown(engine) == [soon.physical_offset, late.physical_offset]


def test_a_backlog_is_returned_in_pieces(engine: DelayEngine) -> None:
    """One piece is in memory at a time. Messages that are released between two pieces are left out."""
    draft = RecordDraft(
        SCHEDULE_TOPIC, 0, b"", encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"}), delay_ms=5
    )
    for _ in range(20):
        engine.store.put(Drafts([draft] * 1_000))
    pieces = engine.schedule.pending(0, 1 << 62)

    count = len(next(pieces).rows)
    engine.advance(5)

    assert 0 < count < 20_000
    assert list(pieces) == []


def test_pending_messages_of_a_part_of_the_log_are_returned(engine: DelayEngine) -> None:
    puts = [engine.send(b"", DELAY=level) for level in (1, 3, 1, 3)]

    rows = engine.schedule.pending_between(puts[1].physical_offset, puts[3].physical_offset)

    assert sorted(rows["physical_offset"].tolist()) == [puts[1].physical_offset, puts[2].physical_offset]
    assert rows["size"].tolist() == [puts[2].size, puts[1].size]
    assert len(engine.schedule.pending_between(0, 0)) == 0


def test_a_message_that_another_thread_removes_is_not_released(engine: DelayEngine) -> None:
    """The release holds the lock from reading the queue to appending the copies. So one thread gets the message."""
    put = engine.send(b"", DELAY=1)
    engine.clock.move_ms(1 * SECOND)
    stepping = threading.Thread(target=engine.schedule.step)
    with engine.schedule.lock:
        stepping.start()
        remove(engine, put)

    stepping.join()

    assert engine.bodies() == []


def test_a_reschedule_marks_the_unit_once_its_copy_is_on_disk(tmp_path: Path) -> None:
    """Before, a power failure could take the copy and leave the mark."""
    for flush, is_marked in ((FlushDiskType.SYNC_FLUSH, True), (FlushDiskType.ASYNC_FLUSH, False)):
        engine = DelayEngine(tmp_path / flush.value, flush=flush)

        engine.control.reschedule(engine.send_for(b"moved", DELAY=5), engine.clock.now_ms() + 90_000)

        [size] = engine.store.consume_queue(SCHEDULE_TOPIC, 4).units(0, 1)["size"].tolist()
        assert (size == DONE_SIZE_MARK) is is_marked


# --- both services ----------------------------------------------------------------------------------

DELAYS = {"level": {"DELAY": 1}, "timer": {"TIMER_DELAY_MS": 1_000}}
BOTH = pytest.mark.parametrize("kind", DELAYS)


def service_of(engine: DelayEngine, kind: str) -> DelayStore:
    return engine.schedule if kind == "level" else engine.timer


@BOTH
def test_a_new_message_wakes_its_service_only(engine: DelayEngine, kind: str) -> None:
    woken: set[str] = set()
    for each in DELAYS:
        service_of(engine, each).on_wake(partial(woken.add, each))

    engine.send(b"plain")
    assert woken == set()
    engine.send(b"delayed", **DELAYS[kind])
    assert woken == {kind}


@pytest.mark.feature("F14", "F17", "D1")
@BOTH
def test_a_full_disk_delays_messages_but_loses_none(engine: DelayEngine, kind: str) -> None:
    """The same messages are tried again each second until there is space. RocketMQ gives up after three tries."""
    for body in (b"a", b"b"):
        engine.send(body, **DELAYS[kind])
    engine.release_due()
    engine.clock.move_ms(2 * SECOND)

    with full_disk(engine):
        for _ in range(10):
            assert service_of(engine, kind).step() == engine.clock.now_ms() + 1 * SECOND
            engine.clock.move_ms(1 * SECOND)
    engine.release_due()

    assert engine.bodies() == [b"a", b"b"]


@pytest.mark.feature("F16", "D7", "D14")
@BOTH
def test_a_damaged_record_is_counted_and_skipped(engine: DelayEngine, kind: str) -> None:
    """It does not block the other messages, and nothing of it is delivered."""
    damaged = engine.send(b"damaged", **DELAYS[kind])
    engine.send(b"healthy", **DELAYS[kind])
    engine.release_due()
    engine.damage(damaged)

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"healthy"]
    assert engine.poison_count == 1


@pytest.mark.feature("F17", "D13")
@pytest.mark.parametrize(
    ("topic", "properties"),
    [
        (SCHEDULE_TOPIC, {"DELAY": "1", "REAL_QID": "0"}),
        (SCHEDULE_TOPIC, {"DELAY": "1", "REAL_TOPIC": "orders"}),
        (SCHEDULE_TOPIC, {"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "zero"}),
        (SCHEDULE_TOPIC, {"DELAY": "1", "REAL_TOPIC": "../etc", "REAL_QID": "0"}),
        (SCHEDULE_TOPIC, {"DELAY": "1", "REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"}),
        (TIMER_TOPIC, {"REAL_TOPIC": "orders", "REAL_QID": "0"}),
        (TIMER_TOPIC, {"REAL_TOPIC": "orders", "REAL_QID": "0", "TIMER_OUT_MS": "soon"}),
        (TIMER_TOPIC, {"REAL_TOPIC": "orders", "TIMER_OUT_MS": "1767225600000"}),
        (TIMER_TOPIC, {"REAL_QID": "0", "TIMER_OUT_MS": "1767225600000"}),
    ],
)
def test_a_poison_message_goes_to_the_dead_letters_and_blocks_no_other(
    open_engine: OpenEngine, topic: str, properties: dict[str, str]
) -> None:
    """It is logged, counted, and kept for operators. It is copied once, also across crashes."""
    engine = open_engine()
    delay_ms = 1_000 if topic == SCHEDULE_TOPIC else -1
    engine.put(RecordDraft(topic, 0, b"poison", encode_properties(properties), delay_ms=delay_ms))
    for delay in DELAYS.values():
        engine.send(b"healthy", **delay)
    counts = []
    for _ in range(3):
        engine.release_due()
        engine.advance(60 * SECOND)
        assert engine.bodies() == [b"healthy", b"healthy"]
        assert engine.bodies(UNDELIVERABLE_TOPIC) == [b"poison"]
        counts.append(engine.poison_count)
        engine.crash()
        engine = open_engine()

    assert counts == [1, 0, 0]


class OvertakenTopics(set[str]):
    """Topics to announce. While another thread adds some, it waits until those before are announced."""

    def __init__(self) -> None:
        super().__init__()
        self.is_adding, self.is_announced = threading.Event(), threading.Event()

    def update(self, *topics: Iterable[str]) -> None:
        self.is_adding.set()
        assert self.is_announced.wait(PATIENCE_S)
        super().update(*topics)


def test_what_another_thread_releases_while_the_service_announces_is_announced_too(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has to catch up with a long backlog releases messages. Their consumers were not notified."""
    announced: list[list[bytes]] = []
    schedule, topics = engine.schedule, OvertakenTopics()
    engine.store.watch("orders", lambda: announced.append(engine.bodies()))
    engine.send(b"one", DELAY=1)
    releaser = schedule._releaser
    releaser._unconfirmed = topics
    confirm = releaser.confirm

    def release() -> None:
        with schedule.lock:
            schedule._release_due(engine.clock.now_ms())

    def confirm_while_another_thread_releases(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(releaser, "confirm", confirm)
        engine.clock.move_ms(SECOND)
        thread = threading.Thread(target=release)
        thread.start()
        eventually(lambda: topics.is_adding.is_set() or not thread.is_alive(), "the other thread has released it")
        confirm(*arguments, **options)
        topics.is_announced.set()
        thread.join()

    monkeypatch.setattr(releaser, "confirm", confirm_while_another_thread_releases)
    schedule.step()

    schedule.step()

    assert announced == [[b"one"]]

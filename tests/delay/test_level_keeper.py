"""What the service of the levels offers to those who look at what waits, and to those who steer it."""

from __future__ import annotations

import threading
from pathlib import Path

from mqtemplate.delay import DelayLevels
from mqtemplate.delay.delay_store import WAITING_DTYPE, DelayStore
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import encode_properties
from mqtemplate.store import FlushDiskType, PutResult
from mqtemplate.store.layout import DONE_SIZE_MARK
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.waiting_room import WaitingRoom

SECOND, MINUTE = 1_000, 60_000


def change_table(room: WaitingRoom, text: str) -> None:
    """At run time: for the front door, and for the service."""
    room.levels = DelayLevels.parse(text)
    room.schedule.change_levels(room.levels)


def record_of(room: WaitingRoom, put: PutResult) -> StoredRecord:
    return room.store.read(put.physical_offset, put.size)


def withdraw(room: WaitingRoom, put: PutResult) -> None:
    with room.schedule.lock:
        room.schedule.catch_up()
        room.schedule.withdraw(record_of(room, put))


def shown(room: WaitingRoom, after_ms: int = 0, before_ms: int = 1 << 62) -> list[int]:
    """Physical offsets of what waits, in order of due time; checks what the pieces promise."""
    rows: list[tuple[int, int]] = []
    floors: list[int] = []
    for floor_ms, piece in room.schedule.waiting(after_ms, before_ms):
        floors.append(floor_ms)
        assert piece.dtype == WAITING_DTYPE
        assert all(due_ms >= max(floors) for due_ms in piece["due_ms"].tolist())
        rows += list(zip(piece["due_ms"].tolist(), piece["physical_offset"].tolist(), strict=True))
    assert floors == sorted(floors)
    return [physical_offset for _, physical_offset in sorted(rows)]


def test_it_keeps_what_a_keeper_keeps(room: WaitingRoom) -> None:
    """`DelayStore`: the protocol that steering and looking work with."""
    delay_store: DelayStore = room.schedule

    assert delay_store.source_topic == SCHEDULE_TOPIC


def test_a_message_waits_until_it_is_handed_over_or_withdrawn(room: WaitingRoom) -> None:
    first, second, third = (record_of(room, room.send(b"", DELAY=level)) for level in (1, 3, 3))
    room.schedule.catch_up()
    assert [room.schedule.is_waiting(record) for record in (first, second, third)] == [True] * 3

    room.advance(1 * SECOND)
    room.schedule.withdraw(third)

    assert [room.schedule.is_waiting(record) for record in (first, second, third)] == [False, True, False]


def test_a_level_that_nobody_used_has_nothing_that_waits(room: WaitingRoom) -> None:
    record = record_of(room, room.send(b"", DELAY=1))

    assert not room.schedule.is_waiting(record._replace(queue_id=9))


def test_due_time_and_slot_are_those_of_the_queue(room: WaitingRoom) -> None:
    """RocketMQ looks for a delete marker in the slot before its message's time."""
    room.clock.move_ms(300)
    record = record_of(room, room.send(b"", DELAY=3))
    change_table(room, "1m")

    due_ms = room.clock.now_ms() + 10 * SECOND
    assert room.schedule.due_ms(record) == due_ms
    assert room.schedule.slot_of(record) == due_ms // SECOND * SECOND


def test_what_waits_is_shown_over_all_levels_and_segments(room: WaitingRoom) -> None:
    start = room.clock.now_ms()
    late = room.send(b"", DELAY=4)
    change_table(room, "1s 5s 10s 3s")
    soon, sooner = room.send(b"", DELAY=4), room.send(b"", DELAY=1)
    gone = room.send(b"", DELAY=2)
    withdraw(room, gone)

    assert shown(room) == [sooner.physical_offset, soon.physical_offset, late.physical_offset]
    assert shown(room, start + 3 * SECOND, start + 30 * SECOND) == [soon.physical_offset]
    assert shown(room, start + 3 * SECOND + 1) == [late.physical_offset]

    room.advance(1 * SECOND)
    assert shown(room) == [soon.physical_offset, late.physical_offset]


def test_a_backlog_is_shown_in_pieces(room: WaitingRoom) -> None:
    """Memory is that of one piece, and what is handed over meanwhile is left out."""
    draft = RecordDraft(
        SCHEDULE_TOPIC, 0, b"", encode_properties({"DELAY": "1", "REAL_TOPIC": "orders", "REAL_QID": "0"}), delay_ms=5
    )
    for _ in range(20):
        room.store.put_all([draft] * 1_000)
    pieces = room.schedule.waiting(0, 1 << 62)

    count = len(next(pieces).rows)
    room.advance(5)

    assert 0 < count < 20_000
    assert list(pieces) == []


def test_what_waits_in_a_part_of_the_log_is_shown(room: WaitingRoom) -> None:
    puts = [room.send(b"", DELAY=level) for level in (1, 3, 1, 3)]

    rows = room.schedule.waiting_between(puts[1].physical_offset, puts[3].physical_offset)

    assert sorted(rows["physical_offset"].tolist()) == [puts[1].physical_offset, puts[2].physical_offset]
    assert rows["size"].tolist() == [puts[2].size, puts[1].size]
    assert len(room.schedule.waiting_between(0, 0)) == 0


def test_a_message_that_another_thread_withdraws_is_not_handed_over(room: WaitingRoom) -> None:
    """The release holds the lock from looking until the copies are there: whoever gets it first has the message."""
    put = room.send(b"", DELAY=1)
    room.clock.move_ms(1 * SECOND)
    stepping = threading.Thread(target=room.schedule.step)
    with room.schedule.lock:
        stepping.start()
        withdraw(room, put)

    stepping.join()

    assert room.bodies() == []


def test_a_cancel_is_struck_out_before_it_is_answered(tmp_path: Path) -> None:
    """RocketMQ, which knows no recall of levels, may open the folder of a process that is killed right afterwards."""
    room = WaitingRoom(tmp_path / "store")
    handle = room.send_for(b"gone", DELAY=5)
    room.send_for(b"kept", DELAY=5)

    room.steering.cancel(handle)

    sizes = room.store.consume_queue(SCHEDULE_TOPIC, 4).units(0, 2)["size"].tolist()
    assert sizes[0] == DONE_SIZE_MARK
    assert sizes[1] > DONE_SIZE_MARK


def test_a_reschedule_is_struck_out_once_its_copy_is_on_the_disk(tmp_path: Path) -> None:
    """Before that a power failure could take the copy and leave the mark."""
    for flush, is_struck_out in ((FlushDiskType.SYNC_FLUSH, True), (FlushDiskType.ASYNC_FLUSH, False)):
        room = WaitingRoom(tmp_path / flush.value, flush=flush)

        room.steering.reschedule(room.send_for(b"moved", DELAY=5), room.clock.now_ms() + 90_000)

        [size] = room.store.consume_queue(SCHEDULE_TOPIC, 4).units(0, 1)["size"].tolist()
        assert (size == DONE_SIZE_MARK) is is_struck_out

"""Delay levels over restarts: what is handed over, and where that stands written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.delay import DEAD_LETTER_TOPIC, DelayLevels
from mqtemplate.delay.levels.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store import PutResult
from mqtemplate.store.files.json_files import read_table
from mqtemplate.store.layout import DONE_SIZE_MARK
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.delay.conftest import OpenRoom
from tests.delay.foreign_records import foreign_copy, foreign_level_message
from tests.delay.waiting_room import WaitingRoom

SECOND, MINUTE = 1_000, 60_000


def change_table(room: WaitingRoom, text: str) -> None:
    """At run time: for the front door, and for the service."""
    room.levels = DelayLevels.parse(text)
    room.schedule.change_levels(room.levels)


def marker(record: StoredRecord) -> RecordDraft:
    """What takes the place of a waiting message that was cancelled."""
    kept = {name: decode_properties(record.properties_bytes)[name] for name in ("REAL_TOPIC", "REAL_QID")}
    due = {"TIMER_DELIVER_MS": "1000", "TIMER_OUT_MS": "0", "TIMER_DEL_UNIQKEY": "-", "__STEERED": "1"}
    return linked(record, TIMER_TOPIC, kept | due)


def linked(record: StoredRecord, topic: str, properties: dict[str, str]) -> RecordDraft:
    source = record.physical_offset
    return RecordDraft(topic, 0, record.body, encode_properties(properties), prepared_transaction_offset=source + 1)


def cancel(room: WaitingRoom, put: PutResult) -> None:
    record = room.store.read(put.physical_offset, put.size)
    with room.schedule.lock:
        room.schedule.catch_up()
        assert room.schedule.is_waiting(record)
        room.put(marker(record))
        room.schedule.withdraw(record)
        assert not room.schedule.is_waiting(record)


# --- progress ---------------------------------------------------------------------------------------


@pytest.mark.feature("F9", "F10", "F12")
def test_progress_is_kept_in_upstreams_file(open_room: OpenRoom) -> None:
    """Level -> next queue offset; written at a checkpoint and at the end."""
    room = open_room()
    room.send(b"", DELAY=2)
    room.send(b"", DELAY=2)
    room.send(b"", DELAY=4)
    room.advance(5 * SECOND)
    room.store.take_checkpoint()

    table = read_table(room.store_files, DELAY_OFFSET_FILE)
    assert table["offsetTable"] == {"2": 2, "4": 0}
    assert set(table["dataVersion"]) == {"counter", "stateVersion", "timestamp"}

    room.close()
    assert open_room().schedule.positions == {2: 2, 4: 0}


@pytest.mark.feature("F12")
def test_upstreams_file_with_bare_numbers_as_keys_is_read(open_room: OpenRoom) -> None:
    """As found on the disk of a real broker."""
    room = open_room()
    room.send(b"", DELAY=2)
    for _ in range(3):
        room.send(b"", DELAY=3)
    room.close()
    room.store_files.write_bytes(
        DELAY_OFFSET_FILE,
        b'{\n\t"dataVersion":{"counter":18,"stateVersion":0,"timestamp":1795254125147},\n\t"offsetTable":{2:1,3:1}\n}',
    )

    room = open_room()

    assert room.schedule.positions == {2: 1, 3: 1}
    room.advance(10 * SECOND)
    assert len(room.bodies()) == 2


@pytest.mark.feature("D9")
@pytest.mark.parametrize("text", [b"{", b"[]", b'{"offsetTable":7}', b'{"offsetTable":{"1":-1}}', b"\xff"])
def test_a_file_that_cannot_be_read_is_made_anew_from_the_log(open_room: OpenRoom, text: bytes) -> None:
    """The log knows better anyway; nothing is delivered again."""
    room = open_room()
    room.send(b"done", DELAY=1)
    room.send(b"waits", DELAY=3)
    room.advance(1 * SECOND)
    room.close()
    room.store_files.write_bytes(DELAY_OFFSET_FILE, text)

    room = open_room()

    assert room.schedule.positions == {1: 1, 3: 0}
    room.advance(60 * SECOND)
    assert room.bodies() == [b"done", b"waits"]


@pytest.mark.feature("F20")
def test_progress_beyond_the_queues_ends_is_corrected(open_room: OpenRoom) -> None:
    """Before its minimum: the minimum; behind its maximum: the maximum."""
    room = open_room()
    room.send(b"", DELAY=1)
    room.close()
    room.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{"1":77}}')

    assert open_room().schedule.positions == {1: 1}


@pytest.mark.feature("G11")
def test_without_progress_a_level_starts_at_its_first_message(open_room: OpenRoom) -> None:
    room = open_room()
    room.send(b"first", DELAY=1)
    room.crash()

    room = open_room()
    assert room.schedule.positions == {1: 0}
    room.advance(1 * SECOND)
    assert room.bodies() == [b"first"]


def test_a_lost_progress_file_does_not_deliver_again(open_room: OpenRoom) -> None:
    """Upstream would hand over the whole backlog once more; the copies in the log tell."""
    room = open_room()
    room.send(b"done", DELAY=1)
    room.send(b"waits", DELAY=3)
    room.advance(1 * SECOND)
    room.close()
    room.store_files.delete(DELAY_OFFSET_FILE)
    room.store_files.delete(DELAY_OFFSET_FILE + ".bak")

    room = open_room()
    room.advance(60 * SECOND)

    assert room.bodies() == [b"done", b"waits"]


def test_a_kill_right_behind_the_hand_over_does_not_repeat_it(open_room: OpenRoom) -> None:
    room = open_room()
    room.send(b"once", DELAY=1)
    room.store.take_checkpoint()
    room.advance(1 * SECOND)
    room.crash()

    room = open_room()
    room.advance(60 * SECOND)

    assert room.bodies() == [b"once"]


@pytest.mark.feature("D9")
def test_an_older_progress_file_does_not_deliver_again(open_room: OpenRoom) -> None:
    """Where only the ``.bak`` is left, the log tells what was handed over since."""
    room = open_room()
    for body in (b"first", b"second", b"third"):
        room.send(body, DELAY=1)
        room.advance(1 * SECOND)
        room.store.take_checkpoint()
    room.close()
    room.store_files.delete(DELAY_OFFSET_FILE)
    assert read_table(room.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 2}

    room = open_room()
    room.advance(60 * SECOND)

    assert room.schedule.positions == {1: 3}
    assert room.bodies() == [b"first", b"second", b"third"]


def test_upstreams_progress_of_levels_that_the_table_does_not_have_is_kept(open_room: OpenRoom) -> None:
    room = open_room()
    room.send(b"", DELAY=1)
    room.send(b"", DELAY=18)
    room.close()
    room.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:0,18:0}}')

    room = open_room(levels="1s 5s")
    room.advance(1 * SECOND)
    room.store.take_checkpoint()

    assert read_table(room.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 1, "18": 0}


@pytest.mark.feature("D7")
def test_a_level_without_a_queue_is_looked_for_in_the_log(open_room: OpenRoom, tmp_path: Path) -> None:
    """Its queue's folder was lost, and no later message of that level shows it."""
    room = open_room()
    room.send(b"1s", DELAY=1)
    room.send(b"10s", DELAY=3)
    room.close()
    shutil.rmtree(tmp_path / "consumequeue" / SCHEDULE_TOPIC / "2")

    room = open_room()
    room.advance(10 * SECOND)

    assert room.bodies() == [b"1s", b"10s"]
    assert room.schedule.positions == {1: 1, 3: 1}


def test_progress_of_a_level_that_nobody_ever_used_is_forgotten(open_room: OpenRoom) -> None:
    room = open_room()
    room.send(b"", DELAY=1)
    room.close()
    room.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:0,18:5}}')

    assert open_room().schedule.positions == {1: 0}


@pytest.mark.feature("F20")
def test_progress_before_the_queues_begin_is_corrected(open_room: OpenRoom) -> None:
    """RocketMQ's file may be older than the queue."""
    room = open_room(queue_file_size=200)
    puts = [room.send(b"%d" % number, DELAY=1) for number in range(25)]
    queue = room.store.consume_queue(SCHEDULE_TOPIC, 0)
    queue.delete_before(puts[20].physical_offset)
    room.close()
    room.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:3}}')

    room = open_room(queue_file_size=200)

    assert room.schedule.positions == {1: 20}
    room.advance(1 * SECOND)
    assert room.bodies() == [b"20", b"21", b"22", b"23", b"24"]


# --- progress out of turn ---------------------------------------------------------------------------


def shortened(open_room: OpenRoom) -> WaitingRoom:
    """Two levels' worth of messages in one queue: the later ones are due earlier, and are handed over."""
    room = open_room(levels="1m")
    room.send(b"minute", DELAY=1)
    change_table(room, "1s")
    room.send(b"second", DELAY=1)
    room.send(b"again", DELAY=1)
    room.advance(1 * SECOND)
    assert room.bodies() == [b"second", b"again"]
    return room


@pytest.mark.feature("D10", "D11")
def test_the_file_keeps_the_first_that_is_not_done(open_room: OpenRoom) -> None:
    """It never goes past one that waits, and never back."""
    room = shortened(open_room)

    room.store.take_checkpoint()
    assert read_table(room.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 0}

    room.advance(1 * MINUTE)
    room.store.take_checkpoint()
    assert read_table(room.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 3}


@pytest.mark.feature("D8", "D11")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [WaitingRoom.close, WaitingRoom.crash])
def test_what_was_handed_over_out_of_turn_is_not_repeated(
    open_room: OpenRoom, has_checkpoint: bool, ends: Callable[[WaitingRoom], None]
) -> None:
    """Behind the checkpoint the copies tell, before it the marks in the queue."""
    room = shortened(open_room)
    if has_checkpoint:
        room.store.take_checkpoint()
    ends(room)

    room = open_room(levels="1s")
    room.advance(1 * MINUTE)

    assert room.bodies() == [b"second", b"again", b"minute"]


@pytest.mark.feature("D29")
def test_marks_are_made_at_the_checkpoint(open_room: OpenRoom) -> None:
    """Before it a power failure might take the copies and leave the marks, and the messages were lost."""
    room = shortened(open_room)
    units = room.store.consume_queue(SCHEDULE_TOPIC, 0).units
    assert DONE_SIZE_MARK not in units(0, 3)["size"]

    room.store.take_checkpoint()

    assert units(0, 3)["size"].tolist()[1:] == [DONE_SIZE_MARK, DONE_SIZE_MARK]
    assert units(0, 3)["size"][0] > DONE_SIZE_MARK


def lose_checkpoint_too(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue")
    (folder / "checkpoint").unlink()


def lose_queues(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue")


def lose_schedule_queues(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue" / SCHEDULE_TOPIC)


def damage_schedule_queue(folder: Path) -> None:
    [file] = (folder / "consumequeue" / SCHEDULE_TOPIC / "0").iterdir()
    data = bytearray(file.read_bytes())
    data[20:40] = bytes(20)
    file.write_bytes(data)


@pytest.mark.feature("X11")
@pytest.mark.parametrize("lose", [lose_checkpoint_too, lose_queues, lose_schedule_queues, damage_schedule_queue])
def test_queues_that_were_lost_are_rebuilt_with_what_is_done(
    open_room: OpenRoom, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """The marks went with them, and the due times of a table that is no more."""
    room = shortened(open_room)
    room.store.take_checkpoint()
    room.crash()
    lose(tmp_path)

    room = open_room(levels="1s")
    room.advance(1 * MINUTE)

    assert room.bodies() == [b"second", b"again", b"minute"]
    assert room.arrived()[-1].at_ms == room.clock.now_ms() - 1 * SECOND


@pytest.mark.feature("X11")
def test_a_queue_that_lost_its_end_is_rebuilt_with_what_is_done(open_room: OpenRoom, tmp_path: Path) -> None:
    """Nobody sees that anything is missing, until the log goes on behind it."""
    room = shortened(open_room)
    room.store.take_checkpoint()
    room.send(b"behind", DELAY=1)
    room.crash()
    [file] = (tmp_path / "consumequeue" / SCHEDULE_TOPIC / "0").iterdir()
    file.write_bytes(file.read_bytes()[:20].ljust(file.stat().st_size, b"\0"))

    room = open_room(levels="1s")
    room.advance(1 * MINUTE)

    assert room.bodies() == [b"second", b"again", b"behind", b"minute"]


@pytest.mark.feature("D29")
def test_progress_is_written_when_the_copies_are_on_the_disk(open_room: OpenRoom) -> None:
    """Upstream's copies never wait for the disk, though its progress file does."""
    room = open_room()
    room.send(b"", DELAY=1)
    room.advance(1 * SECOND)
    assert room.store.group_commit.flushed < room.store.end_offset

    room.schedule.persist()

    assert room.store.group_commit.flushed == room.store.end_offset
    assert read_table(room.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 1}


@pytest.mark.feature("D30")
def test_an_end_in_the_middle_of_a_backlog_loses_and_repeats_nothing(open_room: OpenRoom) -> None:
    """A step is whole before the progress of it is written; there are no results that somebody waits for."""
    room = open_room()
    bodies = [b"%d" % number for number in range(1_500)]
    for body in bodies:
        room.send(body, DELAY=1)
    room.clock.move_ms(1 * SECOND)
    room.schedule.step()
    count = len(room.bodies())
    assert 0 < count < 1_500
    room.close()

    room = open_room()
    assert room.schedule.positions == {1: count}
    room.confirm()

    assert room.bodies() == bodies


# --- steering ---------------------------------------------------------------------------------------


def test_a_withdrawn_message_is_never_handed_over(open_room: OpenRoom) -> None:
    room = open_room()
    room.send(b"stays", DELAY=1)
    cancel(room, room.send(b"goes", DELAY=1))

    room.advance(1 * SECOND)

    assert room.bodies() == [b"stays"]


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [WaitingRoom.close, WaitingRoom.crash])
def test_a_withdrawal_lasts(open_room: OpenRoom, has_checkpoint: bool, ends: Callable[[WaitingRoom], None]) -> None:
    """Behind the checkpoint the marker in the log tells, before it the mark in the queue."""
    room = open_room()
    room.send(b"stays", DELAY=1)
    cancel(room, room.send(b"goes", DELAY=1))
    if has_checkpoint:
        room.store.take_checkpoint()
    ends(room)

    room = open_room()
    room.advance(1 * SECOND)

    assert room.bodies() == [b"stays"]


def test_a_copy_alone_takes_its_sources_place(open_room: OpenRoom) -> None:
    """A kill may leave of a reschedule the copy, and not the marker behind it."""
    room = open_room()
    put = room.send(b"moved", DELAY=1)
    record = room.store.read(put.physical_offset, put.size)
    room.put(linked(record, "orders", decode_properties(record.properties_bytes) | {"__STEERED": "1"}))
    room.crash()

    room = open_room()
    room.advance(1 * SECOND)

    assert room.bodies() == [b"moved"]


def test_a_marker_for_another_place_withdraws_nothing(open_room: OpenRoom) -> None:
    """What a copy carries on may name something that was never in this queue."""
    room = open_room()
    put = room.send(b"stays", DELAY=1)
    record = room.store.read(put.physical_offset, put.size)
    room.put(marker(record._replace(physical_offset=record.physical_offset + 1)))
    room.crash()

    room = open_room()
    room.advance(1 * SECOND)

    assert room.bodies() == [b"stays"]


# --- after RocketMQ ---------------------------------------------------------------------------------


def hand_over_like_upstream(room: WaitingRoom, count: int) -> None:
    """Append the copies of the first messages of level 1, as RocketMQ does; our service does not see it."""
    for record in room.waiting()[:count]:
        room.put(foreign_copy(record))


@pytest.mark.feature("D8")
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_upstream_handed_over_is_not_repeated(open_room: OpenRoom, is_ours: bool) -> None:
    """Its file is up to ten seconds older; its copies do not name their sources."""
    room = open_room()
    for number in range(5):
        body = b"%d" % number
        unique = {"UNIQ_KEY": f"A{number}"}
        if is_ours:
            room.send(body, DELAY=1, **unique)
        else:
            room.put(foreign_level_message(body, 1, 1 * SECOND, **unique))
    room.store.take_checkpoint()
    room.clock.move_ms(1 * SECOND)
    hand_over_like_upstream(room, 3)
    room.crash()

    room = open_room()
    room.advance(60 * SECOND)

    assert room.bodies() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.feature("D9")
def test_without_upstreams_file_its_copies_tell(open_room: OpenRoom) -> None:
    """It would hand over its whole backlog once more."""
    room = open_room()
    for number in range(5):
        room.put(foreign_level_message(b"%d" % number, 1, number * SECOND, UNIQ_KEY=f"A{number}"))
        room.clock.move_ms(1 * SECOND)
    hand_over_like_upstream(room, 3)
    room.close()
    for name in (DELAY_OFFSET_FILE, f"{DELAY_OFFSET_FILE}.bak"):
        room.store_files.delete(name)

    room = open_room()

    assert room.schedule.positions == {1: 3}
    room.advance(60 * SECOND)
    assert room.bodies() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.feature("D7", "D13")
def test_what_upstream_dropped_is_still_handed_over(open_room: OpenRoom) -> None:
    """It passes over what it cannot bring to its topic; here that is one for the dead letters."""
    room = open_room()
    for number in range(3):
        other = {"REAL_QID": "none"} if number == 1 else {}
        room.put(foreign_level_message(b"%d" % number, 1, 1 * SECOND, UNIQ_KEY=f"A{number}", **other))
    first, _, third = room.waiting()
    room.store.take_checkpoint()
    room.clock.move_ms(1 * SECOND)
    room.put(foreign_copy(first))
    room.put(foreign_copy(third))
    room.crash()

    room = open_room()
    room.advance(60 * SECOND)

    assert room.bodies() == [b"0", b"2"]
    assert room.bodies(DEAD_LETTER_TOPIC) == [b"1"]


@pytest.mark.feature("D11")
def test_a_message_that_upstream_hurried_is_not_repeated(open_room: OpenRoom) -> None:
    """After its table was shortened it hands over at once what waits longer than the table says."""
    room = open_room(levels="10m")
    room.send(b"10m", DELAY=1, UNIQ_KEY="A1")
    room.send(b"20m", DELAY=1, UNIQ_KEY="A2")
    room.store.take_checkpoint()
    hand_over_like_upstream(room, 1)
    room.crash()

    room = open_room(levels="1s")
    room.advance(20 * MINUTE)

    assert room.bodies() == [b"10m", b"20m"]

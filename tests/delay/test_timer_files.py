"""The bytes of wheel, timer log and checkpoint: pinned to dumps of RocketMQ 5.5.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.delay.timer_checkpoint import TimerCheckpoint, read_timer_checkpoint, write_timer_checkpoint
from mqtemplate.delay.timer_files import TimerFiles, TimerSettings
from mqtemplate.delay.timer_log import TIMER_UNIT_SIZE, TimerLog, TimerUnit
from mqtemplate.delay.timer_wheel import DEFAULT_SLOTS_TOTAL, Slot, TimerWheel, wheel_file_size
from mqtemplate.errors import ConfigurationError, StoreFormatError
from mqtemplate.store import FolderHome, MappedFile, MappedFileQueue

WRITE_MS = 0x1A1FD727C48
SMALL = TimerSettings(slots_total=100, roll_window_slots=40, log_file_size=600)


def unit(slot_ms: int, physical_offset: int = 0, previous_pos: int = -1, magic: int = 1) -> TimerUnit:
    return TimerUnit(52, previous_pos, magic, WRITE_MS, slot_ms - WRITE_MS, physical_offset, 100, 7, 0)


# --- wheel ------------------------------------------------------------------------------------------


def test_a_slot_has_upstreams_bytes() -> None:
    """A9 Time, first position, last position, count, magic: 32 bytes, as dumped from a real wheel."""
    file = MappedFile(None, wheel_file_size(DEFAULT_SLOTS_TOTAL))
    wheel = TimerWheel(file, DEFAULT_SLOTS_TOTAL, 1_000)

    wheel.link(1_795_253_516_000, 0)
    wheel.link(1_795_253_516_000, 0x34)

    at = 207_116 * 32
    expected = bytes.fromhex("000000006b01650c 0000000000000000 0000000000000034 00000002 00000000")
    assert file.view[at : at + 32] == expected
    assert file.size == 38_707_200
    assert wheel.get(1_795_253_516_000) == Slot(1_795_253_516, 0, 0x34, 2, 0)


def small_wheel() -> TimerWheel:
    return TimerWheel(MappedFile(None, wheel_file_size(100)), 100, 1_000)


def test_a_slot_of_an_earlier_lap_is_not_live() -> None:
    """The place is the same after 200 ticks; the time in it tells."""
    wheel = small_wheel()
    wheel.link(5_000, 0)

    assert wheel.get(205_000) is None

    wheel.link(205_000, 520)
    assert wheel.get(205_000) == Slot(205, 520, 520, 1, 0)
    assert wheel.get(5_000) is None


@pytest.mark.parametrize("ticks", [0, 1, 99, 150, 199])
def test_the_next_live_slot_is_found_over_the_rings_end(ticks: int) -> None:
    wheel = small_wheel()
    start_ms = 1_170_000

    assert wheel.next_live(start_ms) is None
    wheel.link(start_ms + ticks * 1_000, 0)
    assert wheel.next_live(start_ms) == start_ms + ticks * 1_000


def test_the_oldest_live_slot_is_found_after_any_time() -> None:
    """However long nobody looked: what waits since then is delivered, not abandoned."""
    wheel = small_wheel()
    wheel.link(50_000, 0)
    wheel.link(70_000, 52)

    assert wheel.oldest_live(60_000) == 70_000
    assert wheel.oldest_live(10_000) == 50_000
    assert wheel.oldest_live(71_000) is None


# --- log --------------------------------------------------------------------------------------------


def test_units_have_upstreams_bytes() -> None:
    """A10 Size, previous position, magic, write time, delay, log offset, size, topic hash, reserved: 52 bytes."""
    files = MappedFileQueue(None, 10_000)
    log = TimerLog(files)

    for row in [
        TimerUnit(52, -1, 1, WRITE_MS, 15_000, 0x38C, 0x161, 0x114CA214, 0),
        TimerUnit(52, 0, 1, WRITE_MS, 15_000, 0x4ED, 0x163, 0x114CA214, 0),
        TimerUnit(52, -1, 3, WRITE_MS, 86_400_000, 0x650, 0x163, 0x114CA214, 0),
    ]:
        log.next_position()
        log.append(row)

    assert files.read(0, 156) == bytes.fromhex(
        "00000034 ffffffffffffffff 00000001 000001a1fd727c48 00003a98"
        "000000000000038c 00000161 114ca214 0000000000000000"
        "00000034 0000000000000000 00000001 000001a1fd727c48 00003a98"
        "00000000000004ed 00000163 114ca214 0000000000000000"
        "00000034 ffffffffffffffff 00000003 000001a1fd727c48 05265c00"
        "0000000000000650 00000163 114ca214 0000000000000000"
    )


def test_a_full_file_ends_with_upstreams_blank() -> None:
    """Files of 600 bytes take eleven units; the blank stands at 572, the twelfth unit at 600."""
    files = MappedFileQueue(None, 600)
    log = TimerLog(files)

    positions = []
    for number in range(23):
        positions.append(log.next_position())
        log.append(unit(WRITE_MS, number))

    assert positions == [*range(0, 572, 52), *range(600, 1172, 52), 1200]
    assert files.read(572, 16) == bytes.fromhex("0000001c 0000000000000000 cbd43194")
    assert log.end == 1252


def test_the_last_unit_is_found_over_the_blank() -> None:
    log = TimerLog(MappedFileQueue(None, 600))
    ends = []
    for number in range(12):
        log.next_position()
        log.append(unit(WRITE_MS, number))
        ends.append(log.end)

    assert log.last_position() == 600
    assert log.last_position(600) == 520
    assert log.last_position(ends[10]) == 520
    assert log.last_position(0) == -1


def test_the_units_of_a_slot_are_a_chain_that_goes_back() -> None:
    """A11 The slot's last position is its head; scanning from first to last finds the same units."""
    log = TimerLog(MappedFileQueue(None, 600))
    heads = {1: -1, 2: -1}
    for number in range(30):
        position = log.next_position()
        slot = 1 + number % 2
        log.append(unit(WRITE_MS + slot, number, heads[slot]))
        heads[slot] = position

    walked = log.chain(heads[1])
    scanned = [offset for piece in log.scan(0, heads[1], WRITE_MS + 1) for offset in piece["physical_offset"].tolist()]

    assert walked["physical_offset"].tolist() == list(range(28, -1, -2))
    assert scanned == list(range(0, 30, 2))


def test_a_damaged_chain_is_not_walked_for_ever() -> None:
    log = TimerLog(MappedFileQueue(None, 600))
    log.next_position()
    log.append(unit(WRITE_MS, previous_pos=0))

    assert len(log.chain(0)) == 1


# --- checkpoint -------------------------------------------------------------------------------------


def test_the_checkpoint_has_upstreams_bytes() -> None:
    """Read up to 1795253586000, five units in the log, queue at 5."""
    file = MappedFile(None, 4_096)

    write_timer_checkpoint(file, TimerCheckpoint(1_795_253_586_000, 260, 5, 5, 0, 0x1A1FD73CAD7, 0xD2))

    assert file.view[:56] == bytes.fromhex(
        "000001a1fd73c850 0000000000000104 0000000000000005 0000000000000005 0000000000000000 000001a1fd73cad7"
        "00000000000000d2"
    )
    assert read_timer_checkpoint(file).last_timer_log_flush_pos == 260


# --- together ---------------------------------------------------------------------------------------


def fill(files: TimerFiles, slots: list[int]) -> list[int]:
    """Link a unit to each slot, as the service does; gives the ends of the log."""
    ends = []
    for slot_ms in slots:
        position = files.log.next_position()
        files.log.append(unit(slot_ms, len(ends), files.wheel.last_pos(slot_ms)))
        files.wheel.link(slot_ms, position)
        ends.append(files.log.end)
    return ends


SLOTS = [WRITE_MS // 1_000 * 1_000 + 1_000 * (number % 7) for number in range(30)]


@pytest.mark.parametrize("kept", [0, 1, 10, 11, 12, 29, 30])
def test_wheel_and_log_can_be_taken_back_to_any_earlier_end(tmp_path: Path, kept: int) -> None:
    """What was linked after the checkpoint is unlinked; chains and counts are as they were then."""
    files = TimerFiles(FolderHome(tmp_path), SMALL)
    ends = fill(files, SLOTS)
    files.close()

    again = TimerFiles(FolderHome(tmp_path), SMALL)
    assert again.repair([0, *ends][kept])

    for slot_ms in set(SLOTS):
        of_slot = [number for number, slot in enumerate(SLOTS[:kept]) if slot == slot_ms]
        slot = again.wheel.get(slot_ms)
        assert (slot is None) == (not of_slot)
        if slot is not None:
            assert again.log.chain(slot.last_pos)["physical_offset"].tolist() == of_slot[::-1]
            assert slot.num == len(of_slot)
    again.close()


def test_a_wheel_that_does_not_fit_the_log_is_found_out(tmp_path: Path) -> None:
    """As where a snapshot, not the file, held the wheel: the log's last unit must be the last of its slot."""
    home = FolderHome(tmp_path)
    files = TimerFiles(home, SMALL)
    end = fill(files, SLOTS)[-1]
    files.close()
    home.delete("timerwheel")

    again = TimerFiles(home, SMALL)

    assert not again.repair(end)
    again.close()


def test_units_of_records_that_the_log_lost_are_cut(tmp_path: Path) -> None:
    files = TimerFiles(FolderHome(tmp_path), SMALL)
    ends = fill(files, SLOTS)

    assert files.cut_behind(100 + 17) == ends[17]
    assert files.cut_behind(10_000) == ends[-1]
    assert files.cut_behind(0) == 0
    files.close()


def test_a_folder_keeps_its_precision(tmp_path: Path) -> None:
    """Slots hold times divided by it; another one would read other times."""
    files = TimerFiles(FolderHome(tmp_path), SMALL)
    files.save(TimerCheckpoint(0, 0, 0, 0, precision_ms=1_000), 0)
    files.close()

    with pytest.raises(StoreFormatError, match="written with timer-precision-ms 1000, now it is 100; open the folder"):
        TimerFiles(FolderHome(tmp_path), TimerSettings(precision_ms=100, slots_total=100, roll_window_slots=40))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"precision_ms": 0}, r"timer-precision-ms must be 1\.\.10000, got 0"),
        ({"roll_window_slots": 1}, r"timer-roll-window-slot must be 2\.\.604740, got 1"),
        ({"precision_ms": 10_000, "roll_window_slots": 300_000}, "must be below 2147483648 ms"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        TimerSettings(**settings)


def test_a_unit_has_52_bytes() -> None:
    """A10"""
    assert TIMER_UNIT_SIZE == 52

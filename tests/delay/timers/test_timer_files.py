"""The bytes of wheel, timer log and checkpoint, compared with dumps of RocketMQ 5.5.0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.files import (
    TimerCheckpoint,
    TimerFiles,
    Writer,
    read_timer_checkpoint,
    write_timer_checkpoint,
)
from mqtemplate.delay.timers.timer_log import (
    DONE_RECORD_SIZE,
    TIMER_UNIT_DTYPE,
    TIMER_UNIT_SIZE,
    Magic,
    TimerLog,
    TimerLogDamageError,
    are_valid,
    deliver_times,
    seal_units,
    unpack_unit,
)
from mqtemplate.delay.timers.timer_wheel import Slot, TimerWheel, wheel_file_size
from mqtemplate.errors import ConfigurationError, StoreFormatError
from mqtemplate.store.files.disk_files import DiskFile
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
from tests.store.small_store import overwrite

WRITE_MS = 0x1A1FD727C48
DEFAULT_SLOTS_TOTAL = TimerSettings().slots_total
SMALL = TimerSettings(slots_total=100, roll_window_slots=40, log_file_size=600)


def units(slots_ms: list[int], physical_offsets: list[int], previous: list[int] | None = None) -> np.ndarray:
    """Return units of records of 100 bytes, without their check."""
    new = np.zeros(len(slots_ms), TIMER_UNIT_DTYPE)
    new["size"], new["magic"], new["write_time_ms"] = 52, Magic.DEFAULT, WRITE_MS
    new["delay_ms"] = np.array(slots_ms) - WRITE_MS
    new["physical_offset"], new["record_size"], new["topic_hash"] = physical_offsets, 100, 7
    new["previous_pos"] = -1 if previous is None else previous
    return new


def append(log: TimerLog, new: np.ndarray) -> list[int]:
    positions = log.next_positions(len(new))
    log.append(new, positions)
    return list(positions.tolist())


def link(wheel: TimerWheel, slot_ms: int, position: int, count: int = 1) -> int:
    """Link one unit. Return the position of the previous unit of its slot."""
    links = wheel.plan(np.array([slot_ms]), np.array([position]), np.array([count]))
    wheel.put(links.slots)
    return int(links.previous[0])


# --- wheel ------------------------------------------------------------------------------------------


@pytest.mark.feature("A9")
def test_a_slot_has_the_bytes_of_rocketmq() -> None:
    """Time, first position, last position, count, magic: 32 bytes, from the wheel of a real broker."""
    file = MappedFile(wheel_file_size(DEFAULT_SLOTS_TOTAL))
    wheel = TimerWheel(file, DEFAULT_SLOTS_TOTAL, 1_000)

    assert link(wheel, 1_795_253_516_000, 0) == -1
    assert link(wheel, 1_795_253_516_000, 0x34) == 0

    [(page, data)] = wheel.changes()
    at = 207_116 * 32 - page * 4_096
    expected = bytes.fromhex("000000006b01650c 0000000000000000 0000000000000034 00000002 00000000")
    assert data[at : at + 32] == expected
    assert file.size == 38_707_200
    assert wheel.get(1_795_253_516_000) == Slot(1_795_253_516, 0, 0x34, 2, 0)


def small_wheel() -> TimerWheel:
    return TimerWheel(MappedFile(wheel_file_size(100)), 100, 1_000)


def test_a_slot_of_an_earlier_lap_is_not_live() -> None:
    """The same slot is used again after 200 ticks. Its time shows the lap."""
    wheel = small_wheel()
    link(wheel, 5_000, 0)

    assert wheel.get(205_000) is None

    link(wheel, 205_000, 520)
    assert wheel.get(205_000) == Slot(205, 520, 520, 1, 0)
    assert wheel.get(5_000) is None


@pytest.mark.parametrize("ticks", [0, 1, 99, 150, 199])
def test_the_next_live_slot_is_found_across_the_end_of_the_ring(ticks: int) -> None:
    wheel = small_wheel()
    start_ms = 1_170_000

    assert wheel.next_live(start_ms) == NEVER_MS
    link(wheel, start_ms + ticks * 1_000, 0)
    assert wheel.next_live(start_ms) == start_ms + ticks * 1_000


def test_the_next_live_slot_is_found_after_any_outage() -> None:
    """Messages that are overdue for any time are released, not dropped."""
    wheel = small_wheel()
    link(wheel, 50_000, 0)
    link(wheel, 70_000, 52)

    assert wheel.next_live(60_000) == 70_000
    assert wheel.next_live(10_000) == 50_000
    assert wheel.next_live(71_000) == NEVER_MS


def test_linking_many_units_equals_linking_them_one_by_one() -> None:
    """The chains, their ends and the counts are the same."""
    slots_ms = np.array([7_000, 3_000, 7_000, 7_000, 250_000, 3_000])
    positions = np.arange(6) * 52
    counts = np.array([1, 1, -1, 1, 1, 1])
    one_by_one, together = small_wheel(), small_wheel()
    for wheel in (one_by_one, together):
        link(wheel, 3_000, 1_000)
        link(wheel, 50_000, 1_052)  # uses the slot of 250_000, a lap earlier

    previous = [
        link(one_by_one, slot_ms, position, count)
        for slot_ms, position, count in zip(slots_ms.tolist(), positions.tolist(), counts.tolist(), strict=True)
    ]
    links = together.plan(slots_ms, positions, counts)
    together.put(links.slots)

    assert links.previous.tolist() == previous == [-1, 1_000, 0, 104, -1, 52]
    for slot_ms in (3_000, 7_000, 50_000, 250_000):
        assert together.get(slot_ms) == one_by_one.get(slot_ms)
    assert together.get(7_000) == Slot(7, 0, 156, 1, 0)
    assert together.checksum == one_by_one.checksum


@pytest.mark.feature("D27")
def test_only_changed_pages_are_written_and_only_by_write(tmp_path: Path) -> None:
    """RocketMQ compares 38 MB each second. Until `write` the file stays as the last checkpoint describes it."""
    file = DiskFile(tmp_path / "timerwheel", wheel_file_size(DEFAULT_SLOTS_TOTAL))
    wheel = TimerWheel(file, DEFAULT_SLOTS_TOTAL, 1_000)
    link(wheel, 5_000, 0)
    link(wheel, 6_000, 52)
    link(wheel, 900_000, 104)

    assert not file.view[:4_096].strip(b"\0")
    changes = wheel.changes()
    assert [page for page, _ in changes] == [0, 7]
    wheel.write(changes)
    assert wheel.changes() == []
    again = TimerWheel(DiskFile(file.path, file.size), DEFAULT_SLOTS_TOTAL, 1_000)
    assert again.get(6_000) == Slot(6, 52, 52, 1, 0)
    assert again.checksum == wheel.checksum
    wheel.close()
    again.close()


@pytest.mark.parametrize("can_free", [True, False], ids=["Linux", "macOS"])
def test_the_memory_of_past_pages_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_free: bool) -> None:
    """Only pages that the file has are freed. Future pages stay. Some systems cannot free a page: it is set to zero."""
    monkeypatch.setattr("mqtemplate.delay.timers.timer_wheel._CAN_FREE", can_free)
    wheel = TimerWheel(DiskFile(tmp_path / "timerwheel", wheel_file_size(1_000)), 1_000, 1_000)
    link(wheel, 5_000, 0)
    link(wheel, 900_000, 52)

    wheel.forget_before(600_000)
    assert wheel.get(5_000) is not None, "not written yet"
    wheel.write(wheel.changes())
    wheel.forget_before(600_000)

    assert wheel.get(5_000) is None
    assert wheel.get(900_000) is not None
    again = TimerWheel(DiskFile(tmp_path / "timerwheel", wheel_file_size(1_000)), 1_000, 1_000)
    assert again.get(5_000) is not None
    again.clear_all()
    assert again.get(5_000) is None
    wheel.close()
    again.close()


def test_the_checksum_of_a_wheel_detects_any_single_wrong_bit(tmp_path: Path) -> None:
    path = tmp_path / "timerwheel"
    wheel = TimerWheel(DiskFile(path, wheel_file_size(100)), 100, 1_000)
    for tick in (5, 70, 150):
        link(wheel, tick * 1_000, tick * 52)
    wheel.write(wheel.changes())
    wheel.close()
    whole = path.read_bytes()

    for at in [*range(5 * 32, 6 * 32), *range(70 * 32, 71 * 32), 0, len(whole) - 1]:
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            damaged = TimerWheel(DiskFile(path, len(whole)), 100, 1_000)
            assert damaged.checksum != wheel.checksum
            damaged.close()


# --- log --------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> TimerLog:
    """A log with eleven units in each file."""
    return TimerLog(MappedFileQueue(600))


@pytest.mark.feature("A10")
def test_units_have_the_bytes_of_rocketmq() -> None:
    """Size, previous position, magic, write time, delay, physical offset, size, topic hash; RocketMQ does not read the
    last 8 of the 52 bytes."""
    files = MappedFileQueue(10_000)
    log = TimerLog(files)
    new = units([WRITE_MS + 15_000, WRITE_MS + 15_000, WRITE_MS + 86_400_000], [0x38C, 0x4ED, 0x650], [-1, 0, -1])
    new["record_size"], new["topic_hash"] = [0x161, 0x163, 0x163], 0x114CA214
    new["magic"] = [1, 1, 3]

    append(log, new)

    rocketmqs = [
        "00000034 ffffffffffffffff 00000001 000001a1fd727c48 00003a98 000000000000038c 00000161 114ca214",
        "00000034 0000000000000000 00000001 000001a1fd727c48 00003a98 00000000000004ed 00000163 114ca214",
        "00000034 ffffffffffffffff 00000003 000001a1fd727c48 05265c00 0000000000000650 00000163 114ca214",
    ]
    assert TIMER_UNIT_SIZE == 52
    assert [files.read(at, 44) for at in (0, 52, 104)] == [bytes.fromhex(text) for text in rocketmqs]


def test_a_unit_has_its_exact_due_time_and_a_check() -> None:
    """The check detects any wrong bit. RocketMQ's units have no check, and are accepted unchanged."""
    new = units([WRITE_MS], [1_000])
    new["tail"] = WRITE_MS + 37
    assert are_valid(units([WRITE_MS], [1_000])).all(), "RocketMQ's"

    seal_units(new)

    data = new.tobytes()
    unit = unpack_unit(data)
    assert unit is not None
    assert (deliver_times(new).tolist(), unit.slot_ms) == ([WRITE_MS + 37], WRITE_MS)
    assert are_valid(new).all()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_unit(bytes(damaged)) is None
        assert not are_valid(np.frombuffer(bytes(damaged), TIMER_UNIT_DTYPE)).any()


def test_a_full_file_ends_with_the_blank_of_rocketmq() -> None:
    """A file of 600 bytes has eleven units. The blank is at 572, the twelfth unit at 600."""
    files = MappedFileQueue(600)
    log = TimerLog(files)

    positions = append(log, units([WRITE_MS] * 12, list(range(12))))
    positions += append(log, units([WRITE_MS] * 11, list(range(12, 23))))

    assert positions == [*range(0, 572, 52), *range(600, 1172, 52), 1200]
    assert files.read(572, 16) == bytes.fromhex("0000001c 0000000000000000 cbd43194")
    assert log.end == 1252


@pytest.mark.feature("D17")
def test_the_last_unit_is_found_across_the_blank(log: TimerLog) -> None:
    """RocketMQ reads 24 bytes before the end. At the start of a file that is the padding of the file before."""
    append(log, units([WRITE_MS] * 12, list(range(12))))

    assert log.last_position() == 600
    assert log.last_position(600) == 520
    assert log.last_position(572) == 520
    assert log.last_position(0) == -1


def test_a_unit_is_found_by_its_record(log: TimerLog) -> None:
    """It is found across files."""
    append(log, units([WRITE_MS] * 30, [number * 10 for number in range(30)]))

    found = [log.find(number * 10) for number in range(30)]

    assert [unit.physical_offset for _, unit in filter(None, found)] == [number * 10 for number in range(30)]
    assert log.find(5) is None
    assert log.find(300) is None
    assert [log.position_after(offset) for offset in (0, 101, 110, 291)] == [0, 600, 600, log.end]


@pytest.mark.feature("A11")
def test_the_units_of_a_slot_are_a_chain_that_leads_back(log: TimerLog) -> None:
    """The slot's last position is its head. Following the chain and scanning find the same units."""
    positions = append(log, units([WRITE_MS] * 30, list(range(30))))
    previous = [-1, -1, *positions[:-2]]
    log.truncate(0)
    append(log, units([WRITE_MS + 1 + number % 2 for number in range(30)], list(range(30)), previous))

    chain_positions, chain_units = log.chain(positions[28], WRITE_MS + 1)
    pieces = list(log.scan(0, positions[28], WRITE_MS + 1))
    scanned = np.concatenate([found for _, found in pieces])
    both = log.chains(np.array(positions[28:]))

    assert chain_units["physical_offset"].tolist() == list(range(28, -1, -2))
    assert scanned["physical_offset"].tolist() == list(range(0, 30, 2))
    assert [position for scan_positions, _ in pieces for position in scan_positions.tolist()] == positions[:29:2]
    assert chain_positions.tolist() == positions[28::-2]
    assert sorted(both["physical_offset"].tolist()) == list(range(30))


def test_reading_a_damaged_unit_raises_an_error(log: TimerLog) -> None:
    append(log, units([WRITE_MS] * 5, list(range(5)), [-1, 0, 52, 104, 156]))
    log._files.files[0].view[52 + 30] ^= 1

    for read in (
        lambda: log.chain(208, WRITE_MS),
        lambda: log.chains(np.array([208])),
        lambda: list(log.scan(0, 208, WRITE_MS)),
        lambda: log.find(1),
    ):
        with pytest.raises(TimerLogDamageError, match="timerlog: "):
            read()


def test_a_chain_that_leads_back_to_itself_raises_an_error(log: TimerLog) -> None:
    append(log, units([WRITE_MS], [0], [0]))

    with pytest.raises(TimerLogDamageError, match="does not belong to the slot"):
        log.chain(0, WRITE_MS)
    with pytest.raises(TimerLogDamageError, match="a chain of units is damaged"):
        log.chains(np.array([0]))


def test_a_unit_that_is_marked_as_done_is_valid(log: TimerLog) -> None:
    append(log, units([WRITE_MS] * 3, [0, 10, 20]))

    log.mark_done(np.array([52]))

    read = [(unit.magic, unit.record_size) for unit in map(log.read, (0, 52, 104)) if unit]
    assert read == [(1, 100), (Magic.DEFAULT | Magic.DONE, DONE_RECORD_SIZE), (1, 100)]


@pytest.mark.parametrize("numbers", [[], [0], [29], [0, 29], [9, 10, 11], list(range(30)), list(range(0, 30, 3))])
def test_only_the_given_units_are_marked(log: TimerLog, numbers: list[int]) -> None:
    """In runs and alone, on both sides of a file's end. The rest of each file, blanks included, keeps its bytes."""
    positions = append(log, units([WRITE_MS] * 30, list(range(30))))
    before = [bytes(file.view) for file in log._files.files]

    log.mark_done(np.array(positions, np.int64)[numbers])

    marked = [number for number, at in enumerate(positions) if (unit := log.read(at)) and unit.magic & Magic.DONE]
    assert marked == numbers
    for at in (positions[number] for number in numbers):
        file, within = log._files.files[at // 600], at % 600
        file.view[within : within + 52] = before[at // 600][within : within + 52]
    assert [bytes(file.view) for file in log._files.files] == before


def test_units_that_are_deleted_damaged_or_past_are_not_marked(log: TimerLog) -> None:
    """A mark has its own check, which must not make a damaged unit look valid."""
    positions = append(log, units([WRITE_MS + number for number in range(30)], list(range(30))))
    log._files.files[1].view[3 * 52 + 30] ^= 1
    log.delete_before(600)

    log.mark_done(np.array(positions), WRITE_MS + 13)

    assert log.read(positions[14]) is None
    assert [number for number, at in enumerate(positions) if (unit := log.read(at)) and unit.magic & Magic.DONE] == [
        13,
        *range(15, 30),
    ]


# --- checkpoint -------------------------------------------------------------------------------------


def test_the_checkpoint_has_the_bytes_of_rocketmq() -> None:
    """Read up to 1795253586000, five units in the log, queue offset 5."""
    file = MappedFile(4_096)

    write_timer_checkpoint(file, TimerCheckpoint(1_795_253_586_000, 260, 5, 5, 0, 0x1A1FD73CAD7, 0xD2))

    assert file.view[:56] == bytes.fromhex(
        "000001a1fd73c850 0000000000000104 0000000000000005 0000000000000005 0000000000000000 000001a1fd73cad7"
        "00000000000000d2"
    )
    checkpoint, writer = read_timer_checkpoint(file)
    assert (checkpoint.last_timer_log_flush_pos, writer) == (260, Writer.OURS)


def test_the_checkpoint_shows_its_writer_and_repairs_a_wrong_bit() -> None:
    """Our numbers are there twice, with a check. RocketMQ changes the first copy only, and more than one bit of it."""
    file = MappedFile(4_096)
    assert read_timer_checkpoint(file)[1] is Writer.UNKNOWN
    ours = TimerCheckpoint(1_795_253_586_000, 260, 5, 5, 0, 0x1A1FD73CAD7, 0xD2, 0, 1_000, -7)
    write_timer_checkpoint(file, ours)

    for bit in range(168 * 8):
        file.view[bit // 8] ^= 1 << bit % 8
        assert read_timer_checkpoint(file) in ((ours, Writer.OURS), (read_timer_checkpoint(file)[0], Writer.UNKNOWN))
        file.view[bit // 8] ^= 1 << bit % 8
    file.view[0:16] = bytes.fromhex("000001a1fd73c850 0000000000000138")
    file.view[40:48] = bytes(8)
    assert read_timer_checkpoint(file)[1] is Writer.ROCKETMQ
    assert read_timer_checkpoint(file)[0].last_timer_log_flush_pos == 312


# --- all files --------------------------------------------------------------------------------------


def fill(files: TimerFiles, slots_ms: list[int], first: int = 0) -> None:
    """Link one unit to each slot, as the service does."""
    new = units(slots_ms, [100 * number for number in range(first, first + len(slots_ms))])
    positions = files.log.next_positions(len(new))
    links = files.wheel.plan(np.array(slots_ms), positions, np.ones(len(new), np.int64))
    new["previous_pos"] = links.previous
    files.log.append(new, positions)
    files.wheel.put(links.slots)


def save(files: TimerFiles, read_ms: int = 0) -> None:
    changes = files.wheel.changes()
    checkpoint = TimerCheckpoint(read_ms, files.log.end, 0, 0, precision_ms=1_000, wheel_checksum=files.wheel.checksum)
    files.save(checkpoint, changes)


SLOTS = [WRITE_MS // 1_000 * 1_000 + 1_000 * (number % 7) for number in range(30)]


def offsets_of(files: TimerFiles, slot_ms: int) -> list[int]:
    slot = files.wheel.get(slot_ms)
    return [] if slot is None else files.log.chain(slot.last_pos, slot_ms)[1]["physical_offset"].tolist()


def assert_has(files: TimerFiles, count: int) -> None:
    """Assert that wheel and log have the units of the first *count* of `SLOTS`, and no others."""
    for slot_ms in set(SLOTS):
        numbers = [number for number, slot in enumerate(SLOTS[:count]) if slot == slot_ms]
        assert offsets_of(files, slot_ms) == [100 * number for number in numbers[::-1]]
        slot = files.wheel.get(slot_ms)
        assert (0 if slot is None else slot.num) == len(numbers)


@pytest.mark.parametrize("kept", [0, 1, 10, 11, 12, 29, 30])
@pytest.mark.parametrize("is_written", [False, True])
def test_wheel_and_log_are_taken_back_to_the_last_checkpoint(tmp_path: Path, kept: int, is_written: bool) -> None:
    """Later units are unlinked, whether the wheel's pages were written or not."""
    files = TimerFiles(FolderStoreFiles(tmp_path), SMALL)
    if kept:
        fill(files, SLOTS[:kept])
    save(files)
    if kept < 30:
        fill(files, SLOTS[kept:], kept)
    if is_written:
        files.wheel.write(files.wheel.changes())
    files.close()

    again = TimerFiles(FolderStoreFiles(tmp_path), SMALL)

    assert again.recover()
    assert_has(again, kept)
    again.close()


def write_all(folder: Path) -> None:
    """Leave files with a unit for each of `SLOTS`."""
    files = TimerFiles(FolderStoreFiles(folder), SMALL)
    fill(files, SLOTS)
    save(files)
    files.close()


@pytest.mark.feature("D16")
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_lost_wheel_is_rebuilt_from_the_log_unless_it_is_damaged(tmp_path: Path, is_damaged: bool) -> None:
    """Slots, chains and counts are derived from the units."""
    write_all(tmp_path)
    (tmp_path / "timerwheel").unlink()
    if is_damaged:
        overwrite(tmp_path / "timerlog" / f"{600:020d}", 100, b"\xff")

    again = TimerFiles(FolderStoreFiles(tmp_path), SMALL)

    assert again.recover() is not is_damaged
    if not is_damaged:
        assert_has(again, 30)
    again.close()


@pytest.mark.feature("D14")
def test_units_of_records_that_the_commit_log_lost_are_removed(tmp_path: Path) -> None:
    files = TimerFiles(FolderStoreFiles(tmp_path), SMALL)
    fill(files, SLOTS)

    files.cut_after(10_000)
    assert_has(files, 30)
    files.cut_after(1_799)
    assert_has(files, 17)
    files.cut_after(0)
    assert_has(files, 0)


@pytest.mark.feature("D14")
def test_a_marked_unit_stays_as_long_as_its_record(tmp_path: Path) -> None:
    """It does not have the record's size any more. The record's start suffices."""
    files = TimerFiles(FolderStoreFiles(tmp_path), SMALL)
    fill(files, SLOTS)
    files.log.mark_done(np.array([files.log.last_position()]))

    end, last = files.log.end, files.log.last_position()

    files.cut_after(2_901)
    assert files.log.end == end
    files.cut_after(2_900)
    assert files.log.end == last
    files.close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        # RocketMQ's files have 104857600 bytes.
        (
            {"log_file_size": 1_200},
            "files have 600 bytes, but mapped-file-size-timer-log is 1200; leave mapped-file-size-timer-log out, or",
        ),
        # A slot has a time divided by the precision. With another precision, times would be wrong.
        ({"precision_ms": 100}, "written with timer-precision-ms 1000, now it is 100; open the directory"),
    ],
)
def test_the_error_for_other_settings_names_the_setting_and_its_value(
    tmp_path: Path, changes: dict[str, int], complaint: str
) -> None:
    write_all(tmp_path)

    with pytest.raises(StoreFormatError, match=complaint):
        TimerFiles(FolderStoreFiles(tmp_path), replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"precision_ms": 0}, r"timer-precision-ms must be 1\.\.10000, got 0"),
        ({"roll_window_slots": 1}, r"timer-roll-window-slot must be 2\.\.604740, got 1"),
        ({"precision_ms": 10_000, "roll_window_slots": 300_000}, "must be below 2147483648 ms"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        TimerSettings(**settings)

"""Retention, beside the golden scripts: delete hours, the disk, errors of readers, and settings."""

from __future__ import annotations

import dataclasses
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.store.cleaning import next_delete_hour
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import DiskUsage, MemoryStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import StoreSettings
from tests.store.small_store import NothingPending, OpenStore, bodies, draft, opened, small, used

HOUR_MS = 3_600_000
FILE = 4_096
BODY = bytes(1_500)  # two of them fill a file


@pytest.fixture(autouse=True)
def _utc(utc: None) -> None:
    """Delete hours are UTC."""


def fill(store: MessageStore, files: int) -> None:
    """Fill *files* files of the log with two records each, and start another."""
    for _ in range(files * 2 + 1):
        store.put(draft(BODY))


def without_pending(store: MessageStore) -> MessageStore:
    """Let the store delete any file: it has no pending messages."""
    store.cleaning.load(NothingPending())
    return store


def log_names(folder: Path) -> list[int]:
    """Return the files of the log as numbers from 0."""
    return [int(path.name) // FILE for path in sorted((folder / "commitlog").iterdir())]


def advance(store: MessageStore, milliseconds: int) -> int:
    """Let time pass for the cleaning alone. Return the number of steps."""
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    target_ms = clock.now_ms() + milliseconds
    steps = 0
    while (due_ms := store.cleaning.step()) is not None and due_ms <= target_ms:
        clock.set_ms(max(due_ms, clock.now_ms()))
        steps += 1
    clock.set_ms(target_ms)
    store.cleaning.step()
    return steps


# --- by age -----------------------------------------------------------------------------------------


@given(time_ms=st.integers(0, 4_000_000_000_000), hours=st.sets(st.integers(0, 23), min_size=1))
def test_the_next_delete_hour_is_the_first_millisecond_in_one(time_ms: int, hours: set[int]) -> None:
    found_ms = next_delete_hour(time_ms, frozenset(hours))

    def hour(at_ms: int) -> int:
        return datetime.fromtimestamp(at_ms // 1_000, UTC).hour

    assert hour(found_ms) in hours
    assert found_ms == time_ms or found_ms % HOUR_MS == 0
    between = range(time_ms, found_ms, HOUR_MS)
    assert not {hour(at_ms) for at_ms in between} & hours


def test_an_hour_skipped_by_daylight_saving_comes_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2026-03-29 the clocks in Berlin skip from two to three."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    before = int(datetime(2026, 3, 29, 0, 59, 59, tzinfo=UTC).timestamp() * 1_000)  # 01:59:59 there

    found = datetime.fromtimestamp(next_delete_hour(before, frozenset({2})) / 1_000, UTC)

    assert found == datetime(2026, 3, 30, 0, 0, tzinfo=UTC)


def test_a_deleted_file_is_logged_and_counted(open_store: OpenStore) -> None:
    store = without_pending(open_store(small(file_reserved_time=1)))
    fill(store, 1)

    with capture_logs() as logs:
        advance(store, 4 * HOUR_MS)

    (line,) = [line for line in logs if line["event"] == "store.file_deleted"]
    assert (line["file"], line["reason"], line["age_h"]) == (f"{0:020d}", "age", 4.0)
    assert store.metrics.snapshot()["store.files_deleted"] == 1


def test_forty_days_need_few_steps(open_store: OpenStore) -> None:
    """The next time at which a file can expire is known, so there are no steps in between."""
    store = without_pending(open_store())
    fill(store, 2)

    assert advance(store, 40 * 24 * HOUR_MS) < 50


# --- by the disk ------------------------------------------------------------------------------------


def test_forcible_cleaning_ends_when_the_disk_has_space(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store())
    fill(store, 4)
    store.disk.read = lambda: used(0.80 + 0.02 * len(log_names(tmp_path)))

    while (due_ms := store.cleaning.step()) is not None and due_ms <= store.clock.now_ms():
        pass

    assert log_names(tmp_path) == [3, 4]  # 0.84


def test_the_disk_is_checked_every_ten_seconds_but_not_on_a_virtual_clock(tmp_path: Path) -> None:
    """A test must not depend on the disk of its machine."""
    clock = SystemClock()
    real, virtual = opened(tmp_path / "real", clock=clock), opened(tmp_path / "virtual")

    now_ms = clock.now_ms()
    next_ms = real.cleaning.step()

    assert next_ms is not None
    assert now_ms + 10_000 <= next_ms <= clock.now_ms() + 10_000
    assert virtual.disk.space() is None
    for store in (real, virtual):
        store.close()


def test_the_used_ratio_belongs_to_the_disk_of_the_folder(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    blocks = stat.f_blocks - stat.f_bfree

    ratio = FolderStoreFiles(tmp_path).disk_usage().used_ratio

    assert ratio == pytest.approx(blocks / (blocks + stat.f_bavail), abs=0.05)
    assert MemoryStoreFiles().disk_usage() is None


# --- the figures ------------------------------------------------------------------------------------

GIB = 1 << 30


def filling(store: MessageStore, bytes_a_second: int, free: int = 40 * GIB) -> None:
    """Let a disk of 100 GiB fill."""
    clock = store.clock
    start_ms = clock.now_ms()

    def read() -> DiskUsage:
        left = max(free - bytes_a_second * (clock.now_ms() - start_ms) // 1_000, 0)
        return DiskUsage(100 * GIB - left, left)

    store.disk.read = read


def full_in_s(store: MessageStore) -> int | None:
    space = store.disk.space()
    assert space is not None
    return None if space.full_in_ms is None else space.full_in_ms // 1_000


def test_the_time_until_the_disk_is_full_comes_from_the_last_five_minutes(open_store: OpenStore) -> None:
    """Until its limit, at which messages are deleted: here 64 KiB, 16 files of the log."""
    store = open_store()
    filling(store, 10 << 20)
    store.cleaning.clean()
    at_first = full_in_s(store)

    advance(store, 60_000)
    after_a_minute = full_in_s(store)
    advance(store, 540_000)
    after_ten = full_in_s(store)
    free = store.disk.read()
    store.disk.read = lambda: free
    advance(store, 310_000)

    assert at_first is None
    assert after_a_minute == pytest.approx(40 * 1_024 // 10 - 60, abs=2)
    assert after_ten == pytest.approx(40 * 1_024 // 10 - 600, abs=2)
    assert full_in_s(store) is None, "it does not fill any more"


def test_a_disk_at_its_limit_is_full_in_no_time(open_store: OpenStore) -> None:
    store = open_store()
    store.disk.read = lambda: used(0.86)

    space = store.disk.space()

    assert space is not None
    assert (space.used_bytes, space.free_bytes, space.limit_free_bytes, space.full_in_ms) == (8_600, 1_400, 1_500, 0)


def test_little_free_space_on_a_large_disk_is_a_warning_once(open_store: OpenStore) -> None:
    """The limits do not count there: many files of the log fit."""
    store = open_store()
    filling(store, 20 << 20, free=11 * GIB)
    store.cleaning.clean()

    with capture_logs() as logs:
        advance(store, 300_000)

    (line,) = logs
    assert (line["event"], line["log_level"]) == ("store.disk_low", "warning")
    assert line["used"] == pytest.approx(0.9, abs=0.005)
    assert line["full_in_s"] == pytest.approx(10 * 1_024 // 20, abs=12)
    assert line["hint"] == (
        "less than 10% of the disk is free (disk-free-warning-ratio); free space, or use a larger disk, before "
        "messages are deleted or refused"
    )
    assert store.disk.is_low


def test_the_warning_can_be_switched_off(open_store: OpenStore) -> None:
    store = open_store(small(disk_free_warning_ratio=0))
    filling(store, 0, free=GIB)

    with capture_logs() as logs:
        store.cleaning.clean()

    assert logs == []


# --- after a deletion -------------------------------------------------------------------------------


def cleaned(store: MessageStore, count: int) -> MessageStore:
    """Delete the first *count* files."""
    without_pending(store)
    store.disk.read = lambda: used(0.88)
    for _ in range(count):
        store.cleaning.clean()
    store.disk.read = lambda: None
    store.cleaning.clean()
    return store


def test_hooks_get_the_new_start_of_the_log(open_store: OpenStore) -> None:
    store = open_store()
    starts: list[int] = []
    store.cleaning.on_cleaned.append(starts.append)
    fill(store, 2)

    cleaned(store, 2)

    assert starts == [FILE, 2 * FILE]


def test_files_in_memory_are_deleted_as_well(clock: VirtualClock) -> None:
    store = without_pending(opened(MemoryStoreFiles(), small(file_reserved_time=1), clock=clock))
    fill(store, 3)

    advance(store, 4 * HOUR_MS)

    assert store.start_offset == 3 * FILE
    assert len(bodies(store)) == 1
    store.close()


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"file_reserved_time": 0}, "file-reserved-time must be 1 hour or more, got 0"),
        (
            {"dead_letter_reserved_time": -1},
            "dead-letter-reserved-time must be 0 hours or more (0: no longer than other messages), got -1",
        ),
        (
            {"group_reserved_time": 0},
            "got 0; to delete files whether or not a group has read them, set keep-unread-messages to false",
        ),
        (
            {"delete_when": "4,16"},
            "delete-when: '4,16' is not an hour of the day; give 00 to 23, several with a semicolon",
        ),
        ({"delete_when": ""}, "delete-when: '' is not an hour of the day"),
        ({"disk_max_used_space_ratio": 0}, "are percent of the disk, 1 to 100, none above the next, got 0, 85 and 90"),
        ({"disk_space_warning_level_ratio": 80}, "none above the next, got 75, 85 and 80"),
        ({"disk_space_warning_level_ratio": 101}, "1 to 100, none above the next, got 75, 85 and 101"),
    ],
)
def test_an_invalid_setting_is_refused_with_what_is_allowed(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dataclasses.replace(StoreSettings(), **changes)  # type: ignore[arg-type]

    assert text in str(caught.value)

"""Retention: which files are deleted and when, which files stay, and what readers find afterwards."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import ConfigurationError, CorruptRecordError, DeletedRecordError, StoreFullError
from mqtemplate.record.codec import Drafts, StoredRecord
from mqtemplate.store.cleaning import next_delete_hour
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import StoreSettings
from tests.store.small_store import NothingPending, OpenStore, bodies, draft, kill, small

HOUR_MS = 3_600_000
FILE = 4_096
BODY = bytes(1_500)  # two of them fill a file


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Delete hours are local time. In these tests that is UTC, where the virtual clock starts at midnight."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def fill(store: MessageStore, files: int, clock: VirtualClock | None = None, *, every_ms: int = 0) -> None:
    """Fill *files* files of the log with two records each, and start another. The clock moves after each record."""
    for _ in range(files * 2 + 1):
        store.put(draft(BODY))
        if clock is not None:
            clock.move_ms(every_ms)


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


def test_a_file_is_deleted_when_its_newest_record_is_old_enough(open_store: OpenStore, tmp_path: Path) -> None:
    """The first record of the next file bounds the age of the newest record."""
    store = without_pending(open_store(small(file_reserved_time=72, delete_when=";".join(map(str, range(24))))))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 3, clock, every_ms=HOUR_MS)  # file 1 starts at hour 2, file 2 at hour 4, file 3 at hour 6

    advance(store, 67 * HOUR_MS - 1)
    before = log_names(tmp_path)
    advance(store, 1)

    assert (before, log_names(tmp_path)) == ([0, 1, 2, 3], [1, 2, 3])
    advance(store, 2 * HOUR_MS)
    assert log_names(tmp_path) == [2, 3]


def test_old_files_are_deleted_at_the_hour(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1, delete_when="04")))
    fill(store, 3)

    advance(store, 4 * HOUR_MS - 1)
    before = log_names(tmp_path)
    advance(store, 1)

    assert (before, log_names(tmp_path)) == ([0, 1, 2, 3], [3])


def test_a_delete_hour_ends_and_comes_again_the_next_day(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1, delete_when="04")))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    clock.move_ms(4 * HOUR_MS)
    fill(store, 1)

    advance(store, HOUR_MS)  # at five it is old enough, but the hour is over
    at_five = log_names(tmp_path)
    advance(store, 23 * HOUR_MS - 1)
    a_day_later = log_names(tmp_path)
    advance(store, 1)

    assert (at_five, a_day_later, log_names(tmp_path)) == ([0, 1], [0, 1], [1])


def test_there_may_be_several_delete_hours(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1, delete_when="23; 2 ;16")))
    fill(store, 1)

    advance(store, 2 * HOUR_MS)

    assert log_names(tmp_path) == [1]


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


def test_the_last_file_is_never_deleted(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1)))
    fill(store, 0)

    advance(store, 1_000 * HOUR_MS)

    assert log_names(tmp_path) == [0]
    assert len(bodies(store)) == 1


def test_an_empty_last_file_does_not_keep_the_file_before_it(open_store: OpenStore, tmp_path: Path) -> None:
    """A killed process left a file without records: no first record bounds the age of the file before."""
    store = open_store(small(file_reserved_time=1))
    fill(store, 1)
    store.close()
    (tmp_path / "commitlog" / f"{2 * FILE:020d}").write_bytes(bytes(FILE))

    again = without_pending(open_store(small(file_reserved_time=1)))
    advance(again, 100 * HOUR_MS)

    assert log_names(tmp_path) == [1, 2]  # the log still ends in file 1
    assert len(bodies(again)) == 1


def test_at_most_ten_files_are_deleted_in_one_run(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1)))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 14)
    clock.move_ms(4 * HOUR_MS)

    while (due_ms := store.cleaning.step()) is not None and due_ms <= clock.now_ms():
        pass

    assert log_names(tmp_path) == [10, 11, 12, 13, 14]
    assert due_ms == clock.now_ms() + 10_000
    advance(store, 10_000)
    assert log_names(tmp_path) == [14]


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


def test_a_file_filled_later_is_deleted_in_time(open_store: OpenStore, tmp_path: Path) -> None:
    """The cleaning needs no wake-up: later records are younger than the file that expires next."""
    store = without_pending(open_store(small(file_reserved_time=2, delete_when=";".join(map(str, range(24))))))
    next_ms = store.cleaning.step()

    fill(store, 1)

    assert next_ms == store.clock.now_ms() + 2 * HOUR_MS
    advance(store, 2 * HOUR_MS)
    assert log_names(tmp_path) == [1]


def test_a_clock_that_is_set_back_does_not_stop_the_cleaning(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1)))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 1)
    clock.move_ms(5 * HOUR_MS)  # after today's hour
    assert store.cleaning.step() == clock.now_ms() + 23 * HOUR_MS

    clock.move_ms(-HOUR_MS)
    store.cleaning.step()

    assert log_names(tmp_path) == [1]


# --- by the disk ------------------------------------------------------------------------------------


def on_a_disk(store: MessageStore, used: float) -> MessageStore:
    """Set the used ratio of the store's disk, and check it."""
    store.cleaning.disk_used_ratio = lambda: used
    store.cleaning.clean()
    return store


def test_above_the_first_ratio_old_files_are_deleted_at_any_hour(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(file_reserved_time=1)))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 1)
    clock.move_ms(HOUR_MS)

    on_a_disk(store, 0.75)
    at_the_ratio = log_names(tmp_path)
    on_a_disk(store, 0.76)

    assert (at_the_ratio, log_names(tmp_path)) == ([0, 1], [1])


def test_above_the_second_ratio_the_oldest_files_are_deleted_whatever_their_age(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = without_pending(open_store())
    fill(store, 3)

    with capture_logs() as logs:
        on_a_disk(store, 0.85)
        at_the_ratio = log_names(tmp_path)
        on_a_disk(store, 0.86)

    assert (at_the_ratio, log_names(tmp_path)) == ([0, 1, 2, 3], [1, 2, 3])
    assert [line["reason"] for line in logs if line["event"] == "store.file_deleted"] == ["disk"]


def test_files_that_are_not_old_stay_without_forcible_cleaning(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store(small(clean_file_forcibly_enable=False)))
    fill(store, 3)

    on_a_disk(store, 0.99)

    assert log_names(tmp_path) == [0, 1, 2, 3]


def test_forcible_cleaning_ends_when_the_disk_has_space(open_store: OpenStore, tmp_path: Path) -> None:
    store = without_pending(open_store())
    fill(store, 4)
    store.cleaning.disk_used_ratio = lambda: 0.80 + 0.02 * len(log_names(tmp_path))

    while (due_ms := store.cleaning.step()) is not None and due_ms <= store.clock.now_ms():
        pass

    assert log_names(tmp_path) == [3, 4]  # 0.84


def test_above_the_third_ratio_messages_are_refused_until_the_disk_has_space(open_store: OpenStore) -> None:
    store = without_pending(open_store())
    fill(store, 0)
    count = len(bodies(store))

    with capture_logs() as logs:
        on_a_disk(store, 0.91)
        for put in (lambda: store.put(draft(b"x")), lambda: store.put(Drafts([draft(b"x")]))):
            with pytest.raises(
                StoreFullError,
                match=r"the disk is 91% full, and above 90% \(disk-space-warning-level-ratio\) no message is taken; "
                r"free space there, or raise the ratio, then send again: what was acknowledged is safe",
            ):
                put()
        on_a_disk(store, 0.90)

    assert store.put(draft(b"x")).queue_offset == count
    assert [line["event"] for line in logs] == ["store.messages_refused", "store.messages_accepted"]


def test_copies_that_free_space_are_accepted_on_a_full_disk(open_store: OpenStore) -> None:
    store = on_a_disk(without_pending(open_store()), 0.95)

    (put,) = store.put(Drafts([draft(b"copied forward")]), though_full=True)

    assert put.queue_offset == 0


def test_a_ratio_of_a_hundred_is_never_reached(open_store: OpenStore, tmp_path: Path) -> None:
    never = {f"disk_{name}_ratio": 100 for name in ("max_used_space", "space_clean_forcibly", "space_warning_level")}
    store = without_pending(open_store(small(**never)))
    fill(store, 1)

    on_a_disk(store, 1.0)

    assert log_names(tmp_path) == [0, 1]
    assert store.put(draft(b"x"))


def test_the_disk_is_checked_every_ten_seconds_but_not_on_a_virtual_clock(tmp_path: Path) -> None:
    """A test must not depend on the disk of its machine."""
    clock = SystemClock()
    real = MessageStore(FolderStoreFiles(tmp_path / "real"), small(), clock)
    virtual = MessageStore(FolderStoreFiles(tmp_path / "virtual"), small(), VirtualClock())
    for store in (real, virtual):
        store.load()

    now_ms = clock.now_ms()
    next_ms = real.cleaning.step()

    assert next_ms is not None
    assert now_ms + 10_000 <= next_ms <= clock.now_ms() + 10_000
    assert virtual.cleaning.disk_used_ratio is None
    for store in (real, virtual):
        store.close()


def test_the_used_ratio_is_that_of_the_folders_disk(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    used = stat.f_blocks - stat.f_bfree

    assert FolderStoreFiles(tmp_path).disk_used_ratio() == pytest.approx(used / (used + stat.f_bavail), abs=0.05)
    assert FolderStoreFiles(tmp_path).disk_used_ratio(roomy_bytes=1) == 0.0, "with enough space no ratio applies"
    assert FolderStoreFiles(tmp_path).disk_used_ratio(roomy_bytes=1 << 60) > 0.0
    assert MemoryStoreFiles().disk_used_ratio() == 0.0


# --- files that stay --------------------------------------------------------------------------------


class Pending:
    """Stand-in for the delay services: pending records of one topic."""

    def __init__(self, store: MessageStore, *, copies: bool = True) -> None:
        self._store = store
        self._copies = copies
        self.calls: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # physical offset -> size
        store.cleaning.load(self)

    def add(self, body: bytes) -> None:
        put = self._store.put(draft(body, topic="pending"))
        self.sizes[put.physical_offset] = put.size

    def between(self, start: int, end: int) -> list[int]:
        return [offset for offset in self.sizes if start <= offset < end]

    def pending_bytes(self, start: int, end: int) -> int:
        return sum(self.sizes[offset] for offset in self.between(start, end))

    def copy_forward(self, start: int, end: int) -> bool:
        self.calls.append((start, end))
        if not self._copies:
            return not self.between(start, end)
        for offset in self.between(start, end):
            record = self._store.read(offset, self.sizes.pop(offset))
            (put,) = self._store.put(Drafts([draft(record.body, topic="pending")]), though_full=True)
            self.sizes[put.physical_offset] = put.size
        return True

    def bodies(self) -> list[bytes]:
        return [self._store.read(offset, size).body for offset, size in sorted(self.sizes.items())]


@pytest.mark.feature("D6")
def test_a_file_stays_while_it_has_a_pending_message(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ deletes undelivered messages. Here their file stays, and all later files: the log has no gaps."""
    store = open_store(small(file_reserved_time=1))
    pending = Pending(store, copies=False)
    pending.add(b"in a year")
    fill(store, 3)

    with capture_logs() as logs:
        advance(store, 1_000 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1, 2, 3]
    assert pending.bodies() == [b"in a year"]
    kept = [line for line in logs if line["event"] == "store.file_kept"]
    assert [(line["file"], line["reason"]) for line in kept] == [
        (f"{0:020d}", "it has pending messages that could not be copied forward")
    ]


@pytest.mark.feature("D6")
def test_a_file_is_deleted_once_it_has_no_pending_message(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1, delete_when="4;5"))
    pending = Pending(store, copies=False)
    pending.add(b"until half past four")
    fill(store, 2)
    advance(store, 4 * HOUR_MS + HOUR_MS // 2)
    assert log_names(tmp_path) == [0, 1, 2]

    pending.sizes.clear()
    advance(store, 600_000)

    assert log_names(tmp_path) == [2]


@pytest.mark.feature("D6")
def test_pending_messages_are_copied_forward_before_their_file_is_deleted(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """A message may be copied many times: here it outlives forty files."""
    store = open_store(small(file_reserved_time=24))
    pending = Pending(store)
    pending.add(b"in six weeks")

    for _ in range(40):
        fill(store, 1)
        advance(store, 24 * HOUR_MS)

    assert pending.bodies() == [b"in six weeks"]
    assert log_names(tmp_path)[0] > 30
    assert len(log_names(tmp_path)) < 10


def test_pending_messages_are_copied_file_by_file(open_store: OpenStore) -> None:
    store = open_store(small(file_reserved_time=1))
    pending = Pending(store)
    fill(store, 2)

    advance(store, 4 * HOUR_MS)

    assert pending.calls == [(0, FILE), (FILE, 2 * FILE)]


@pytest.mark.feature("D6")
def test_a_tight_disk_gets_a_file_back_if_it_has_few_pending_messages(open_store: OpenStore, tmp_path: Path) -> None:
    """Also above the level at which new messages are refused."""
    store = open_store()
    pending = Pending(store)
    pending.add(b"little")
    fill(store, 1)

    on_a_disk(store, 0.95)

    assert log_names(tmp_path) == [1]
    assert pending.bodies() == [b"little"]


@pytest.mark.feature("D6")
def test_on_a_tight_disk_a_file_with_many_pending_messages_stays(open_store: OpenStore, tmp_path: Path) -> None:
    """Copying most of a file would need the space that its deletion frees. The file is tried again later."""
    store = open_store()
    pending = Pending(store)
    pending.add(BODY)
    pending.add(BODY[:800])
    fill(store, 1)
    size = pending.pending_bytes(0, FILE)
    assert size > FILE // 2

    with capture_logs() as logs:
        on_a_disk(store, 0.95)
        on_a_disk(store, 0.95)

    assert log_names(tmp_path) == [0, 1, 2]
    assert pending.calls == []
    (line,) = [line for line in logs if line["event"] == "store.file_kept"]
    assert (line["log_level"], line["file"]) == ("warning", f"{0:020d}")
    assert line["reason"] == (f"{size} of its 4096 bytes are pending messages, and the disk has no space for copies")
    store.cleaning.disk_used_ratio = None
    advance(store, 80 * HOUR_MS)
    assert log_names(tmp_path)[0] > 0  # once the disk has space, its age counts


def test_a_file_stays_if_the_disk_has_no_space_for_the_copies(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1))

    class NoSpace(NothingPending):
        def copy_forward(self, physical_start: int, physical_end: int) -> bool:
            raise StoreFullError("no room on the disk")

    store.cleaning.load(NoSpace())
    fill(store, 1)

    with capture_logs() as logs:
        advance(store, 4 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1]
    assert [line["reason"] for line in logs if line["event"] == "store.file_kept"] == [
        "its pending messages could not be copied forward: no room on the disk"
    ]


def test_every_file_stays_while_the_pending_messages_are_unknown(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1))
    fill(store, 1)

    advance(store, 100 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1]


class Follower:
    """Follower that needs the log from *start* on after a crash."""

    def __init__(self) -> None:
        self.start: int | None = 0

    def replay_from(self) -> int | None:
        return None

    def replay(self, record: StoredRecord) -> None:
        return

    def persist(self) -> int | None:
        return self.start


def test_a_file_stays_while_a_restart_would_read_it(tmp_path: Path) -> None:
    """A slow follower would miss the records that tell it which messages were delivered."""
    follower = Follower()
    store = MessageStore(FolderStoreFiles(tmp_path), small(file_reserved_time=1), VirtualClock())
    store.load([follower], NothingPending())
    fill(store, 2)

    advance(store, 4 * HOUR_MS)
    while_needed = log_names(tmp_path)
    follower.start = None
    advance(store, 600_000)

    assert (while_needed, log_names(tmp_path)) == ([0, 1, 2], [2])
    store.close()


# --- after a deletion -------------------------------------------------------------------------------


def cleaned(store: MessageStore, count: int) -> MessageStore:
    """Delete the first *count* files."""
    without_pending(store)
    store.cleaning.disk_used_ratio = lambda: 0.88
    for _ in range(count):
        store.cleaning.clean()
    store.cleaning.disk_used_ratio = None
    store.cleaning.clean()
    return store


def test_queues_start_with_the_first_record_of_the_log(open_store: OpenStore, tmp_path: Path) -> None:
    """Queue files are deleted if all their units point before the start of the log."""
    store = open_store(small(mapped_file_size_consume_queue=80))
    fill(store, 4)

    cleaned(store, 3)

    queue = store.consume_queue("orders", 0)
    assert (queue.min_offset, queue.max_offset) == (6, 9)
    assert store.start_offset == queue.unit(6).physical_offset == 3 * FILE
    assert [int(path.name) // 20 for path in sorted((tmp_path / "consumequeue/orders/0").iterdir())] == [4, 8]


def test_a_queue_without_messages_keeps_its_next_queue_offset(open_store: OpenStore) -> None:
    store = open_store()
    for _ in range(3):
        store.put(draft(b"early", topic="early"))
    fill(store, 2)

    cleaned(store, 2)
    store.close()
    again = open_store()

    queue = again.consume_queue("early", 0)
    assert (queue.min_offset, queue.max_offset) == (3, 3)
    assert again.put(draft(b"late", topic="early")).queue_offset == 3
    assert bodies(again, "early") == [b"late"]


@pytest.mark.parametrize("ends", ["cleanly", "killed"])
def test_a_restart_finds_the_files_that_were_kept(open_store: OpenStore, tmp_path: Path, ends: str) -> None:
    """The first file of the log no longer starts at 0."""
    store = open_store()
    fill(store, 4)
    cleaned(store, 2)

    store.close() if ends == "cleanly" else kill(store)
    again = open_store()

    assert (again.start_offset, log_names(tmp_path)) == (2 * FILE, [2, 3, 4])
    assert again.consume_queue("orders", 0).min_offset == 4
    assert again.put(draft(b"next")).queue_offset == 9
    assert len(bodies(again)) == 6


def test_a_kill_between_deleting_log_and_queues_is_harmless(open_store: OpenStore, tmp_path: Path) -> None:
    """The log's files are deleted first. Units that point before its start are removed by the next load."""
    store = open_store(small(mapped_file_size_consume_queue=80))
    fill(store, 4)
    store.take_checkpoint()
    kill(store)
    for number in (0, 1, 2):
        (tmp_path / "commitlog" / f"{number * FILE:020d}").unlink()

    again = open_store(small(mapped_file_size_consume_queue=80))

    queue = again.consume_queue("orders", 0)
    assert (queue.min_offset, queue.max_offset) == (6, 9)
    assert len(list((tmp_path / "consumequeue/orders/0").iterdir())) == 2
    assert again.put(draft(b"next")).queue_offset == 9


def test_lost_queues_are_rebuilt_from_the_files_that_were_kept(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    fill(store, 4)
    cleaned(store, 2)
    kill(store)
    for path in (tmp_path / "consumequeue/orders/0").iterdir():
        path.unlink()
    (tmp_path / "checkpoint").unlink()

    again = open_store()

    queue = again.consume_queue("orders", 0)
    assert (queue.min_offset, queue.max_offset) == (4, 9)
    assert len(bodies(again)) == 5


def test_a_deleted_record_is_reported_as_deleted(open_store: OpenStore) -> None:
    store = open_store()
    first = store.put(draft(b"x"))
    fill(store, 1)
    cleaned(store, 1)

    with pytest.raises(DeletedRecordError) as caught:
        store.read(first.physical_offset, first.size)

    assert str(caught.value) == (
        "the record at physical offset 0 was deleted by retention: the commit log now starts at 4096; to keep "
        "messages longer, raise file-reserved-time or free disk space"
    )
    assert (caught.value.physical_offset, caught.value.log_start) == (0, FILE)
    assert store.read_at(0) is None


def test_a_record_that_never_existed_is_not_reported_as_deleted(open_store: OpenStore) -> None:
    store = open_store()
    fill(store, 1)
    cleaned(store, 1)

    with pytest.raises(CorruptRecordError) as caught:
        store.read(100 * FILE, 100)

    assert not isinstance(caught.value, DeletedRecordError)


def test_hooks_get_the_new_start_of_the_log(open_store: OpenStore) -> None:
    store = open_store()
    starts: list[int] = []
    store.cleaning.on_cleaned(starts.append)
    fill(store, 2)

    cleaned(store, 2)

    assert starts == [FILE, 2 * FILE]


def test_files_in_memory_are_deleted_as_well(clock: VirtualClock) -> None:
    store = MessageStore(MemoryStoreFiles(), small(file_reserved_time=1), clock)
    store.load(pending=NothingPending())
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
        ({"delete_when": "4,16"}, "delete-when: '4,16' is no hour of the day; give 00 to 23, several with a semicolon"),
        ({"delete_when": ""}, "delete-when: '' is no hour of the day"),
        ({"disk_max_used_space_ratio": 0}, "are percent of the disk, 1 to 100, none above the next, got 0, 85 and 90"),
        ({"disk_space_warning_level_ratio": 80}, "none above the next, got 75, 85 and 80"),
        ({"disk_space_warning_level_ratio": 101}, "1 to 100, none above the next, got 75, 85 and 101"),
    ],
)
def test_an_invalid_setting_is_refused_with_what_is_allowed(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dataclasses.replace(StoreSettings(), **changes)  # type: ignore[arg-type]

    assert text in str(caught.value)

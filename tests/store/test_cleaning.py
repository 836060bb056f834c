"""Retention: which files go, when, what keeps them, and what is left for whoever reads."""

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
from mqtemplate.record.codec import StoredRecord
from mqtemplate.store import FolderStoreFiles, MemoryStoreFiles, MessageStore, StoreSettings
from mqtemplate.store.cleaning import DeleteHours
from tests.store.small_store import OpenStore, bodies, draft, kill, small

HOUR_MS = 3_600_000
FILE = 4_096
BODY = bytes(1_500)  # two of them fill a file


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hours are those of local time: the tests live in Greenwich. The virtual clock starts at midnight there."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def fill(store: MessageStore, files: int, clock: VirtualClock | None = None, *, every_ms: int = 0) -> None:
    """Fill so many files of the log, two records each, and begin another; time passes before each."""
    for _ in range(files * 2 + 1):
        store.put(draft(BODY))
        if clock is not None:
            clock.move_ms(every_ms)


def freely(store: MessageStore) -> MessageStore:
    """Nothing waits in this store."""
    store.cleaning.make_free = lambda begin, end: True
    return store


def log_names(folder: Path) -> list[int]:
    """The files of the log, by the number of files before them."""
    return [int(path.name) // FILE for path in sorted((folder / "commitlog").iterdir())]


def advance(store: MessageStore, milliseconds: int) -> int:
    """Let time pass for the cleaning alone; gives how often it was stepped."""
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


def test_a_file_goes_when_its_newest_record_is_old_enough(open_store: OpenStore, tmp_path: Path) -> None:
    """Its age is that of what was stored last in it, by the store's own timestamps: the first of the next file."""
    store = freely(open_store(small(file_reserved_time=72, delete_when=";".join(map(str, range(24))))))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 3, clock, every_ms=HOUR_MS)  # file 1 begins at hour 2, file 2 at hour 4, file 3 at hour 6

    advance(store, 67 * HOUR_MS - 1)
    before = log_names(tmp_path)
    advance(store, 1)

    assert (before, log_names(tmp_path)) == ([0, 1, 2, 3], [1, 2, 3])
    advance(store, 2 * HOUR_MS)
    assert log_names(tmp_path) == [2, 3]


def test_old_files_wait_for_their_hour(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1, delete_when="04")))
    fill(store, 3)

    advance(store, 4 * HOUR_MS - 1)
    before = log_names(tmp_path)
    advance(store, 1)

    assert (before, log_names(tmp_path)) == ([0, 1, 2, 3], [3])


def test_an_hour_lasts_to_its_end_and_comes_again_the_next_day(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1, delete_when="04")))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    clock.move_ms(4 * HOUR_MS)
    fill(store, 1)

    advance(store, HOUR_MS)  # at five it is old enough, and too late
    at_five = log_names(tmp_path)
    advance(store, 23 * HOUR_MS - 1)
    a_day_later = log_names(tmp_path)
    advance(store, 1)

    assert (at_five, a_day_later, log_names(tmp_path)) == ([0, 1], [0, 1], [1])


def test_there_may_be_several_hours(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1, delete_when="23; 2 ;16")))
    fill(store, 1)

    advance(store, 2 * HOUR_MS)

    assert log_names(tmp_path) == [1]


@given(time_ms=st.integers(0, 4_000_000_000_000), hours=st.sets(st.integers(0, 23), min_size=1))
def test_the_next_hour_is_the_first_millisecond_that_is_in_one(time_ms: int, hours: set[int]) -> None:
    found_ms = DeleteHours(";".join(map(str, hours))).next(time_ms)

    def hour(at_ms: int) -> int:
        return datetime.fromtimestamp(at_ms // 1_000, UTC).hour

    assert hour(found_ms) in hours
    assert found_ms == time_ms or found_ms % HOUR_MS == 0
    between = range(time_ms, found_ms, HOUR_MS)
    assert not {hour(at_ms) for at_ms in between} & hours


def test_an_hour_that_the_clocks_leave_out_comes_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2026-03-29 Berlin goes from two to three at once."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    before = int(datetime(2026, 3, 29, 0, 59, 59, tzinfo=UTC).timestamp() * 1_000)  # 01:59:59 there

    found = datetime.fromtimestamp(DeleteHours("02").next(before) / 1_000, UTC)

    assert found == datetime(2026, 3, 30, 0, 0, tzinfo=UTC)


def test_the_last_file_never_goes(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1)))
    fill(store, 0)

    advance(store, 1_000 * HOUR_MS)

    assert log_names(tmp_path) == [0]
    assert len(bodies(store)) == 1


def test_the_last_files_age_decides_when_the_one_before_is_followed_by_nothing(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """A file made ahead by a process that was killed holds nothing: no record tells how old the one before is."""
    store = open_store(small(file_reserved_time=1))
    fill(store, 1)
    store.close()
    (tmp_path / "commitlog" / f"{2 * FILE:020d}").write_bytes(bytes(FILE))

    again = freely(open_store(small(file_reserved_time=1)))
    advance(again, 100 * HOUR_MS)

    assert log_names(tmp_path) == [1, 2]  # the log still ends in file 1
    assert len(bodies(again)) == 1


def test_no_more_than_ten_files_go_in_a_row(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1)))
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


def test_what_went_is_logged_with_file_reason_and_age_and_counted(open_store: OpenStore) -> None:
    store = freely(open_store(small(file_reserved_time=1)))
    fill(store, 1)

    with capture_logs() as logs:
        advance(store, 4 * HOUR_MS)

    (line,) = [line for line in logs if line["event"] == "store.file_deleted"]
    assert (line["file"], line["reason"], line["age_h"]) == (f"{0:020d}", "age", 4.0)
    assert store.metrics.snapshot()["store.files_deleted"] == 1


def test_forty_days_are_few_steps(open_store: OpenStore) -> None:
    """The next time at which a file can expire is known, so nothing is looked at in between."""
    store = freely(open_store())
    fill(store, 2)

    assert advance(store, 40 * 24 * HOUR_MS) < 50


def test_a_file_that_is_filled_later_is_noticed_in_time(open_store: OpenStore, tmp_path: Path) -> None:
    """Nobody wakes the cleaning: what is stored from now on is younger than anything it could be woken for."""
    store = freely(open_store(small(file_reserved_time=2, delete_when=";".join(map(str, range(24))))))
    asked_again_ms = store.cleaning.step()

    fill(store, 1)

    assert asked_again_ms == store.clock.now_ms() + 2 * HOUR_MS
    advance(store, 2 * HOUR_MS)
    assert log_names(tmp_path) == [1]


def test_a_clock_that_is_set_back_does_not_stop_the_cleaning(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1)))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 1)
    clock.move_ms(5 * HOUR_MS)  # past the hour of today
    assert store.cleaning.step() == clock.now_ms() + 23 * HOUR_MS

    clock.move_ms(-HOUR_MS)
    store.cleaning.step()

    assert log_names(tmp_path) == [1]


# --- by the disk ------------------------------------------------------------------------------------


def on_a_disk(store: MessageStore, used: float) -> MessageStore:
    """The disk of this store is so full from now on."""
    store.cleaning.disk_used_ratio = lambda: used
    store.cleaning.look()
    return store


def test_above_the_first_ratio_old_files_go_at_any_hour(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(file_reserved_time=1)))
    clock = store.clock
    assert isinstance(clock, VirtualClock)
    fill(store, 1)
    clock.move_ms(HOUR_MS)

    on_a_disk(store, 0.75)
    at_the_ratio = log_names(tmp_path)
    on_a_disk(store, 0.76)

    assert (at_the_ratio, log_names(tmp_path)) == ([0, 1], [1])


def test_above_the_second_ratio_the_oldest_go_whatever_their_age(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store())
    fill(store, 3)

    with capture_logs() as logs:
        on_a_disk(store, 0.85)
        at_the_ratio = log_names(tmp_path)
        on_a_disk(store, 0.86)

    assert (at_the_ratio, log_names(tmp_path)) == ([0, 1, 2, 3], [1, 2, 3])
    assert [line["reason"] for line in logs if line["event"] == "store.file_deleted"] == ["disk"]


def test_files_that_are_not_old_stay_where_force_is_forbidden(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store(small(clean_file_forcibly_enable=False)))
    fill(store, 3)

    on_a_disk(store, 0.99)

    assert log_names(tmp_path) == [0, 1, 2, 3]


def test_cleaning_by_force_ends_when_there_is_room_again(open_store: OpenStore, tmp_path: Path) -> None:
    store = freely(open_store())
    fill(store, 4)
    store.cleaning.disk_used_ratio = lambda: 0.80 + 0.02 * len(log_names(tmp_path))

    while (due_ms := store.cleaning.step()) is not None and due_ms <= store.clock.now_ms():
        pass

    assert log_names(tmp_path) == [3, 4]  # 0.84


def test_above_the_third_ratio_nothing_is_taken_until_there_is_room(open_store: OpenStore) -> None:
    store = freely(open_store())
    fill(store, 0)
    count = len(bodies(store))

    with capture_logs() as logs:
        on_a_disk(store, 0.91)
        for put in (lambda: store.put(draft(b"x")), lambda: store.put_all([draft(b"x")])):
            with pytest.raises(
                StoreFullError,
                match=r"the disk is 91% full, and above 90% \(disk-space-warning-level-ratio\) no message is taken; "
                r"free space there, or raise the ratio, then send again: what was acknowledged is safe",
            ):
                put()
        on_a_disk(store, 0.90)

    assert store.put(draft(b"x")).queue_offset == count
    assert [line["event"] for line in logs] == ["store.refuses_messages", "store.takes_messages_again"]


def test_what_makes_room_is_taken_on_a_full_disk(open_store: OpenStore) -> None:
    store = on_a_disk(freely(open_store()), 0.95)

    (put,) = store.put_all([draft(b"copied forward")], though_full=True)

    assert put.queue_offset == 0


def test_a_ratio_of_a_hundred_is_never_reached(open_store: OpenStore, tmp_path: Path) -> None:
    never = {f"disk_{name}_ratio": 100 for name in ("max_used_space", "space_clean_forcibly", "space_warning_level")}
    store = freely(open_store(small(**never)))
    fill(store, 1)

    on_a_disk(store, 1.0)

    assert log_names(tmp_path) == [0, 1]
    assert store.put(draft(b"x"))


def test_the_disk_is_looked_at_every_ten_seconds_and_not_on_a_virtual_clock(tmp_path: Path) -> None:
    """What a test sees must not depend on how full the disk of its machine is."""
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


def test_how_full_a_disk_is_comes_from_its_home(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    used = stat.f_blocks - stat.f_bfree

    assert FolderStoreFiles(tmp_path).disk_used_ratio() == pytest.approx(used / (used + stat.f_bavail), abs=0.05)
    assert FolderStoreFiles(tmp_path).disk_used_ratio(roomy_bytes=1) == 0.0, "with room enough no ratio counts"
    assert FolderStoreFiles(tmp_path).disk_used_ratio(roomy_bytes=1 << 60) > 0.0
    assert MemoryStoreFiles().disk_used_ratio() == 0.0


# --- what keeps a file ------------------------------------------------------------------------------


class Waiting:
    """Stands for the delay services: records of a topic that are to be delivered, and copied forward before."""

    def __init__(self, store: MessageStore, *, copies: bool = True) -> None:
        self._store = store
        self._copies = copies
        self.asked: list[tuple[int, int]] = []
        self.places: dict[int, int] = {}  # physical offset -> size
        store.cleaning.make_free = self.make_free
        store.cleaning.waiting_bytes = self.waiting_bytes

    def add(self, body: bytes) -> None:
        put = self._store.put(draft(body, topic="waiting"))
        self.places[put.physical_offset] = put.size

    def between(self, begin: int, end: int) -> list[int]:
        return [offset for offset in self.places if begin <= offset < end]

    def waiting_bytes(self, begin: int, end: int) -> int:
        return sum(self.places[offset] for offset in self.between(begin, end))

    def make_free(self, begin: int, end: int) -> bool:
        self.asked.append((begin, end))
        if not self._copies:
            return not self.between(begin, end)
        for offset in self.between(begin, end):
            record = self._store.read(offset, self.places.pop(offset))
            (put,) = self._store.put_all([draft(record.body, topic="waiting")], though_full=True)
            self.places[put.physical_offset] = put.size
        return True

    def bodies(self) -> list[bytes]:
        return [self._store.read(offset, size).body for offset, size in sorted(self.places.items())]


@pytest.mark.feature("D6")
def test_d6_a_file_stays_while_a_message_waits_in_it(open_store: OpenStore, tmp_path: Path) -> None:
    """Upstream deletes what nobody has been given yet. Those behind it stay with it: the log has no holes."""
    store = open_store(small(file_reserved_time=1))
    waiting = Waiting(store, copies=False)
    waiting.add(b"in a year")
    fill(store, 3)

    with capture_logs() as logs:
        advance(store, 1_000 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1, 2, 3]
    assert waiting.bodies() == [b"in a year"]
    kept = [line for line in logs if line["event"] == "store.file_kept"]
    assert [(line["file"], line["reason"]) for line in kept] == [
        (f"{0:020d}", "messages wait in it, and could not be copied forward")
    ]


def test_d6_a_file_goes_once_nothing_waits_in_it(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1, delete_when="4;5"))
    waiting = Waiting(store, copies=False)
    waiting.add(b"until half past four")
    fill(store, 2)
    advance(store, 4 * HOUR_MS + HOUR_MS // 2)
    assert log_names(tmp_path) == [0, 1, 2]

    waiting.places.clear()
    advance(store, 600_000)

    assert log_names(tmp_path) == [2]


def test_d6_what_waits_is_copied_forward_before_its_file_goes(open_store: OpenStore, tmp_path: Path) -> None:
    """As often as it takes: here a message outlives its file forty times."""
    store = open_store(small(file_reserved_time=24))
    waiting = Waiting(store)
    waiting.add(b"in six weeks")

    for _ in range(40):
        fill(store, 1)
        advance(store, 24 * HOUR_MS)

    assert waiting.bodies() == [b"in six weeks"]
    assert log_names(tmp_path)[0] > 30
    assert len(log_names(tmp_path)) < 10


def test_each_file_is_asked_for_by_its_bounds(open_store: OpenStore) -> None:
    store = open_store(small(file_reserved_time=1))
    waiting = Waiting(store)
    fill(store, 2)

    advance(store, 4 * HOUR_MS)

    assert waiting.asked == [(0, FILE), (FILE, 2 * FILE)]


def test_d6_a_full_disk_gets_a_file_back_if_little_waits_in_it(open_store: OpenStore, tmp_path: Path) -> None:
    """Also above the level from which nobody else may write."""
    store = open_store()
    waiting = Waiting(store)
    waiting.add(b"little")
    fill(store, 1)

    on_a_disk(store, 0.95)

    assert log_names(tmp_path) == [1]
    assert waiting.bodies() == [b"little"]


def test_d6_on_a_full_disk_a_file_that_waits_by_half_stays_and_a_warning_says_why(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """Copying most of a file forward would need the room that it gives. It is asked for again later."""
    store = open_store()
    waiting = Waiting(store)
    waiting.add(BODY)
    waiting.add(BODY[:800])
    fill(store, 1)
    size = waiting.waiting_bytes(0, FILE)
    assert size > FILE // 2

    with capture_logs() as logs:
        on_a_disk(store, 0.95)
        on_a_disk(store, 0.95)

    assert log_names(tmp_path) == [0, 1, 2]
    assert waiting.asked == []
    (line,) = [line for line in logs if line["event"] == "store.file_kept"]
    assert (line["log_level"], line["file"]) == ("warning", f"{0:020d}")
    assert line["reason"] == (
        f"{size} of its 4096 bytes wait to be delivered, and the disk has no room to copy them forward"
    )
    store.cleaning.disk_used_ratio = None
    advance(store, 80 * HOUR_MS)
    assert log_names(tmp_path)[0] > 0  # with room, it is copied by its age


def test_a_disk_without_room_for_the_copies_keeps_the_file(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1))

    def make_free(begin: int, end: int) -> bool:
        raise StoreFullError("no room on the disk")

    store.cleaning.make_free = make_free
    fill(store, 1)

    with capture_logs() as logs:
        advance(store, 4 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1]
    assert [line["reason"] for line in logs if line["event"] == "store.file_kept"] == [
        "what waits in it could not be copied forward: no room on the disk"
    ]


def test_every_file_stays_while_nobody_tells_what_waits(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(small(file_reserved_time=1))
    fill(store, 1)

    advance(store, 100 * HOUR_MS)

    assert log_names(tmp_path) == [0, 1]


class Follower:
    """Needs the log from *start* on after a crash."""

    def __init__(self) -> None:
        self.start: int | None = 0

    def replay_from(self) -> int | None:
        return None

    def replay(self, record: StoredRecord) -> None:
        return

    def persist(self) -> int | None:
        return self.start


def test_a_file_stays_while_a_restart_would_read_it(tmp_path: Path) -> None:
    """A follower that lags behind would find records gone that tell it what was handed over."""
    follower = Follower()
    store = freely(MessageStore(FolderStoreFiles(tmp_path), small(file_reserved_time=1), VirtualClock()))
    store.load([follower])
    fill(store, 2)

    advance(store, 4 * HOUR_MS)
    while_it_lags = log_names(tmp_path)
    follower.start = None
    advance(store, 600_000)

    assert (while_it_lags, log_names(tmp_path)) == ([0, 1, 2], [2])
    store.close()


# --- what is left -----------------------------------------------------------------------------------


def cleaned(store: MessageStore, count: int) -> MessageStore:
    """The first *count* files are gone."""
    freely(store)
    store.cleaning.disk_used_ratio = lambda: 0.88
    for _ in range(count):
        store.cleaning.look()
    store.cleaning.disk_used_ratio = None
    store.cleaning.look()
    return store


def test_queues_begin_where_the_log_begins(open_store: OpenStore, tmp_path: Path) -> None:
    """Queue files whose units all point before it are deleted."""
    store = open_store(small(mapped_file_size_consume_queue=80))
    fill(store, 4)

    cleaned(store, 3)

    queue = store.consume_queue("orders", 0)
    assert (queue.min_offset, queue.max_offset) == (6, 9)
    assert store.begin_offset == queue.unit(6).physical_offset == 3 * FILE
    assert [int(path.name) // 20 for path in sorted((tmp_path / "consumequeue/orders/0").iterdir())] == [4, 8]


def test_a_queue_whose_messages_are_all_gone_is_empty_and_goes_on_counting(open_store: OpenStore) -> None:
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
def test_a_restart_finds_what_was_kept(open_store: OpenStore, tmp_path: Path, ends: str) -> None:
    """The first file of the log is not the one that begins at 0 any more."""
    store = open_store()
    fill(store, 4)
    cleaned(store, 2)

    store.close() if ends == "cleanly" else kill(store)
    again = open_store()

    assert (again.begin_offset, log_names(tmp_path)) == (2 * FILE, [2, 3, 4])
    assert again.consume_queue("orders", 0).min_offset == 4
    assert again.put(draft(b"next")).queue_offset == 9
    assert len(bodies(again)) == 6


def test_a_kill_between_log_and_queues_does_no_harm(open_store: OpenStore, tmp_path: Path) -> None:
    """The log's files go first. Units that point before its begin are passed over, and gone after the next load."""
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


def test_queues_that_are_lost_are_rebuilt_from_what_was_kept(open_store: OpenStore, tmp_path: Path) -> None:
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


def test_a_deleted_record_is_called_deleted_and_not_damaged(open_store: OpenStore) -> None:
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


def test_a_record_that_never_was_is_not_called_deleted(open_store: OpenStore) -> None:
    store = open_store()
    fill(store, 1)
    cleaned(store, 1)

    with pytest.raises(CorruptRecordError) as caught:
        store.read(100 * FILE, 100)

    assert not isinstance(caught.value, DeletedRecordError)


def test_whoever_listens_is_told_where_the_log_begins(open_store: OpenStore) -> None:
    store = open_store()
    told: list[int] = []
    store.cleaning.on_cleaned(told.append)
    fill(store, 2)

    cleaned(store, 2)

    assert told == [FILE, 2 * FILE]


def test_memory_is_given_back_as_files_are(clock: VirtualClock) -> None:
    store = freely(MessageStore(MemoryStoreFiles(), small(file_reserved_time=1), clock))
    store.load()
    fill(store, 3)

    advance(store, 4 * HOUR_MS)

    assert store.begin_offset == 3 * FILE
    assert len(bodies(store)) == 1
    store.close()


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"file_reserved_time": 0}, "file-reserved-time: files are kept for 1 hour or more, got 0"),
        ({"delete_when": "4,16"}, "delete-when: '4,16' is no hour of the day; give 00 to 23, several with a semicolon"),
        ({"delete_when": ""}, "delete-when: '' is no hour of the day"),
        ({"disk_max_used_space_ratio": 0}, "are percent of the disk, 1 to 100, none above the next; got 0, 85 and 90"),
        ({"disk_space_warning_level_ratio": 80}, "none above the next; got 75, 85 and 80"),
        ({"disk_space_warning_level_ratio": 101}, "1 to 100, none above the next; got 75, 85 and 101"),
    ],
)
def test_settings_that_cannot_be_say_what_is_allowed(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dataclasses.replace(StoreSettings(), **changes)  # type: ignore[arg-type]

    assert text in str(caught.value)

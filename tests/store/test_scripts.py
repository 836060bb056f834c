"""Golden scripts of the store: records, units, and what a start makes of files that a failure left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.errors import StoreFullError
from mqtemplate.record.codec import Drafts, StoredRecord
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from tests.golden import check_script, scripts_in
from tests.store.small_store import NothingPending, draft, kill, small

DETAILS = ("file", "physical_offset", "topic", "queue_id", "offset", "reason")
FEATURES = {
    "queue_differs_from_log": ("D21", "D22"),
    "torn_tail": ("D24",),
    "file_ends": ("D17",),
    "retention_pending": ("D6",),
}
FILE = 4_096


class Pending:
    """Stand-in for the delay services: pending records of one topic."""

    def __init__(self, store: MessageStore, copies: str) -> None:
        self.store = store
        self.copies = copies
        self.calls: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # physical offset -> size
        store.cleaning.load(self)

    def between(self, start: int, end: int) -> list[int]:
        return [offset for offset in self.sizes if start <= offset < end]

    def pending_bytes(self, physical_start: int, physical_end: int) -> int:
        return sum(self.sizes[offset] for offset in self.between(physical_start, physical_end))

    def copy_forward(self, physical_start: int, physical_end: int) -> bool:
        self.calls.append((physical_start, physical_end))
        if self.copies == "full":
            raise StoreFullError("no room on the disk")
        if self.copies == "no":
            return not self.between(physical_start, physical_end)
        for offset in self.between(physical_start, physical_end):
            record = self.store.read(offset, self.sizes.pop(offset))
            (put,) = self.store.put(Drafts([draft(record.body, topic="pending")]), though_full=True)
            self.sizes[put.physical_offset] = put.size
        return True


class Follower:
    """Follower that needs the log from *start* on after a crash."""

    def __init__(self, start: int | None) -> None:
        self.start = start

    def replay_from(self) -> int | None:
        return None

    def replay(self, record: StoredRecord) -> None:
        return

    def persist(self) -> int | None:
        return self.start


class StoreScript:
    """The commands of a script. Files of the log have 4096 bytes, files of a queue ten units."""

    def __init__(self, root: Path) -> None:
        self.root = self.folder = root
        self.clock = VirtualClock()
        self.store: MessageStore
        self.follower = Follower(None)

    # --- what is done ------------------------------------------------------------------------------

    def use(self, name: str) -> None:
        """Continue with another folder, at the start of the clock."""
        if self.folder != self.root:
            self.close()
        self.folder, self.clock = self.root / name, VirtualClock()

    def open(self, follower: str = "", **settings: str) -> Iterator[str]:
        """Open the store. Print what it repaired."""
        values = {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
        self.store = MessageStore(FolderStoreFiles(self.folder), small(**values), self.clock)
        self.follower = Follower(int(follower) if follower else None)
        yield from self._events(lambda: self.store.load([self.follower]))

    def _events(self, call: Callable[[], object], *infos: str) -> Iterator[str]:
        """Print the warnings of *call*, and other events whose names are given."""
        with capture_logs() as events:
            call()
        for event in events:
            if event["log_level"] in ("warning", "error") or event["event"] in infos:
                yield " ".join([event["event"], *(f"{name}={event[name]}" for name in DETAILS if name in event)])

    def close(self) -> None:
        self.store.close()

    def kill(self) -> None:
        kill(self.store)

    def put(
        self, *bodies: str, topic: str = "orders", queue: str = "0", times: str = "1", copy: str = ""
    ) -> Iterator[str]:
        """Store messages one by one; *copy*: together, as copies that free disk space."""
        drafts = [draft(body.encode() * int(times), topic, int(queue)) for body in bodies]
        try:
            for each in [Drafts(drafts)] if copy else drafts:
                self.store.put(each, though_full=copy == "yes")
        except StoreFullError as exc:
            yield str(exc)

    def delete(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def create(self, name: str, size: str) -> None:
        (self.folder / name).write_bytes(bytes(int(size)))

    def start_queue_at(self, offset: str) -> None:
        """Remove all units of a queue. Its next message gets this queue offset."""
        self.store.consume_queue("orders", 0).clear(int(offset))

    def checkpoint(self) -> None:
        self.store.take_checkpoint()

    def zero(self, name: str, start: str, end: str = "") -> None:
        """Set a part of a file to zeros, as a power failure leaves pages that were not written."""
        data = bytearray((self.folder / name).read_bytes())
        part = slice(int(start), int(end) if end else len(data))
        data[part] = bytes(len(data[part]))
        (self.folder / name).write_bytes(data)

    def move(self, name: str, start: str, end: str, to: str) -> None:
        """Copy a part of a file to another place of it."""
        data = bytearray((self.folder / name).read_bytes())
        part = data[int(start) : int(end)]
        data[int(to) : int(to) + len(part)] = part
        (self.folder / name).write_bytes(data)

    # --- retention ---------------------------------------------------------------------------------

    def fill(self, files: str, every: str = "0ms") -> None:
        """Fill files of the log with two records each, and start another. The clock moves after each record."""
        for number in range(int(files) * 2 + 1):
            self.store.put(draft(b"%d" % (number % 10) * 1_500))
            self.clock.move_ms(duration_ms(every))

    def nothing_pending(self) -> None:
        self.store.cleaning.load(NothingPending())

    def pending(self, copies: str = "yes") -> None:
        self.waiting = Pending(self.store, copies)

    def add(self, body: str, times: str = "1") -> None:
        put = self.store.put(draft(body.encode() * int(times), topic="pending"))
        self.waiting.sizes[put.physical_offset] = put.size

    def deliver(self) -> None:
        self.waiting.sizes.clear()

    def follower_is_done(self) -> None:
        self.follower.start = None

    def move_clock(self, time: str) -> None:
        self.clock.move_ms(-duration_ms(time[1:]) if time.startswith("-") else duration_ms(time))

    def set_clock(self, time: str) -> None:
        """Set the clock, also back: the steady time does not move."""
        self.clock.step_ms(-duration_ms(time[1:]) if time.startswith("-") else duration_ms(time))

    def advance(self, *times: str) -> Iterator[str]:
        """Let time pass for the cleaning alone."""
        target_ms = self.clock.now_ms() + duration_ms(" ".join(times))

        def steps() -> None:
            while (due_ms := self.store.cleaning.step()) is not None and due_ms <= target_ms:
                self.clock.set_ms(max(due_ms, self.clock.now_ms()))
            self.clock.set_ms(target_ms)
            self.store.cleaning.step()

        return self._events(steps)

    def step(self, again: str = "") -> list[str]:
        """Let the cleaning work once, or until it is not due again at once. Print when it is due."""
        while (due_ms := self.store.cleaning.step()) is not None and again and due_ms <= self.clock.now_ms():
            pass
        return [f"due in {format_ms((due_ms or 0) - self.clock.now_ms())}"]

    def disk(self, used: str = "") -> Iterator[str]:
        """Set the used ratio of the disk, or ignore the disk again; then clean."""
        self.store.cleaning.disk_used_ratio = (lambda: float(used)) if used else None
        events = "store.file_deleted", "store.messages_refused", "store.messages_accepted"
        return self._events(self.store.cleaning.clean, *events)

    def clean(self, files: str) -> None:
        """Delete the first files."""
        self.nothing_pending()
        self.store.cleaning.disk_used_ratio = lambda: 0.88
        for _ in range(int(files)):
            self.store.cleaning.clean()
        self.store.cleaning.disk_used_ratio = None
        self.store.cleaning.clean()

    def log(self) -> list[str]:
        """Print the files of the log as numbers from 0."""
        numbers = [int(path.name) // FILE for path in (self.folder / "commitlog").iterdir()]
        return [f"files {' '.join(map(str, sorted(numbers)))}"]

    def waiting_messages(self) -> list[str]:
        """Print the pending messages, and the parts of the log for whose copies the cleaning asked."""
        bodies = [self.store.read(offset, size).body for offset, size in sorted(self.waiting.sizes.items())]
        return [
            " ".join(body.decode()[:20] for body in bodies) or "-",
            f"asked for {list(dict.fromkeys(self.waiting.calls))}",
        ]

    # --- what is printed ---------------------------------------------------------------------------

    def queue(self, topic: str = "orders", queue: str = "0") -> Iterator[str]:
        """Print the units of a queue with the bodies that they refer to."""
        units = self.store.consume_queue(topic, int(queue))
        if units.min_offset == units.max_offset:
            yield f"empty at {units.max_offset}"
        for offset in range(units.min_offset, units.max_offset):
            unit = units.unit(offset)
            record = self.store.read(unit.physical_offset, unit.size)
            body = record.body.decode()
            yield f"{offset}: {unit.physical_offset}+{unit.size} {body if len(body) < 20 else body[:3] + '...'}"

    def files(self, name: str) -> Iterator[str]:
        """Print the files of a folder, and the bytes before their trailing zeros."""
        for path in sorted((self.folder / name).iterdir()):
            data = path.read_bytes()
            yield f"{path.name.lstrip('0') or '0'}: {len(data.rstrip(bytes(1)))} of {len(data)} bytes"


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.feature(*FEATURES.get(path.stem, ())), id=path.stem)
        for path in scripts_in(Path(__file__).parent / "scripts")
    ],
)
def test_the_script_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    script = StoreScript(tmp_path)

    check_script(path, script)

    script.close()

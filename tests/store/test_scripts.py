"""Golden scripts of the store: records, units, and what a start makes of files that a failure left."""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.engine.reader import QueueReader
from mqtemplate.errors import MQTemplateError, StoreFullError
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.store import index_file
from mqtemplate.store.checkpoint import StoreCheckpoint
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.layout import unpack_index_header
from mqtemplate.store.key_reader import keys_of
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType
from tests.delay.foreign_records import ForeignDraft
from tests.golden import check_script, scripts_in
from tests.store.faulty_disk import FaultyDisk
from tests.store.power_loss_disk import RestartedDisk
from tests.store.small_store import NothingPending, draft, kill, small
from tests.store.small_store import used as used_space

DETAILS = (
    *("file", "physical_offset", "size", "topic", "queue", "queue_id", "offset", "count", "whole_records_dropped"),
    *("read_from", "end_offset", "continued_at", "reason"),
)
FEATURES = {
    "append": ("B6", "E5"),
    "damage": ("D22",),
    "index_restart": ("D23",),
    "queue_differs_from_log": ("D21", "D22"),
    "torn_tail": ("D24",),
    "file_ends": ("D17",),
    "retention_pending": ("D6",),
}
SETTINGS = {"none": None, "ASYNC_FLUSH": FlushDiskType.ASYNC_FLUSH}
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
    """Follower that needs the log from *start* on after a crash, and from *replay_start* on now.

    Attributes:
        seen: Bodies of the replayed records.
    """

    def __init__(self, start: int | None = None, replay_start: int | None = None) -> None:
        self.start = start
        self.replay_start = replay_start
        self.seen: list[str] = []

    def replay_from(self) -> int | None:
        return self.replay_start

    def replay(self, record: StoredRecord) -> None:
        self.seen.append(record.body.decode())

    def persist(self) -> int | None:
        return self.start


class StoreScript:
    """The commands of a script. Files of the log have 4096 bytes, files of a queue ten units."""

    def __init__(self, root: Path) -> None:
        self.root = self.folder = root
        self.clock = VirtualClock()
        self.start_ms = self.clock.now_ms()
        self.device: Disk = FaultyDisk()
        self.store: MessageStore
        self.follower = Follower()
        self.times: dict[str, int] = {}
        self.notified: list[int] = []

    # --- what is done ------------------------------------------------------------------------------

    def use(self, name: str) -> None:
        """Continue with another folder, at the start of the clock."""
        if self.folder != self.root:
            self.close()
        self.folder, self.clock, self.device = self.root / name, VirtualClock(), FaultyDisk()

    def open(self, follower: str = "", replay_from: str = "", **settings: str) -> Iterator[str]:
        """Open the store. Print what it repaired, and the error. See `SETTINGS`."""
        values = {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
        values = {name: SETTINGS.get(value, value) for name, value in values.items()}  # type: ignore[misc,call-overload]
        self.store = MessageStore(FolderStoreFiles(self.folder, self.device), small(**values), self.clock)
        self.follower = Follower(*(int(text) if text else None for text in (follower, replay_from)))
        yield from self._events(lambda: self.store.load([self.follower]))

    def _events(self, call: Callable[[], object], *infos: str) -> Iterator[str]:
        """Print the warnings of *call*, other events whose names are given, and the error."""
        error = None
        with capture_logs() as events:
            try:
                call()
            except MQTemplateError as exc:
                error = exc
        for event in events:
            if event["log_level"] in ("warning", "error") or event["event"] in infos:
                yield self._shown(
                    " ".join([event["event"], *(f"{name}={event[name]}" for name in DETAILS if name in event)])
                )
        if error is not None:
            yield self._shown(f"{type(error).__name__}: {error}")

    def _shown(self, text: str) -> str:
        return text.replace(f"{self.folder}/commitlog/", "").replace(str(self.folder), "FOLDER")

    def restart_machine(self) -> None:
        """The power failed: the next start is the first one of another boot."""
        self.device = RestartedDisk("another boot")

    def disk_fails(self, kind: str = "", code: str = "EIO", times: str = "1") -> None:
        """Let the next calls of a kind fail; without a kind none any more."""
        assert isinstance(self.device, FaultyDisk)
        left = [getattr(errno, code)] * int(times)
        self.device.judge = lambda number, asked: left.pop() if asked == kind and left else 0

    def close(self) -> None:
        self.store.close()

    def kill(self) -> None:
        kill(self.store)

    def put(
        self, *bodies: str, topic: str = "orders", queue: str = "0", times: str = "1", copy: str = "", **more: str
    ) -> Iterator[str]:
        """Store messages one by one; *copy*: together, as copies that free disk space."""
        drafts = [self._draft(body.encode() * int(times), topic, int(queue), **more) for body in bodies]
        try:
            for each in [Drafts(drafts)] if copy else drafts:
                self.store.put(each, though_full=copy == "yes")
        except MQTemplateError as exc:
            yield self._shown(str(exc))

    def _draft(
        self,
        body: bytes,
        topic: str,
        queue: int,
        properties: str = "TAGS:paid",
        by: str = "",
        link: str = "0",
        **more: str,
    ) -> RecordDraft:
        """Return a draft, by RocketMQ if so named. Properties are ``NAME:value``, separated by ``/``."""
        encoded = "".join(f"{pair.replace(':', chr(1), 1)}\x02" for pair in properties.split("/") if pair).encode()
        created = (ForeignDraft if by == "rocketmq" else RecordDraft)(topic, queue, body, encoded)
        created.prepared_transaction_offset = int(link)
        return replace(created, **{name: int(value) for name, value in more.items()})

    def keyed(self, *keys: str, topic: str = "orders", times: str = "1", **more: str) -> Iterator[str]:
        """Store messages that have only business keys; each is named by its keys."""
        for each in keys:
            yield from self.put(each, topic=topic, times=times, properties=f"KEYS:{each}", **more)

    def early(self, *bodies: str, times: str = "1") -> None:
        """Store messages, and let the disk begin to write each, as a producer does that flushes itself."""
        for body in bodies:
            self.store.start_flush(self.store.put(draft(body.encode() * int(times))))

    def started(self) -> list[str]:
        """Print what was written early: position in the file, and size."""
        assert isinstance(self.device, FaultyDisk)
        return [" ".join(f"{at}+{size}" for at, size in self.device.started) or "-"]

    def folder_named(self, *names: str) -> None:
        for name in names:
            (self.folder / name).mkdir(parents=True)

    def delete(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def create(self, name: str, size: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("wb") as file:
            file.truncate(int(size))

    def prepare(self) -> None:
        """Create the file for the next unit of a queue."""
        self.store.prepare("orders", 0)

    def start_queue_at(self, offset: str) -> None:
        """Remove all units of a queue. Its next message gets this queue offset."""
        self.store.consume_queue("orders", 0).clear(int(offset))

    def checkpoint(self) -> None:
        self.store.take_checkpoint()

    def zero(self, name: str, start: str, end: str = "") -> None:
        """Set a part of a file to zeros, as a power failure leaves pages that were not written."""
        self._change(name, int(start), lambda data: bytes(len(data)), int(end) if end else None)

    def damage(self, name: str, start: str, end: str = "") -> None:
        """Flip a bit of one byte; or flip bits of all bytes of a part."""
        self._change(name, int(start), lambda data: bytes(byte ^ 1 for byte in data), int(end or int(start) + 1))

    def overwrite(self, name: str, start: str, number: str) -> None:
        """Write a number of 8 bytes, as RocketMQ does in its checkpoint."""
        self._change(name, int(start), lambda _: int(number).to_bytes(8, "big"), int(start) + 8)

    def move(self, name: str, start: str, end: str, to: str, source: str = "") -> None:
        """Copy a part of a file to another place of it, or from another file."""
        part = (self.folder / (source or name)).read_bytes()[int(start) : int(end)]
        self._change(name, int(to), lambda _: part, int(to) + len(part))

    def _change(self, name: str, start: int, change: Callable[[bytes], bytes], end: int | None) -> None:
        data = bytearray((self.folder / name).read_bytes())
        data[start:end] = change(bytes(data[start:end]))
        (self.folder / name).write_bytes(data)

    def note(self, *names: str) -> None:
        """Remember when files were written."""
        self.times = {name: (self.folder / name).stat().st_mtime_ns for name in names}

    def written(self) -> list[str]:
        """Print which of them were written since then."""
        return [
            " ".join(name for name, at in self.times.items() if (self.folder / name).stat().st_mtime_ns > at) or "-"
        ]

    def watch(self) -> None:
        """Note the end of the readable records at each notification of new messages."""
        self.notified = []
        self.store.watch("orders", lambda: self.notified.append(self.store.confirm_offset))

    def confirm(self, wait: str = "yes") -> Iterator[str]:
        """Confirm all messages, also without waiting. Print the errors, and what the watcher noted."""
        end, errors = self.store.end_offset, list[object]()
        yield from self._events(
            lambda: (
                self.store.confirm(end, ["orders"])
                if wait == "yes"
                else self.store.confirm_async(end, ["orders"], errors.append)
            )
        )
        yield f"readable to {self.store.confirm_offset}, notified at {self.notified}, callback {len(errors)}"

    def flush(self) -> list[str]:
        self.store.take_checkpoint()
        return [f"readable to {self.store.confirm_offset}, notified at {self.notified}"]

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
        self.store.disk.read = lambda: used_space(float(used)) if used else None
        events = "store.file_deleted", "store.messages_refused", "store.messages_accepted"
        return self._events(self.store.cleaning.clean, *events)

    def clean(self, files: str) -> None:
        """Delete the first files."""
        self.nothing_pending()
        self.store.disk.read = lambda: used_space(0.88)
        for _ in range(int(files)):
            self.store.cleaning.clean()
        self.store.disk.read = lambda: None
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

    # --- index -------------------------------------------------------------------------------------

    def index(self) -> Iterator[str]:
        """Index all messages, and flush the index."""
        yield from self._events(self.store.index.catch_up)
        self.store.index.flush()

    def index_step(self) -> list[str]:
        due_ms = self.store.index.step()
        return ["not due" if due_ms is None else f"due in {format_ms(due_ms - self.clock.now_ms())}"]

    def delete_before(self, physical_offset: str) -> None:
        """Delete the files of the log before this offset."""
        self.store.delete_before(int(physical_offset))

    def find(
        self, *keys: str, topic: str = "orders", since: str = "0s", until: str = "9999d", count: str = "64"
    ) -> Iterator[str]:
        """Print the messages with a key, newest first; times count from the start of the script."""
        span = (self.start_ms + duration_ms(since), self.start_ms + duration_ms(until))
        for key in keys:
            records = [self.store.read_at(at) for at in self.store.index.find(topic, key, *span, int(count))]
            bodies = [each.body for each in records if each and f"{topic}#{key}" in keys_of(each.topic, each[-1])]
            yield f"{key}: {', '.join(body.decode()[:20] for body in bodies) or '-'}"

    def index_files(self) -> Iterator[str]:
        """Print the index files: the records at both ends, and the number of keys."""
        self.store.index.flush()
        for path in sorted((self.folder / "index").iterdir()):
            header = unpack_index_header(path.read_bytes()[:40])
            ends = f"{header.begin_physical_offset}..{header.end_physical_offset}"
            yield f"{path.name}: {ends}, {header.index_count - 1} keys"

    def geometry(self) -> list[str]:
        return ["{} slots, {} units".format(*self.store.index.geometry)]

    # --- what is printed ---------------------------------------------------------------------------

    def replayed(self) -> list[str]:
        """Print the bodies of the records that were replayed at the last start."""
        return [" ".join(self.follower.seen) or "-"]

    def read(self, *offsets: str, topic: str = "orders", queue: str = "0") -> Iterator[str]:
        """Print the first message from each of these queue offsets on, as a consumer gets it, or the error."""
        reader, where = QueueReader(self.store, "b"), MessageQueue(topic, "b", int(queue))
        for offset in map(int, offsets):
            try:
                for message in reader.read(where, offset, 1, None)[0]:
                    yield f"{message.queue_offset}: {message.body.decode()[:20]}"
            except MQTemplateError as exc:
                yield f"{offset}: {self._shown(str(exc))}"

    def read_log(self, physical_offset: str, size: str) -> Iterator[str]:
        """Print the record at a physical offset, or the error."""
        return self._events(lambda: self.store.read(int(physical_offset), int(size)))

    def search(self, *times: str) -> list[str]:
        """Print the first queue offset stored at each time or later; times count from the start of the script."""
        reader, where = QueueReader(self.store, "b"), MessageQueue("orders", "b", 0)
        return [" ".join(str(reader.search_offset(where, self.start_ms + duration_ms(time))) for time in times)]

    def codes(self, topic: str = "orders", queue: str = "0") -> list[str]:
        """Print the code in each unit: hash of the tags, or how far the deliver time is away."""
        units = self.store.consume_queue(topic, int(queue)).unit_tuples(0, 10)
        now_ms = self.clock.now_ms()
        return [f"due in {format_ms(code - now_ms)}" if code > now_ms else f"tags {code}" for *_, code in units]

    def steps(self) -> list[str]:
        """Print the steps back of the clock."""
        times = [(step[0], *(format_ms(ms - self.start_ms) for ms in step[1:])) for step in self.store.clock_steps]
        return ["{}: {} -> {}".format(*each) for each in times]

    def checkpoint_page(self) -> Iterator[str]:
        """Print the fields of the checkpoint, and who wrote it last: the CRC-32 of RocketMQ's fields follows ours."""
        checkpoint, page = StoreCheckpoint(FolderStoreFiles(self.folder)), (self.folder / "checkpoint").read_bytes()
        writer = "mqtemplate" if int.from_bytes(page[60:64], "big") == zlib.crc32(page[:48]) else "RocketMQ"
        indexed = checkpoint.fields.index_msg_timestamp
        yield f"replay from {checkpoint.replay_start}, in RocketMQ {checkpoint.fields.logics_physical_offset}"
        yield f"written by {writer}, indexed to {format_ms(indexed - self.start_ms) if indexed else '-'}"
        checkpoint.close()

    def bytes(self, name: str, start: str, end: str) -> list[str]:
        """Print a part of a file in hex digits."""
        return [(self.folder / name).read_bytes()[int(start) : int(end)].hex()]

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


SCRIPTS = scripts_in(Path(__file__).parent / "scripts")
CASES = [
    pytest.param(path, limit, marks=pytest.mark.feature(*FEATURES.get(path.stem, ())), id=f"{path.stem}-{keys_from}")
    for keys_from, limit, paths in (
        ("memory", None, SCRIPTS),
        ("log", 0, [path for path in SCRIPTS if path.stem.startswith("index")]),
    )
    for path in paths
]


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize(("path", "limit"), CASES)
def test_the_script_prints_what_it_says(
    path: Path, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index takes the keys of new records from memory, or reads them from the log: with the same results."""
    if limit is not None:
        monkeypatch.setattr(index_file, "_MAX_BYTES", limit)
    script = StoreScript(tmp_path)

    check_script(path, script)

    script.close()

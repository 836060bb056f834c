"""Damaged bytes: a damaged message is reported and never delivered; all other messages are delivered."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.reader import QueueReader
from mqtemplate.errors import CorruptRecordError, StoreError, StoreFormatError
from mqtemplate.message import MessageQueue
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import StoreSettings
from mqtemplate.store.tables import ConsumerOffsets, TopicTable, read_table, write_table
from tests.store.power_loss_disk import RestartedDisk
from tests.store.small_store import draft, kill, opened, small
from tests.thirds import NINTHS, THIRDS

LOG_FILE = 400
TOPIC, QUEUES = "orders", 2


@dataclass
class Sent:
    """Position of a message."""

    body: bytes
    file: str
    start: int
    end: int


Positions = dict[tuple[int, int], Sent]  # (queue id, queue offset) -> message


class Folder:
    """Folder of a store that is damaged and restored many times."""

    def __init__(self, root: Path, settings: StoreSettings) -> None:
        self.root = root
        self.settings = settings
        self.sent: Positions = {}
        self.kept: dict[Path, bytes] = {}

    def open(self) -> MessageStore:
        return opened(self.root, self.settings, disk=RestartedDisk())

    def fill(self, count: int, body_of: Callable[[int], bytes], *, stop: Callable[[MessageStore], None]) -> None:
        store = self.open()
        for number in range(count):
            put = store.put(draft(body_of(number), TOPIC, number % QUEUES, b"TAGS\x01t\x02"))
            file_start = put.physical_offset - put.physical_offset % self.settings.mapped_file_size_commit_log
            position = number % QUEUES, put.queue_offset
            self.sent[position] = Sent(body_of(number), f"{file_start:020d}", put.physical_offset, put.end)
        stop(store)
        self.kept = {Path(path): Path(path).read_bytes() for path in _files(self.root)}

    def kept_in(self, folder: str) -> list[tuple[Path, bytes]]:
        return [(path, data) for path, data in sorted(self.kept.items()) if path.is_relative_to(self.root / folder)]

    def restore(self, path: Path, data: bytes) -> None:
        """Restore all files, but give one file other *data*."""
        for other in set(_files(self.root)) - {str(kept) for kept in self.kept}:
            Path(other).unlink()
        for kept, content in self.kept.items():
            fd = os.open(kept, os.O_WRONLY | os.O_CREAT)
            wanted = data if kept == path else content
            os.pwrite(fd, wanted, 0)
            os.truncate(fd, len(wanted))
            os.close(fd)

    def hits(self, path: Path, bit: int) -> set[tuple[int, int]]:
        """Return the messages with this bit of the log or of a queue."""
        offset = int(path.name) + bit // 8
        if path.parent.name != "commitlog":
            return {(int(path.parent.name), offset // 20)}
        return {key for key, sent in self.sent.items() if sent.start <= offset < sent.end}

    def read(self) -> Seen:
        """Open the store and read every message."""
        with capture_logs() as logs:
            store = self.open()
        seen = Seen(logs)
        reader = QueueReader(store, "broker-a")
        for queue_id, offset in self.sent:
            queue = MessageQueue(TOPIC, "broker-a", queue_id)
            try:
                found, _ = reader.read(queue, offset, 1, None)
            except CorruptRecordError as exc:
                seen.errors[queue_id, offset] = exc
            else:
                seen.bodies[queue_id, offset] = found[0].body if found else None
        store.release()
        return seen


def _files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path))
        else:
            yield entry.path


class Seen:
    """Messages and errors of a reader, and the log events of the start."""

    def __init__(self, logs: list[Any]) -> None:
        self.logs = logs
        self.bodies: dict[tuple[int, int], bytes | None] = {}
        self.errors: dict[tuple[int, int], CorruptRecordError] = {}

    def reported(self, event: str) -> list[tuple[str, int]]:
        """Return file and offset of each event with this name."""
        return [(Path(line["file"]).name, line["physical_offset"]) for line in self.logs if line["event"] == event]


def check(sent: Positions, seen: Seen, *, hit: set[tuple[int, int]]) -> None:
    """Check that all messages but the *hit* ones were read, and none at the position of another."""
    for position, message in sent.items():
        if position in seen.bodies:
            assert seen.bodies[position] in {message.body, None} if position in hit else {message.body}
            assert seen.bodies[position] == message.body or position in hit
        else:
            assert position in hit, f"{position} was not hit: {seen.errors[position]}"
            assert seen.errors[position].queue_offset == position[1]


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder for four messages in two log files and two queues."""
    return Folder(tmp_path / "store", small(mapped_file_size_commit_log=LOG_FILE, mapped_file_size_consume_queue=40))


STOPS = [pytest.param(MessageStore.close, id="clean"), pytest.param(kill, id="killed")]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("ninth", NINTHS)
def test_every_flipped_bit_of_the_log_damages_one_message_at_most_and_is_reported(
    folder: Folder, stop: Callable[[MessageStore], None], ninth: int
) -> None:
    """Flip every bit that was written, and the first ones after the end.

    Every ninth bit hits nearly each byte, and another bit of it than of the byte before.
    """
    folder.fill(4, lambda number: b"%d" % number, stop=stop)
    for path, data in folder.kept_in("commitlog"):
        for bit in range(ninth, (len(data.rstrip(b"\0")) + 4) * 8, 9):
            folder.restore(path, flipped(data, bit))

            seen = folder.read()

            hit = folder.hits(path, bit)
            check(folder.sent, seen, hit=hit)
            for key in hit:
                sent, is_read = folder.sent[key], key in seen.bodies
                errors = [(exc.path.name, exc.physical_offset) for exc in seen.errors.values()]
                assert is_read or (path.name, sent.start) in [*seen.reported("store.record_damaged"), *errors]
                assert (
                    not is_read or sent.end - CHECK_SIZE <= int(path.name) + bit // 8
                )  # the bit is in the check itself


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("ninth", NINTHS)
def test_no_flipped_bit_of_a_queue_leads_to_another_message(
    folder: Folder, stop: Callable[[MessageStore], None], ninth: int
) -> None:
    folder.fill(4, lambda number: b"%d" % number, stop=stop)
    for path, data in folder.kept_in("consumequeue"):
        for bit in range(ninth, len(data) * 8, 9):
            folder.restore(path, flipped(data, bit))

            check(folder.sent, folder.read(), hit=folder.hits(path, bit))


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("ninth", NINTHS)
def test_every_flipped_bit_of_the_checkpoint_is_harmless(
    folder: Folder, stop: Callable[[MessageStore], None], ninth: int
) -> None:
    folder.fill(4, lambda number: b"%d" % number, stop=stop)
    path = folder.root / "checkpoint"
    for bit in range(ninth, 68 * 8, 9):
        folder.restore(path, flipped(folder.kept[path], bit))

        check(folder.sent, folder.read(), hit=set())


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", ["commitlog", "consumequeue", "checkpoint"])
@pytest.mark.parametrize("third", THIRDS)
def test_a_file_cut_at_any_byte_is_opened_or_refused_with_the_reason(
    folder: Folder, stop: Callable[[MessageStore], None], kind: str, third: int
) -> None:
    folder.fill(4, lambda number: b"%d" % number, stop=stop)
    refused, opened = set(), 0
    for path, data in folder.kept_in(kind):
        for length in range(third, len(data) if len(data) < 1_000 else 100, 3):
            folder.restore(path, data[:length])
            is_log = kind == "commitlog"
            hit = {key for key, sent in folder.sent.items() if is_log and sent.end > int(path.name) + length}
            try:
                seen = folder.read()
            except StoreError as exc:
                refused.add((f"{length} bytes" in str(exc), kind in str(exc)))
            else:
                opened += 1
                check(folder.sent, seen, hit={key for key in hit if folder.sent[key].file == path.name})
    assert refused <= {(True, True)}
    assert opened or (kind == "checkpoint" and third)  # of the checkpoints only the empty one


@pytest.mark.parametrize("seed", range(20))
def test_random_flips_damage_only_the_messages_that_they_hit(tmp_path: Path, seed: int) -> None:
    """Flip eight bits anywhere in log and queues, after a kill."""
    chance = random.Random(seed)
    sizes = [chance.randrange(2_000) for _ in range(300)]
    contents = [chance.randbytes(size) for size in sizes]
    folder = Folder(tmp_path / "store", small(mapped_file_size_commit_log=65_536, mapped_file_size_consume_queue=2_000))
    folder.fill(300, contents.__getitem__, stop=kill)
    hit = set()
    paths = [path for kind in ("commitlog", "consumequeue") for path, _ in folder.kept_in(kind)]
    for _ in range(8):
        path = chance.choice(paths)
        bit = chance.randrange(max(1, len(path.read_bytes().rstrip(b"\0"))) * 8)
        path.write_bytes(flipped(path.read_bytes(), bit))
        hit |= folder.hits(path, bit)

    seen = folder.read()

    check(folder.sent, seen, hit=hit)


# --- tables ----------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path: Path) -> FolderStoreFiles:
    store_files, clock = FolderStoreFiles(tmp_path / "store", RestartedDisk()), VirtualClock()
    topics, offsets = TopicTable(store_files, clock), ConsumerOffsets(store_files, clock)
    topics.create("orders", 4)
    offsets.commit("billing", "orders", 0, 7)
    offsets.persist()
    write_table(store_files, "config/delayOffset.json", {"offsetTable": {"3": 1}})
    return store_files


def load_tables(store_files: FolderStoreFiles) -> None:
    TopicTable(store_files, VirtualClock()).load()
    ConsumerOffsets(store_files, VirtualClock()).load()
    read_table(store_files, "config/delayOffset.json")


@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json", "delayOffset.json"])
def test_a_damaged_table_is_read_or_refused_by_name(tables: FolderStoreFiles, name: str) -> None:
    """JSON has no checksum: a flipped digit is read as another. An unreadable table is refused with a way out."""
    path = tables.root / "config" / name
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(1, len(whole))]
    damaged += [flipped(whole, bit) for bit in range(len(whole) * 8)]
    errors = []
    for data in damaged:
        path.write_bytes(data)
        try:
            load_tables(tables)
        except StoreFormatError as exc:
            errors.append(str(exc))
    assert len(errors) >= len(whole) - 1
    assert all(
        name in text and ("delete it to start with an empty one" in text or "expected an object" in text)
        for text in errors
    )

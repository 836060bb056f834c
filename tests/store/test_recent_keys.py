"""Keys of the newest records, in memory: the same as in the log, for any mix of writes."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from mqtemplate.errors import StoreError
from mqtemplate.record.codec import Drafts, RecordDraft
from mqtemplate.record.columns import to_rows
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.record_arrays import UniformBatch
from mqtemplate.store import index_file, index_service
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.index_file import RecentKeys
from mqtemplate.store.key_reader import KeyReader
from mqtemplate.store.message_store import MessageStore
from tests.store.faulty_disk import FaultyDisk, never
from tests.store.small_store import OpenStore, no_keys, opened, small

FORMS = ("", "KEYS\x01%04d\x02", "UNIQ_KEY\x01%04d\x02TAGS\x01a\x02", "KEYS\x01k %04d b\x02", "KEYS\x01ü%04d\x02")
FLAGS = (0, 0, SysFlag.TRANSACTION_ROLLBACK, SysFlag.TRANSACTION_COMMIT)
TOPICS = ("orders", "orders", "bills", "%RETRY%" + "x" * 200)


@pytest.fixture
def store() -> MessageStore:
    return opened(MemoryStoreFiles(), small(mapped_file_size_commit_log=16_384))


def draft(chance: random.Random, number: int, *, topic: str | None = None) -> RecordDraft:
    form = chance.choice(FORMS)
    properties = (form % number if "%" in form else form).encode()
    topic = topic or chance.choice(TOPICS)
    return RecordDraft(topic, number % 2, bytes(chance.randrange(3)), properties, sys_flag=chance.choice(FLAGS))


def batch(chance: random.Random, number: int) -> UniformBatch:
    ids = [b"%06d" % (number * 100 + each) for each in range(chance.randrange(1, 20))]
    first = RecordDraft("orders", 0, b"12", b"UNIQ_KEY\x01%b\x02TAGS\x01b\x02" % ids[0], sys_flag=chance.choice(FLAGS))
    return UniformBatch(first, to_rows([b"12"] * len(ids)), to_rows(ids), first.properties.index(ids[0]))


def write_anything(store: MessageStore, chance: random.Random, count: int) -> None:
    """Write records in all ways, across files, some at the same time and some later."""
    for number in range(count):
        match chance.randrange(4):
            case 0:
                store.put(draft(chance, number))
            case 1:
                store.put(Drafts([draft(chance, number * 50 + each) for each in range(chance.randrange(1, 20))]))
            case 2:
                topic = chance.choice(TOPICS)
                form = RecordDraft(topic, 0, b"1", b"KEYS\x01%04d\x02" % number)
                store.put(Drafts([form] * chance.randrange(1, 30)))
            case _:
                store.put(batch(chance, number))
        store.clock.move_ms(chance.choice([0, 0, 1_700]))  # type: ignore[attr-defined]


def keys_of(store: MessageStore, keys: RecentKeys, portion: int) -> list[tuple[int, int, int]]:
    """Return hash, physical offset and store timestamp of all keys, read in portions."""
    reader, rows = KeyReader(store._commit_log, keys), list[tuple[int, int, int]]()
    while reader.position < store.end_offset:
        rows += zip(*(column.tolist() for column in reader.read(store.end_offset, portion)), strict=True)
    return rows


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit", [1 << 30, 20_000])
def test_the_keys_in_memory_are_those_in_the_log(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, seed: int, limit: int
) -> None:
    """With the smaller limit most records are left out, and read from the log."""
    monkeypatch.setattr(index_file, "_MAX_BYTES", limit)
    chance = random.Random(seed)
    write_anything(store, chance, 120)

    from_log = keys_of(store, no_keys(), 64)
    found = keys_of(store, store._writer._recent_keys, chance.choice([1, 3, 64]))

    assert found == from_log
    assert len(found) > 1_000


def test_records_between_those_in_memory_are_read_from_the_log(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, keys = random.Random(1), store._writer._recent_keys
    reader, rows = KeyReader(store._commit_log, keys), list[tuple[int, int, int]]()
    for limit in (1 << 30, 0, 1 << 30, 0):
        monkeypatch.setattr(index_file, "_MAX_BYTES", limit)
        write_anything(store, chance, 10)
        end = store.end_offset
        write_anything(store, chance, 5)
        while reader.position < end:
            rows += zip(*(column.tolist() for column in reader.read(end, 16)), strict=True)
    while reader.position < store.end_offset:
        rows += zip(*(column.tolist() for column in reader.read(store.end_offset, 16)), strict=True)

    assert rows == keys_of(store, no_keys(), 64)


def test_the_log_is_not_read_for_records_in_memory(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyReader, "_read_log", lambda *arguments: pytest.fail("the log was read"))
    store.put(RecordDraft("orders", 0, b"1", b"KEYS\x01one\x02"))
    store.put(Drafts([RecordDraft("orders", 0, b"1", b"KEYS\x01two\x02")] * 3))

    assert len(store.index.find("orders", "one")) == 1
    assert len(store.index.find("orders", "two")) == 3


def test_many_records_are_indexed_at_once(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would exceed the memory before the next step, a second after the first of them."""
    monkeypatch.setattr(index_file, "_MANY_BYTES", 2_000)
    store = open_store(small(mapped_file_size_commit_log=1 << 16, max_index_num=2_000))
    store.put(RecordDraft("orders", 0, b"1", b"KEYS\x01one\x02"))
    due_ms = store.index.step()
    assert due_ms == store.clock.now_ms() + 1_000

    store.put(Drafts([RecordDraft("orders", 0, b"1", b"KEYS\x01two\x02")] * 20))
    store.index.step()

    assert store.index._files[-1].header.index_count == 22


def test_memory_that_was_taken_is_free_again(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "_MAX_BYTES", 1_000)
    keys = store._writer._recent_keys
    for _ in range(3):
        for _ in range(30):
            store.put(RecordDraft("orders", 0, b"1", b"KEYS\x01one\x02"))
        assert 0 < len(keys.take().topics) < 30


def test_records_that_retention_deleted_are_skipped(store: MessageStore) -> None:
    for number in range(400):
        store.put(RecordDraft("orders", 0, bytes(100), b"KEYS\x01k%d\x02" % number))
    store.delete_before(40_000)
    start = store.start_offset

    store.index.catch_up()

    assert start > 0
    assert store.index.find("orders", "k0") == []
    assert len(store.index.find("orders", "k399")) == 1
    assert all(offset >= start for offset in store.index.find("orders", "k399"))


# --- indexing in the thread that wrote the records ---------------------------------------------------------------


def indexed(store: MessageStore) -> int:
    """Return the number of keys in the last index file."""
    return store.index._files[-1].header.index_count - 1


def fill(store: MessageStore, count: int, *, topics: int = 1) -> None:
    for number in range(count):
        store.put(RecordDraft(f"orders-{number % topics}", 0, b"1", b"KEYS\x01one\x02"))


@pytest.fixture
def indexing(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> MessageStore:
    """A store with an index file, whose writer indexes when a few records are in memory."""
    monkeypatch.setattr(index_file, "_SOME_BYTES", 2_000)
    store = open_store(small(mapped_file_size_commit_log=1 << 16, max_index_num=100))
    fill(store, 1)
    store.index.catch_up()
    return store


def test_the_writer_indexes_when_there_are_enough_records(indexing: MessageStore) -> None:
    fill(indexing, 5)
    indexing.index.index_recent()
    before = indexed(indexing)
    fill(indexing, 15, topics=3)
    indexing.index.index_recent()

    assert (before, indexed(indexing)) == (1, 21)
    assert indexing.index.step() == indexing.clock.now_ms() + 1_000  # the service has nothing to do now


def test_the_writer_does_not_wait_for_the_service(indexing: MessageStore) -> None:
    fill(indexing, 20)
    with indexing.index._mutex:  # the service flushes
        indexing.index.index_recent()
        assert indexed(indexing) == 1

    indexing.index.index_recent()

    assert indexed(indexing) == 21


def test_the_writer_leaves_records_that_have_to_be_read_from_the_log(
    indexing: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(index_file, "_MAX_BYTES", 0)
        fill(indexing, 1)
    fill(indexing, 20)

    indexing.index.index_recent()
    by_writer = indexed(indexing)
    indexing.index.step()  # it is due at once

    assert (by_writer, indexed(indexing)) == (1, 22)


def test_the_writer_leaves_what_does_not_fit_into_the_file(indexing: MessageStore) -> None:
    fill(indexing, 150)

    indexing.index.index_recent()
    files = len(indexing.index._files)
    by_writer = indexed(indexing)
    indexing.index.step()

    assert (files, by_writer) == (1, 99)
    assert (len(indexing.index._files), indexed(indexing)) == (2, 151 - 99)


def test_the_writer_leaves_the_flush(indexing: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_service, "_FLUSH_UNITS", 10)
    fill(indexing, 30)

    indexing.index.index_recent()
    unflushed = indexing.index._files[-1].unflushed
    indexing.index.step()

    assert unflushed == 31
    assert indexing.index._files[-1].unflushed == 0


@pytest.mark.parametrize("again", [0, 1])
def test_the_writer_does_not_notice_that_the_disk_fails(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """Its messages are stored. The service gets the error, and indexes them when the disk works again."""
    monkeypatch.setattr(index_file, "_SOME_BYTES", 2_000)
    store = opened(quick_folder, disk=(disk := FaultyDisk()))
    fill(store, 1)
    store.index.catch_up()
    fill(store, 20)
    disk.judge = lambda number, kind: errno.EIO if kind == "write" else 0

    for _ in range(again + 1):
        store.index.index_recent()
    by_writer = indexed(store)
    with pytest.raises(StoreError, match="Input/output error"):
        store.index.step()
    disk.judge = never
    fill(store, 20)
    store.index.index_recent()

    assert by_writer == 1
    assert len(store.index.find("orders-0", "one")) == 41
    store.close()

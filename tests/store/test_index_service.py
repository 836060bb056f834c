"""Index files: RocketMQ's bytes, filled in the background, and complete after any failure."""

from __future__ import annotations

import random
import shutil
import struct
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import StoreFullError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import HostAddress
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.store import index_file, index_service, key_reader
from mqtemplate.store.files import layout
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.layout import IndexHeader, index_file_size, unpack_index_header
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.index_file import IndexFile, KeyRows
from mqtemplate.store.index_service import IndexService
from mqtemplate.store.key_reader import KeyReader, index_key_hashes, keys_of
from mqtemplate.store.message_store import MessageStore
from tests.store.small_store import OpenStore, kill, no_keys, opened, overwrite, small
from tests.thirds import examples

FROM_LOG = pytest.mark.parametrize("keys_from", ["log"], indirect=True)
SLOTS, UNITS = 5, 9
TINY = small(max_hash_slot_num=SLOTS, max_index_num=UNITS)


def keyed(keys: str, body: bytes = b"", *, topic: str = "orders", sys_flag: int = 0) -> RecordDraft:
    """Return a record that has only business keys."""
    properties = f"KEYS\x01{keys}\x02".encode() if keys else b""
    return RecordDraft(topic, 0, body or keys.encode(), properties, sys_flag=sys_flag)


def fill(store: MessageStore, count: int, start: int = 0) -> list[PutResult]:
    """Store records ``k0``, ``k1``, …, each with its name as its only key."""
    return [store.put(keyed(f"k{number}")) for number in range(start, start + count)]


def bodies(store: MessageStore, key: str, topic: str = "orders", *, index: IndexService | None = None) -> list[bytes]:
    """Return the bodies of the records that really have a key, newest first; by default by the store's own index."""
    records = [store.read_at(offset) for offset in dict.fromkeys((index or store.index).find(topic, key))]
    return [record.body for record in records if record and f"{topic}#{key}" in keys_of(record.topic, record[-1])]


def lost(store: MessageStore, numbers: Sequence[int], index: IndexService | None = None) -> list[int]:
    """Return the numbers of the records that are not found."""
    return [number for number in numbers if bodies(store, f"k{number}", index=index) != [b"k%d" % number]]


def index_files(folder: Path) -> list[Path]:
    return sorted((folder / "index").iterdir()) if (folder / "index").is_dir() else []


@pytest.fixture(autouse=True, params=["memory", "log"])
def keys_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the index take the keys of new records from memory, or read them from the log."""
    if request.param == "log":
        monkeypatch.setattr(index_file, "_MAX_BYTES", 0)


@pytest.fixture
def store(open_store: OpenStore) -> MessageStore:
    return open_store(TINY)


class RocketMQIndex:
    """RocketMQ's algorithm for one key, over plain bytes."""

    def __init__(self) -> None:
        self.file = bytearray(index_file_size(SLOTS, UNITS))
        self._count = 1

    def put(self, key: str, physical_offset: int, timestamp: int) -> None:
        key_hash = abs(java_string_hash(key))
        key_hash = 0 if key_hash > 0x7FFF_FFFF else key_hash
        begin_ms, _, begin_offset, _, slots, _ = struct.unpack_from(">qqqqii", self.file)
        slot_at = 40 + key_hash % SLOTS * 4
        newest = struct.unpack_from(">i", self.file, slot_at)[0]
        seconds = max(0, timestamp - begin_ms) // 1_000 if begin_ms > 0 else 0
        unit_at = 40 + 4 * SLOTS + 20 * self._count
        struct.pack_into(">iqii", self.file, unit_at, key_hash, physical_offset, seconds, newest)
        struct.pack_into(">i", self.file, slot_at, self._count)
        if self._count == 1:
            begin_ms, begin_offset = timestamp, physical_offset
        slots += newest == 0
        self._count += 1
        struct.pack_into(
            ">qqqqii", self.file, 0, begin_ms, timestamp, begin_offset, physical_offset, slots, self._count
        )


# --- the bytes ---------------------------------------------------------------------------------


def test_a_key_has_the_hash_that_rocketmq_writes() -> None:
    """From a dump of a real file. The smallest number has no absolute value and counts as 0."""
    assert index_key_hashes(["SpecTopic#T#TagA", "polygenelubricants"]).tolist() == [0x75E953DB, 0]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 400), st.integers(0, 5_000)), min_size=1, max_size=8
    ),
    st.lists(st.integers(1, 7), max_size=4),
)
def test_keys_appended_in_any_portions_equal_keys_appended_one_by_one(
    keys: list[tuple[str, int, int]], cuts: list[int]
) -> None:
    rocketmq = RocketMQIndex()
    file = IndexFile(MappedFile(index_file_size(SLOTS, UNITS)), "1", SLOTS, UNITS)
    physical_offset, timestamp = 0, 1_767_225_600_000
    rows = []
    for key, size, pause_ms in keys:
        physical_offset, timestamp = physical_offset + size, timestamp + pause_ms
        rows.append((key, physical_offset, timestamp))
        rocketmq.put(*rows[-1])

    ends = [*sorted({cut for cut in cuts if cut < len(rows)}), len(rows)]
    for start, end in zip([0, *ends], ends, strict=False):
        part = list(zip(*rows[start:end], strict=True))
        file.append(KeyRows(index_key_hashes(part[0]), np.array(part[1]), np.array(part[2])))
    file.flush()

    assert file._file.view[:] == rocketmq.file


def test_the_header_of_an_empty_file_has_the_end_of_the_previous_file() -> None:
    file = IndexFile(MappedFile(index_file_size(SLOTS, UNITS)), "1", SLOTS, UNITS)

    file.start_after(IndexHeader(1_000, 2_000, 100, 200, 5, 9))

    assert unpack_index_header(file._file.view) == IndexHeader(2_000, 2_000, 200, 200, 0, 1)


# --- indexed records ---------------------------------------------------------------------------


def test_records_of_every_form_are_indexed(open_store: OpenStore) -> None:
    """IPv6 hosts, topics of more than 127 characters, keys that are not ASCII, and what has no properties at all."""
    store = open_store(small(listen_host=HostAddress("::1", 10911)))
    long_topic = "%RETRY%" + "x" * 200

    store.put(keyed(""))
    store.put(keyed("kéy 日本", b"v6"))
    store.put(keyed("4466", b"v2", topic=long_topic))

    assert bodies(store, "kéy") == bodies(store, "日本") == [b"v6"]
    assert bodies(store, "4466", long_topic) == [b"v2"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["orders", "invoices"]),
            st.lists(st.sampled_from(["Aa", "BB", "k1", "k2", "k3"]), max_size=4),
            st.integers(0, 2),
        ),
        max_size=40,
    )
)
def test_the_index_finds_the_same_records_as_a_dict(messages: list[tuple[str, list[str], int]]) -> None:
    """``Aa`` and ``BB`` have the same hash, five slots make long chains, and some messages are followed by queries."""
    store = opened(MemoryStoreFiles(), TINY)
    model: dict[tuple[str, str], list[bytes]] = {}
    for number, (topic, keys, queries) in enumerate(messages):
        store.put(keyed(" ".join(keys), b"%d" % number, topic=topic))
        for key in set(keys):
            model.setdefault((topic, key), []).insert(0, b"%d" % number)
        for key in keys[:queries]:
            assert bodies(store, key, topic) == model[topic, key]

    found = {(topic, key): bodies(store, key, topic) for topic, key in model}
    store.close()

    assert found == model


# --- following the log -------------------------------------------------------------------------


# --- filters of full files -------------------------------------------------------------------------


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=8, max_size=300), st.integers(1, 100))
def test_a_filter_passes_every_key_that_its_file_has(hashes: list[int], part: int) -> None:
    units = len(hashes) + 1
    file = IndexFile(MappedFile(index_file_size(SLOTS, units)), "1", SLOTS, units)
    file.append(KeyRows(np.array(hashes, np.int32), np.arange(len(hashes)), np.full(len(hashes), 1_000)))
    chains = {key_hash: file.newest_unit(key_hash) for key_hash in hashes}

    for _ in iter(lambda: file.extend_filter(part), True):
        assert file.newest_unit(hashes[0]) == chains[hashes[0]], "it is not complete"

    assert {key_hash: file.newest_unit(key_hash) for key_hash in hashes} == chains


def test_a_filter_saves_the_chains_of_most_keys_that_are_not_there() -> None:
    """Also of keys that differ by a number only."""
    keys = [f"#P carts cart-{number}" for number in range(20_000)]
    file = IndexFile(MappedFile(index_file_size(100, 20_001)), "1", 100, 20_001)
    file.append(KeyRows(index_key_hashes(keys), np.arange(20_000), np.full(20_000, 1_000)))
    others = index_key_hashes([f"#P carts cart-{number}" for number in range(20_000, 40_000)]).tolist()
    before = sum(file.newest_unit(each) > 0 for each in others)
    file.extend_filter(20_000)

    assert before == 20_000
    assert sum(file.newest_unit(each) > 0 for each in others) < 20_000 / 8


def test_the_first_look_up_of_a_pending_key_gives_the_newest_full_files_a_filter(
    open_store: OpenStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that become old lose it again."""
    monkeypatch.setattr(index_service, "_MOST_FILTER_BYTES", 3 * index_file.filter_bytes(UNITS))
    store = open_store(TINY)
    filtered = []
    for start in (0, 41):
        fill(store, 41, start)
        store.index.newest_keyed("carts", "new")
        store.index.changed()  # as each confirmed send does
        for _ in range(20):
            clock.move_ms(1_000)
            store.index.step()
        filtered.append([file._filter is not None for file in store.index._files])

    assert filtered == [[False] * 3 + [True, True, False], [False] * 8 + [True, True, False]]
    assert lost(store, range(82)) == []


@FROM_LOG
def test_a_step_is_short_and_pauses_longer_while_the_log_grows(open_store: OpenStore, clock: VirtualClock) -> None:
    store = open_store(small(mapped_file_size_commit_log=1 << 20, max_index_num=2_000))
    fill(store, 600)
    clock.move_ms(1_000)
    pauses = []

    for _ in range(10):
        due_ms = store.index.step()
        if due_ms is None:
            break
        pauses.append((due_ms - clock.now_ms(), store.index._files[-1].header.index_count - 1))
        clock.move_ms(pauses[-1][0])

    assert pauses == [(20, 256), (2, 512)]
    assert store.index._files[-1].header.index_count == 601


def test_a_query_finds_each_message_stored_before_while_threads_write(tmp_path: Path) -> None:
    """Threads store and query while the service steps: each finds its own message at once."""
    settings = small(mapped_file_size_commit_log=1 << 16, max_index_num=50)
    store = opened(MemoryStoreFiles(), settings, clock=SystemClock())

    def put_and_query(worker: int) -> list[int]:
        missing = []
        for number in range(worker * 1_000, worker * 1_000 + 150):
            fill(store, 1, start=number)
            store.index.step()
            missing += lost(store, [number])
        return missing

    with ThreadPoolExecutor(4) as pool:
        missing = [number for answer in pool.map(put_and_query, range(4)) for number in answer]
    store.close()

    assert missing == []


STRETCHES = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.integers(0, 3),
        st.sampled_from(
            ["", "KEYS\x01%04d\x02", "UNIQ_KEY\x01%04d\x02TAGS\x01a\x02", "KEYS\x01k %04d\x02", "KEYS\x01ü%04d\x02"]
        ),
        st.sampled_from([0, SysFlag.TRANSACTION_ROLLBACK, SysFlag.TRANSACTION_COMMIT]),
        st.sampled_from(["orders", "%RETRY%" + "x" * 200]),
    ),
    max_size=8,
)


@settings(max_examples=examples(60), deadline=None)
@given(stretches=STRETCHES, portion=st.integers(1, 40))
def test_records_that_are_alike_have_the_keys_that_they_have_one_by_one(
    stretches: list[tuple[int, int, str, int, str]], portion: int
) -> None:
    """Producers send many records of one size, in portions of any size, across files of the log."""
    store, numbers = opened(MemoryStoreFiles(), small()), count()
    for length, size, form, flag, topic in stretches:
        for number in islice(numbers, length):
            text = form % number if "%" in form else form
            store.put(RecordDraft(topic, 0, bytes(size), text.encode(), sys_flag=flag))
    found = []
    for fewest in (2, 1_000_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(key_reader, "_FEWEST_ALIKE", fewest)
            reader, rows = KeyReader(store._commit_log, no_keys()), list[tuple[int, int, int]]()
            while reader.position < store.end_offset:
                part = reader.read(store.end_offset, portion)
                rows += zip(*(column.tolist() for column in part), strict=True)
        found.append(rows)
    store.close()

    assert found[0] == found[1]


@pytest.mark.parametrize("number", [2, 40])
@pytest.mark.parametrize("at", range(88))
def test_damage_in_the_log_hides_no_other_record(at: int, number: int) -> None:
    """Any byte of a record's header may change while the store runs: the other records are found."""
    store = opened(MemoryStoreFiles(), small(max_index_num=100))
    puts = [store.put(keyed("all", b"body")) for _ in range(60)]
    file, start = store._commit_log.files.find(puts[number].physical_offset) or pytest.fail("no file")
    file.view[puts[number].physical_offset - start + at] ^= 0x41

    found = store.index.find("orders", "all")
    store.close()

    assert {put.physical_offset for put in puts} - set(found) <= {puts[number].physical_offset}


# --- stops, kills and damage -------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from(["put", "put", "index", "flush", "step", "kill", "close", "clean"]), max_size=25))
def test_every_stored_message_is_found_after_any_sequence_of_events(events: list[str]) -> None:
    """Compare with a list, after kills, closes and deletions in any order."""
    with tempfile.TemporaryDirectory() as folder:
        clock = VirtualClock()
        store = opened(Path(folder), TINY, clock=clock)
        puts: list[PutResult] = []
        for event in [*events, "kill"]:
            if event == "put":
                numbers = range(len(puts), len(puts) + 3)
                puts += [store.put(keyed(f"k{number} all", bytes(300))) for number in numbers]
            elif event == "index":
                store.index.catch_up()
            elif event == "flush":
                store.index.flush()
            elif event == "step":
                clock.move_ms(1_000)
                store.index.step()
            elif event == "clean" and puts:
                store.delete_before(puts[len(puts) // 2].physical_offset)
            elif event in ("kill", "close"):
                kill(store) if event == "kill" else store.close()
                store = opened(Path(folder), TINY, clock=clock)

        kept = [put.physical_offset for put in puts if put.physical_offset >= store.start_offset]
        found = [store.index.find("orders", f"k{number}") for number in range(len(puts) - len(kept), len(puts))]
        everything = [offset for offset in store.index.find("orders", "all") if offset >= store.start_offset]
        store.close()

        assert [set(offsets) for offsets in found] == [{offset} for offset in kept]
        assert list(dict.fromkeys(everything)) == kept[:-65:-1]


@FROM_LOG
@pytest.mark.parametrize("damaged", [None, 7])
def test_a_missing_index_is_built_while_the_recovery_reads_the_log(
    open_store: OpenStore, tmp_path: Path, damaged: int | None
) -> None:
    """Over several files of the log. After a damaged record the service has to go on, and reads the log for it."""
    store = open_store(TINY)
    puts = fill(store, 60)
    store.close()
    for name in ("index", "consumequeue"):
        shutil.rmtree(tmp_path / name)
    if damaged is not None:
        overwrite(tmp_path / "commitlog" / f"{0:020d}", puts[damaged].physical_offset + 8, b"\xff")

    store = open_store(TINY)
    position = store.index._reader.position

    assert position == (store.end_offset if damaged is None else puts[damaged].physical_offset)
    assert [number for number in range(60) if not store.index.find("orders", f"k{number}")] in ([], [damaged])


@pytest.fixture
def filled(store: MessageStore) -> MessageStore:
    """A store with a full index file and another one, both flushed."""
    fill(store, 13)
    store.index.catch_up()
    store.index.flush()
    return store


def reopened(store: MessageStore, *, was_clean: bool, durable_timestamp: int = 0) -> IndexService:
    """Open another service over the present files."""
    index = IndexService(store.store_files, TINY, store.clock)
    index.open(store._commit_log, no_keys(), was_clean=was_clean)
    index.load(store.written_end, durable_timestamp, was_clean=was_clean)
    return index


def test_an_index_file_cut_at_any_byte_after_a_crash_is_repaired(filled: MessageStore, tmp_path: Path) -> None:
    """The rest may be zeros, or the file may be shorter. In both cases all records are found."""
    last = index_files(tmp_path)[-1]
    data = last.read_bytes()
    for cut in range(len(data)):
        for left in (data[:cut].ljust(len(data), b"\0"), data[:cut])[: 1 + (cut % 9 == 0)]:
            for file in index_files(tmp_path)[1:]:
                file.unlink()
            last.write_bytes(left)

            index = reopened(filled, was_clean=False)

            assert lost(filled, range(13), index) == [], cut
            index.close()


def test_a_flipped_bit_hides_one_key_at_most(filled: MessageStore, tmp_path: Path) -> None:
    """Flip a bit in each byte of the last file after a crash: one key at most is missing, and no call raises."""
    last = index_files(tmp_path)[-1]
    data = last.read_bytes()
    chance = random.Random(4466)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << chance.randrange(8)
        last.write_bytes(damaged)

        index = reopened(filled, was_clean=False)
        lost_numbers = lost(filled, range(13), index)
        index.close()

        assert len(lost_numbers) <= 1, at
        for file in index_files(tmp_path)[1:]:
            file.unlink()


def test_damage_in_a_closed_index_never_raises_nor_loops(filled: MessageStore, tmp_path: Path) -> None:
    """These files are not checked at the start. A reader may miss keys, and rejects wrong candidates."""
    files = index_files(tmp_path)
    whole = [file.read_bytes() for file in files]
    chance = random.Random(4466)
    for _ in range(100):
        for file, data in zip(files, whole, strict=True):
            damaged = bytearray(data)
            for _ in range(chance.choice([1, 4, 100])):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            file.write_bytes(damaged)

        index = reopened(filled, was_clean=True)
        for number in range(13):
            for offset in index.find("orders", f"k{number}", max_count=1_000):
                filled.read_at(offset)
        index.close()

        for file in index_files(tmp_path):
            file.unlink()


@given(
    slots=st.integers(1, 3_000),
    spare=st.integers(0, 5_000),
    keys=st.lists(st.tuples(st.integers(0, 3), st.integers(1, (1 << 31) - 1)), min_size=1, max_size=60),
    start=st.sampled_from([0, 1, 123_456_789]),
)
def test_the_geometry_of_an_index_file_follows_from_its_content(
    slots: int, spare: int, keys: list[tuple[int, int]], start: int
) -> None:
    """Numbers of slots and units that no other geometry of the same size explains as well."""
    units = len(keys) + 1 + spare
    file = MappedFile(layout.index_file_size(slots, units))
    index_file = IndexFile(file, "20260101000000000", slots, units)
    offsets = start + np.cumsum([step * 100 for step, _ in keys]) - keys[0][0] * 100
    rows = KeyRows(np.array([key for _, key in keys], np.int32), offsets.astype(np.int64), np.full(len(keys), 1_000))
    index_file.start_after(layout.IndexHeader())
    index_file.append(rows)
    index_file.flush()

    found = layout.find_geometry(file)

    assert found is not None
    if found != (slots, units):  # then a reader that uses it finds the same records
        other = IndexFile(file, "20260101000000000", *found)
        for _, key in keys:
            expected = index_file.follow(key, index_file.newest_unit(key), 0, 2_000, 100)
            assert other.follow(key, other.newest_unit(key), 0, 2_000, 100) == expected


class FullStoreFiles(FolderStoreFiles):
    """Files on a disk without space for index files while ``is_full``."""

    is_full = True

    def open_mapped(self, name: str, size: int, *, sparse: bool = False) -> MappedFile:
        if self.is_full and name.startswith("index/"):
            raise StoreFullError(f"no room on the disk for {name}")
        return super().open_mapped(name, size, sparse=sparse)


def test_without_space_for_an_index_file_sends_succeed_and_queries_fail(tmp_path: Path) -> None:
    """Once there is space again, no key is missing. After a close the next start indexes the rest."""
    store_files = FullStoreFiles(tmp_path)
    store = opened(store_files, TINY)
    fill(store, 3)
    with pytest.raises(StoreFullError, match="index/"):
        store.index.find("orders", "k0")
    fill(store, 1, start=3)
    store_files.is_full = False
    found = lost(store, range(4))
    store_files.is_full = True
    fill(store, 10, start=4)
    store.close()
    store_files.is_full = False

    store = opened(store_files, TINY)
    found += lost(store, range(14))
    store.close()

    assert found == []

"""Recovery: the start after a kill, after a power failure, and after RocketMQ."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.store.checkpoint import StoreCheckpoint
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from tests.delay.foreign_records import ForeignDraft
from tests.store.power_loss_disk import RestartedDisk
from tests.store.small_store import OpenStore, bodies, draft, kill, opened, overwrite, small


def test_a_log_cut_at_any_byte_keeps_all_whole_records(quick_folder: Path) -> None:
    """Cut the last file at every byte: all whole records are still there, in order, and the next put succeeds.

    A process that is killed while it appends has not written the unit yet, so no queue refers to the record.
    """
    source = quick_folder / "source"
    store = opened(source, small(mapped_file_size_commit_log=600))
    written = [b"first" * 60, b"second" * 20, b"", b"fourth"]
    puts = [store.put(draft(body)) for body in written]
    kill(store)
    last = max((source / "commitlog").iterdir())
    start = int(last.name)
    data = last.read_bytes()
    assert puts[-1].physical_offset > start > puts[0].physical_offset

    for cut in range(puts[-1].end - start + 1):
        folder = quick_folder / "cut"
        shutil.copytree(source, folder)
        (folder / "commitlog" / last.name).write_bytes(data[:cut].ljust(600, b"\0"))
        shutil.rmtree(folder / "consumequeue")

        again = opened(folder, small(mapped_file_size_commit_log=600))

        whole = [body for body, put in zip(written, puts, strict=True) if put.end <= start + cut]
        assert bodies(again) == whole
        assert again.put(draft(b"next")).queue_offset == len(whole)
        again.close()
        shutil.rmtree(folder)


def linked(body: bytes) -> RecordDraft:
    """Return a copy of a delayed record: it has a link to its source."""
    return replace(draft(body), prepared_transaction_offset=1)


class Follower:
    """Follower that remembers the replayed records."""

    def __init__(self, persisted: int | None = None, replay_from: int | None = None) -> None:
        self.seen: list[bytes] = []
        self._persisted = persisted
        self._from = replay_from

    def replay_from(self) -> int | None:
        return self._from

    def replay(self, record: StoredRecord) -> None:
        self.seen.append(record.body)

    def persist(self) -> int | None:
        return self._persisted


@pytest.mark.parametrize(("replay_from", "replayed"), [(None, [b"c"]), (0, [b"a", b"b", b"c"])])
def test_followers_replay_the_log_from_the_checkpoint_or_from_their_own_offset(
    tmp_path: Path, replay_from: int | None, replayed: list[bytes]
) -> None:
    store = opened(tmp_path)
    store.put(linked(b"a"))
    store.put(linked(b"b"))
    store.take_checkpoint()
    store.put(linked(b"c"))
    kill(store)
    follower = Follower(replay_from=replay_from)

    again = opened(tmp_path, followers=[follower])
    again.close()

    assert follower.seen == replayed


def test_followers_replay_copies_of_delayed_messages_and_possible_copies_by_rocketmq(
    tmp_path: Path,
) -> None:
    """RocketMQ's copies have no link. So its records with a delay property are replayed as well."""
    foreign = b"REAL_TOPIC\x01orders\x02DELAY\x013\x02"
    store = opened(tmp_path)
    store.put(draft(b"plain"))
    store.put(draft(b"ours, delayed", properties=foreign))
    store.put(ForeignDraft("orders", 0, b"theirs", b"TAGS\x01paid\x02"))
    store.put(ForeignDraft("orders", 0, b"theirs, delayed", foreign))
    store.put(linked(b"a copy"))
    kill(store)
    follower = Follower()

    again = opened(tmp_path, followers=[follower])
    again.close()

    assert follower.seen == [b"theirs, delayed", b"a copy"]


def test_the_checkpoint_does_not_pass_the_slowest_follower(tmp_path: Path) -> None:
    store = opened(tmp_path, followers=[Follower(persisted=0)])
    store.put(linked(b"a"))
    store.take_checkpoint()
    kill(store)
    follower = Follower()

    again = opened(tmp_path, followers=[follower])
    again.close()

    assert follower.seen == [b"a"]


@given(data=st.data())
def test_any_mix_of_puts_closes_and_kills_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    model: dict[int, list[bytes]] = {0: [], 1: []}
    steps = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, 1), st.binary(max_size=700)), st.sampled_from(["close", "kill", "checkpoint"])
            ),
            max_size=25,
        )
    )
    store = opened(folder)
    for step in steps:
        if step == "checkpoint":
            store.take_checkpoint()
        elif isinstance(step, str):
            kill(store) if step == "kill" else store.close()
            store = opened(folder)
        else:
            queue_id, body = step
            assert store.put(draft(body, queue_id=queue_id)).queue_offset == len(model[queue_id])
            model[queue_id].append(body)
        assert {queue_id: bodies(store, queue_id=queue_id) for queue_id in model} == model
    store.close()
    shutil.rmtree(folder)


# --- queues that differ from the log ---------------------------------------------------------------


@pytest.mark.feature("D21")
def test_every_record_is_dispatched_however_many_files_there_are(open_store: OpenStore, tmp_path: Path) -> None:
    """A clean start of RocketMQ skips the first record without a unit, and reads ten files at most."""
    store = open_store()
    for number in range(60):
        store.put(draft(b"%02d" % number * 400, queue_id=number % 2))
    assert len(list((tmp_path / "commitlog").iterdir())) > 12
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")

    again = open_store()

    assert [body[:2] for body in bodies(again)] == [b"%02d" % number for number in range(0, 60, 2)]
    assert again.put(draft(b"next", queue_id=1)).queue_offset == 30


@pytest.mark.feature("D22")
def test_only_the_queue_that_lacks_units_is_rebuilt(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ continues at the end of the queue, so each later message gets too small a queue offset."""
    store = open_store()
    for number in range(30):
        store.put(draft(bytes(300) + b"%d" % number, queue_id=number % 3))
    store.close()
    shutil.rmtree(tmp_path / "consumequeue" / "orders" / "1")
    others = {queue_id: tmp_path / "consumequeue" / "orders" / queue_id / f"{0:020d}" for queue_id in "02"}
    before = {queue_id: file.stat().st_mtime_ns for queue_id, file in others.items()}

    with capture_logs() as logs:
        again = open_store()

    rebuilt = [line for line in logs if line["event"] == "store.queue_rebuilt"]
    assert [line["reason"] for line in rebuilt] == ["queue 1 of orders ends at 0, the log continues with 9"]
    assert [body[300:] for body in bodies(again, queue_id=1)] == [b"%d" % number for number in range(1, 30, 3)]
    assert {queue_id: file.stat().st_mtime_ns for queue_id, file in others.items()} == before


@pytest.mark.feature("D24")
def test_records_of_a_cut_tail_never_become_valid_again(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ does not clear them. They would be valid again after a record that ends where one of them starts."""
    store = open_store()
    _, torn, third = (store.put(draft(body * 50)) for body in (b"a", b"b", b"c"))
    kill(store)
    shutil.rmtree(tmp_path / "consumequeue")
    file = tmp_path / "commitlog" / f"{0:020d}"
    overwrite(file, torn.physical_offset, bytes(4))
    overwrite(file, third.physical_offset, bytes(4))

    again = open_store()
    assert bodies(again) == [b"a" * 50]
    assert again.put(draft(b"d" * 50)).end == torn.end
    assert not any(file.read_bytes()[torn.end :])
    kill(again)

    assert bodies(open_store()) == [b"a" * 50, b"d" * 50]


@pytest.mark.feature("D24")
def test_old_records_after_the_end_of_rocketmqs_log_are_ignored(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ cut a tail, overwrote its start with a shorter record, and was killed. Older records follow that one."""
    clock = VirtualClock()
    store = MessageStore(FolderStoreFiles(tmp_path), small(), clock)
    store.load()
    puts = [store.put(ForeignDraft("orders", 0, body * 50, b"")) for body in (b"a", b"b", b"c")]
    kill(store)
    file = tmp_path / "commitlog" / f"{0:020d}"
    newer = ForeignDraft("orders", 0, b"n" * 20, b"").encode(1, puts[1].physical_offset, clock.now_ms() + 9, _HOST)
    overwrite(file, puts[1].physical_offset, newer)
    shutil.rmtree(tmp_path / "consumequeue")

    again = open_store()

    assert bodies(again) == [b"a" * 50, b"n" * 20]
    assert again.put(draft(b"next")).physical_offset == puts[1].physical_offset + len(newer)


@pytest.mark.feature("D15")
def test_a_message_whose_flush_timed_out_is_stored_once(open_store: OpenStore) -> None:
    """RocketMQ's services append such a message again. But the record is in the log; only the flush is late."""
    store = open_store()
    put = store.put(draft(b"slow disk"))
    store.group_commit.wait = lambda end, timeout_ms: False  # type: ignore[method-assign]
    assert not store.confirm(put.end, ["orders"], timeout_ms=0)
    kill(store)

    assert bodies(open_store()) == [b"slow disk"]


# --- power failures --------------------------------------------------------------------------------


def restart_machine(folder: Path) -> MessageStore:
    """Open the store after a power failure."""
    return opened(folder, disk=RestartedDisk("another boot"))


@pytest.mark.parametrize("sector", [512, 4_096])
def test_a_sector_lost_in_a_power_failure_ends_the_log(tmp_path: Path, sector: int) -> None:
    """No later record was acknowledged, because each flush writes the whole file."""
    settings = small(mapped_file_size_commit_log=16_384)
    store = opened(tmp_path, settings)
    puts = [store.put(draft(b"%02d" % number * 100)) for number in range(30)]
    kill(store)
    file = tmp_path / "commitlog" / f"{0:020d}"
    overwrite(file, 4_096, bytes(sector))
    lost = [number for number, put in enumerate(puts) if put.end > 4_096]

    with capture_logs() as logs:
        again = opened(tmp_path, settings, disk=RestartedDisk("another boot"))

    cut = next(line for line in logs if line["event"] == "store.unflushed_tail_cut")
    whole = [number for number, put in enumerate(puts) if put.physical_offset >= 4_096 + sector]
    assert (cut["physical_offset"], cut["whole_records_dropped"]) == (puts[lost[0]].physical_offset, len(whole))
    assert bodies(again) == [b"%02d" % number * 100 for number in range(lost[0])]
    assert not any(file.read_bytes()[puts[lost[0]].physical_offset :])
    again.close()


def test_a_lost_sector_before_the_checkpoint_is_damage(tmp_path: Path) -> None:
    store = opened(tmp_path)
    puts = [store.put(draft(b"%d" % number * 700)) for number in range(4)]
    store.take_checkpoint()
    kill(store)
    file = tmp_path / "commitlog" / f"{0:020d}"
    overwrite(file, 1_024, bytes(512))

    with capture_logs() as logs:
        again = restart_machine(tmp_path)

    damaged = [line["physical_offset"] for line in logs if line["event"] == "store.record_damaged"]
    assert damaged == [puts[1].physical_offset]
    assert again.consume_queue("orders", 0).max_offset == 4
    again.close()


def test_units_lost_in_a_power_failure_are_rebuilt_from_the_log(tmp_path: Path) -> None:
    """Zeros in the middle of a file, and a missing file. The units before the checkpoint were on the disk."""
    store = opened(tmp_path)
    for number in range(5):
        store.put(draft(b"%d" % number))
    store.take_checkpoint()
    for number in range(5, 25):
        store.put(draft(b"%d" % number))
    kill(store)
    queue = tmp_path / "consumequeue" / "orders" / "0"
    overwrite((queue / f"{0:020d}"), 120, bytes(40))
    (queue / f"{400:020d}").unlink()

    again = restart_machine(tmp_path)

    assert bodies(again) == [b"%d" % number for number in range(25)]
    again.close()


# --- files of RocketMQ -----------------------------------------------------------------------------

_HOST = b"\x7f\x00\x00\x01\x00\x00*\x9f"
_HOST_V6 = bytes(15) + b"\x01\x00\x00*\x9f"


def test_a_store_written_by_rocketmq_is_opened(tmp_path: Path) -> None:
    """Records without check, long topics, IPv6, transactions, a blank, files created ahead, a deleted first file."""
    drafts = [
        ForeignDraft("orders", 0, b"expired" * 100, b"TAGS\x01paid\x02"),
        *(ForeignDraft("orders", 0, b"%d" % number * 600, b"TAGS\x01paid") for number in range(3)),
        ForeignDraft("%RETRY%" + "g" * 130, 0, b"long topic", b""),
        ForeignDraft("orders", 0, b"six", b"", born_host=_HOST_V6),
        ForeignDraft("HALF", 0, b"prepared", b"", sys_flag=SysFlag.TRANSACTION_PREPARED),
        ForeignDraft("HALF", 0, b"rolled back", b"", sys_flag=SysFlag.TRANSACTION_ROLLBACK),
        ForeignDraft("orders", 0, b"committed", b"", sys_flag=SysFlag.TRANSACTION_COMMIT),
    ]
    folder = tmp_path / "commitlog"
    folder.mkdir()
    write_log(folder, drafts, file_size=1_000)
    (folder / f"{0:020d}").unlink()
    end = max(folder.iterdir())
    for ahead in (1, 2):
        (folder / f"{int(end.name) + ahead * 1_000:020d}").write_bytes(bytes(1_000))
    (tmp_path / "checkpoint").write_bytes(bytes(4_096))
    (tmp_path / "abort").write_bytes(b"4711")

    store = opened(tmp_path, small(mapped_file_size_commit_log=1_000))

    queue = store.consume_queue("orders", 0)
    assert (queue.min_offset, queue.max_offset) == (1, 6)
    assert bodies(store) == [b"0" * 600, b"1" * 600, b"2" * 600, b"six", b"committed"]
    assert bodies(store, topic="%RETRY%" + "g" * 130) == [b"long topic"]
    assert store.read(*queue.unit(4)[:2]).born_host == _HOST_V6
    assert store.queue_ids("HALF") == []
    assert store.put(draft(b"ours")).queue_offset == 6
    store.close()


def write_log(folder: Path, drafts: list[ForeignDraft], file_size: int) -> None:
    """Write commit log files as RocketMQ does: with a blank where the next record does not fit."""
    files, offsets = [bytearray()], dict.fromkeys(("orders", "%RETRY%" + "g" * 130, "HALF"), 0)
    for item in drafts:
        size = len(item.encode(0, 0, 0, _HOST))
        if len(files[-1]) + size + 8 > file_size:
            files[-1] += (file_size - len(files[-1])).to_bytes(4, "big") + b"\xcb\xd4\x31\x94" + b"rest of another file"
            files.append(bytearray())
        at = (len(files) - 1) * file_size + len(files[-1])
        files[-1] += item.encode(offsets[item.topic], at, 1_000 + at, _HOST)
        offsets[item.topic] += item.topic != "HALF"
    for number, data in enumerate(files):
        (folder / f"{number * file_size:020d}").write_bytes(data.ljust(file_size, b"\0")[:file_size])


# --- the checkpoint --------------------------------------------------------------------------------


def checkpoint_of(folder: Path) -> StoreCheckpoint:
    return StoreCheckpoint(FolderStoreFiles(folder))


def fields_are_ours(folder: Path) -> bool:
    """Return True if RocketMQ's fields are as mqtemplate wrote them: their CRC-32 follows ours."""
    page = (folder / "checkpoint").read_bytes()
    return int.from_bytes(page[60:64], "big") == zlib.crc32(page[:48])


def test_our_part_of_the_checkpoint_survives_a_write_by_rocketmq(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    end = store.put(draft(b"x")).end
    store.close()
    assert (checkpoint_of(tmp_path).replay_start, fields_are_ours(tmp_path)) == (end, True)

    overwrite((tmp_path / "checkpoint"), 40, (9_999).to_bytes(8, "big"))

    assert checkpoint_of(tmp_path).fields.logics_physical_offset == 9_999
    assert (checkpoint_of(tmp_path).replay_start, fields_are_ours(tmp_path)) == (end, False)


def test_with_a_checkpoint_of_rocketmq_alone_the_whole_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes((9_999).to_bytes(8, "big") * 6 + bytes(4_048))

    assert (checkpoint_of(tmp_path).replay_start, fields_are_ours(tmp_path)) == (0, False)


def test_records_that_rocketmq_wrote_after_our_checkpoint_are_replayed(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ advances its own offset. The messages that it delivered are between ours and that."""
    store = open_store()
    store.put(linked(b"known"))
    store.take_checkpoint()
    end = store.put(linked(b"delivered by RocketMQ")).end
    kill(store)
    (tmp_path / "abort").unlink()
    overwrite((tmp_path / "checkpoint"), 40, end.to_bytes(8, "big"))
    follower = Follower()

    again = opened(tmp_path, followers=[follower])
    again.close()

    assert follower.seen == [b"delivered by RocketMQ"]


def test_a_log_that_ends_before_the_checkpoint_is_reported(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    for number in range(3):
        put = store.put(draft(b"%d" % number * 2_500))
    store.close()
    (tmp_path / "commitlog" / f"{8_192:020d}").unlink()

    with capture_logs() as logs:
        again = open_store()

    lost = next(line for line in logs if line["event"] == "store.records_lost")
    assert (lost["physical_offset"], lost["end_offset"]) == (8_192, put.end)
    assert bodies(again) == [b"0" * 2_500, b"1" * 2_500]


def test_queue_files_of_another_size_are_refused_with_the_setting(open_store: OpenStore) -> None:
    store = open_store()
    store.put(draft(b"x"))
    store.close()

    with pytest.raises(
        StoreFormatError,
        match="the files in consumequeue/orders/0 have 200 bytes, but mapped-file-size-consume-queue is 400; .* leave "
        "mapped-file-size-consume-queue out, or set it to 200. .* or delete the folder consumequeue, which is rebuilt",
    ):
        open_store(small(mapped_file_size_consume_queue=400))

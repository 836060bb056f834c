"""Recovery, beside the golden scripts: any cut, and logs that RocketMQ left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.record.layout import SysFlag
from tests.delay.foreign_records import ForeignDraft
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


# --- tails that were cut off, and late flushes -----------------------------------------------------


@pytest.mark.feature("D24")
def test_old_records_after_the_end_of_rocketmqs_log_are_ignored(open_store: OpenStore, tmp_path: Path) -> None:
    """RocketMQ cut a tail, overwrote its start with a shorter record, and was killed. Older records follow that one."""
    clock = VirtualClock()
    store = opened(tmp_path, clock=clock)
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

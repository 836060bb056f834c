"""The engine: append records, start new files, read records."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError, StoreFormatError, StoreFullError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import Drafts, pack_host
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.message_store import MessageStore
from tests.store.small_store import OpenStore, bodies, draft, small


def test_a_unit_points_at_its_record_and_has_the_hash_of_the_tags(open_store: OpenStore) -> None:
    store = open_store()
    code = java_string_hash("paid")
    message = draft(b"x")
    message.tags_code = code

    put = store.put(message)

    assert store.consume_queue("orders", 0).unit(0) == (put.physical_offset, put.size, code)


@pytest.mark.feature("B6", "E5")
def test_a_unit_of_the_schedule_topic_has_the_deliver_time(open_store: OpenStore, clock: VirtualClock) -> None:
    """The sum of store time and level delay replaces the hash of the tags."""
    store = open_store()
    message = draft(b"x", topic="SCHEDULE_TOPIC_XXXX", queue_id=2)
    message.delay_ms = 10_000

    store.put(message)

    assert store.consume_queue("SCHEDULE_TOPIC_XXXX", 2).unit(0).tags_code == clock.now_ms() + 10_000


def test_a_full_file_ends_with_a_blank_and_the_record_is_in_the_next_file(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store()

    puts = [store.put(draft(bytes(1_000))) for _ in range(5)]

    files = sorted((tmp_path / "commitlog").iterdir())
    assert [file.name for file in files] == ["00000000000000000000", "00000000000000004096"]
    end = puts[2].physical_offset + puts[2].size
    assert struct.unpack(">ii", files[0].read_bytes()[end : end + 8]) == (4096 - end, -875286124)
    assert puts[3].physical_offset == 4096
    assert len(bodies(store)) == 5


def test_a_record_larger_than_a_file_is_refused_with_the_setting(open_store: OpenStore) -> None:
    store = open_store()

    with pytest.raises(
        MessageError, match=r"do not fit into a commit log file of 4096 bytes.*mapped-file-size-commit-log"
    ):
        store.put(draft(bytes(5_000)))

    assert store.put(draft(b"next")).queue_offset == 0


def test_store_timestamps_follow_a_clock_that_is_set_back(open_store: OpenStore, clock: VirtualClock) -> None:
    """One message that was stored while the clock was ahead must not change the times of all later ones."""
    store = open_store()
    first = store.put(draft(b"a"))

    clock.step_ms(-60_000)
    second = store.put(draft(b"b"))

    assert second.store_timestamp == first.store_timestamp - 60_000
    assert [step[1:] for step in store.clock_steps] == [(first.store_timestamp, second.store_timestamp)]


def test_an_ipv6_born_host_is_stored_with_the_longer_header(open_store: OpenStore) -> None:
    store = open_store()
    message = draft(b"hello")
    message.born_host = pack_host(HostAddress("::1", 4))

    put = store.put(message)

    record = store.read(put.physical_offset, put.size)
    assert record.body == b"hello"
    assert record.born_host == message.born_host
    assert record.sys_flag == 0x10


def test_a_store_in_memory_stores_and_reads_messages(clock: VirtualClock) -> None:
    store = MessageStore(MemoryStoreFiles(), small(), clock)
    store.load()

    for number in range(20):
        store.put(draft(bytes(500) + str(number).encode()))

    assert [body[500:] for body in bodies(store)] == [str(number).encode() for number in range(20)]
    store.close()


def test_a_full_disk_fails_the_put_until_there_is_space(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files are preallocated, so a full disk is an error when the next file is created, and only then."""
    store = open_store()
    for _ in range(3):
        store.put(draft(bytes(1_000)))

    def no_room(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(StoreFullError, match=r"no room on the disk for 0+4096 \(4096 bytes\).*free space there"):
            store.put(draft(bytes(1_000)))
        assert store.put(draft(b"small")).queue_offset == 3  # a record that fits is still stored

    store.put(draft(bytes(1_000)))
    assert len(bodies(store)) == 5
    assert not list((tmp_path / "commitlog").glob("*8192"))


def test_a_full_disk_fails_a_batch_as_a_whole(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.put(draft(bytes(3_000)))

    def no_room(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(StoreFullError):
        store.put(Drafts([draft(bytes(300)) for _ in range(5)]))

    assert len(bodies(store)) == 1


def test_a_folder_with_other_file_sizes_is_refused(open_store: OpenStore) -> None:
    store = open_store()
    store.put(draft(b"x"))
    store.close()

    with pytest.raises(
        StoreFormatError,
        match=r"the files in commitlog have 4096 bytes, but mapped-file-size-commit-log is 8192; .* "
        r"or set it to 4096\. If 8192 is right, a file was cut: restore it$",
    ):
        open_store(small(mapped_file_size_commit_log=8_192))

    assert bodies(open_store()) == [b"x"]


def test_an_unknown_file_in_the_commit_log_is_named(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.put(draft(b"x"))
    store.close()
    (tmp_path / "commitlog" / "notes.txt").write_text("mine")

    with pytest.raises(StoreFormatError, match=r"notes.txt does not belong there"):
        open_store()

"""Power failures: any part of the unflushed bytes may be missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.message import Message
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from tests.store.power_loss_disk import Choice, PowerLossDisk, RestartedDisk, subsets, write_image
from tests.store.power_loss_run import run
from tests.store.small_store import bodies, draft, opened, small

STORES = [(3, 2), *(pytest.param(seed, 5, marks=pytest.mark.thorough) for seed in (3, 11))]
"""Seed of a store, and number of images at each moment."""


@pytest.mark.parametrize("mode", FlushDiskType)
@pytest.mark.parametrize(("seed", "most"), STORES)
def test_any_image_that_a_power_failure_leaves_keeps_the_guarantees(
    quick_folder: Path, mode: FlushDiskType, seed: int, most: int, record_property: pytest.RecordProperty
) -> None:
    """About 1,500 images with both seeds and five at each moment; see `power_loss_run`, which can build more."""
    with capture_logs():
        report = run(quick_folder, seed, mode, most=most)

    record_property("images", report.cases)
    print(f"{report.cases} images of {report.moments} moments: {mode.value}, seed {seed}")
    assert report.failures[:3] == []
    assert report.cases > 60 * most


def settings(**changes: object) -> StoreSettings:
    return small(mapped_file_size_consume_queue=20_000, **changes)


def open_image(disk: PowerLossDisk, folder: Path, chosen: set[Choice]) -> MessageStore:
    write_image(disk.image(disk.contents(), chosen), folder)
    return opened(folder, settings(), disk=RestartedDisk())


def test_bytes_of_a_failed_flush_are_written_by_the_next(tmp_path: Path) -> None:
    """After an error the system counts the pages as written, and the next flush succeeds. Messages that are
    acknowledged then must be on the disk nevertheless."""
    (tmp_path / "store").mkdir()
    disk = PowerLossDisk(tmp_path / "store", sector=512)
    store = opened(tmp_path / "store", settings(), disk=disk)
    first = store.put(draft(b"a" * 600))
    flushes = disk.flushes
    disk.fails = lambda number: number == flushes + 1
    with pytest.raises(StoreError, match="not safe"):
        store.confirm(first.end, ["orders"])
    second = store.put(draft(b"b" * 600))
    assert store.confirm(second.end, ["orders"])

    again = open_image(disk, tmp_path / "image", set())

    assert bodies(again) == [b"a" * 600, b"b" * 600]
    again.close()
    store.close()


def test_bytes_cut_off_by_a_recovery_stay_cut_off_after_the_next_power_failure(tmp_path: Path) -> None:
    """A removed unit must not return and point at a newer record at the same offset."""
    (tmp_path / "store").mkdir()
    disk = PowerLossDisk(tmp_path / "store")
    store = opened(tmp_path / "store", settings(flush_disk_type=FlushDiskType.ASYNC_FLUSH), disk=disk)
    store.put(draft(b"kept"))
    store.take_checkpoint()
    store.put(draft(b"lost"))
    contents = disk.contents()
    log = disk.number_of(tmp_path / "store" / "commitlog" / f"{0:020d}")
    all_but_the_log = {choice for choice in disk.choices(contents) if choice.where != log}
    write_image(disk.image(contents, all_but_the_log), tmp_path / "second")
    store.close()
    second_disk = PowerLossDisk(tmp_path / "second", boot="boot-2")
    second = opened(tmp_path / "second", settings(), disk=second_disk)
    second.put(draft(b"another queue's", topic="other"))
    second.take_checkpoint()

    third = open_image(second_disk, tmp_path / "third", set())

    assert (bodies(third), bodies(third, "other")) == ([b"kept"], [b"another queue's"])
    third.close()
    second.close()


def test_a_consumer_offset_is_never_ahead_of_the_log_after_a_power_failure(quick_folder: Path) -> None:
    """With ``ASYNC_FLUSH`` an offset is durable only with the consumed messages. Otherwise the group would skip new
    ones."""
    (quick_folder / "store").mkdir()
    disk = PowerLossDisk(quick_folder / "store")
    clock = VirtualClock()
    options = EmbeddedSettings(
        flush_disk_type=FlushDiskType.ASYNC_FLUSH,
        flush_consumer_offset_interval_ms=100,
        mapped_file_size_commit_log=16_384,
        default_topic_queue_nums=1,
    )
    broker = EmbeddedBroker(settings=options, clock=clock, store_files=FolderStoreFiles(quick_folder / "store", disk))
    broker.start()
    sent = broker.sends.send(Message("orders", b"read before the power failed"))
    broker.groups.commit_offset("billing", sent.message_queue, 1)
    clock.move_ms(100)
    for service in broker.services():
        service.step()

    write_image(disk.image(disk.contents(), set()), quick_folder / "image")
    store_files = FolderStoreFiles(quick_folder / "image", RestartedDisk())
    with EmbeddedBroker(settings=options, clock=clock, store_files=store_files) as again:
        assert (
            again.groups.committed_offset("billing", sent.message_queue)
            == again.reader.max_offset(sent.message_queue)
            == 1
        )
    broker.close()


# --- the simulated disk -----------------------------------------------------------------------------------


def test_the_simulated_disk_loses_unflushed_bytes(tmp_path: Path) -> None:
    """Names, lengths and pieces are lost independently."""
    root = tmp_path / "store"
    root.mkdir()
    (root / "old").write_bytes(b"a" * 1_024)
    disk = PowerLossDisk(root, sector=512)
    fd = disk.open(root / "old")
    disk.write_at(fd, b"b" * 1_024, 0)
    new = disk.open(root / "new")
    disk.set_length(new, 512)
    disk.write_at(new, b"c", 0)
    contents = disk.contents()

    choices = disk.choices(contents)
    seen = set()
    for chosen in subsets(choices, random.Random(0), most=64, all_up_to=6):
        image = dict(disk.image(contents, chosen))
        old, new_bytes = image["old"], image.get("new")
        assert old is not None
        seen.add((old[::512], new_bytes and new_bytes[:1], new_bytes and len(new_bytes)))

    assert [choice.kind for choice in choices] == ["name", "piece", "piece", "length", "piece"]
    olds = {b"aa", b"ab", b"ba", b"bb"}
    news = {(None, None), (b"", b""), (b"\0", 512), (b"c", 512)}  # no name, no length, no bytes, all
    assert seen == {(old, *new) for old in olds for new in news}


def test_the_simulated_disk_keeps_flushed_bytes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    disk = PowerLossDisk(root)
    fd = disk.open(root / "file")
    disk.write_at(fd, b"flushed", 0)
    disk.flush(fd)
    disk.sync_folder(root)

    assert disk.choices(disk.contents()) == []
    assert disk.image(disk.contents(), set()) == (("file", b"flushed"),)

"""With SYNC_FLUSH the disk begins to write a sent message before its producer flushes; see also the golden script."""

from __future__ import annotations

from pathlib import Path

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from tests.store.faulty_disk import FaultyDisk


def test_a_send_is_written_early_and_one_without_waiting_is_not(tmp_path: Path) -> None:
    settings = EmbeddedSettings(mapped_file_size_commit_log=1 << 20)
    store_files = FolderStoreFiles(tmp_path, disk := FaultyDisk())
    with EmbeddedBroker(settings=settings, clock=VirtualClock(), store_files=store_files) as broker:
        broker.sends.send_one_way(Message("orders", b"one"))
        assert disk.started == []
        start = broker.store.end_offset
        broker.sends.send(Message("orders", b"two"))

        assert disk.started == [(start, broker.store.end_offset - start)]

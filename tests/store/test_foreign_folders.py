"""Folders from elsewhere: names in their files and their links lead to no other file of this user."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError, StoreError, StoreFormatError
from mqtemplate.message import Message
from mqtemplate.record import codec
from mqtemplate.results import TransactionState
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.topics import is_file_name
from tests.server.serving import Serving

EVIL = "../../../evil"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store folder, some levels below the folder of the test."""
    folder = tmp_path / "a" / "b" / "store"
    with EmbeddedBroker(folder, clock=VirtualClock()) as broker:
        broker.sends.send(Message("orders", b"first"))
    return folder


def opened(folder: Path) -> EmbeddedBroker:
    return EmbeddedBroker(folder, clock=VirtualClock())


def names_outside(tmp_path: Path, folder: Path) -> list[str]:
    """Return the files and folders of the test that are not in the store folder."""
    return sorted(
        path.name
        for path in tmp_path.rglob("*")
        if path != folder and folder not in path.parents and path.name not in "ab"
    )


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_legal"),
    [
        ("orders", True),
        ("%RETRY%billing", True),
        ("host-1.example.com", True),
        ("grüße", True),
        ("", False),
        (".", False),
        ("..", False),
        (EVIL, False),
        ("a/b", False),
        ("a\\b", False),
        ("a\0b", False),
        ("a\nb", False),
        ("x" * 256, False),
    ],
)
def test_a_name_is_the_name_of_one_file(name: str, is_legal: bool) -> None:
    """RocketMQ's topics include the name of its broker, which is a host name by default."""
    assert is_file_name(name) is is_legal


@pytest.mark.parametrize(
    ("file", "table", "text"),
    [
        ("topics", {"topicConfigTable": {EVIL: {"writeQueueNums": 1}}}, f"the topic '{EVIL}' is not a legal name"),
        ("consumerOffset", {"offsetTable": {f"{EVIL}@g": {"0": 1}}}, f"the topic '{EVIL}' is not a legal name"),
        ("consumerOffset", {"offsetTable": {f"t@{EVIL}": {"0": 1}}}, f"the group '{EVIL}' is not a legal name"),
    ],
)
def test_a_table_with_a_name_that_leads_out_of_the_folder_is_refused(
    folder: Path, tmp_path: Path, file: str, table: dict[str, object], text: str
) -> None:
    (folder / "config" / f"{file}.json").write_text(json.dumps(table))

    with pytest.raises(StoreFormatError) as refused:
        opened(folder).start()

    assert str(refused.value).startswith(f"config/{file}.json has unexpected content ({text}); restore it from ")
    assert names_outside(tmp_path, folder) == []


@pytest.mark.parametrize("followed_by", [b"", b"last"])
def test_a_record_whose_topic_leads_out_of_the_folder_is_damaged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed_by: bytes
) -> None:
    """Starting created the files of its queue. The records before and after it are read."""
    with opened(folder) as broker, monkeypatch.context() as writing:
        writing.setattr(codec, "_encode_topic", encoder_of(EVIL))
        writing.setattr(codec, "decode_topic", bytes.decode)
        broker.sends.send(Message("e" * len(EVIL), b"evil"))
        writing.undo()
        if followed_by:
            broker.sends.send(Message("orders", followed_by))
    (folder / "abort").write_text("1")
    (folder / "checkpoint").unlink()
    shutil.rmtree(folder / "consumequeue")

    with capture_logs() as logs, opened(folder) as broker:
        bodies = [
            message.body for queue in broker.queues("orders") for message in broker.reader.pull(queue, 0, 32).messages
        ]

    assert sorted(bodies) == sorted(filter(None, [b"first", followed_by]))
    assert names_outside(tmp_path, folder) == []
    event = "store.record_damaged" if followed_by else "store.torn_tail_cut"
    assert [each["reason"] for each in logs if each["event"] == event] == [f"its topic '{EVIL}' is not a legal name"]


def encoder_of(topic: str) -> object:
    """Return an encoder that writes *topic* into records of any topic with as many characters."""
    encode = codec._encode_topic

    def encode_topic(given: str) -> tuple[int, bytes]:
        magic, encoded = encode(given)
        return magic, encoded[: -len(topic)] + topic.encode() if given == "e" * len(topic) else encoded

    return encode_topic


def test_a_half_message_whose_real_topic_leads_out_of_the_folder_is_not_committed(folder: Path, tmp_path: Path) -> None:
    """Committing it created the files of its queue."""
    topic = "e" * len(EVIL)
    with opened(folder) as broker:
        draft, _ = broker.engine.drafts.make_half(Message(topic, b"evil"), "producers", 0, broker.clock.now_ms())
        draft.properties = draft.properties.replace(topic.encode(), EVIL.encode())
        half = broker.engine.transactions.prepare(draft)

        with pytest.raises(MessageError, match="has characters that are not allowed"):
            broker.engine.transactions.end(
                half.queue_offset, half.physical_offset, "producers", TransactionState.COMMIT
            )

    assert names_outside(tmp_path, folder) == []


def test_a_table_of_groups_with_a_name_that_leads_out_of_the_folder_is_refused() -> None:
    serving = Serving()
    table = json.dumps({"subscriptionGroupTable": {EVIL: {"groupName": EVIL}}})
    serving.engine.store.store_files.write_bytes("config/subscriptionGroup.json", table.encode())

    with pytest.raises(StoreFormatError, match=f"subscriptionGroup.json has .*the group '{EVIL}' is not a legal name"):
        serving.server.load()
    serving.engine.close()


def test_a_topic_that_leads_out_of_the_folder_has_no_queue(folder: Path) -> None:
    with opened(folder) as broker, pytest.raises(StoreError, match="has no queues: it cannot be the name of a folder"):
        broker.store.consume_queue(EVIL, 0)


@pytest.mark.parametrize("name", ["../evil", "/evil", "config/../../evil", "a\0b"])
def test_no_file_is_opened_by_a_name_that_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    files = FolderStoreFiles(tmp_path)
    for use in (files.read_bytes, files.exists, files.delete, files.file_sizes, files.list_folders):
        with pytest.raises(StoreError, match="leads out of the store directory"):
            use(name)
    with pytest.raises(StoreError, match="leads out of the store directory"):
        files.write_bytes(name, b"x")


# --- links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config/topics.json.tmp", "abort.tmp", "config/consumerOffset.json.tmp"])
def test_a_link_with_the_name_of_a_new_file_is_replaced(folder: Path, tmp_path: Path, name: str) -> None:
    """The file that it names is not written."""
    target = tmp_path / "target"
    target.write_text("of the user")
    (folder / name).symlink_to(target)

    with opened(folder) as broker:
        broker.create_topic("invoices", 1)

    assert target.read_text() == "of the user"


@pytest.mark.parametrize("name", ["lock", "checkpoint", "config/topics.json", "commitlog/00000000000000000000"])
def test_a_link_with_the_name_of_a_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    link = folder / name
    target.write_bytes(link.read_bytes())
    before = target.read_bytes()
    link.unlink()
    link.symlink_to(target)

    with pytest.raises(StoreError) as refused:
        opened(folder).start()

    assert str(refused.value) == (
        f"{link} is a symbolic link; a store directory may be one, but nothing in it: put the file or folder itself "
        "there (a folder of another disk by a bind mount), or remove the link"
    )
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["config", "consumequeue", "consumequeue/orders", "broadcast"])
def test_a_link_with_the_name_of_a_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "target").mkdir()
    link = folder / name
    if link.exists():
        link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "target")

    with pytest.raises(StoreError, match="is a symbolic link"):
        FolderStoreFiles(folder).write_bytes(f"{name}/0/file", b"x")

    assert list((tmp_path / "target").iterdir()) == []


def test_the_store_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)

    with opened(tmp_path / "link") as broker:
        assert broker.queues("orders")


def test_a_pipe_with_the_name_of_a_table_does_not_block_the_start(folder: Path) -> None:
    (folder / "config" / "topics.json").unlink()
    os.mkfifo(folder / "config" / "topics.json")

    with pytest.raises(
        StoreError, match=r"config/topics.json is not a regular file; move it away, or restore the file"
    ):
        FolderStoreFiles(folder).read_bytes("config/topics.json")


# --- rights of files ------------------------------------------------------------------------------------


def test_only_the_owner_can_read_a_store_folder(folder: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    folder_modes = {path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if path.is_dir()}

    assert (modes, folder_modes) == ({0o600}, {0o700})

"""The tables of topics and consumer offsets, in RocketMQ's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
from mqtemplate.store.tables import ConsumerOffsets, TopicTable, load_json


def test_integer_keys_without_quotes_are_read() -> None:
    """RocketMQ writes integer keys without quotes, which is not JSON."""
    assert load_json('{"offsetTable":{ 2:1, 3:1,\n\t4:0},"text":"{ 5:1"}') == {
        "offsetTable": {"2": 1, "3": 1, "4": 0},
        "text": "{ 5:1",
    }


def test_consumer_offsets_are_stored_in_rocketmqs_format(tmp_path: Path) -> None:
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    offsets = ConsumerOffsets(store_files, clock)
    offsets.commit("billing", "orders", 2, 17)
    offsets.commit("billing", "%RETRY%billing", 0, 3)
    offsets.persist()

    again = ConsumerOffsets(store_files, clock)
    again.load()

    table = json.loads((tmp_path / "config/consumerOffset.json").read_text())
    assert table["offsetTable"] == {"orders@billing": {"2": 17}, "%RETRY%billing@billing": {"0": 3}}
    assert again.offset("billing", "orders", 2) == 17
    assert again.offset("billing", "orders", 1) is None
    assert again.groups() == {"billing"}


def test_a_missing_table_is_read_from_its_backup(tmp_path: Path) -> None:
    """RocketMQ renames the old file before it writes the new one. A crash in between leaves only the backup."""
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    for queue_offset in (1, 2):
        offsets = ConsumerOffsets(store_files, clock)
        offsets.commit("g", "t", 0, queue_offset)
        offsets.persist()
    (tmp_path / "config/consumerOffset.json").unlink()

    again = ConsumerOffsets(store_files, clock)
    again.load()

    assert again.offset("g", "t", 0) == 1


def test_a_table_that_is_not_json_is_refused_by_name(tmp_path: Path) -> None:
    store_files = FolderStoreFiles(tmp_path)
    store_files.write_bytes("config/topics.json", b"{broken")

    with pytest.raises(
        StoreFormatError, match=r"config/topics.json is not JSON .*restore it from config/topics.json.bak"
    ):
        TopicTable(store_files, VirtualClock()).load()


def test_create_never_removes_queues_and_keeps_rocketmqs_settings(tmp_path: Path) -> None:
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    store_files.write_bytes(
        "config/topics.json",
        b'{"topicConfigTable":{"orders":{"topicName":"orders","readQueueNums":4,"writeQueueNums":4,"perm":4,"order":true}}}',
    )
    topics = TopicTable(store_files, clock)
    topics.load()

    assert topics.create("orders", 2) == 4
    assert topics.create("orders", 8) == 8

    config = json.loads((tmp_path / "config/topics.json").read_text())["topicConfigTable"]["orders"]
    assert (config["perm"], config["order"], config["readQueueNums"]) == (4, True, 8)


def test_create_never_reduces_the_read_queues(tmp_path: Path) -> None:
    """RocketMQ shrinks a topic in two steps: it reduces the write queues first, then the read queues."""
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    store_files.write_bytes(
        "config/topics.json",
        b'{"topicConfigTable":{"orders":{"topicName":"orders","readQueueNums":16,"writeQueueNums":2,"perm":6}}}',
    )
    topics = TopicTable(store_files, clock)
    topics.load()

    topics.create("orders", 8)

    config = json.loads((tmp_path / "config/topics.json").read_text())["topicConfigTable"]["orders"]
    assert (config["readQueueNums"], config["writeQueueNums"]) == (16, 8)


def test_tables_keep_their_version_and_unknown_members(tmp_path: Path) -> None:
    """RocketMQ's brokers compare the versions, and later releases may have other members."""
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    version = b'"dataVersion":{"counter":41,"stateVersion":7,"timestamp":5}'
    store_files.write_bytes("config/topics.json", b'{%b,"other":[1],"topicConfigTable":{}}' % version)
    store_files.write_bytes(
        "config/consumerOffset.json",
        b'{%b,"groupTopicMap":{"g":["t"]},"offsetTable":{"t@g":{0:3}},"pullOffsetTable":{"t@g":{1:2}}}' % version,
    )
    topics, offsets = TopicTable(store_files, clock), ConsumerOffsets(store_files, clock)
    topics.load()
    offsets.load()

    topics.create("orders", 2)
    offsets.commit("g", "t", 0, 4)
    offsets.persist()

    topics_table = json.loads((tmp_path / "config/topics.json").read_text())
    offsets_table = json.loads((tmp_path / "config/consumerOffset.json").read_text())
    expected = {"counter": 42, "stateVersion": 7, "timestamp": clock.now_ms()}
    assert (topics_table["dataVersion"], topics_table["other"]) == (expected, [1])
    assert offsets_table == {
        "dataVersion": expected,
        "offsetTable": {"t@g": {"0": 4}},
        "pullOffsetTable": {"t@g": {"1": 2}},
    }


# --- changes by administrators ---------------------------------------------------------------------


@pytest.fixture
def store_files() -> StoreFiles:
    return MemoryStoreFiles()


def topics_in(store_files: StoreFiles) -> TopicTable:
    table = TopicTable(store_files, VirtualClock())
    table.load()
    return table


def test_an_update_of_a_topic_keeps_its_other_settings(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)
    table.update("orders", {"newInVersion9": "kept"})

    table.update("orders", {"perm": 4, "writeQueueNums": 2})

    config = topics_in(store_files).config("orders")
    assert config is not None
    assert (config["perm"], config["writeQueueNums"], config["readQueueNums"]) == (4, 2, 4)
    assert config["newInVersion9"] == "kept"
    assert topics_in(store_files).queue_count("orders") == 2


def test_an_update_without_a_difference_is_not_counted(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.update("orders", {"perm": 4})

    table.update("orders", {"perm": 4})

    assert table.version.counter == topics_in(store_files).version.counter == 1


def test_the_returned_settings_of_a_topic_are_a_copy(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)

    config = table.config("orders")
    assert config is not None
    config["perm"] = 0

    assert (table.config("orders") or {})["perm"] == 6


def test_a_deleted_topic_stays_deleted(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)

    assert (table.delete("orders"), table.delete("orders")) == (True, False)

    assert (topics_in(store_files).names(), topics_in(store_files).config("orders")) == ([], None)


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ({"group": "billing"}, {("audit", "orders")}),
        ({"topic": "orders"}, {("billing", "invoices")}),
        ({"group": "billing", "topic": "orders"}, {("billing", "invoices"), ("audit", "orders")}),
        ({"group": "unknown"}, {("billing", "orders"), ("billing", "invoices"), ("audit", "orders")}),
    ],
)
def test_offsets_are_removed_by_group_by_topic_or_by_both(
    store_files: StoreFiles, removed: dict[str, str], left: set[tuple[str, str]]
) -> None:
    offsets = ConsumerOffsets(store_files, VirtualClock())
    for group, topic in (("billing", "orders"), ("billing", "invoices"), ("audit", "orders")):
        offsets.commit(group, topic, 0, 5)
    offsets.persist()

    offsets.forget(**removed)
    offsets.persist()

    again = ConsumerOffsets(store_files, VirtualClock())
    again.load()
    assert {(group, topic) for group in again.groups() for topic in again.topics_of(group)} == left


def test_groups_and_topics_are_found_in_both_directions(store_files: StoreFiles) -> None:
    offsets = ConsumerOffsets(store_files, VirtualClock())
    offsets.commit("billing", "orders", 0, 5)
    offsets.commit("billing", "orders", 1, 6)
    offsets.commit("audit", "orders", 0, 1)

    assert offsets.groups_of("orders") == {"billing", "audit"}
    assert offsets.topics_of("billing") == {"orders"}
    assert offsets.offsets("billing", "orders") == {0: 5, 1: 6}
    assert offsets.offsets("billing", "invoices") == {}

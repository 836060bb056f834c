"""The tables in JSON, as RocketMQ writes and reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.store import ConsumerOffsets, FolderStoreFiles, TopicTable
from mqtemplate.store.files.json_files import load_json


def test_keys_without_quotes_are_read() -> None:
    """Upstream writes integer keys bare, which is no JSON."""
    assert load_json('{"offsetTable":{ 2:1, 3:1,\n\t4:0},"text":"{ 5:1"}') == {
        "offsetTable": {"2": 1, "3": 1, "4": 0},
        "text": "{ 5:1",
    }


def test_consumer_offsets_survive_a_restart_in_upstreams_shape(tmp_path: Path) -> None:
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


def test_a_table_that_is_missing_is_read_from_its_backup(tmp_path: Path) -> None:
    """Upstream renames the old file before it writes the new one; a crash in between leaves only the backup."""
    store_files, clock = FolderStoreFiles(tmp_path), VirtualClock()
    for queue_offset in (1, 2):
        offsets = ConsumerOffsets(store_files, clock)
        offsets.commit("g", "t", 0, queue_offset)
        offsets.persist()
    (tmp_path / "config/consumerOffset.json").unlink()

    again = ConsumerOffsets(store_files, clock)
    again.load()

    assert again.offset("g", "t", 0) == 1


def test_a_table_that_is_no_json_is_named(tmp_path: Path) -> None:
    store_files = FolderStoreFiles(tmp_path)
    store_files.write_bytes("config/topics.json", b"{broken")

    with pytest.raises(
        StoreFormatError, match=r"config/topics.json is not JSON .*restore it from config/topics.json.bak"
    ):
        TopicTable(store_files, VirtualClock()).load()


def test_topics_only_ever_grow_and_keep_what_upstream_wrote(tmp_path: Path) -> None:
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


def test_a_topic_whose_queues_were_closed_to_writing_keeps_those_that_are_read(tmp_path: Path) -> None:
    """Upstream shrinks a topic in two steps: fewer queues are written first, then fewer are read."""
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


def test_tables_go_on_with_the_version_they_have_and_keep_members_nobody_here_knows(tmp_path: Path) -> None:
    """Upstream's brokers compare versions, and its next releases have members of their own."""
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

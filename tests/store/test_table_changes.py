"""What administrators change in the tables of topics and offsets."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.store import ConsumerOffsets, MemoryStoreFiles, StoreFiles, TopicTable


@pytest.fixture
def store_files() -> StoreFiles:
    return MemoryStoreFiles()


def topics_in(store_files: StoreFiles) -> TopicTable:
    table = TopicTable(store_files, VirtualClock())
    table.load()
    return table


def test_a_topic_is_changed_in_part_and_the_rest_stays(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)
    table.update("orders", {"newInVersion9": "kept"})

    table.update("orders", {"perm": 4, "writeQueueNums": 2})

    config = topics_in(store_files).config("orders")
    assert config is not None
    assert (config["perm"], config["writeQueueNums"], config["readQueueNums"]) == (4, 2, 4)
    assert config["newInVersion9"] == "kept"
    assert topics_in(store_files).queue_count("orders") == 2


def test_a_change_that_says_nothing_new_is_not_counted(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.update("orders", {"perm": 4})

    table.update("orders", {"perm": 4})

    assert table.version.counter == topics_in(store_files).version.counter == 1


def test_what_is_told_of_a_topic_cannot_change_the_table(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)

    config = table.config("orders")
    assert config is not None
    config["perm"] = 0

    assert (table.config("orders") or {})["perm"] == 6


def test_a_deleted_topic_is_gone_for_good(store_files: StoreFiles) -> None:
    table = topics_in(store_files)
    table.create("orders", 4)

    assert (table.delete("orders"), table.delete("orders")) == (True, False)

    assert (topics_in(store_files).names(), topics_in(store_files).config("orders")) == ([], None)


@pytest.mark.parametrize(
    ("wish", "left"),
    [
        ({"group": "billing"}, {("audit", "orders")}),
        ({"topic": "orders"}, {("billing", "invoices")}),
        ({"group": "billing", "topic": "orders"}, {("billing", "invoices"), ("audit", "orders")}),
        ({"group": "nobody"}, {("billing", "orders"), ("billing", "invoices"), ("audit", "orders")}),
    ],
)
def test_offsets_are_forgotten_by_group_by_topic_or_by_both(
    store_files: StoreFiles, wish: dict[str, str], left: set[tuple[str, str]]
) -> None:
    offsets = ConsumerOffsets(store_files, VirtualClock())
    for group, topic in (("billing", "orders"), ("billing", "invoices"), ("audit", "orders")):
        offsets.commit(group, topic, 0, 5)
    offsets.persist()

    offsets.forget(**wish)
    offsets.persist()

    again = ConsumerOffsets(store_files, VirtualClock())
    again.load()
    assert {(group, topic) for group in again.groups() for topic in again.topics_of(group)} == left


def test_who_read_what_is_told_both_ways_round(store_files: StoreFiles) -> None:
    offsets = ConsumerOffsets(store_files, VirtualClock())
    offsets.commit("billing", "orders", 0, 5)
    offsets.commit("billing", "orders", 1, 6)
    offsets.commit("audit", "orders", 0, 1)

    assert offsets.groups_of("orders") == {"billing", "audit"}
    assert offsets.topics_of("billing") == {"orders"}
    assert offsets.offsets("billing", "orders") == {0: 5, 1: 6}
    assert offsets.offsets("billing", "invoices") == {}

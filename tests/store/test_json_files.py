"""Tables in JSON: a table of thousands of entries is written fast after a change of one of them."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.store import tables
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.tables import EntryTexts, TopicTable, VersionedTable, dump_json, write_table

TABLES: list[dict[str, Any]] = [
    {},
    {"orders": {}},
    {"orders": {"perm": 6, "attributes": {}, "names": ["a\nb", "ü"]}, 'quote"d': {"deep": {"er": {"x": None}}}},
]


@pytest.mark.parametrize("entries", TABLES)
def test_entries_have_the_same_text_as_the_whole_table(entries: dict[str, Any]) -> None:
    files, texts = MemoryStoreFiles(), EntryTexts()

    assert texts.dump(entries) == dump_json(entries)
    write_table(files, "config/a.json", {"dataVersion": {"counter": 1}}, {"table": texts.dump(entries)})

    whole = dump_json({"dataVersion": {"counter": 1}, "table": entries})
    assert (files.read_bytes("config/a.json") or b"").decode() == whole


def test_an_entry_is_encoded_again_only_if_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    dump = tables.dump_json
    monkeypatch.setattr(tables, "dump_json", lambda value: encoded.append(value) or dump(value))
    texts, first, second = EntryTexts(), {"perm": 6}, {"perm": 4}

    before = texts.dump({"a": first, "b": second})
    after = texts.dump({"a": first, "b": {"perm": 2}, "c": second})

    assert encoded == [first, second, {"perm": 2}, second]
    assert (before != after, after) == (True, dump({"a": first, "b": {"perm": 2}, "c": second}))
    assert texts.dump({"c": second}) == dump({"c": second})


def test_a_new_topic_encodes_no_other_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 1,500 new topics encoded all of them, which held the topics of other clients for 38 seconds."""
    table = TopicTable(MemoryStoreFiles(), VirtualClock())
    table.load()
    table.update_all({f"topic-{number}": {"perm": 6} for number in range(300)})
    encoded: list[object] = []
    dump = tables.dump_json
    monkeypatch.setattr(tables, "dump_json", lambda value: encoded.append(value) or dump(value))

    table.create("orders", 4)

    assert [entry["topicName"] for entry in encoded if "topicName" in entry] == ["orders"]  # type: ignore[index,operator]


def test_members_that_another_version_knows_are_kept() -> None:
    files, clock = MemoryStoreFiles(), VirtualClock()
    files.write_bytes("config/a.json", b'{"table":{"x":{"y":1}},"future":[1,2]}')
    table = VersionedTable(files, clock, "config/a.json", entries="table")

    loaded = table.load()
    table.save(table=loaded["table"])

    assert VersionedTable(files, clock, "config/a.json", entries="table").load() == {
        "future": [1, 2],
        "dataVersion": {"counter": 1, "stateVersion": 0, "timestamp": clock.now_ms()},
        "table": {"x": {"y": 1}},
    }

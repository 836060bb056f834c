"""The tables of topics and consumer offsets, in RocketMQ's JSON. A large one is written fast after a change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.topics import EntryWriter
from mqtemplate.errors import StoreError, StoreFormatError, StoreFullError
from mqtemplate.store import tables
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.tables import ConsumerOffsets, EntryTexts, TopicTable, dump_json, write_table
from tests.golden import check_script, scripts_in
from tests.waiting import PATIENCE_S, eventually


class TablesScript:
    """The commands of a script: both tables in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = FolderStoreFiles(root)
        self.load()

    def load(self) -> list[str]:
        """Read both tables; print the error."""
        self.topics = TopicTable(self.files, VirtualClock())
        self.offsets = ConsumerOffsets(self.files, VirtualClock())
        try:
            self.topics.load()
            self.offsets.load()
        except StoreFormatError as exc:
            return [str(exc)]
        return []

    def file(self, name: str, text: str) -> None:
        """Write a file, as RocketMQ does."""
        self.files.write_bytes(name, text.encode())

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def show(self, name: str, *members: str) -> Iterator[str]:
        """Print some members of a table in a file."""
        table = json.loads((self.root / name).read_text())
        yield from (f"{member}: {json.dumps(table[member])}" for member in members or table)

    def create(self, topic: str, queue_count: str) -> list[str]:
        return [f"{self.topics.create(topic, int(queue_count))} queues"]

    def update(self, topic: str, **changes: str) -> None:
        self.topics.update(topic, {name: int(text) if text.isdecimal() else text for name, text in changes.items()})

    def delete(self, topic: str) -> list[str]:
        return [str(self.topics.delete(topic))]

    def topic(self, name: str) -> list[str]:
        return [
            f"{self.topics.queue_count(name)} queues, {self.topics.config(name)}, change {self.topics.version.counter}"
        ]

    def commit(self, group: str, topic: str, **offsets: str) -> None:
        """Commit the offsets of queues, and write the table."""
        for queue_id, offset in offsets.items():
            self.offsets.commit(group, topic, int(queue_id), int(offset))
        self.offsets.persist()

    def forget(self, **names: str) -> None:
        self.offsets.forget(**names)
        self.offsets.persist()

    def groups(self) -> Iterator[str]:
        """Print the offsets by group and topic, and what is found in the other direction."""
        for group in sorted(self.offsets.groups()):
            for topic in sorted(self.offsets.topics_of(group)):
                others = sorted(self.offsets.groups_of(topic))
                yield f"{group} {topic} {self.offsets.offsets(group, topic)}, groups of the topic {others}"


@pytest.mark.parametrize("path", scripts_in(Path(__file__).parent / "scripts" / "tables"), ids=lambda path: path.stem)
def test_the_tables_contain_what_the_script_says(path: Path, tmp_path: Path) -> None:
    check_script(path, TablesScript(tmp_path))


def test_the_returned_settings_of_a_topic_are_a_copy() -> None:
    table = TopicTable(MemoryStoreFiles(), VirtualClock())
    table.create("orders", 4)

    (table.config("orders") or {})["perm"] = 0

    assert (table.config("orders") or {})["perm"] == 6


# --- many entries ----------------------------------------------------------------------------------


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


# --- writes that changes share ---------------------------------------------------------------------


class SlowFiles(MemoryStoreFiles):
    """Files whose first write waits until `release`.

    Attributes:
        writes: The topics in each write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[str]] = []
        self.is_writing, self._may_end = threading.Event(), threading.Event()
        self.error: StoreError | None = None

    def release(self) -> None:
        self._may_end.set()

    def write_bytes(self, name: str, data: bytes) -> None:
        self.writes.append([*json.loads(data)["topicConfigTable"]])
        self.is_writing.set()
        assert self._may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        super().write_bytes(name, data)


def create_during_a_write(files: SlowFiles, table: TopicTable, count: int) -> list[Future[int]]:
    """Create the topic "first", and *count* more while it is written. Return when they wait."""
    with ThreadPoolExecutor(count + 1) as pool:
        created = [pool.submit(table.create, "first", 4)]
        assert files.is_writing.wait(PATIENCE_S)
        created += [pool.submit(table.create, f"topic-{number}", 4) for number in range(count)]
        eventually(lambda: table.file.waiting_count == count, "the changes wait")
        table.add_later({"later": {"writeQueueNums": 1}})  # it does not wait
        files.release()
    return created


def test_changes_during_a_write_share_the_next_one() -> None:
    """Each new topic had two flushes of its own, beside which the flushes of messages waited."""
    files = SlowFiles()
    table = TopicTable(files, VirtualClock())

    created = create_during_a_write(files, table, 5)

    assert [each.result() for each in created] == [4] * 6
    assert [sorted(names) for names in files.writes] == [
        ["first"],
        sorted(["first", "later", *(f"topic-{number}" for number in range(5))]),
    ]
    assert table.file.is_written("later")


def test_changes_that_share_a_write_that_fails_are_not_made() -> None:
    files = SlowFiles()
    table = TopicTable(files, VirtualClock())
    files.error = StoreFullError("no space")

    created = create_during_a_write(files, table, 3)

    assert all(isinstance(each.exception(), StoreFullError) for each in created)
    assert table.names() == ["later"]
    assert not table.file.is_written("later")
    files.error = None
    assert table.create("orders", 4) == 4
    assert files.writes[-1] == ["later", "orders"]


def test_a_topic_that_is_added_during_a_write_is_in_the_next_one() -> None:
    files = SlowFiles()
    table = TopicTable(files, VirtualClock())
    writing = threading.Thread(target=table.create, args=("first", 4))
    writing.start()
    assert files.is_writing.wait(PATIENCE_S)

    table.add_later({"later": {"writeQueueNums": 1}})
    files.release()
    writing.join()

    assert (table.names(), table.file.is_written("later")) == (["first", "later"], False)
    table.file.persist()
    table.file.persist()
    assert files.writes == [["first"], ["first", "later"]]
    assert table.version.counter == 2


def test_a_table_is_written_some_time_after_the_first_addition() -> None:
    files, clock = SlowFiles(), VirtualClock()
    files.release()
    table = TopicTable(files, clock)
    writer = EntryWriter(clock, 5_000, table.file)

    for topic in ("a", "b"):
        table.add_later({topic: {"writeQueueNums": 1}})
        writer.service.step()
        clock.move_ms(2_499)
    before = list(files.writes)
    clock.move_ms(2)
    writer.service.step()

    assert before == []
    assert files.writes == [["a", "b"]]

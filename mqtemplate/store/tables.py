"""The tables of a store in JSON: topics with their queues, and the offsets of consumer groups."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.topics import is_application_topic, is_file_name

HAND_OVER_FILE = "config/handOver.json"
"""State of a hand-over to another broker. Few store directories have it."""
_INHERIT = 1
"""Bit of the permission of a topic from which new topics may inherit."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(\s*:)')


def load_json(text: str) -> Any:
    """Parse JSON as RocketMQ writes it: integer keys have no quotes (fastjson).

    Raises:
        ValueError: The text is not JSON, or its values are nested too deeply.
    """
    quoted = _TOKEN.sub(lambda found: f'{found[1]}"{found[2]}"{found[3]}' if found[2] else found[0], text)
    try:
        return json.loads(quoted)
    except RecursionError as exc:
        raise ValueError("its values are nested too deeply") from exc


def dump_json(value: Any) -> str:
    """Return JSON with the indentation of RocketMQ."""
    return json.dumps(value, indent="\t", separators=(",", ":"))


class DataVersion:
    """Number of changes of a table. RocketMQ's brokers compare the versions of their tables."""

    def __init__(self, counter: int = 0, state_version: int = 0, timestamp: int = 0) -> None:
        self.counter, self.state_version, self.timestamp = counter, state_version, timestamp

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> DataVersion:
        """Return the version of a table; 0 if it contains none."""
        found = table.get("dataVersion") or {}
        return cls(*(int(found.get(name, 0)) for name in ("counter", "stateVersion", "timestamp")))

    def next(self, now_ms: int) -> dict[str, int]:
        """Count one change and return the new version."""
        self.counter += 1
        self.timestamp = now_ms
        return self.to_json()

    def to_json(self) -> dict[str, int]:
        """Return the version as tables have it."""
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}


def read_table(store_files: StoreFiles, name: str) -> dict[str, Any]:
    """Return the table in a file; empty if the file is missing.

    If the file is missing or empty, read its ``.bak``: RocketMQ moves the old file away before it writes the new one,
    so a crash may leave only that.

    Raises:
        StoreFormatError: The file is not a JSON object.
    """
    for candidate in (name, f"{name}.bak"):
        data = store_files.read_bytes(candidate)
        if data:
            return _parse(candidate, data)
    return {}


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        table = load_json(data.decode())
    except ValueError as exc:
        raise StoreFormatError(
            f"{name} is not JSON ({exc}); restore it from {name}.bak, or delete it to start with an empty one"
        ) from exc
    if not isinstance(table, dict):
        raise StoreFormatError(f"{name} holds {type(table).__name__}, expected an object; restore it from {name}.bak")
    return table


@contextmanager
def format_errors(name: str) -> Iterator[None]:
    """Raise `StoreFormatError` if the block finds values of other types than expected in the table *name*."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        problem = f"{exc} is missing" if isinstance(exc, KeyError) else exc
        raise StoreFormatError(
            f"{name} has unexpected content ({problem}); restore it from {name}.bak, or delete it to start with an "
            "empty one"
        ) from exc


def check_names(kind: str, names: Iterable[str]) -> None:
    """Check the names of topics or groups in a table.

    Raises:
        ValueError: One of them cannot be the name of a folder: it would lead out of the store directory.
    """
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"the {kind} {name[:40]!r} is not a legal name")


class EntryTexts:
    """The entries of a table as JSON, kept between two writes: a change of one topic encodes one of thousands again.

    An entry is encoded again when it is another object than before. So entries are replaced, never changed.
    """

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Mapping[str, Any], str]] = {}

    def dump(self, entries: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the same as `dump_json`."""
        known = self._texts
        self._texts = texts = {
            name: found
            if (found := known.get(name)) is not None and found[0] is entry
            else (entry, f"{json.dumps(name)}:{_indented(dump_json(entry))}")
            for name, entry in entries.items()
        }
        return _braces([text for _, text in texts.values()])


def _indented(text: str) -> str:
    return text.replace("\n", "\n\t")  # a string in JSON has no line break


def _braces(members: list[str]) -> str:
    return "{\n\t" + ",\n\t".join(members) + "\n}" if members else "{}"


def write_table(
    store_files: StoreFiles, name: str, table: Mapping[str, Any], entries: Mapping[str, str] | None = None
) -> None:
    """Replace the table in a file.

    Args:
        entries: Members that are encoded already, by `EntryTexts`.
    """
    members = [f"{json.dumps(key)}:{_indented(dump_json(value))}" for key, value in table.items()]
    members += [f"{json.dumps(key)}:{_indented(text)}" for key, text in (entries or {}).items()]
    store_files.write_bytes(name, _braces(members).encode())


class VersionedTable:
    """A table in a file with a version. Members unknown to mqtemplate are kept as they were found.

    Args:
        name: The file.
        members: Members of the table that the caller reads and writes.
        entries: The member with many entries of which few change; see `EntryTexts`.

    Attributes:
        version: Counts the changes.
    """

    def __init__(self, store_files: StoreFiles, clock: Clock, name: str, *members: str, entries: str = "") -> None:
        self.name = name
        self.version = DataVersion()
        self._store_files = store_files
        self._clock = clock
        self._members = (*members, entries)
        self._entries = entries
        self._texts = EntryTexts()
        self._others: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        """Return the table.

        Raises:
            StoreFormatError: It cannot be read.
        """
        table = read_table(self._store_files, self.name)
        with format_errors(self.name):
            self.version = DataVersion.of(table)
        self._others = {name: value for name, value in table.items() if name not in self._members}
        return table

    def count_change(self) -> None:
        """Count a change that a later `write` stores."""
        self.version.next(self._clock.now_ms())

    def save(self, **members: Any) -> None:
        """Count a change, and write the table."""
        self.count_change()
        self.write(**members)

    def write(self, **members: Any) -> None:
        """Write the table with these members."""
        texts = {name: self._texts.dump(members.pop(name)) for name in (self._entries,) if name in members}
        head = {"dataVersion": self.version.to_json()}
        write_table(self._store_files, self.name, self._others | head | members, texts)


_ValueT = TypeVar("_ValueT")


@dataclass(slots=True, eq=False)
class _EntryChange(Generic[_ValueT]):
    """A change of entries that waits for its write.

    Attributes:
        of: Returns the changed entries; the same object if nothing changes.
        error: Of the write.
    """

    of: Callable[[dict[str, _ValueT]], dict[str, _ValueT]]
    is_done: bool = False
    error: BaseException | None = None


class EntryTable(Generic[_ValueT]):
    """Entries by name in a file. One write contains the changes of all threads that wait for one.

    - `change` returns when the change is in the file. If the write fails, the entries are as before.
    - `add_later` neither waits nor fails: the next `change` or `persist` writes the entries. A crash before loses them.
    - At most one write is in progress. It holds no lock that `add_later` or a reader needs.
    - Thread-safe.

    Args:
        name: The file.
        member: The member of the file that has the entries.
        to_json: Returns the entry in the file: the same object for the same value.

    Attributes:
        entries: They are replaced by each change, never changed.
    """

    def __init__(
        self,
        store_files: StoreFiles,
        clock: Clock,
        name: str,
        member: str,
        to_json: Callable[[_ValueT], Mapping[str, Any]],
    ) -> None:
        self.entries: dict[str, _ValueT] = {}
        self._file = VersionedTable(store_files, clock, name, entries=member)
        self._member = member
        self._to_json = to_json
        self._writing = threading.Lock()  # held during a write
        self._lock = threading.Lock()  # protects what follows, and *entries*
        self._waiting: list[_EntryChange[_ValueT]] = []
        self._unwritten: set[str] = set()  # names of `add_later`
        self._on_change: Callable[[], None] = lambda: None

    def load(self, parse: Callable[[dict[str, Any]], dict[str, _ValueT]]) -> None:
        """Read the file.

        Args:
            parse: Makes the entries of what the file has.

        Raises:
            StoreFormatError: It cannot be read, or *parse* finds values of other types than expected.
        """
        table = self._file.load()
        with format_errors(self._file.name):
            self.entries = parse(dict(table.get(self._member, {})))

    @property
    def version(self) -> DataVersion:
        """Number of changes of this table."""
        return self._file.version

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call *changed* after each `add_later`, which only `persist` may write."""
        self._on_change = changed

    @property
    def waiting_count(self) -> int:
        """Number of changes that wait for the write after the one that is in progress."""
        return len(self._waiting)

    def is_written(self, name: str) -> bool:
        """Return True if an entry exists and is in the file, so that a crash does not lose it."""
        return name in self.entries and name not in self._unwritten

    def add_later(self, entries: Mapping[str, _ValueT]) -> None:
        """Add the entries whose names are missing."""
        with self._lock:
            new = {name: value for name, value in entries.items() if name not in self.entries}
            if not new:
                return
            self.entries = self.entries | new
            self._unwritten = self._unwritten | new.keys()
            self._file.count_change()
        self._on_change()

    def persist(self) -> None:
        """Write what `add_later` has added.

        Raises:
            StoreError: The file cannot be written. The entries stay, and the next call tries again.
        """
        if self._unwritten:
            self.change(lambda entries: entries)

    def change(self, change: Callable[[dict[str, _ValueT]], dict[str, _ValueT]]) -> None:
        """Change the entries, and return when they are in the file.

        Args:
            change: Returns the changed entries; the same object if nothing changes. Another thread may call it.

        Raises:
            StoreError: The file cannot be written.
        """
        waiting = _EntryChange(change)
        with self._lock:
            self._waiting.append(waiting)
        with self._writing:
            if not waiting.is_done:  # the write that was in progress began before this change
                self._write_waiting()
        if waiting.error is not None:
            raise waiting.error

    def _write_waiting(self) -> None:
        with self._lock:
            changes, self._waiting = self._waiting, []
            before, unwritten = self.entries, self._unwritten
        try:
            self._write(changes, before, unwritten)
        except BaseException as exc:
            for each in changes:
                each.error = exc
        for each in changes:
            each.is_done = True

    def _write(self, changes: list[_EntryChange[_ValueT]], before: dict[str, _ValueT], unwritten: set[str]) -> None:
        entries = before
        for each in changes:
            entries = each.of(entries)
        if entries is not before:
            self._file.count_change()
        elif not unwritten:
            return
        self._file.write(**{self._member: {name: self._to_json(value) for name, value in entries.items()}})
        with self._lock:
            added = {name: value for name, value in self.entries.items() if name not in before}  # during the write
            self.entries = entries | added if added else entries
            self._unwritten = set(added)


_READ_AND_WRITE = 6


class TopicTable:
    """Topic -> number of its queues. All other settings that RocketMQ keeps for a topic stay as they were found.

    Each change is written first, but those of `add_later`. If that raises `StoreError`, the table is as before.

    Attributes:
        file: The entries, and how they are written.
    """

    def __init__(self, store_files: StoreFiles, clock: Clock) -> None:
        self.file: EntryTable[dict[str, Any]] = EntryTable(
            store_files, clock, "config/topics.json", "topicConfigTable", lambda config: config
        )

    @property
    def _table(self) -> dict[str, dict[str, Any]]:
        return self.file.entries

    def load(self) -> None:
        """Read the file."""

        def parse(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
            check_names("topic", table)
            for config in table.values():  # the numbers that the broker and its tools read
                for name in ("writeQueueNums", "readQueueNums", "perm"):
                    int(config.get(name, 0))
            return table

        self.file.load(parse)

    @property
    def version(self) -> DataVersion:
        """Number of changes of this table."""
        return self.file.version

    @property
    def state(self) -> object:
        """An object that is replaced by each change. While it is the same one, so are all settings."""
        return self._table

    def has(self, topic: str) -> bool:
        """Return True if *topic* exists."""
        return topic in self._table

    def names(self) -> list[str]:
        """Return all topics."""
        return list(self._table)

    def application_topics(self) -> list[str]:
        """Return the topics to which applications send.

        The topic of each broker and of each cluster, from which new topics may inherit, is none of them.
        """
        table = self._table
        return [name for name in table if is_application_topic(name) and not int(table[name].get("perm", 0)) & _INHERIT]

    def count(self) -> int:
        """Return the number of topics."""
        return len(self._table)

    def config(self, topic: str) -> dict[str, Any] | None:
        """Return the settings of *topic* by RocketMQ's names, such as ``perm``; None if the topic is unknown."""
        config = self._table.get(topic)
        return None if config is None else _default_config(topic) | config

    def queue_count(self, topic: str) -> int:
        """Return the number of queues of *topic*; 0 if the topic is unknown."""
        config = self._table.get(topic)
        return 0 if config is None else int(config.get("writeQueueNums", 0))

    def create(self, topic: str, queue_count: int) -> int:
        """Create *topic*, or add queues. Return the number of its queues.

        The number is never reduced, because the queues may contain messages.
        """
        if queue_count > self.queue_count(topic) or not self.file.is_written(topic):
            self.file.change(lambda table: _with_queues(table, topic, queue_count))
        return self.queue_count(topic)

    def update(self, topic: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings of *topic*; create it if missing. An administrator may also reduce the queues.

        Returns:
            All settings of the topic.
        """
        self.update_all({topic: changes})
        return _default_config(topic) | self._table.get(topic, {})

    def update_all(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change or create several topics, as `update` does, and write the file once."""

        def updated(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            changed = {
                topic: config
                for topic, change in changes.items()
                if (config := _default_config(topic) | table.get(topic, {}) | dict(change)) != table.get(topic)
            }
            return table | changed if changed else table

        self.file.change(updated)

    def add_later(self, topics: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the missing ones of several topics with these settings. They are written soon, see `EntryTable`.

        Before a message is stored in such a topic, `create` it.
        """
        self.file.add_later({topic: _default_config(topic) | dict(settings) for topic, settings in topics.items()})

    def delete(self, topic: str) -> bool:
        """Delete *topic*. Return False if it is unknown."""
        found = False

        def without(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            nonlocal found
            found = topic in table
            return {name: config for name, config in table.items() if name != topic} if found else table

        self.file.change(without)
        return found


def _with_queues(table: dict[str, dict[str, Any]], topic: str, queue_count: int) -> dict[str, dict[str, Any]]:
    found = table.get(topic, {})
    if queue_count <= int(found.get("writeQueueNums", 0)):
        return table
    # RocketMQ removes queues in two steps: it reduces the write queues first, then the read queues.
    counts = {"readQueueNums": max(queue_count, int(found.get("readQueueNums", 0))), "writeQueueNums": queue_count}
    return table | {topic: _default_config(topic) | found | counts}


def _default_config(topic: str) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": _READ_AND_WRITE,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
    }


class ConsumerOffsets:
    """(group, topic) -> queue id -> the next queue offset to consume.

    Args:
        name: The file. A broadcasting group has a file for each member.
        flush: Make durable what consumers may have read. A durable offset must not be ahead of the log after a power
            failure: the group would skip the messages that get the lost queue offsets.
    """

    def __init__(
        self,
        store_files: StoreFiles,
        clock: Clock,
        name: str = "config/consumerOffset.json",
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        # The topics of a group follow from the offsets; RocketMQ computes its groupTopicMap again. So it is not
        # written.
        self._file = VersionedTable(store_files, clock, name, "offsetTable", "groupTopicMap")
        self._flush = flush
        self._lock = threading.Lock()
        self._table: dict[tuple[str, str], dict[int, int]] = {}
        self._is_dirty = False
        self._on_change: Callable[[], None] = lambda: None

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call *changed* at the first change after each `persist`."""
        self._on_change = changed

    def load(self) -> None:
        """Read the file."""
        table = self._file.load()
        with format_errors(self._file.name):
            for key, offsets in table.get("offsetTable", {}).items():
                topic, _, group = key.rpartition("@")
                check_names("topic", [topic])
                check_names("group", [group])
                self._table[group, topic] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the committed offset; None without one."""
        offsets = self._table.get((group, topic))
        return None if offsets is None else offsets.get(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Set the next queue offset to consume."""
        offsets = self._table.get((group, topic))
        if offsets is None:
            with self._lock:
                offsets = self._table.setdefault((group, topic), {})
        if offsets.get(queue_id) != queue_offset:
            offsets[queue_id] = queue_offset
            if not self._is_dirty:
                self._mark_dirty()

    def _mark_dirty(self) -> None:
        self._is_dirty = True
        self._on_change()

    def groups(self) -> set[str]:
        """Return all groups that have committed an offset."""
        return {group for group, _ in list(self._table)}

    def topics_of(self, group: str) -> set[str]:
        """Return all topics in which *group* has committed an offset."""
        return {topic for name, topic in list(self._table) if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Return all groups that have committed an offset in *topic*."""
        return {group for group, name in list(self._table) if name == topic}

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return queue id -> committed offset."""
        return dict(self._table.get((group, topic), {}))

    def all(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return a copy of the whole table, by group and topic."""
        return {key: dict(offsets) for key, offsets in list(self._table.items())}

    def forget(self, *, group: str | None = None, topic: str | None = None) -> None:
        """Remove the offsets of a group, of a topic, or of a group in a topic if both are given."""
        with self._lock:
            kept = {
                key: offsets
                for key, offsets in self._table.items()
                if (group is not None and key[0] != group) or (topic is not None and key[1] != topic)
            }
            is_change = len(kept) < len(self._table)
            self._table = kept
        if is_change and not self._is_dirty:
            self._mark_dirty()

    def persist(self) -> None:
        """Write the table, if it has changed."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        with self._lock:
            tables = list(self._table.items())
        table = {
            f"{topic}@{group}": {str(queue): offset for queue, offset in dict(offsets).items()}
            for (group, topic), offsets in tables
        }
        try:
            self._flush()
            self._file.save(offsetTable=table)
        except BaseException:
            self._is_dirty = True
            raise

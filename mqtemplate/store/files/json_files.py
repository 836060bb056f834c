"""RocketMQ's tables in JSON: topics, consumer offsets, delay offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.topics import is_file_name

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


def dump_json(value: Mapping[str, Any]) -> str:
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
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}


def read_table(store_files: StoreFiles, name: str) -> dict[str, Any]:
    """Return the table in a file; empty if there is none.

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
    members = [f"{json.dumps(key)}:{_indented(_dump_member(value))}" for key, value in table.items()]
    members += [f"{json.dumps(key)}:{_indented(text)}" for key, text in (entries or {}).items()]
    store_files.write_bytes(name, _braces(members).encode())


def _dump_member(value: Any) -> str:
    return json.dumps(value, indent="\t", separators=(",", ":"))


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

    def save(self, **members: Any) -> None:
        """Write the table with these members and the next version."""
        version = self.version.next(self._clock.now_ms())
        texts = {name: self._texts.dump(members.pop(name)) for name in (self._entries,) if name in members}
        write_table(self._store_files, self.name, self._others | {"dataVersion": version} | members, texts)

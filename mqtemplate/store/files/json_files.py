"""RocketMQ's tables in JSON: topics, consumer offsets, delay offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import StoreFiles

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(\s*:)')


def load_json(text: str) -> Any:
    """Parse JSON as upstream writes it: keys that are numbers stand there without quotes."""
    quoted = _TOKEN.sub(lambda found: f'{found[1]}"{found[2]}"{found[3]}' if found[2] else found[0], text)
    return json.loads(quoted)


def dump_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent="\t", separators=(",", ":"))


class DataVersion:
    """Counts the changes of a table, as upstream's brokers compare them."""

    def __init__(self, counter: int = 0, state_version: int = 0, timestamp: int = 0) -> None:
        self.counter, self.state_version, self.timestamp = counter, state_version, timestamp

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> DataVersion:
        """The version that a table was written with; a first one where it tells none."""
        found = table.get("dataVersion") or {}
        return cls(*(int(found.get(name, 0)) for name in ("counter", "stateVersion", "timestamp")))

    def next(self, now_ms: int) -> dict[str, int]:
        """Count one change and tell the version."""
        self.counter += 1
        self.timestamp = now_ms
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}


def read_table(store_files: StoreFiles, name: str) -> dict[str, Any]:
    """The table in a file; from its ``.bak`` where the file is missing or empty, which is how upstream's way of
    writing leaves it after a crash; empty where there is neither.

    Raises:
        StoreFormatError: It is there, but is no JSON object.
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
            f"{name} is not JSON ({exc}); restore it from {name}.bak, or delete it to begin anew"
        ) from exc
    if not isinstance(table, dict):
        raise StoreFormatError(f"{name} holds {type(table).__name__}, expected an object; restore it from {name}.bak")
    return table


@contextmanager
def format_errors(name: str) -> Iterator[None]:
    """Take the values out of a table that was read.

    Raises:
        StoreFormatError: They are of other kinds than they should be.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as exc:
        raise StoreFormatError(
            f"{name} does not hold what it should ({exc}); restore it from {name}.bak, or delete it to begin anew"
        ) from exc


def write_table(store_files: StoreFiles, name: str, table: Mapping[str, Any]) -> None:
    store_files.write_bytes(name, dump_json(table).encode())

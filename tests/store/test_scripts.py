"""Golden scripts of the store: records, units, and what a start makes of files that a failure left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from tests.golden import check_script, scripts_in
from tests.store.small_store import draft, kill, small

DETAILS = ("file", "physical_offset", "topic", "queue_id", "offset", "reason")
FEATURES = {"queue_differs_from_log": ("D21", "D22"), "torn_tail": ("D24",), "file_ends": ("D17",)}


class StoreScript:
    """The commands of a script. Files of the log have 4096 bytes, files of a queue ten units."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: MessageStore

    # --- what is done ------------------------------------------------------------------------------

    def open(self) -> Iterator[str]:
        """Open the store. Print what it repaired."""
        self.store = MessageStore(FolderStoreFiles(self.folder), small(), VirtualClock())
        with capture_logs() as events:
            self.store.load()
        for event in events:
            if event["log_level"] in ("warning", "error"):
                details = " ".join(f"{name}={event[name]}" for name in DETAILS if name in event)
                yield f"{event['event']} {details}"

    def close(self) -> None:
        self.store.close()

    def kill(self) -> None:
        kill(self.store)

    def put(self, *bodies: str, topic: str = "orders", queue: str = "0", times: str = "1") -> None:
        for body in bodies:
            self.store.put(draft(body.encode() * int(times), topic, int(queue)))

    def delete(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.folder / name)

    def zero(self, name: str, start: str, end: str = "") -> None:
        """Set a part of a file to zeros, as a power failure leaves pages that were not written."""
        data = bytearray((self.folder / name).read_bytes())
        part = slice(int(start), int(end) if end else len(data))
        data[part] = bytes(len(data[part]))
        (self.folder / name).write_bytes(data)

    def move(self, name: str, start: str, end: str, to: str) -> None:
        """Copy a part of a file to another place of it."""
        data = bytearray((self.folder / name).read_bytes())
        part = data[int(start) : int(end)]
        data[int(to) : int(to) + len(part)] = part
        (self.folder / name).write_bytes(data)

    # --- what is printed ---------------------------------------------------------------------------

    def queue(self, topic: str = "orders", queue: str = "0") -> Iterator[str]:
        """Print the units of a queue with the bodies that they refer to."""
        units = self.store.consume_queue(topic, int(queue))
        for offset in range(units.min_offset, units.max_offset):
            unit = units.unit(offset)
            record = self.store.read(unit.physical_offset, unit.size)
            body = record.body.decode()
            yield f"{offset}: {unit.physical_offset}+{unit.size} {body if len(body) < 20 else body[:3] + '...'}"

    def files(self, name: str) -> Iterator[str]:
        """Print the files of a folder, and the bytes before their trailing zeros."""
        for path in sorted((self.folder / name).iterdir()):
            data = path.read_bytes()
            yield f"{path.name.lstrip('0') or '0'}: {len(data.rstrip(bytes(1)))} of {len(data)} bytes"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.feature(*FEATURES.get(path.stem, ())), id=path.stem)
        for path in scripts_in(Path(__file__).parent / "scripts")
    ],
)
def test_the_script_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    script = StoreScript(tmp_path)

    check_script(path, script)

    script.close()

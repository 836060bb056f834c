"""Interface to the offsets of a group member, and the file with the offsets of a broadcasting group.

Source: RocketMQ ``client: OffsetStore``, ``LocalFileOffsetStore``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from mqtemplate.errors import MQTemplateError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody


class OffsetStore(Protocol):
    """Committed offsets of one member. Thread-safe."""

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        """Return the committed offset; None if there is none.

        Args:
            young_is_zero: Also return 0 if there is no offset, the queue still has its first message, and that message
                is near the end of the commit log.
        """

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Set the offset of a queue; the next flush stores it."""

    def commit_now(self, queue: MessageQueue, queue_offset: int) -> None:
        """Store the offset of a queue, which need not be assigned to this member."""

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store the changed offsets of *queues*, or of all queues, before this returns."""

    def forget(self, queue: MessageQueue) -> None:
        """Remove a queue that is assigned to another member now."""


class _OffsetFile(JsonBody):
    """Content of RocketMQ's ``offsets.json``."""

    offset_table: dict[MessageQueue, int]


def local_offset_file(folder: Path, instance_name: str, name_servers: Iterable[str], group: str) -> Path:
    """Return the path of a broadcasting member's file; queues of different clusters may have one name."""
    cluster = "+".join(sorted(name_servers))
    return folder / quote(f"{instance_name}@{cluster}", safe="@+") / quote(group, safe="%|") / "offsets.json"


class LocalFileOffsetStore:
    """Offsets of a broadcasting group, in a file of RocketMQ's format. Each flush replaces the whole file.

    Raises:
        MQTemplateError: The file exists and is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._has_changed = False
        self._offsets = self._load()

    def _load(self) -> dict[MessageQueue, int]:
        with contextlib.suppress(FileNotFoundError):
            try:
                return dict(_OffsetFile.decode(self._path.read_bytes()).offset_table)
            except RemoteProtocolError as exc:
                raise MQTemplateError(
                    f"{self._path} cannot be read: {exc}; repair it, or delete it to have the group start again"
                ) from exc
        return {}

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        return self._offsets.get(queue)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        with self._lock:
            if self._offsets.get(queue) != queue_offset:
                self._offsets[queue] = queue_offset
                self._has_changed = True

    def commit_now(self, queue: MessageQueue, queue_offset: int) -> None:
        self.commit(queue, queue_offset)
        self.flush()

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._lock:
            if not self._has_changed:
                return
            data = _OffsetFile(offset_table=dict(self._offsets)).encode()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            self._has_changed = False

    def forget(self, queue: MessageQueue) -> None:
        """Do nothing: a broadcasting member keeps the offsets of all queues."""

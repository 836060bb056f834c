"""Log of changes: who changed what and when, and the values before it, from which a change can be undone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from mqtemplate.clock import Clock
from mqtemplate.errors import ConfigurationError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import OPEN_FLAGS, absolute_path, home_folder

_log = get_logger("mqtemplate.operations")

OldValue: TypeAlias = Mapping[str, Any]
"""Values of one message or one queue before a change, as JSON has them."""

_FEW = 20
"""Old values up to this number are in the line of the change; more are in a file beside the log."""
_KEPT = 100
_KEPT_VALUES = 10_000
_FIRST_FIELDS = ("time", "id", "action", "state", "remote", "user")


@dataclass(slots=True)
class AuditEntry:
    """One change while it runs.

    Attributes:
        old: The values before it.
        result: Facts for the second line.
    """

    id: str
    old: OldValues
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One change of the log.

    Attributes:
        state: ``succeeded``, ``failed``, or ``started`` if its end is unknown.
        author: Address of a client, or name of a user of the command line.
        facts: The other fields of its lines.
        old: The values before it.
        undone_by: Id of the change that has undone it.
    """

    id: str
    time: str
    action: str
    state: str
    author: str
    facts: Mapping[str, Any]
    old: OldValues
    undone_by: str | None = None


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """Limits of the space that a log takes on the disk. Old changes are forgotten: they are not listed, nor undone.

    Attributes:
        max_bytes: With this length the file is renamed, and a new one begins.
        max_files: Number of files that are kept, the newest ones.
        max_value_files: Number of files with old values that are kept, the newest ones.
        max_value_bytes: Bytes in them together. The newest one is kept whatever its length.
    """

    max_bytes: int = 4 << 20
    max_files: int = 10
    max_value_files: int = 1_000
    max_value_bytes: int = 1 << 30


class AuditLog:
    """Writes changes to a file with mode 0600, one JSON document for each line, and reads them again.

    A change has two lines with one id: ``started`` before it, with the values from which it can be undone, and
    ``succeeded`` or ``failed`` after it. If the first cannot be written, the change does not happen.

    The space on the disk is bounded: see `AuditLimits`. Several processes may write to one log.

    Args:
        path: The file; None to keep the last changes in memory. A relative one is resolved here.
        user: Name of the user of all changes, for the command line; None if each change has an address.
        event: Called with the fields of each change that has ended, to log it.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        *,
        user: str | None = None,
        event: Callable[..., object] | None = None,
        limits: AuditLimits | None = None,
    ) -> None:
        self._files = None if path is None else _LogFiles(absolute_path(path), clock, limits or AuditLimits())
        self.path = path = None if path is None else absolute_path(path)
        self._clock = clock
        self._user = user
        self._shown: str | None = None
        self._event = event
        self._lock = threading.Lock()
        self._kept: deque[tuple[dict[str, Any], OldValues | None]] = deque(maxlen=2 * _KEPT)
        if path is not None:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _append(path, b"")
            except OSError as exc:
                raise ConfigurationError(
                    f"the audit log {path} cannot be written: {exc.strerror or exc}; choose another file"
                ) from exc

    def of(self, user: str, *, only_own: bool = False) -> AuditLog:
        """Return this log for one user: each change that it writes has the name of the user.

        Args:
            only_own: It has only the changes of the user to read.
        """
        found = copy(self)
        found._user = user
        found._shown = user if only_own else None
        return found

    # --- writing -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(
        self, action: str, remote: str | None = None, old: Iterable[OldValue] = (), **target: object
    ) -> Iterator[AuditEntry]:
        """Log the change in the ``with`` block. What it adds to the result of the entry is in the second line.

        Args:
            old: Values from which the change can be undone. All are read before it.
        """
        change_id = secrets.token_hex(5)
        values = OldValues.written(old, self._values_path(change_id))
        if self._files is not None:
            self._files.limit_values()
        author = {"remote": remote, "user": self._user}
        first = {"id": change_id, "action": action, "state": "started", **author, **target, **values.fields()}
        self._write(first, values)
        entry = AuditEntry(change_id, values)
        last = {**first, "state": "succeeded"}
        try:
            yield entry
        except BaseException as exc:
            last |= {"state": "failed", "error": f"{type(exc).__name__}: {exc}"}
            raise
        finally:
            self._write({name: value for name, value in last.items() if name not in ("old", "old_file")} | entry.result)

    def _values_path(self, change_id: str) -> Path | None:
        return None if self.path is None else values_folder(self.path) / f"{change_id}.jsonl"

    def _write(self, fields: dict[str, Any], values: OldValues | None = None) -> None:
        time = datetime.fromtimestamp(self._clock.now_ms() / 1_000, UTC).isoformat(timespec="milliseconds")
        record = {"time": time, **{name: value for name, value in fields.items() if value is not None}}
        if self._files is not None:
            with self._lock:
                self._files.append(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        else:
            with self._lock:
                self._kept.append((record, None if values is None else values.kept()))
        if self._event is not None and record["state"] != "started":
            self._event(**{name: value for name, value in record.items() if name != "time"})

    # --- reading -------------------------------------------------------------------------------

    def get(self, change_id: str) -> LoggedChange:
        """Return one change.

        Raises:
            UnknownNameError: The log does not have it.
        """
        found = {each.id: each for each in self._changes(change_id)}.get(change_id)
        if found is None:
            place = "in the memory of this process" if self.path is None else f"in {self.path}"
            raise UnknownNameError(f"there is no change {change_id!r:.40} {place}; list them with: mqtemplate changes")
        return found

    def recent(self, count: int) -> list[LoggedChange]:
        """Return the last changes, the newest first."""
        return list(self._changes())[: -count - 1 : -1]

    def _changes(self, change_id: str | None = None) -> Iterator[LoggedChange]:
        """Yield all changes, or one of them, in the order of their first lines."""
        merged: dict[str, tuple[dict[str, Any], OldValues]] = {}
        undone: dict[str, str] = {}
        for record, kept in self._records(change_id):
            if record["id"] not in merged:
                merged[record["id"]] = ({}, kept or OldValues.read_from(record, self._values_path(record["id"])))
            merged[record["id"]][0].update(record)
            if record.get("undo_of") and record["state"] == "succeeded":
                undone[record["undo_of"]] = record["id"]
        for each_id, (record, values) in merged.items():
            if self._shown is not None and record.get("user") != self._shown:
                continue
            facts = {name: value for name, value in record.items() if name not in (*_FIRST_FIELDS, "old", "old_file")}
            author = record.get("user") or record.get("remote") or "unknown"
            yield LoggedChange(
                each_id, record["time"], record["action"], record["state"], author, facts, values, undone.get(each_id)
            )

    def _records(self, change_id: str | None) -> Iterator[tuple[dict[str, Any], OldValues | None]]:
        if self._files is None:
            with self._lock:
                yield from list(self._kept)
            return
        wanted = b"" if change_id is None else change_id.encode()
        for line in self._files.lines():
            record = _record_of(line) if wanted in line else None
            if record is not None:
                yield record, None


class _LogFiles:
    """The file of a log, those that it was renamed to, and the folder with old values.

    A renamed file has the time and a random part in its name, so that two processes that rename at once lose nothing.
    A process that has the file open at this moment writes its line into the renamed one.
    """

    def __init__(self, path: Path, clock: Clock, limits: AuditLimits) -> None:
        self._path = path
        self._clock = clock
        self._limits = limits
        self._values = values_folder(path)
        self._name = re.compile(rf"{re.escape(path.stem)}\.\d{{13}}-\d{{3}}-[0-9a-f]{{4}}{re.escape(path.suffix)}")

    def append(self, line: bytes) -> None:
        """Append a line, in a new file if this one is full."""
        try:
            self._rotate()
        except OSError as exc:  # a longer log is better than a change without its line
            _log.warning("audit.not_rotated", file=str(self._path), reason=exc.strerror or str(exc))
        _append(self._path, line)

    def lines(self) -> Iterator[bytes]:
        """Yield all lines, the oldest first."""
        with contextlib.ExitStack() as stack:
            newest = None
            with contextlib.suppress(FileNotFoundError):  # it was renamed just now
                newest = stack.enter_context(self._path.open("rb"))
            for path in self._renamed():
                with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
                    if newest is None or not os.path.sameopenfile(newest.fileno(), lines.fileno()):
                        yield from lines
            yield from newest or ()

    def limit_values(self) -> None:
        """Delete the oldest files with old values, except the newest one."""
        found = []
        for path in self._values.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        size = 0
        for number, (_, path, length) in enumerate(sorted(found, reverse=True)):
            size += length
            if number and (number >= self._limits.max_value_files or size > self._limits.max_value_bytes):
                path.unlink(missing_ok=True)

    def _renamed(self) -> list[Path]:
        return sorted(path for path in self._path.parent.iterdir() if self._name.fullmatch(path.name))

    def _rotate(self) -> None:
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode) or status.st_size < self._limits.max_bytes:
            return
        time = self._clock.now_ms() * 1_000
        for last in self._renamed()[-1:]:  # the names ascend, also within a millisecond and after a step of the clock
            milliseconds, number, _ = last.name.removeprefix(f"{self._path.stem}.").split("-", 2)
            time = max(time, int(milliseconds) * 1_000 + int(number) + 1)
        name = f"{self._path.stem}.{time // 1_000:013d}-{time % 1_000:03d}-{secrets.token_hex(2)}{self._path.suffix}"
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self._path.rename(self._path.with_name(name))
        for path in self._renamed()[: -max(self._limits.max_files - 1, 1)]:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        """Delete a renamed file, and the old values of its changes."""
        with contextlib.suppress(FileNotFoundError):
            with path.open("rb") as lines:
                records = [record for line in lines if b'"old_file"' in line and (record := _record_of(line))]
            for record in records:
                # An id of ours; a line must not lead to another file.
                if re.fullmatch("[0-9a-f]{10}", record["id"]):
                    (self._values / f"{record['id']}.jsonl").unlink(missing_ok=True)
            path.unlink()


def _append(path: Path, line: bytes) -> None:
    # O_NOFOLLOW: in a directory of another user a symbolic link could lead the lines elsewhere.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_FLAGS, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def values_folder(path: Path) -> Path:
    """Return the folder for the old values of a log."""
    return path.with_name(f"{path.stem}.old")


def _record_of(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None for one that was cut off, or that another program has written."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_change = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in _FIRST_FIELDS[:4])
    return record if is_change else None


class OldValues:
    """The old values of one change: in its line, or in a file beside the log. A call yields them.

    Args:
        path: The file; None if they are in *few*.
    """

    def __init__(self, few: tuple[OldValue, ...] = (), path: Path | None = None) -> None:
        self._few = few
        self._path = path

    @classmethod
    def written(cls, values: Iterable[OldValue], path: Path | None) -> OldValues:
        """Write the values to the file if they are many, and keep them if there is no file."""
        rest = iter(values)
        few = tuple(islice(rest, None if path is None else _FEW + 1))
        if path is None or len(few) <= _FEW:
            return cls(few)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            for value in chain(few, rest):
                opened.write(json.dumps(value, ensure_ascii=False) + "\n")
        return cls((), path)

    @classmethod
    def read_from(cls, record: Mapping[str, Any], path: Path | None) -> OldValues:
        """Return the values that the first line of a change names."""
        if isinstance(record.get("old"), list):
            return cls(tuple(record["old"]))
        # The name comes from the id, not from the line: a line must not lead to another file.
        return cls((), path) if "old_file" in record else cls()

    @property
    def exists(self) -> bool:
        """True if there are values, or their file."""
        return bool(self._few) or (self._path is not None and self._path.exists())

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line of the change."""
        if self._path is not None:
            return {"old_file": f"{self._path.parent.name}/{self._path.name}"}
        return {"old": list(self._few) if 0 < len(self._few) <= _FEW else None}

    def kept(self) -> OldValues:
        """Return the values to keep in memory: a change of very many keeps none."""
        return self if len(self._few) <= _KEPT_VALUES else OldValues()

    def __call__(self) -> Iterator[OldValue]:
        """Yield the values, in the order in which they were given.

        Raises:
            UnknownNameError: Their file is missing.
        """
        if self._path is None:
            yield from self._few
            return
        try:
            lines = self._path.open(encoding="utf-8")
        except FileNotFoundError as exc:
            raise UnknownNameError(f"the old values in {self._path} were deleted, so nothing can be undone") from exc
        with lines:
            yield from map(json.loads, lines)


def default_audit_path() -> Path:
    """Return the audit log of this user: ``$XDG_STATE_HOME/mqtemplate/audit.jsonl``."""
    state = os.environ.get("XDG_STATE_HOME")
    instead = "XDG_STATE_HOME, or name the file: mqtemplate.management.audit-log"
    folder = Path(state) if state else home_folder("the log of changes", instead) / ".local" / "state"
    return folder / "mqtemplate" / "audit.jsonl"

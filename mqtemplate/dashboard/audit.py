"""Audit log: each change by the dashboard as a line of JSON, and as a log event."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import absolute_path, home_folder

_log = get_logger("mqtemplate.dashboard")


class AuditLog:
    """Writes changes to a file with mode 0600, one JSON document for each line, and as events ``dashboard.changed``.

    A change has two lines: ``started`` before it, and ``succeeded`` or ``failed`` after it. If the first cannot be
    written, the change does not happen.

    Args:
        path: The file; None for events only. A relative one is resolved here.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.path = path = None if path is None else absolute_path(path)
        self._clock = clock
        self._lock = threading.Lock()
        if path is not None:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._append(path, b"")
            except OSError as exc:
                raise ConfigurationError(
                    f"the audit log {path} cannot be written: {exc.strerror or exc}; choose another file"
                ) from exc

    @contextmanager
    def change(self, action: str, remote: str, **target: object) -> Iterator[dict[str, Any]]:
        """Log the change in the ``with`` block. What the block adds to the yielded dict is in the second line."""
        self._write("started", action, remote, target)
        result: dict[str, Any] = {}
        try:
            yield result
        except BaseException as exc:
            self._write("failed", action, remote, {**target, **result, "error": f"{type(exc).__name__}: {exc}"})
            raise
        self._write("succeeded", action, remote, {**target, **result})

    def _write(self, state: str, action: str, remote: str, fields: dict[str, object]) -> None:
        time = datetime.fromtimestamp(self._clock.now_ms() / 1_000, UTC).isoformat(timespec="milliseconds")
        given = {name: value for name, value in fields.items() if value is not None}
        if self.path is not None:
            record = {"time": time, "action": action, "state": state, "remote": remote, **given}
            self._append(self.path, json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        if state != "started":
            _log.warning("dashboard.changed", action=action, state=state, remote=remote, **given)

    def _append(self, path: Path, line: bytes) -> None:
        # O_NOFOLLOW: in a directory of another user a symbolic link could lead the lines elsewhere.
        with self._lock:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)


def default_audit_path() -> Path:
    """Return the audit log of this user: ``$XDG_STATE_HOME/mqtemplate/dashboard-audit.jsonl``."""
    state = os.environ.get("XDG_STATE_HOME")
    instead = "XDG_STATE_HOME, or name the file: --audit-log, or mqtemplate.management.dashboard.audit-log"
    folder = Path(state) if state else home_folder("the log of changes", instead) / ".local" / "state"
    return folder / "mqtemplate" / "dashboard-audit.jsonl"

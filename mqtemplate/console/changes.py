"""Changes by the dashboard: the log of all changes, and jobs that change many messages."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from mqtemplate.clock import Clock
from mqtemplate.errors import ConfigurationError, MessageError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import OPEN_FLAGS, absolute_path, home_folder

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
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_FLAGS, 0o600)
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


_MAX_KEPT = 50


class JobState(Enum):
    """State of a job."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class StoppedError(MQTemplateError):
    """A user has stopped a job."""


class Job:
    """A change of many messages.

    Attributes:
        title: Text for a reader.
        total: Number of messages; None if unknown.
        done: Number of messages that are done.
        result: Text for a reader, at the end.
        back: Path of the page to go back to.
        must_stop: Set it to end the job before its next message.
    """

    def __init__(self, title: str, total: int | None, back: str) -> None:
        self.id = secrets.token_hex(8)
        self.title = title
        self.total = total
        self.back = back
        self.done = 0
        self.state = JobState.RUNNING
        self.result = ""
        self.must_stop = False

    def advance(self, count: int) -> None:
        """Count messages that are done.

        Raises:
            StoppedError: The job shall end.
        """
        self.done += count
        if self.must_stop:
            raise StoppedError(f"stopped after {self.done} messages")

    def run(self, work: Work) -> None:
        """Do the work, and set state and result."""
        try:
            self.result = work(self)
            self.state = JobState.SUCCEEDED
        except StoppedError as exc:
            self.result, self.state = str(exc), JobState.STOPPED
        except MQTemplateError as exc:
            self.result, self.state = str(exc), JobState.FAILED
        except Exception as exc:
            _log.exception("dashboard.job_failed", job=self.title)
            self.result, self.state = f"{type(exc).__name__}: {exc}", JobState.FAILED


Work: TypeAlias = Callable[[Job], str]
"""Function that does a job: it calls `Job.advance`, and returns the result as text."""


class Jobs:
    """The running job, and the last ones. One runs at a time.

    Args:
        in_background: False: a job runs in the calling thread. For a virtual clock.
    """

    def __init__(self, *, in_background: bool = True) -> None:
        self._in_background = in_background
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, title: str, total: int | None, back: str, work: Work) -> Job:
        """Start a job.

        Raises:
            MessageError: Another one is running.
        """
        with self._lock:
            running = next((each for each in self._jobs.values() if each.state is JobState.RUNNING), None)
            if running is not None:
                raise MessageError(f"another change is running: {running.title}; wait for it, or stop it")
            job = Job(title, total, back)
            self._jobs[job.id] = job
            while len(self._jobs) > _MAX_KEPT:
                self._jobs.popitem(last=False)
        if self._in_background:
            threading.Thread(target=job.run, args=(work,), name="mqtemplate-dashboard-job", daemon=True).start()
        else:
            job.run(work)
        return job

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            UnknownNameError: It is not kept any more.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownNameError("there is no such change; the dashboard was restarted, or it is too long ago")
        return job

    def close(self) -> None:
        """Stop the running job."""
        for job in list(self._jobs.values()):
            job.must_stop = True

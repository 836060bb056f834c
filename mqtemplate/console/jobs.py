"""Jobs: changes of many messages by the dashboard, in a thread."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

from mqtemplate.errors import MessageError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.dashboard")


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

"""A worker process, as the supervisor sees it."""

from __future__ import annotations

import queue
import signal
import sys
from pathlib import Path

import pytest

from mqtemplate.running.supervisor import WorkerProcess
from mqtemplate.running.target import RunOptions
from tests.waiting import PATIENCE_S


def test_the_end_of_a_worker_that_has_not_read_its_options_is_reported() -> None:
    """It resets the connection, and without the report the supervisor would wait for this worker for ever."""
    ends: queue.Queue[int] = queue.Queue()

    worker = WorkerProcess(RunOptions(target="shop:app"), lambda: None, ends.put)
    worker.kill()

    assert ends.get(timeout=PATIENCE_S) == -signal.SIGKILL


def test_the_end_of_a_process_that_reads_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    ends: queue.Queue[int] = queue.Queue()

    WorkerProcess(RunOptions(target="shop:app"), lambda: None, ends.put)

    assert ends.get(timeout=PATIENCE_S) == 7

"""Schedules of several real processes on our server; one of them is killed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.server.process import BrokerProcess
from tests.waiting import eventually

WORKER = """
import os, sys
from mqtemplate import MQApplication, ScheduledRun, scheduled

@scheduled(every="1s", catch_up="all")
def tick(run: ScheduledRun) -> None:
    with open("runs", "a") as file:
        file.write(f"{os.getpid()} {run.scheduled_at.isoformat()}\\n")

MQApplication(tick, settings={"rocketmq.name-server": sys.argv[1]}, environment={}).run()
"""


def runs_in(folder: Path) -> list[tuple[int, datetime]]:
    file = folder / "runs"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(pid), datetime.fromisoformat(at)) for pid, at in map(str.split, lines)]


LONG_RUNS = """
import os, sys, threading
from mqtemplate import MQApplication, ScheduledRun, scheduled

def wait_for(name: str) -> None:
    while not os.path.exists(name):
        threading.Event().wait(0.01)

@scheduled(every="1s", catch_up="all")
def tick(run: ScheduledRun) -> None:
    with open("runs", "a") as file:
        file.write(f"{os.getpid()} {run.scheduled_at.isoformat()}\\n")
    wait_for("end")

wait_for(f"start-{os.getpid()}")
MQApplication(tick, settings={"rocketmq.name-server": sys.argv[1]}, environment={}).run()
"""


@pytest.mark.slow
@pytest.mark.feature("X17")
def test_a_process_that_joins_during_a_run_does_not_repeat_it(tmp_path: Path) -> None:
    """It gets the queue, and with it the message of the run that is not done yet."""
    (tmp_path / "worker.py").write_text(LONG_RUNS, "utf-8")
    with BrokerProcess(tmp_path) as server:
        command = [sys.executable, "-W", "error", "worker.py", str(server.name_server)]
        log = tmp_path / "log"
        with log.open("w") as errors:
            workers = [subprocess.Popen(command, cwd=tmp_path, stderr=errors) for _ in range(2)]
        try:
            # The client ids begin with the pids, and the first one in their order gets the only queue.
            joining, first = sorted(workers, key=lambda worker: str(worker.pid))
            (tmp_path / f"start-{first.pid}").touch()
            eventually(lambda: runs_in(tmp_path), "the first process runs the function")
            (tmp_path / f"start-{joining.pid}").touch()
            eventually(lambda: "another process runs the schedule" in log.read_text(), "the other one has the queue")
            (tmp_path / "end").touch()
            eventually(lambda: len([pid for pid, _ in runs_in(tmp_path) if pid == joining.pid]) >= 3, "its own runs")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    times = [at for _, at in runs_in(tmp_path)]
    assert times == [times[0] + timedelta(seconds=second) for second in range(len(times))]


@pytest.mark.slow
@pytest.mark.feature("X17")
def test_processes_run_each_second_once_also_when_one_is_killed(tmp_path: Path) -> None:
    """No second is missing. Only the run during which the process was killed may be repeated."""
    (tmp_path / "worker.py").write_text(WORKER, "utf-8")
    with BrokerProcess(tmp_path) as server:
        command = [sys.executable, "-W", "error", "worker.py", str(server.name_server)]
        workers = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(2)]
        try:
            eventually(lambda: len(runs_in(tmp_path)) >= 3, "three runs")
            [active] = {pid for pid, _ in runs_in(tmp_path)[-1:]}
            killed = next(worker for worker in workers if worker.pid == active)
            killed.kill()
            killed.wait()
            eventually(lambda: len({at for pid, at in runs_in(tmp_path) if pid != active}) >= 3, "runs of the other")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    last_of_killed = max(at for pid, at in runs_in(tmp_path) if pid == active)
    times = [at for _, at in runs_in(tmp_path)]
    first, last = min(times), max(times)
    assert sorted(set(times)) == [
        first + timedelta(seconds=second) for second in range(int((last - first).total_seconds()) + 1)
    ]
    assert [at for at, count in Counter(times).items() if count > 1] in ([], [last_of_killed])

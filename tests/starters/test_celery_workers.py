"""The starter of Celery in real workers, with Redis and our server."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import end_group
from tests.server.process import BrokerProcess
from tests.starters.redis_server import PROGRAM, redis_server
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]

TASKS = """
import os
from pathlib import Path

from celery import Celery
from mqtemplate_starter_celery import MQTemplate

HERE = Path(__file__).parent
celery = Celery({name!r}, broker={redis!r}, set_as_current=False)
messages = MQTemplate(app=celery, config_folder=HERE)

def note(text):
    with open(HERE / "ran.txt", "a") as file:
        file.write(text + "\\n")

@celery.task(shared=False, name="note")
def note_task(text):
    note(text)

@celery.task(shared=False, name="flaky", bind=True, max_retries=3)
def flaky(self):
    note(f"attempt {{self.request.retries}}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # several processes start one after the other
    pytest.mark.skipif(PROGRAM is None, reason="Redis is not installed: redis-server"),
]


@pytest.fixture
def tasks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module with the tasks; it sends from this process. ``application.yml`` beside it names the broker."""
    with redis_server() as redis, BrokerProcess(tmp_path) as broker:
        (tmp_path / "application.yml").write_text(f"rocketmq: {{name-server: '{broker.name_server}'}}", "utf-8")
        source = tmp_path / "shop_tasks.py"
        source.write_text(TASKS.format(name=request.node.name, redis=redis.url), "utf-8")
        spec = importlib.util.spec_from_file_location("shop_tasks", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        module.messages.stop()
        broker.stop()


@contextmanager
def worker(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker of Celery; it is stopped as an operator does it."""
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "shop_tasks:celery", "worker", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'starters'}:{folder}"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL), (folder / "worker.log").read_text("utf-8")
    finally:
        end_group(process)
        process.wait(PATIENCE_S)


def ran(folder: Path) -> list[str]:
    """Return the lines that tasks have written."""
    file = folder / "ran.txt"
    return file.read_text("utf-8").splitlines() if file.exists() else []


@pytest.mark.parametrize(
    "options",
    [
        ["-P", "prefork", "-c", "2"],
        pytest.param(["-P", "threads", "-c", "2"], marks=pytest.mark.thorough),
        pytest.param(["-P", "solo"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_worker_forwards_and_runs_delayed_tasks_and_retries(
    tmp_path: Path, tasks: ModuleType, options: list[str]
) -> None:
    """Forwarding starts and stops with the worker. A retry is a delayed task too, sent by a child of the worker."""
    with worker(tmp_path, *options):
        tasks.note_task.apply_async(("reminded",), countdown=0.5)
        tasks.flaky.apply_async(countdown=0.1)
        eventually(lambda: len(ran(tmp_path)) == 4, "all tasks have run")

    assert sorted(ran(tmp_path)) == ["attempt 0", "attempt 1", "attempt 2", "reminded"]
    log = (tmp_path / "worker.log").read_text("utf-8")
    assert "Traceback" not in log, log


def test_a_killed_worker_loses_no_task_that_waits(tmp_path: Path, tasks: ModuleType) -> None:
    """Nothing waits in its memory, so the next worker runs all of them. One that had just run may run again."""
    waiting = [str(number) for number in range(50)]
    with worker(tmp_path, "-P", "solo") as first:
        tasks.note_task.apply_async(("first",), countdown=0.1)
        eventually(lambda: ran(tmp_path) == ["first"], "the worker works")
        for name in waiting:
            tasks.note_task.apply_async((name,), countdown=8)
        end_group(first)
        first.wait(PATIENCE_S)

    with worker(tmp_path, "-P", "solo"):
        eventually(lambda: set(ran(tmp_path)) == {"first", *waiting}, "all tasks have run")

    assert sorted(name for name in ran(tmp_path) if name != "first") == sorted(waiting)

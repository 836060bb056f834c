"""Backend of Django's tasks. Settings belong to a process, so a copy of ``django_project`` runs in one of its own."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import PATHS, run_python
from tests.running.program import Program
from tests.waiting import eventually

pytest.importorskip("django")
PROJECT = Path(__file__).parent / "django_project"
HAS_TASKS = find_spec("django.tasks") is not None or find_spec("django_tasks") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TASKS, reason="this Django is older than 6 and has no tasks; pip install django-tasks"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project."""
    return Path(shutil.copytree(PROJECT, tmp_path / "project"))


def run_tests(project: Path, name: str) -> str:
    """Run a module of the project as tests, with warnings as errors, and return what pytest prints."""
    (project / "environment.py").rename(project / "conftest.py")
    done = run_python(
        project, "-W", "error", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", f"{name}.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_backend_passes_the_tests_of_django(project: Path) -> None:
    """READY, RUNNING, FAILED and SUCCESSFUL results, by id, with arguments, errors, context, logs and validation."""
    assert "passed" in run_tests(project, "contract")


def test_times_priorities_cancels_transactions_and_failures(project: Path) -> None:
    """All in virtual time, with the worker in the process of the tests."""
    assert "passed" in run_tests(project, "behaviour")


ENQUEUE = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
import django
django.setup()
from datetime import timedelta
from django.utils import timezone
from jobs import tasks
"""
MIGRATE = "from django.core.management import call_command\ncall_command('migrate', run_syncdb=True)\n"
REPORT = """
from jobs.models import Effect
from mqtemplate_starter_django.tasks.models import TaskRecord
print(sorted(Effect.objects.values_list("name", flat=True)))
for record in TaskRecord.objects.order_by("enqueued_at"):
    on_time = record.started_at is not None and record.started_at >= (record.run_after or record.enqueued_at)
    print(record.task_path, record.status, len(record.worker_ids), on_time)
"""


def lines(project: Path, program: str) -> list[str]:
    """Run a program in the project, and return the lines that it prints."""
    done = run_python(project, "-c", ENQUEUE + program, PYTHONPATH=f"{PATHS}:{project}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def effects_of(project: Path) -> list[str]:
    """Return the names of the effects in the database."""
    with closing(sqlite3.connect(project / "jobs.db")) as database:
        return [name for (name,) in database.execute("SELECT name FROM jobs_effect ORDER BY name")]


def test_a_deferred_task_waits_on_disk_until_manage_py_mqtemplate_run_runs_it(project: Path) -> None:
    """Without a server: one process enqueues and ends, and the worker opens the same folder."""
    soon = "timezone.now() + timedelta(seconds=1)"
    lines(
        project,
        f"{MIGRATE}tasks.store_async.using(run_after={soon}).enqueue('deferred')\ntasks.store_async.enqueue('now')",
    )

    with Program(project, "manage", "mqtemplate", "run") as worker:
        eventually(lambda: effects_of(project) == ["deferred", "now"], "both tasks have run", timeout_s=60)
        code = worker.stop()

    assert code == 0
    assert lines(project, REPORT)[1:] == ["jobs.tasks.store_async SUCCESSFUL 1 True"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "effects", "attempts"),
    [
        ("store_once", ["one"], 2),
        ("store_and_wait", ["one", "one"], 2),  # without EFFECT_ONCE: at least once
    ],
)
def test_a_task_of_a_worker_that_was_killed_runs_again(
    project: Path, name: str, effects: list[str], attempts: int
) -> None:
    lines(project, f"{MIGRATE}tasks.{name}.enqueue('one')")
    os.mkfifo(project / "go")

    with Program(project, "manage", "mqtemplate", "run") as killed:
        killed.wait_for("^stored one$")
        killed.stop(signal.SIGKILL)
    with Program(project, "manage", "mqtemplate", "run") as worker:
        (project / "go").write_text("", "utf-8")  # it waits until the task reads
        worker.wait_for("^ended one$")
        assert worker.stop() == 0

    assert lines(project, REPORT) == [str(effects), f"jobs.tasks.{name} SUCCESSFUL {attempts} True"]


def test_a_process_can_work_for_one_queue(project: Path) -> None:
    done = run_python(project, "manage.py", "mqtemplate", "run", "--check", "--listeners", "default.queue_1")

    assert done.returncode == 0, done.stderr
    levels = ("highest", "high", "normal", "low", "lowest")
    assert all(f"tasks-{level}.default.queue_1" in done.stdout for level in levels)
    assert "default.default" not in done.stdout

"""Tasks, most of them as in ``tests/tasks/tasks.py`` of Django."""

from __future__ import annotations

from pathlib import Path

from django.db import transaction

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task

from jobs.models import Effect

RAN: list[object] = []


@task()
def noop_task(*args, **kwargs):
    return None


@task
def noop_task_from_bare_decorator(*args, **kwargs):
    return None


@task()
async def noop_task_async(*args, **kwargs):
    return None


@task()
def calculate_meaning_of_life():
    return 42


@task()
def failing_task_value_error():
    raise ValueError("This Task failed due to ValueError")


@task()
def failing_task_system_exit():
    raise SystemExit("This Task failed due to SystemExit")


@task()
def complex_exception():
    raise ValueError(ValueError("This task failed"))


@task()
def complex_return_value():
    return lambda: True


@task(takes_context=True)
def get_task_id(context):
    return context.task_result.id


@task(takes_context=True)
def check_context(context, attempt):
    assert isinstance(context, TaskContext)
    assert context.attempt == attempt


@task()
def note(value):
    RAN.append(value)


@task()
async def store_async(name):
    return (await Effect.objects.acreate(name=name)).name


@task(backend="once")
def store_and_fail(name):
    Effect.objects.create(name=name)
    raise ValueError("after the effect")


@task(backend="once")
def store_and_chain(name):
    Effect.objects.create(name=name)
    transaction.on_commit(lambda: RAN.append("committed"))
    note.enqueue(name)


def _store_and_wait(name):
    """Store an effect, and wait until the test writes into the pipe; it kills a worker that waits there."""
    Effect.objects.create(name=name)
    print("stored", name, flush=True)
    Path("go").read_text("utf-8")
    print("ended", name, flush=True)


@task(backend="once")
def store_once(name):
    _store_and_wait(name)


@task()
def store_and_wait(name):
    _store_and_wait(name)

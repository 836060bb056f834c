"""The tests of Django for backends, with the same names: ``tests/tasks`` of Django 6.0.

``test_dummy_backend.py`` and ``test_tasks.py`` are about tasks that wait, ``test_immediate_backend.py`` is about tasks
that have run.
"""

from __future__ import annotations

import dataclasses
import logging
from datetime import datetime
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from django.utils.module_loading import import_string
from jobs import tasks as test_tasks

from mqtemplate_starter_django import MQTemplateBackend
from mqtemplate_starter_django.tasks import interface
from mqtemplate_starter_django.tasks.interface import (
    DEFAULT_TASK_QUEUE_NAME,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
)

try:
    from django.tasks import task
    from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultMismatch

    LOGGER = "django.tasks"
except ImportError:
    from django_tasks import task
    from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultMismatch

    LOGGER = "django_tasks"

BOTH = pytest.mark.parametrize("noop", [test_tasks.noop_task, test_tasks.noop_task_async])
MISSING = {**settings.TASKS, "missing": {"BACKEND": "does.not.exist"}}
ONE_QUEUE = {**settings.TASKS, "default": {"BACKEND": settings.BACKEND, "QUEUES": ["queue-1"]}}


def default_backend():
    return task_backends["default"]


# --- tasks that wait: test_dummy_backend.py, test_tasks.py --------------------------------------------


def test_using_correct_backend():
    assert isinstance(task_backends["default"], MQTemplateBackend)
    assert default_backend().alias == "default"
    assert default_backend().options == {"THREADS": 1}


def test_task_decorator():
    assert isinstance(test_tasks.noop_task, Task)
    assert isinstance(test_tasks.noop_task_async, Task)
    assert isinstance(test_tasks.noop_task_from_bare_decorator, Task)


@BOTH
@pytest.mark.parametrize("is_async", [False, True])
def test_enqueue_task(sender, noop, is_async):
    result = async_to_sync(noop.aenqueue)(1, two=3) if is_async else noop.enqueue(1, two=3)

    assert result.status == TaskResultStatus.READY
    assert result.is_finished is False
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
    assert result.task == noop
    assert (result.args, result.kwargs, result.attempts) == ([1], {"two": 3}, 0)
    assert result.errors == []
    assert result.enqueued_at is not None


@pytest.mark.parametrize("is_async", [False, True])
def test_enqueue_with_invalid_argument(sender, is_async):
    enqueue = async_to_sync(test_tasks.noop_task.aenqueue) if is_async else test_tasks.noop_task.enqueue
    with pytest.raises(TypeError, match="Unsupported type"):
        enqueue(datetime.now())  # noqa: DTZ005  # as Django's test


def test_get_result(sender):
    result = default_backend().enqueue(test_tasks.noop_task, (), {})

    assert default_backend().get_result(result.id) == result
    assert test_tasks.noop_task.get_result(result.id) == result


def test_get_result_async(sender):
    result = async_to_sync(default_backend().aenqueue)(test_tasks.noop_task, (), {})

    assert async_to_sync(default_backend().aget_result)(result.id) == result
    assert async_to_sync(test_tasks.noop_task.aget_result)(result.id) == result


def test_get_result_with_all_options(sender):
    """Beyond Django's test: the options of the call come back, too."""
    at = timezone.now()
    changed = test_tasks.noop_task.using(priority=7, queue_name="queue_1", run_after=at)

    result = changed.enqueue()

    assert default_backend().get_result(result.id).task == changed


def test_refresh_result(worker):
    for refresh in ("refresh", "arefresh"):
        result = test_tasks.calculate_meaning_of_life.enqueue()
        original = dataclasses.asdict(result)

        result.refresh()
        assert dataclasses.asdict(result) == original
        worker.run_until_idle()
        assert result.status == TaskResultStatus.READY
        result.refresh() if refresh == "refresh" else async_to_sync(result.arefresh)()
        assert result.status == TaskResultStatus.SUCCESSFUL


def test_get_missing_result(sender):
    for get in (
        default_backend().get_result,
        async_to_sync(default_backend().aget_result),
        test_tasks.noop_task.get_result,
        async_to_sync(test_tasks.noop_task.aget_result),
    ):
        with pytest.raises(TaskResultDoesNotExist, match="123"):
            get("123")


def test_get_incorrect_result(sender):
    result = default_backend().enqueue(test_tasks.noop_task_async, (), {})

    for get in (test_tasks.noop_task.get_result, async_to_sync(test_tasks.noop_task.aget_result)):
        with pytest.raises(TaskResultMismatch, match="Task does not match"):
            get(result.id)


def test_using_changes_a_copy(sender):
    now = timezone.now()
    first = test_tasks.noop_task

    assert (first.priority, first.using(priority=1).priority, first.priority) == (0, 1, 0)
    assert first.using(queue_name="queue_1").queue_name == "queue_1"
    assert first.queue_name == DEFAULT_TASK_QUEUE_NAME
    assert first.using(run_after=now).run_after == now
    assert first.run_after is None
    assert first.using() == first
    assert first.using() is not first
    chained = first.using(run_after=now).using(priority=10)
    assert (chained.priority, chained.run_after) == (10, now)


def test_using_unknown_backend():
    with pytest.raises(InvalidTaskBackend, match="The connection 'unknown' doesn't exist."):
        test_tasks.noop_task.using(backend="unknown")


@override_settings(TASKS=MISSING)
def test_using_missing_backend():
    with pytest.raises(InvalidTaskBackend, match="Could not find backend 'does.not.exist'"):
        test_tasks.noop_task.using(backend="missing")


def test_naive_datetime():
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        test_tasks.noop_task.using(run_after=datetime.now())  # noqa: DTZ005  # as Django's test


@pytest.mark.parametrize("priority", [-101, 101, 3.1])
def test_invalid_priority(priority):
    with pytest.raises(InvalidTask, match="priority must be a whole number between -100 and 100."):
        test_tasks.noop_task.using(priority=priority)


@pytest.mark.parametrize("priority", [100, -100, 0])
def test_valid_priority(priority):
    assert test_tasks.noop_task.using(priority=priority).priority == priority


def test_unknown_queue_name():
    with pytest.raises(InvalidTask, match="Queue 'queue-2' is not valid for backend."):
        test_tasks.noop_task.using(queue_name="queue-2")
    assert test_tasks.noop_task.using(queue_name="queue-2", backend="any").queue_name == "queue-2"


def test_call_task():
    assert test_tasks.calculate_meaning_of_life.call() == 42
    assert async_to_sync(test_tasks.calculate_meaning_of_life.acall)() == 42
    assert test_tasks.noop_task_async.call() is None
    assert async_to_sync(test_tasks.noop_task_async.acall)() is None


def test_invalid_function():
    for invalid in (any, lambda: None):
        with pytest.raises(InvalidTask, match="Task function must be defined at a module level."):
            task()(invalid)


def test_get_backend_name_and_module_path():
    assert isinstance(test_tasks.noop_task.get_backend(), MQTemplateBackend)
    assert test_tasks.noop_task.using(backend="once").get_backend().alias == "once"
    assert test_tasks.noop_task_async.name == "noop_task_async"
    assert test_tasks.noop_task.module_path == "jobs.tasks.noop_task"
    assert import_string(test_tasks.noop_task.module_path) is test_tasks.noop_task


def test_takes_context_without_taking_context():
    with pytest.raises(InvalidTask, match="does not have a first argument of 'context'"):
        task(takes_context=True)(test_tasks.calculate_meaning_of_life.func)


def test_validate_disallowed_async_task():
    with (
        mock.patch.multiple(default_backend(), supports_async_task=False),
        pytest.raises(InvalidTask, match="(?i)backend does not support async tasks."),
    ):
        default_backend().validate_task(test_tasks.noop_task_async)


def test_check():
    assert list(default_backend().check()) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_validate_on_enqueue(is_async):
    other = test_tasks.noop_task.using(queue_name="queue_1")
    enqueue = async_to_sync(other.aenqueue) if is_async else other.enqueue
    with override_settings(TASKS=ONE_QUEUE), pytest.raises(InvalidTask, match="Queue 'queue_1' is not valid"):
        enqueue()


def test_doesnt_wait_until_transaction_commit_by_default(sender):
    with transaction.atomic():
        result = test_tasks.noop_task.enqueue()
        assert result.enqueued_at is not None
        assert default_backend().get_result(result.id) == result

    assert default_backend().get_result(result.id) == result


def test_enqueue_logs(sender, caplog):
    with caplog.at_level(logging.DEBUG, LOGGER):
        result = test_tasks.noop_task.enqueue()

    assert [result.id in line and "enqueued" in line for line in lines(caplog)] == [True]


# --- tasks that have run: test_immediate_backend.py ----------------------------------------------------


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith(LOGGER)]


def run(worker, enqueued):
    worker.run_until_idle()
    enqueued.refresh()
    return enqueued


@BOTH
def test_task_runs(worker, noop):
    result = run(worker, noop.enqueue(1, two=3))

    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.is_finished is True
    assert result.last_attempted_at is not None
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.return_value is None
    assert result.task == noop
    assert (result.args, result.kwargs, result.attempts) == ([1], {"two": 3}, 1)


@pytest.mark.parametrize(
    ("failing", "exception", "message"),
    [
        (test_tasks.failing_task_value_error, ValueError, "This Task failed due to ValueError"),
        (test_tasks.failing_task_system_exit, SystemExit, "This Task failed due to SystemExit"),
    ],
)
def test_catches_exception(worker, caplog, failing, exception, message):
    result = run(worker, failing.enqueue())

    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [message in str(record.exc_info[1]) for record in errors] == [True]
    assert result.status == TaskResultStatus.FAILED
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert result.is_finished is True
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.errors[0].exception_class is exception
    assert result.errors[0].traceback.endswith(f"{exception.__name__}: {message}\n")
    assert result.task == failing


def test_complex_exception(worker):
    result = run(worker, test_tasks.complex_exception.enqueue())

    assert result.status == TaskResultStatus.FAILED
    assert result._return_value is None
    assert result.errors[0].exception_class is ValueError
    assert 'ValueError(ValueError("This task failed"))' in result.errors[0].traceback


def test_complex_return_value(worker):
    result = run(worker, test_tasks.complex_return_value.enqueue())

    assert result.status == TaskResultStatus.FAILED
    assert result._return_value is None
    assert result.errors[0].exception_class is TypeError
    assert "Unsupported type" in result.errors[0].traceback


def test_result(worker):
    assert run(worker, test_tasks.calculate_meaning_of_life.enqueue()).return_value == 42


def test_result_async(worker):
    assert run(worker, async_to_sync(test_tasks.calculate_meaning_of_life.aenqueue)()).return_value == 42


@pytest.mark.parametrize(
    ("which", "end"),
    [(test_tasks.noop_task, "SUCCESSFUL"), (test_tasks.failing_task_value_error, "FAILED")],
)
def test_logs_of_a_task(worker, caplog, which, end):
    with caplog.at_level(logging.DEBUG, LOGGER):
        result = run(worker, which.enqueue())

    found = lines(caplog)
    assert len(found) == 3
    assert all(result.id in line and "None" not in line for line in found)
    assert "enqueued" in found[0]
    assert "state=RUNNING" in found[1]
    assert f"state={end}" in found[2]


def test_takes_context(worker):
    result = run(worker, test_tasks.get_task_id.enqueue())

    assert result.return_value == result.id


def test_context(worker):
    assert run(worker, test_tasks.check_context.enqueue(1)).status == TaskResultStatus.SUCCESSFUL


def test_task_error_invalid_exception(worker):
    error = run(worker, test_tasks.failing_task_value_error.enqueue()).errors[0]

    invalid = (("subprocess.run", ValueError, "not reference a valid exc"), ("does.not", ImportError, "does"))
    for path, kind, text in invalid:
        changed = dataclasses.replace(error, exception_class_path=path)
        assert isinstance(changed, interface.TaskError)
        with pytest.raises(kind, match=text):
            _ = changed.exception_class

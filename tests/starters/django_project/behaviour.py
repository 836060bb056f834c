"""What the backend does beyond the contract: times, priorities, cancels, transactions, effects, and failures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import OperationalError, transaction
from django.test import override_settings
from jobs import tasks
from jobs.models import Effect

from mqtemplate.outbox.django import DjangoInbox
from mqtemplate_starter_django import MQTemplateBackend, template
from mqtemplate_starter_django.tasks.interface import TaskResultDoesNotExist, task_backends
from mqtemplate_starter_django.tasks.models import TaskRecord
from mqtemplate_starter_django.tasks.worker import TaskRunner

START = datetime(2026, 1, 1, tzinfo=UTC)


def status_of(result):
    result.refresh()
    return result.status


def send_again(result, backend="default", queue="default", level="normal"):
    topic = task_backends[backend].topic_of(queue, level)
    template().sync_send(topic, {"id": result.id, "priority": 0})


def effects():
    return sorted(Effect.objects.values_list("name", flat=True))


# --- times and priorities -----------------------------------------------------------------------------


def test_a_deferred_task_runs_at_its_millisecond_and_not_before(worker):
    """Microseconds are rounded up, and hours pass at once."""
    at = START + timedelta(hours=2, microseconds=1_300)

    result = tasks.note.using(run_after=at).enqueue("due")
    worker.advance("2h")
    worker.advance("1ms")
    assert (status_of(result), tasks.RAN) == ("READY", [])
    worker.advance("1ms")

    assert (status_of(result), tasks.RAN) == ("SUCCESSFUL", ["due"])
    assert result.enqueued_at == START
    assert result.started_at == START + timedelta(hours=2, milliseconds=2)


def test_a_time_that_has_passed_means_now(worker):
    tasks.note.using(run_after=START - timedelta(days=1)).enqueue("late")
    worker.run_until_idle()

    assert tasks.RAN == ["late"]


@override_settings(USE_TZ=False, TIME_ZONE="Europe/Berlin")
def test_without_time_zones_times_are_local(worker):
    result = tasks.note.using(run_after=datetime(2026, 1, 1, 3)).enqueue("two hours later")  # noqa: DTZ001
    worker.advance("119m")
    assert tasks.RAN == []
    worker.advance("1m")

    result.refresh()
    assert (tasks.RAN, result.started_at) == (["two hours later"], datetime(2026, 1, 1, 3))  # noqa: DTZ001


def test_tasks_of_a_higher_priority_run_first(worker):
    for priority in (-100, 0, 100, 7, -3):
        tasks.note.using(priority=priority).enqueue(priority)
    worker.run_until_idle()

    assert tasks.RAN == [100, 7, 0, -3, -100]


def test_all_queues_and_backends_have_workers(worker):
    tasks.note.using(queue_name="queue_1").enqueue("queue_1")
    tasks.note.using(backend="any", queue_name="a name with blanks").enqueue("any")
    tasks.note.using(backend="once").enqueue("once")
    worker.run_until_idle()

    assert sorted(tasks.RAN) == ["any", "once", "queue_1"]


# --- cancel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cancelled_task_never_runs_and_leaves_the_broker(worker, is_async):
    result = tasks.note.using(run_after=START + timedelta(hours=2)).enqueue("cancelled")
    worker.run_until_idle()
    assert len(template().pending().messages) == 1

    backend = task_backends["default"]
    assert (async_to_sync(backend.acancel) if is_async else backend.cancel)(result.id) is True
    worker.advance("3h")

    assert (status_of(result), tasks.RAN) == ("FAILED", [])
    assert result.errors[0].exception_class.__name__ == "TaskCancelledError"
    assert "the task was cancelled before it started" in result.errors[0].traceback
    assert len(template().pending().messages) == 0


def test_a_task_that_is_still_in_the_outbox_can_be_cancelled(worker):
    result = tasks.note.enqueue("cancelled")

    assert task_backends["default"].cancel(result.id) is True
    worker.run_until_idle()

    assert (status_of(result), tasks.RAN) == ("FAILED", [])


def test_a_cancel_is_a_part_of_its_transaction(worker):
    result = tasks.note.enqueue("runs")

    with transaction.atomic():
        assert task_backends["default"].cancel(result.id) is True
        transaction.set_rollback(True)
    worker.run_until_idle()

    assert (status_of(result), tasks.RAN) == ("SUCCESSFUL", ["runs"])


def test_a_task_that_has_run_cannot_be_cancelled(worker):
    result = tasks.note.enqueue("ran")
    worker.run_until_idle()

    assert task_backends["default"].cancel(result.id) is False
    assert status_of(result) == "SUCCESSFUL"


def test_a_cancel_of_an_unknown_task_is_an_error(sender):
    with pytest.raises(TaskResultDoesNotExist, match="nothing"):
        task_backends["default"].cancel("nothing")


# --- transactions and effects -------------------------------------------------------------------------


def test_a_task_of_a_transaction_that_is_rolled_back_does_not_exist(worker):
    with transaction.atomic():
        result = tasks.note.enqueue("never")
        transaction.set_rollback(True)
    worker.run_until_idle()

    assert tasks.RAN == []
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()


def test_a_message_that_comes_twice_runs_its_task_once(worker):
    result = tasks.note.enqueue("once")
    worker.run_until_idle()
    send_again(result)
    worker.run_until_idle()

    assert (status_of(result), result.attempts, tasks.RAN) == ("SUCCESSFUL", 1, ["once"])


def test_effects_of_a_task_that_fails_are_rolled_back(worker):
    result = tasks.store_and_fail.enqueue("lost")
    worker.run_until_idle()

    assert (status_of(result), effects()) == ("FAILED", [])
    assert result.errors[0].exception_class is ValueError


def test_effects_and_the_next_task_are_committed_with_the_result(worker):
    result = tasks.store_and_chain.enqueue("first")
    worker.run_until_idle()

    assert (status_of(result), effects(), tasks.RAN) == ("SUCCESSFUL", ["first"], ["committed", "first"])


def test_async_tasks_are_a_part_of_the_transaction(worker):
    result = tasks.store_async.using(backend="once").enqueue("async")
    worker.run_until_idle()

    assert (status_of(result), result.return_value, effects()) == ("SUCCESSFUL", "async", ["async"])


def test_the_inbox_refuses_the_effect_of_a_second_worker(worker):
    """Two workers may run a task at the same time when queues move; here the other one has committed first."""
    result = tasks.store_and_chain.enqueue("mine")
    with transaction.atomic():
        DjangoInbox().is_new(result.id, "task:once")
    worker.run_until_idle()

    assert (effects(), tasks.RAN) == ([], [])


# --- failures -----------------------------------------------------------------------------------------


def test_a_worker_waits_while_the_database_fails(worker):
    result = tasks.note.enqueue("later")
    original, errors = TaskRunner._claim, [OperationalError("database is down")]

    def claim(self, *arguments):
        if errors:
            raise errors.pop()
        return original(self, *arguments)

    with mock.patch.object(TaskRunner, "_claim", claim):
        worker.run_until_idle()
        assert (status_of(result), errors) == ("READY", [])
        worker.advance("5s")

    assert (status_of(result), result.attempts) == ("SUCCESSFUL", 1)


def test_a_task_whose_result_could_not_be_stored_runs_again(worker):
    """At least once: only a backend with EFFECT_ONCE commits the effect and the result together."""
    result = tasks.note.enqueue("twice")
    original, errors = TaskRecord.succeed, [OperationalError("database is down")]

    def succeed(self, *arguments):
        if errors:
            raise errors.pop()
        return original(self, *arguments)

    with mock.patch.object(TaskRecord, "succeed", succeed):
        worker.advance("5s")

    assert (status_of(result), result.attempts, tasks.RAN) == ("SUCCESSFUL", 2, ["twice", "twice"])


def test_a_task_whose_workers_died_fails_after_max_attempts(worker):
    result = tasks.store_and_chain.enqueue("poison")
    TaskRecord.objects.filter(pk=result.id).update(status="RUNNING", worker_ids=["a-1", "a-2"])
    worker.run_until_idle()

    assert (status_of(result), effects()) == ("FAILED", [])
    assert result.errors[0].exception_class.__name__ == "TaskAbandonedError"
    assert "2 workers started the task, and died or lost the database" in result.errors[0].traceback


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("jobs.tasks.gone", "ImportError"),
        ("os.remove", "SuspiciousOperation"),
    ],
)
def test_a_row_that_names_no_task_fails(worker, path, error):
    """Nothing but a task can run, whatever the row or a message names."""
    result = tasks.note.enqueue("gone")
    TaskRecord.objects.filter(pk=result.id).update(task_path=path)
    worker.run_until_idle()

    record = TaskRecord.objects.get(pk=result.id)
    assert (record.status, tasks.RAN) == ("FAILED", [])
    assert record.errors[0]["exception_class_path"].endswith(error)


def test_a_message_without_a_row_runs_nothing(worker):
    result = tasks.note.enqueue("deleted")
    TaskRecord.objects.filter(pk=result.id).delete()
    worker.run_until_idle()

    assert tasks.RAN == []


def test_results_are_kept_for_thirty_days(worker):
    first = tasks.note.enqueue("first")
    worker.advance("29d")
    tasks.note.enqueue("second")
    worker.run_until_idle()
    assert status_of(first) == "SUCCESSFUL"
    worker.advance("2d")
    second = tasks.note.enqueue("third")
    worker.run_until_idle()

    with pytest.raises(TaskResultDoesNotExist):
        first.refresh()
    assert status_of(second) == "SUCCESSFUL"


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"THREAD": 1}, r"TASKS\['jobs'\]\['OPTIONS'\] has no option 'THREAD'; did you mean 'THREADS'\?"),
        ({"XY": 1}, "has no option 'XY'; allowed are THREADS, EFFECT_ONCE, MAX_ATTEMPTS, KEEP, TOPIC"),
        ({"THREADS": 0}, r"\['THREADS'\] must be a whole number from 1 to 1000, got 0"),
        ({"MAX_ATTEMPTS": "3"}, r"\['MAX_ATTEMPTS'\] must be a whole number from 1 to 1000, got '3'"),
        ({"EFFECT_ONCE": "no"}, r"\['EFFECT_ONCE'\] must be True or False, got 'no'"),
        ({"KEEP": "soon"}, r"\['KEEP'\] must be a duration such as '30d' or a timedelta, got 'soon'"),
        ({"TOPIC": "a b"}, r"\['TOPIC'\]: .*'a b'"),
        ({"TOPIC": 7}, r"\['TOPIC'\]: a topic must be text, got 7"),
    ],
)
def test_invalid_options_are_named(options, text):
    with pytest.raises(ImproperlyConfigured, match=text):
        MQTemplateBackend("jobs", {"OPTIONS": options})


def test_a_queue_needs_a_name_that_a_topic_can_have():
    with pytest.raises(ImproperlyConfigured, match=r"TASKS\['jobs'\]\['QUEUES'\]: 'my mails': .*my mails"):
        MQTemplateBackend("jobs", {"QUEUES": ["my mails"]})


@override_settings(
    INSTALLED_APPS=["mqtemplate_starter_django", "jobs"],
    TASKS={name: {"BACKEND": "mqtemplate_starter_django.MQTemplateBackend"} for name in ("default", "once")},
)
def test_check_names_the_apps_that_are_missing():
    errors = task_backends["default"].check()

    assert [error.id for error in errors] == ["mqtemplate.E002"]
    assert errors[0].msg.endswith("lacks 'mqtemplate_starter_django.tasks', 'mqtemplate.outbox.django'")
    assert errors[0].hint == "add them, and run 'manage.py migrate'"


def test_the_migration_is_complete():
    call_command("makemigrations", "--check", "--dry-run", "mqtemplate_tasks", verbosity=0)


@override_settings(TASKS={**settings.TASKS, "missing": {"BACKEND": "does.not.exist"}})
def test_a_backend_that_cannot_be_imported_does_not_stop_the_others(worker, caplog):
    """As in Django, where its use is an error, and ``manage.py check`` finds it."""
    tasks.note.enqueue("runs")
    worker.run_until_idle()

    assert tasks.RAN == ["runs"]
    assert "task.backend_skipped alias=missing reason=\"Could not find backend 'does.not.exist'" in caplog.text

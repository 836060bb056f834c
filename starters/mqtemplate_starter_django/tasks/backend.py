"""The backend for ``TASKS``: a row in the database, and a message in the same transaction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.db import transaction
from django.utils import timezone
from django.utils.crypto import get_random_string

from mqtemplate import Clock
from mqtemplate_starter_django.project import messages, outbox, template
from mqtemplate_starter_django.tasks.interface import (
    BaseTaskBackend,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from mqtemplate_starter_django.tasks.options import TaskOptions, checked_topic
from mqtemplate_starter_django.tasks.priorities import LEVELS, level_of

_APPS = ("mqtemplate_starter_django", "mqtemplate_starter_django.tasks", "mqtemplate.outbox.django")


class TaskCancelledError(Exception):
    """Error in the result of a task that was cancelled before it started."""


class MQTemplateBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Backend of Django's tasks: ``run_after`` waits on the disk of the broker, and results are in the database.

    ::

        TASKS = {"default": {"BACKEND": "mqtemplate_starter_django.MQTemplateBackend"}}

    A task is a row of `TaskRecord` and a message of the outbox, both in the current transaction: it runs if, and only
    if, the transaction is committed. ``manage.py mqtemplate run`` is the worker.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.task_options = TaskOptions.read(alias, self.options)
        for queue_name in self.queues:
            checked_topic(f"TASKS[{alias!r}]['QUEUES']: {queue_name!r}", self.topic_of(queue_name, next(iter(LEVELS))))

    def topic_of(self, queue_name: str, level: str) -> str:
        """Return the topic of a queue and a level of priorities. If all names of queues are allowed they share one."""
        queue = (queue_name,) if self.queues else ()
        return "-".join((self.task_options.topic, *queue, level))

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Enqueue a task in the current transaction; outside of one at once.

        Raises:
            InvalidTask: The task does not fit this backend.
            TypeError: An argument has no form in JSON.
        """
        from mqtemplate_starter_django.tasks.models import TaskRecord

        self.validate_task(task)
        now_ms = messages().get(Clock).now_ms()  # type: ignore[type-abstract]  # selected by its base class
        record = TaskRecord(
            id=get_random_string(32),
            task_path=task.module_path,
            args=normalize_json(list(args)),
            kwargs=normalize_json(dict(kwargs)),
            priority=task.priority,
            queue_name=task.queue_name,
            backend_name=self.alias,
            run_after=task.run_after,
            enqueued_at=as_datetime(now_ms),
        )
        run_after_ms = _epoch_ms(task.run_after)
        with transaction.atomic():
            record.save(force_insert=True)
            outbox().send(
                self.topic_of(task.queue_name, level_of(task.priority)),
                {"id": record.id, "priority": task.priority},
                keys=record.id,
                deliver_at=run_after_ms if run_after_ms > now_ms else None,
            )
        result = record.result()
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result of a task.

        Raises:
            TaskResultDoesNotExist: There is no such task, or its result is not kept any more.
        """
        from mqtemplate_starter_django.tasks.models import TaskRecord

        record = TaskRecord.objects.filter(pk=str(result_id), backend_name=self.alias).first()
        if record is None:
            raise TaskResultDoesNotExist(result_id)
        return record.result()

    def cancel(self, result_id: str) -> bool:
        """Cancel a task that has not started, in the current transaction.

        Returns:
            True: it never runs, and its result is ``FAILED`` with `TaskCancelledError`. False: it has started.

        Raises:
            TaskResultDoesNotExist: There is no such task.
        """
        from mqtemplate_starter_django.tasks.models import TaskRecord, error_fields

        own = TaskRecord.objects.filter(pk=str(result_id), backend_name=self.alias)
        now = as_datetime(messages().get(Clock).now_ms())  # type: ignore[type-abstract]  # selected by its base class
        error = error_fields(TaskCancelledError("the task was cancelled before it started"))
        is_cancelled = own.filter(status=TaskResultStatus.READY).update(
            status=TaskResultStatus.FAILED, finished_at=now, errors=[error]
        )
        if not is_cancelled and not own.exists():
            raise TaskResultDoesNotExist(result_id)
        if is_cancelled:
            # The row decides. This only frees the place of the message in the broker, if it is there already.
            transaction.on_commit(lambda: template().cancel(key=str(result_id)), robust=True)
        return bool(is_cancelled)

    async def acancel(self, result_id: str) -> bool:
        """Do `cancel` in an async view."""
        return await sync_to_async(self.cancel, thread_sensitive=True)(result_id)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Report apps that are missing as ``mqtemplate.E002``."""
        missing = [name for name in _APPS if not apps.is_installed(name)]
        if not missing:
            return []
        names = ", ".join(map(repr, missing))
        return [
            Error(
                f"TASKS[{self.alias!r}] needs its tables and its worker: INSTALLED_APPS lacks {names}",
                hint="add them, and run 'manage.py migrate'",
                id="mqtemplate.E002",
            )
        ]


def as_datetime(now_ms: int) -> datetime:
    """Return epoch milliseconds as aware or naive datetime, as the setting ``USE_TZ`` says."""
    aware = datetime.fromtimestamp(now_ms / 1_000, UTC)
    return aware if settings.USE_TZ else timezone.make_naive(aware)


def _epoch_ms(run_after: datetime | None) -> int:
    """Return a time in epoch milliseconds, rounded up: a task must not run early."""
    if run_after is None:
        return 0
    aware = timezone.make_aware(run_after) if timezone.is_naive(run_after) else run_after
    return math.ceil(aware.timestamp() * 1_000)

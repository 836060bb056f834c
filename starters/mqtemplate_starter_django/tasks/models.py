"""The table of the tasks: arguments, state and result of each one. A message only says which row is due."""

from __future__ import annotations

from datetime import datetime
from traceback import format_exception
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.db import models
from django.utils.module_loading import import_string

from mqtemplate_starter_django.tasks.interface import Task, TaskError, TaskResult, TaskResultStatus

UNFINISHED = (TaskResultStatus.READY, TaskResultStatus.RUNNING)


class TaskRecord(models.Model):  # type: ignore[misc]  # Django has no types
    """One task that was enqueued. The row decides what runs: a message can name no function and no arguments."""

    id = models.CharField(primary_key=True, max_length=64)
    status = models.CharField(max_length=10, default=TaskResultStatus.READY)
    task_path = models.TextField()
    args = models.JSONField()
    kwargs = models.JSONField()
    priority = models.SmallIntegerField()
    queue_name = models.TextField()
    backend_name = models.TextField()
    run_after = models.DateTimeField(null=True)
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True, db_index=True)
    worker_ids = models.JSONField(default=list)
    errors = models.JSONField(default=list)
    return_value = models.JSONField(null=True)

    class Meta:
        db_table = "mqtemplate_task"

    def __str__(self) -> str:
        return f"{self.id}: {self.task_path} {self.status}"

    @property
    def task(self) -> Task:
        """The task, with the options of the call.

        Raises:
            ImportError: Its function does not exist any more.
            SuspiciousOperation: The path names something else.
        """
        task = import_string(self.task_path)
        if not isinstance(task, Task):
            raise SuspiciousOperation(f"task {self.id}: {self.task_path} is a {type(task).__name__}, not a task")
        return task.using(
            priority=self.priority,
            queue_name=self.queue_name,
            run_after=self.run_after,
            backend=self.backend_name,
        )

    def result(self) -> TaskResult:
        """Return the result of this task as it is now; errors as of `task`."""
        result = TaskResult(
            task=self.task,
            id=self.id,
            status=TaskResultStatus[self.status],
            enqueued_at=self.enqueued_at,
            started_at=self.started_at,
            last_attempted_at=self.last_attempted_at,
            finished_at=self.finished_at,
            args=self.args,
            kwargs=self.kwargs,
            backend=self.backend_name,
            errors=[TaskError(**error) for error in self.errors],
            worker_ids=list(self.worker_ids),
        )
        object.__setattr__(result, "_return_value", self.return_value)  # as the backends of Django do
        return result

    def succeed(self, value: Any, now: datetime) -> None:
        """Store the return value."""
        self.status, self.return_value, self.finished_at = TaskResultStatus.SUCCESSFUL, value, now
        self.save(update_fields=["status", "return_value", "finished_at"])

    def fail(self, error: BaseException, now: datetime) -> None:
        """Store an error as the last one."""
        self.errors = [*self.errors, error_fields(error)]
        self.status, self.return_value, self.finished_at = TaskResultStatus.FAILED, None, now
        self.save(update_fields=["status", "return_value", "errors", "finished_at"])


def error_fields(error: BaseException) -> dict[str, str]:
    """Return the fields of a ``TaskError``."""
    kind = type(error)
    trace = "".join(format_exception(error)).replace("\0", "\\0")  # which PostgreSQL cannot store
    return {"exception_class_path": f"{kind.__module__}.{kind.__qualname__}", "traceback": trace}

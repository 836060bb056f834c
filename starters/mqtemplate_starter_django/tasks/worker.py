"""The worker: listeners that run the tasks that are due."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from django.db import InterfaceError, OperationalError, transaction

from mqtemplate import Clock, ConsumeFromWhere, PauseListener, message_listener
from mqtemplate.event_log import get_logger
from mqtemplate.outbox.django import DjangoInbox
from mqtemplate_starter_django.tasks.backend import MQTemplateBackend, as_datetime
from mqtemplate_starter_django.tasks.interface import (
    DEFAULT_TASK_QUEUE_NAME,
    InvalidTaskBackend,
    TaskContext,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from mqtemplate_starter_django.tasks.models import UNFINISHED, TaskRecord
from mqtemplate_starter_django.tasks.options import TaskOptions
from mqtemplate_starter_django.tasks.priorities import LEVELS, PrioritySlots

_log = get_logger("mqtemplate.django")
_PAUSE = "5s"
_LONGEST_TASK = "7d"
_PRUNE_INTERVAL_MS, _PRUNE_COUNT = 60_000, 1_000


class TaskAbandonedError(Exception):
    """Error in the result of a task whose workers died: it is not tried again."""


@dataclass(frozen=True, slots=True)
class DueTask:
    """Body of a message.

    Attributes:
        id: Id of the row.
        priority: Priority of the task.
    """

    id: str
    priority: int


def task_listeners() -> list[Callable[..., None]]:
    """Return the listeners of all backends in ``TASKS`` that are a `MQTemplateBackend`, the most urgent level first."""
    listeners: list[Callable[..., None]] = []
    for alias in task_backends:
        try:
            backend = task_backends[alias]
        except InvalidTaskBackend as error:  # Django, too, reports it where it is used
            _log.warning("task.backend_skipped", alias=alias, reason=str(error))
            continue
        if isinstance(backend, MQTemplateBackend):
            listeners += _listeners_of(backend)
    return listeners


def _listeners_of(backend: MQTemplateBackend) -> list[Callable[..., None]]:
    slots = PrioritySlots(backend.task_options.threads)
    runner = TaskRunner(backend.alias, backend.task_options)
    queues = sorted(backend.queues) or [DEFAULT_TASK_QUEUE_NAME]
    return [_listener(backend, queue, level, slots, runner) for level in LEVELS for queue in queues]


def _listener(
    backend: MQTemplateBackend, queue: str, level: str, slots: PrioritySlots, runner: TaskRunner
) -> Callable[..., None]:
    topic = backend.topic_of(queue, level)

    @message_listener(
        topic,
        consumer_group=topic,
        id=f"tasks-{level}.{backend.alias}.{queue}",
        consume_thread_number=backend.task_options.threads,
        consume_timeout=_LONGEST_TASK,
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    def run_task(due: DueTask, clock: Clock) -> None:
        # On a virtual clock handlers run one after the other, so the order of the listeners is the priority.
        with nullcontext() if clock.is_virtual else slots.slot(due.priority):
            try:
                runner.run(due.id, clock)
            except (OperationalError, InterfaceError) as error:
                raise PauseListener(_PAUSE, f"the database of the tasks fails: {error}") from error

    return run_task


class TaskRunner:
    """Runner of the tasks of one backend. Each step is a transaction of its own.

    Args:
        alias: Alias of the backend.
        options: Its options.
    """

    def __init__(self, alias: str, options: TaskOptions) -> None:
        self._alias = alias
        self._options = options
        self._pruned_ms = 0
        self._prune_lock = threading.Lock()

    def run(self, task_id: str, clock: Clock) -> None:
        """Run a task if it is not finished. Its errors are stored; those of the database are raised."""
        record = self._claim(task_id, clock)
        if record is None:
            _log.debug("task.skipped", id=task_id)  # a repeat, or it was cancelled
            return
        try:
            result = record.result()
        except Exception as error:  # its code is gone, or is not a task
            record.fail(error, _now(clock))
            _log.error("task.failed", id=task_id, path=record.task_path, error=str(error))
            return
        self._execute(record, result, clock)
        self._prune(clock)

    def _claim(self, task_id: str, clock: Clock) -> TaskRecord | None:
        with transaction.atomic():
            # A write comes first: SQLite would refuse to turn a reader into a writer while others write.
            unfinished = TaskRecord.objects.filter(pk=task_id, backend_name=self._alias, status__in=UNFINISHED)
            if not unfinished.update(status=TaskResultStatus.RUNNING, last_attempted_at=_now(clock)):
                return None
            record: TaskRecord = TaskRecord.objects.get(pk=task_id)
            if len(record.worker_ids) >= self._options.max_attempts:
                reason = f"{len(record.worker_ids)} workers started the task, and died or lost the database"
                record.fail(TaskAbandonedError(reason), _now(clock))
                return None
            record.started_at = record.started_at or record.last_attempted_at
            record.worker_ids = [*record.worker_ids, _worker_id()]
            record.save(update_fields=["started_at", "worker_ids"])
            return record

    def _execute(self, record: TaskRecord, result: TaskResult, clock: Clock) -> None:
        sender = type(result.task.get_backend())
        task_started.send(sender=sender, task_result=result)
        try:
            if self._options.effect_once:
                with transaction.atomic():
                    if not DjangoInbox(clock=clock).is_new(record.id, f"task:{self._alias}"):
                        return  # another worker that ran it at the same time was first
                    record.succeed(_call(result), _now(clock))
            else:
                self._succeed(record, _call(result), clock)
        except KeyboardInterrupt:
            raise
        except _StoreError as error:
            raise error.cause from error
        except BaseException as error:  # the result has it, as Django demands, `SystemExit` too
            record.fail(error, _now(clock))
            task_finished.send(sender=sender, task_result=record.result())
        else:
            task_finished.send(sender=sender, task_result=record.result())

    def _succeed(self, record: TaskRecord, value: Any, clock: Clock) -> None:
        try:
            record.succeed(value, _now(clock))
        except (OperationalError, InterfaceError) as error:
            raise _StoreError(error) from error

    def _prune(self, clock: Clock) -> None:
        """Delete results that are too old, at most a thousand a minute."""
        with self._prune_lock:
            now_ms = clock.now_ms()
            if now_ms < self._pruned_ms + _PRUNE_INTERVAL_MS:
                return
            self._pruned_ms = now_ms
        old = TaskRecord.objects.filter(finished_at__lt=as_datetime(now_ms - self._options.keep_ms))
        TaskRecord.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:_PRUNE_COUNT])).delete()


class _StoreError(Exception):
    """The database failed while it stored the result: not an error of the task, which has succeeded."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _call(result: TaskResult) -> Any:
    """Call the function of a task, and return its value as JSON has it."""
    context = (TaskContext(task_result=result),) if result.task.takes_context else ()
    return normalize_json(result.task.call(*context, *result.args, **result.kwargs))


def _now(clock: Clock) -> Any:
    return as_datetime(clock.now_ms())


def _worker_id() -> str:
    """Return the name of this process."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}"

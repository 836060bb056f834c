"""Before: reminders as Celery tasks with an ETA. Each one waits in the memory of a worker.

``celery -A examples.celery_eta.before:celery worker``
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from celery import Celery

celery = Celery("reminders", broker=os.environ.get("CELERY_BROKER", "redis://localhost"))


@celery.task(bind=True, name="remind", max_retries=3)  # type: ignore[untyped-decorator]
def remind(self, order: str, customer: str) -> None:  # type: ignore[no-untyped-def]  # as Celery's documentation writes it
    """Remind a customer; try again in ten minutes if that fails."""
    try:
        print(f"{customer}, please pay order {order}", flush=True)
    except OSError as error:
        raise self.retry(exc=error, countdown=600) from error


def place_order(order: str, customer: str) -> str:
    """Remind the customer in three hours; return the id of the task."""
    task = remind.apply_async((order, customer), countdown=3 * 3_600)
    return str(task.id)


def place_order_until_monday(order: str, customer: str) -> str:
    """Remind the customer at a time."""
    task = remind.apply_async((order, customer), eta=datetime.now(UTC) + timedelta(days=3))
    return str(task.id)


def paid(task_id: str) -> None:
    """Revoke the reminder: a list in the memory of the workers, which a restart of all of them forgets."""
    celery.control.revoke(task_id)

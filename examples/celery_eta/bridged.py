"""With one line more: the same tasks, and what has an ETA waits in mqtemplate. Workers keep running them.

``celery -A examples.celery_eta.bridged:celery worker``
"""

from __future__ import annotations

from pathlib import Path

from mqtemplate import ScheduleChange
from mqtemplate_starter_celery import MQTemplate

from .before import celery, place_order, place_order_until_monday, remind

messages = MQTemplate(app=celery, config_folder=Path(__file__).parent)

__all__ = ["celery", "messages", "paid", "place_order", "place_order_until_monday", "remind"]


def paid(task_id: str) -> ScheduleChange:
    """Cancel the reminder: it is gone, whatever restarts."""
    return messages.cancel(task_id)

"""After: the same reminders as a listener of mqtemplate, without Celery.

``mqtemplate run examples.celery_eta.after:app``
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from mqtemplate import MQApplication, RocketMQTemplate, ScheduleChange, message_listener, service


@message_listener(topic="reminders", consumer_group="mailer", retry=["10m", "10m", "10m"], retry_for=(OSError,))
def remind(reminder: dict[str, str]) -> None:
    """Remind a customer; try again in ten minutes if that fails."""
    print(f"{reminder['customer']}, please pay order {reminder['order']}", flush=True)


@service
class Orders:
    """Orders, and their reminders."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._template = template

    def place_order(self, order: str, customer: str) -> None:
        """Remind the customer in three hours."""
        self._template.sync_send("reminders", {"order": order, "customer": customer}, delay="3h", keys=order)

    def place_order_until_monday(self, order: str, customer: str) -> None:
        """Remind the customer at a time."""
        at = datetime.now(UTC) + timedelta(days=3)
        self._template.sync_send("reminders", {"order": order, "customer": customer}, deliver_at=at, keys=order)

    def paid(self, order: str) -> ScheduleChange:
        """Cancel the reminder by the number of the order."""
        return self._template.cancel(key=order, topic="reminders")


app = MQApplication(remind, Orders, config_folder=Path(__file__).parent)

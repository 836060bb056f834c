"""The listener. It runs on the event loop of the web server, or in a process of ``mqtemplate run``."""

from __future__ import annotations

from pydantic import BaseModel

from mqtemplate import message_listener


class Reminder(BaseModel):
    """Body of a message of the topic ``reminders``."""

    order_id: str
    customer: str
    cents: int


@message_listener(topic="reminders", consumer_group="mailer")
async def remind(reminder: Reminder) -> None:
    """Remind a customer."""
    print(f"{reminder.customer}, please pay {reminder.cents / 100:.2f} for order {reminder.order_id}", flush=True)

"""The listener. Each call has an application context of its own, so ``current_app`` works."""

from __future__ import annotations

from dataclasses import dataclass

from flask import current_app

from mqtemplate import message_listener


@dataclass(frozen=True)
class Reminder:
    """Body of a message of the topic ``reminders``."""

    order_id: str
    customer: str


@message_listener(topic="reminders", consumer_group="mailer")
def remind(reminder: Reminder) -> None:
    """Remind a customer."""
    currency = current_app.config["CURRENCY"]
    print(f"{reminder.customer}, please pay order {reminder.order_id} in {currency}", flush=True)

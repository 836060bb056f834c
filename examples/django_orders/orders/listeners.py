"""Listeners: the starter finds this module, since the app is installed."""

from __future__ import annotations

from mqtemplate import message_listener

from .models import Order


@message_listener(topic="reminders", consumer_group="mailer")
def remind(order_id: int) -> None:
    """Remind a customer. A repeated message changes nothing."""
    if Order.objects.filter(pk=order_id, is_reminded=False).update(is_reminded=True):
        print(f"please pay {Order.objects.get(pk=order_id)}", flush=True)

"""Reminders of unpaid orders: each one is a delayed message, which a payment cancels."""

from __future__ import annotations

from mqtemplate import MessageExt, Send, message_listener
from mqtemplate.asyncapi import documents_send
from mqtemplate.outbox import SQLAlchemyInbox

from .database import UnitOfWork
from .messages import Mail, PaymentReminder, StockChange
from .model import Order, OrderState, euros
from .orders import key_of
from .settings import Settings


@message_listener(topic="reminders", consumer_group="reminders", selector_expression="unpaid")
class Reminders:
    """Listener for reminders that fell due."""

    def __init__(self, settings: Settings, inbox: SQLAlchemyInbox) -> None:
        self._delays = settings.remind_after
        self._inbox = inbox

    @documents_send("mails", Mail)
    @documents_send("reminders:unpaid", PaymentReminder, delay="${shop.remind-after}")
    @documents_send("orders:cancelled", StockChange)
    def on_message(self, reminder: PaymentReminder, unit: UnitOfWork, message: MessageExt) -> list[Send] | None:
        """Remind the customer and send the next reminder; after the last one cancel the order."""
        if not self._inbox.is_new(unit.session, message):
            return None
        order = unit.session.get(Order, reminder.order, with_for_update=True)
        if order is None or order.state != OrderState.RESERVED:
            return None
        return self._remind(order, reminder.number) if reminder.number <= len(self._delays) else self._cancel(order)

    def _remind(self, order: Order, number: int) -> list[Send]:
        is_last = number == len(self._delays)
        text = f"Please pay order {order.id}: {euros(order.total)}."
        following = PaymentReminder(order=order.id, number=number + 1)
        return [
            Send("mails", Mail(to=order.customer, text=text + " This is the last reminder." * is_last)),
            Send(
                "reminders:unpaid",
                following,
                delay=self._delays[min(number, len(self._delays) - 1)],
                keys=key_of(order.id),
            ),
        ]

    def _cancel(self, order: Order) -> list[Send]:
        order.state = OrderState.CANCELLED
        change = StockChange(order=order.id, article=order.article, quantity=order.quantity)
        return [
            Send("mails", Mail(to=order.customer, text=f"Order {order.id} was not paid in time and is cancelled.")),
            Send("orders:cancelled", change, hash_key=order.article),
        ]

"""The warehouse: the stock of each article changes in the order of the messages."""

from __future__ import annotations

from mqtemplate import ConsumeMode, DeadLetter, MessageExt, Send, message_listener, on_tag
from mqtemplate.asyncapi import documents_send
from mqtemplate.outbox import SQLAlchemyInbox

from .database import UnitOfWork
from .messages import Mail, StockChange
from .model import Article, Order, OrderState


@message_listener(topic="orders", consumer_group="warehouse", consume_mode=ConsumeMode.ORDERLY)
class Warehouse:
    """Listener for changes of the stock. All messages of one article are in one queue: ``hash_key=article``."""

    def __init__(self, inbox: SQLAlchemyInbox) -> None:
        self._inbox = inbox

    @on_tag("placed")
    @documents_send("mails", Mail)
    def reserve(self, change: StockChange, unit: UnitOfWork, message: MessageExt) -> Send | None:
        """Reserve what an order needs, or reject the order."""
        if not self._inbox.is_new(unit.session, message):
            return None
        article = unit.session.get(Article, change.article, with_for_update=True)
        if article is None:
            raise DeadLetter(f"there is no article {change.article!r}")  # no retry helps
        order = unit.session.get_one(Order, change.order)
        if article.stock < change.quantity:
            order.state = OrderState.REJECTED
            return rejection(order, f"the {article.id} is sold out")
        article.stock -= change.quantity
        order.state, order.cents = OrderState.RESERVED, article.cents
        return None

    @on_tag("cancelled")
    def put_back(self, change: StockChange, unit: UnitOfWork, message: MessageExt) -> None:
        """Put the article of a cancelled order back."""
        if self._inbox.is_new(unit.session, message):
            unit.session.get_one(Article, change.article, with_for_update=True).stock += change.quantity


@message_listener(topic="%DLQ%warehouse", consumer_group="support")
@documents_send("mails", Mail)
def reject(
    change: StockChange, unit: UnitOfWork, headers: dict[str, str], inbox: SQLAlchemyInbox, message: MessageExt
) -> Send | None:
    """Reject an order that the warehouse could not handle."""
    order = unit.session.get(Order, change.order)
    if order is None or order.state != OrderState.PLACED or not inbox.is_new(unit.session, message):
        return None
    order.state = OrderState.REJECTED
    return rejection(order, headers["dead_letter_message"])


def rejection(order: Order, reason: str) -> Send:
    """Return the mail to send to the customer."""
    return Send("mails", Mail(to=order.customer, text=f"Sorry, order {order.id} is cancelled: {reason}."))

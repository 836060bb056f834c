"""The service of orders: each method is one transaction."""

from __future__ import annotations

import sqlalchemy as sa

from mqtemplate import Clock, RocketMQTemplate, ScheduleChangeStatus, service
from mqtemplate.asyncapi import documents_send
from mqtemplate.outbox import SQLAlchemyOutbox

from .database import Database
from .messages import OrderPaid, PaymentReminder, StockChange
from .model import Order, OrderState
from .settings import Settings


class UnknownOrderError(Exception):
    """There is no order of this number."""


class OrderStateError(Exception):
    """The order is in a state that does not allow the call."""


def key_of(order_id: int) -> str:
    """Return the key of an order's reminder, by which it is cancelled."""
    return f"order-{order_id}"


@service
class OrderService:
    """Places orders and takes payments."""

    def __init__(
        self, database: Database, outbox: SQLAlchemyOutbox, template: RocketMQTemplate, settings: Settings, clock: Clock
    ) -> None:
        self._database = database
        self._outbox = outbox
        self._template = template
        self._settings = settings
        self._clock = clock

    @documents_send("orders:placed", StockChange)
    @documents_send("reminders:unpaid", PaymentReminder, delay="${shop.remind-after}")
    def place(self, customer: str, article: str, quantity: int) -> Order:
        """Store an order. Its messages leave with the transaction: to the warehouse, and the first reminder."""
        with self._database.begin() as session:
            order = Order(customer=customer, article=article, quantity=quantity)
            session.add(order)
            session.flush()  # the database gives it its number
            change = StockChange(order=order.id, article=article, quantity=quantity)
            self._outbox.send(session, "orders:placed", change, hash_key=article)
            reminder = PaymentReminder(order=order.id, number=1)
            self._outbox.send(
                session, "reminders:unpaid", reminder, delay=self._settings.remind_after[0], keys=key_of(order.id)
            )
        return order

    @documents_send("orders:paid", OrderPaid)
    def pay(self, order_id: int) -> ScheduleChangeStatus:
        """Take the payment of a reserved order, and cancel its reminder. Return what became of the reminder.

        Raises:
            UnknownOrderError: There is no such order.
            OrderStateError: It is not reserved.
        """
        with self._database.begin() as session:
            # One statement that checks and changes: a reminder that cancels the order may run at the same time.
            changed = session.execute(
                sa.update(Order)
                .where(Order.id == order_id, Order.state == OrderState.RESERVED)
                .values(state=OrderState.PAID, paid_at_ms=self._clock.now_ms())
                .returning(Order)
            )
            order = changed.scalar_one_or_none()
            if order is not None:
                paid = OrderPaid(order=order.id, article=order.article, quantity=order.quantity, cents=order.total)
                self._outbox.send(session, "orders:paid", paid)
        if order is None:
            raise OrderStateError(f"order {order_id} is {self.find(order_id).state}; only a reserved order can be paid")
        # After the commit. A reminder that is on its way already finds the order paid, and does nothing.
        return self._template.cancel(key=key_of(order_id), topic="reminders").status

    def find(self, order_id: int) -> Order:
        """Return an order.

        Raises:
            UnknownOrderError: There is no such order.
        """
        with self._database.begin() as session:
            order = session.get(Order, order_id)
        if order is None:
            raise UnknownOrderError(f"there is no order {order_id}")
        return order

    def check_paid(self, order_id: int) -> None:
        """Return if an order is paid.

        Raises:
            UnknownOrderError: There is no such order.
            OrderStateError: It is not paid.
        """
        order = self.find(order_id)
        if order.state != OrderState.PAID:
            raise OrderStateError(f"order {order_id} is {order.state}; only a paid order has a receipt")

"""Accounting: receipts on request, and a report each night."""

from __future__ import annotations

from datetime import datetime, time, timedelta

import sqlalchemy as sa

from mqtemplate import RocketMQTemplate, ScheduledRun, message_listener, scheduled, service
from mqtemplate.asyncapi import documents_send
from mqtemplate.outbox import SQLAlchemyInbox

from .database import Database, UnitOfWork
from .messages import Receipt
from .model import DailyReport, Order, OrderState, euros
from .orders import OrderService


@message_listener(topic="receipts", consumer_group="accounting")
class Receipts:
    """Listener for requests: it replies with what it returns."""

    def __init__(self, orders: OrderService) -> None:
        self._orders = orders

    def on_message(self, order_id: int) -> Receipt:
        """Return the receipt of an order."""
        order = self._orders.find(order_id)
        line = f"{order.quantity} x {order.article} at {euros(order.cents)}"
        return Receipt(order=order.id, customer=order.customer, lines=[line], total=euros(order.total))


@service
class ReceiptDesk:
    """Requests receipts from accounting, which may be another process."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._template = template

    @documents_send("receipts", int, reply=Receipt)
    async def receipt(self, order_id: int) -> Receipt:
        """Return the receipt of a paid order; wait for it without blocking the event loop."""
        return await self._template.async_send_and_receive("receipts", order_id, Receipt, timeout="5s")


@service
class Reports:
    """Writes the report of each day."""

    def __init__(self, database: Database, inbox: SQLAlchemyInbox) -> None:
        self._database = database
        self._inbox = inbox

    @scheduled(cron="${shop.report-cron}", zone="${shop.zone}", name="report")
    def write(self, run: ScheduledRun, unit: UnitOfWork) -> None:
        """Write the report of the day before; on request, the report of today."""
        day = run.scheduled_at.date() - timedelta(days=0 if run.is_manual else 1)
        start = datetime.combine(day, time(), run.scheduled_at.tzinfo)
        end = datetime.combine(day + timedelta(days=1), time(), run.scheduled_at.tzinfo)  # 23 or 25 h later, it may be
        paid_in_day = Order.paid_at_ms.between(_ms(start), _ms(end) - 1)
        if not self._inbox.is_new(unit.session, run.id, consumer="report"):
            return
        count, cents = unit.session.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(Order.cents * Order.quantity), 0)).where(
                Order.state == OrderState.PAID, paid_in_day
            )
        ).one()
        unit.session.merge(DailyReport(day=day.isoformat(), orders=count, cents=cents))

    def all(self) -> list[DailyReport]:
        """Return all reports, oldest first."""
        with self._database.begin() as session:
            return list(session.scalars(sa.select(DailyReport).order_by(DailyReport.day)))


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1_000)

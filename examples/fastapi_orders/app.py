"""The web application: an order is sent at once, and its customer is reminded to pay later."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel

from mqtemplate_starter_fastapi import MQTemplate, Template, health_router

from .listeners import remind

messages = MQTemplate(remind, config_folder=Path(__file__).parent)
web = FastAPI(title="orders", lifespan=messages.lifespan)
web.include_router(health_router())


class Order(BaseModel):
    """Body of a request."""

    customer: str
    cents: int


@web.post("/orders/{order_id}", status_code=202)
async def place(order_id: str, order: Order, template: Template) -> dict[str, str]:
    """Store a reminder that is due in three hours."""
    sent = await template.async_send(
        "reminders", {"order_id": order_id, "customer": order.customer, "cents": order.cents}, delay="3h", keys=order_id
    )
    return {"msg_id": sent.msg_id}


@web.delete("/orders/{order_id}/reminder")
async def paid(order_id: str, template: Template) -> dict[str, str]:
    """Cancel the reminder of an order that was paid."""
    change = await template.async_cancel(key=order_id, topic="reminders")
    return {"status": change.status.value}

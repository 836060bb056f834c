"""The web application, by an application factory."""

from __future__ import annotations

from pathlib import Path

from flask import Flask, request

from mqtemplate_starter_flask import MQTemplate

from .listeners import remind

messages = MQTemplate(remind, config_folder=Path(__file__).parent)


def create_app() -> Flask:
    """Return a new web application. Nothing is started before its first request."""
    web = Flask("orders")
    web.config |= {"CURRENCY": "EUR", "MQTEMPLATE_HEALTH_URL": "/health/ready"}
    messages.init_app(web)
    web.add_url_rule("/orders/<order_id>", view_func=place, methods=["POST"])
    return web


def place(order_id: str) -> tuple[dict[str, str], int]:
    """Store a reminder that is due in three hours."""
    customer = request.get_json()["customer"]
    sent = messages.template.sync_send(
        "reminders", {"order_id": order_id, "customer": customer}, delay="3h", keys=order_id
    )
    return {"msg_id": sent.msg_id}, 202

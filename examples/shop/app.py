"""The web application: ``uvicorn examples.shop.app:web``."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from mqtemplate_starter_fastapi import MQTemplate, health_router

from . import accounting, database, mailing, orders, reminders, warehouse
from .orders import OrderStateError, UnknownOrderError
from .web import router, unknown_order, wrong_state

HERE = Path(__file__).parent
COMPONENTS = (database, orders, warehouse, reminders, mailing, accounting)


def new_web(messages: MQTemplate) -> FastAPI:
    """Return the web application. Nothing is opened before its server starts."""
    web = FastAPI(title="shop", lifespan=messages.lifespan)
    web.add_exception_handler(UnknownOrderError, unknown_order)
    web.add_exception_handler(OrderStateError, wrong_state)
    web.include_router(health_router())
    web.include_router(router)
    return web


messages = MQTemplate(*COMPONENTS, config_folder=HERE)
web = new_web(messages)

"""The web application with a Spark listener: ``uvicorn examples.shop.with_spark:web``."""

from __future__ import annotations

from typing import Annotated

from mqtemplate_starter_fastapi import MQTemplate, depends

from .app import COMPONENTS, HERE, new_web
from .sales import Sales
from .web import SalesView

messages = MQTemplate(*COMPONENTS, Sales, config_folder=HERE)
web = new_web(messages)


@web.get("/sales", response_model=list[SalesView])
def sales(sales: Annotated[Sales, depends(Sales)]) -> object:
    """Show the sales of each article."""
    return sales.all()

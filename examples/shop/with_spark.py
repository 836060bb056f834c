"""The web application with a Spark listener: ``uvicorn examples.shop.with_spark:web``."""

from __future__ import annotations

from typing import Annotated

from mqtemplate_starter_fastapi import depends

from .app import new_web
from .sales import Sales
from .web import SalesView

web = new_web(Sales)


@web.get("/sales", response_model=list[SalesView])
def sales(sales: Annotated[Sales, depends(Sales)]) -> object:
    """Show the sales of each article."""
    return sales.all()

"""The HTTP interface. Handlers are plain functions where they use the database: FastAPI runs them in threads."""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, PositiveInt

from mqtemplate import Schedules
from mqtemplate_starter_fastapi import depends

from .accounting import ReceiptDesk, Reports
from .database import Database
from .messages import Receipt
from .model import Article, OrderState
from .orders import OrderService

router = APIRouter()

Orders = Annotated[OrderService, depends(OrderService)]


class NewOrder(BaseModel):
    """Body of a new order."""

    customer: str
    article: str
    quantity: PositiveInt = 1


class OrderView(BaseModel):
    """An order as the customer sees it."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    customer: str
    article: str
    quantity: int
    state: OrderState
    total: int


class ArticleView(BaseModel):
    """An article as the customer sees it."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    cents: int
    stock: int


class ReportView(BaseModel):
    """The report of one day."""

    model_config = ConfigDict(from_attributes=True)

    day: str
    orders: int
    cents: int


class SalesView(BaseModel):
    """The sales of one article."""

    model_config = ConfigDict(from_attributes=True)

    article: str
    quantity: int
    cents: int


@router.post("/orders", status_code=201, response_model=OrderView)
def place(order: NewOrder, orders: Orders) -> object:
    """Place an order; the warehouse reserves it within milliseconds."""
    return orders.place(order.customer, order.article, order.quantity)


@router.get("/orders/{order_id}", response_model=OrderView)
def show(order_id: int, orders: Orders) -> object:
    """Show an order."""
    return orders.find(order_id)


@router.post("/orders/{order_id}/payment")
def pay(order_id: int, orders: Orders) -> dict[str, str]:
    """Pay a reserved order; this cancels its reminder."""
    return {"state": OrderState.PAID, "reminder": orders.pay(order_id).value}


def paid_order(order_id: int, orders: Orders) -> int:
    """Return the number of an order that is paid. FastAPI calls it in a thread."""
    orders.check_paid(order_id)
    return order_id


@router.get("/orders/{order_id}/receipt")
async def receipt(
    order_id: Annotated[int, Depends(paid_order)], desk: Annotated[ReceiptDesk, depends(ReceiptDesk)]
) -> Receipt:
    """Return the receipt of a paid order."""
    return await desk.receipt(order_id)


@router.get("/articles", response_model=list[ArticleView])
def articles(database: Annotated[Database, depends(Database)]) -> object:
    """Show all articles."""
    with database.begin() as session:
        return list(session.scalars(sa.select(Article).order_by(Article.id)))


@router.get("/reports", response_model=list[ReportView])
def reports(reports: Annotated[Reports, depends(Reports)]) -> object:
    """Show the reports of all days."""
    return reports.all()


@router.post("/reports", status_code=202)
def report_now(schedules: Annotated[Schedules, depends(Schedules)]) -> None:
    """Write the report of today, in whichever process gets the message."""
    schedules.trigger("report")


async def unknown_order(_: Request, error: Exception) -> JSONResponse:
    """Answer 404."""
    return JSONResponse({"detail": str(error)}, 404)


async def wrong_state(_: Request, error: Exception) -> JSONResponse:
    """Answer 409."""
    return JSONResponse({"detail": str(error)}, 409)

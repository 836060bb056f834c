"""Bodies of the messages, as JSON; who sends and who receives them stands in ``docs/shop.md``."""

from __future__ import annotations

from pydantic import BaseModel


class StockChange(BaseModel, frozen=True):
    """``orders:placed`` takes articles out of the stock, ``orders:cancelled`` puts them back."""

    order: int
    article: str
    quantity: int


class OrderPaid(BaseModel, frozen=True):
    """``orders:paid``: a sale."""

    order: int
    article: str
    quantity: int
    cents: int


class PaymentReminder(BaseModel, frozen=True):
    """``reminders:unpaid``: look whether an order is paid; *number* counts from 1."""

    order: int
    number: int


class Mail(BaseModel, frozen=True):
    """``mails``: a mail to a customer."""

    to: str
    text: str


class Receipt(BaseModel, frozen=True):
    """Reply to a request to ``receipts``, whose body is the number of an order."""

    order: int
    customer: str
    lines: list[str]
    total: str

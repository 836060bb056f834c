"""The tables of the shop, as classes of SQLAlchemy."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import BigInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from mqtemplate.outbox import outbox_tables


class Base(DeclarativeBase):
    """Base of the classes; its metadata has the tables of outbox and inbox, too."""


outbox_tables(Base.metadata)


class OrderState(StrEnum):
    """Life of an order: placed, then reserved or rejected; a reserved one is paid, or cancelled in the end."""

    PLACED = "placed"
    RESERVED = "reserved"
    REJECTED = "rejected"
    PAID = "paid"
    CANCELLED = "cancelled"


class Article(Base):
    """An article, and how many of it are in stock."""

    __tablename__ = "articles"

    id: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]
    stock: Mapped[int]


class Order(Base):
    """An order of one article."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    article: Mapped[str]
    quantity: Mapped[int]
    cents: Mapped[int] = mapped_column(default=0)  # for one; the warehouse knows the price
    state: Mapped[str] = mapped_column(default=OrderState.PLACED)
    paid_at_ms: Mapped[int | None] = mapped_column(BigInteger)

    @property
    def total(self) -> int:
        """Price of the order in cents."""
        return self.cents * self.quantity


class DailyReport(Base):
    """Sales of one day."""

    __tablename__ = "reports"

    day: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]
    cents: Mapped[int]


class SalesOfArticle(Base):
    """Sums over all paid orders of an article; Spark adds them up."""

    __tablename__ = "sales"

    article: Mapped[str] = mapped_column(primary_key=True)
    quantity: Mapped[int]
    cents: Mapped[int]


def euros(cents: int) -> str:
    """Return an amount as text."""
    return f"{cents / 100:.2f} EUR"

"""The section ``shop`` of application.yml."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from mqtemplate import Section


class ShopSettings(BaseModel, frozen=True):
    """Settings of the shop."""

    database: str
    """URL of SQLAlchemy: SQLite or PostgreSQL."""
    create_tables: bool = True
    """True: the start creates missing tables and the first articles. With several processes one of them must."""
    remind_after: list[str] = Field(min_length=1)
    """Times between two reminders of an unpaid order, such as ``15m``."""


Settings = Annotated[ShopSettings, Section("shop")]

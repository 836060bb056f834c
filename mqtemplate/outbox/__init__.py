"""Effect once: an outbox for sending, and an inbox for receiving, in the transactions of the user's database."""

from typing import TYPE_CHECKING

from mqtemplate.exports import load_export
from mqtemplate.outbox.relay import OutboxRelay
from mqtemplate.outbox.row import OutboxRow
from mqtemplate.outbox.session import OutboxSession

if TYPE_CHECKING:
    from mqtemplate.outbox.sqlalchemy import AsyncSQLAlchemyOutbox, SQLAlchemyInbox, SQLAlchemyOutbox, outbox_tables

__all__ = [
    "AsyncSQLAlchemyOutbox",
    "OutboxRelay",
    "OutboxRow",
    "OutboxSession",
    "SQLAlchemyInbox",
    "SQLAlchemyOutbox",
    "outbox_tables",
]

_SQLALCHEMY = ("AsyncSQLAlchemyOutbox", "SQLAlchemyInbox", "SQLAlchemyOutbox", "outbox_tables")
# imported with their first use: SQLAlchemy is an extra


def __getattr__(name: str) -> object:
    if name not in _SQLALCHEMY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = value = load_export(__name__, "sqlalchemy", name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs SQLAlchemy ({error}); pip install 'mqtemplate[sqlalchemy]'", name=error.name
        ) from error
    return value

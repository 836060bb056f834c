"""Effect once: an outbox for sending, and an inbox for receiving, in the transactions of the user's database."""

from typing import TYPE_CHECKING

from mqtemplate.exports import load_export
from mqtemplate.outbox.database import OutboxRow
from mqtemplate.outbox.relay import OutboxRelay
from mqtemplate.outbox.sending import OutboxSession

if TYPE_CHECKING:
    from mqtemplate.outbox.sqlalchemy import (
        AsyncSQLAlchemyInboxMiddleware,
        AsyncSQLAlchemyOutbox,
        SQLAlchemyInbox,
        SQLAlchemyInboxMiddleware,
        SQLAlchemyOutbox,
        async_inbox_session,
        inbox_session,
        outbox_tables,
    )

__all__ = [
    "AsyncSQLAlchemyInboxMiddleware",
    "AsyncSQLAlchemyOutbox",
    "OutboxRelay",
    "OutboxRow",
    "OutboxSession",
    "SQLAlchemyInbox",
    "SQLAlchemyInboxMiddleware",
    "SQLAlchemyOutbox",
    "async_inbox_session",
    "inbox_session",
    "outbox_tables",
]

# imported with their first use: SQLAlchemy is an extra
_SQLALCHEMY = {
    "AsyncSQLAlchemyInboxMiddleware": "sqlalchemy",
    "AsyncSQLAlchemyOutbox": "sqlalchemy",
    "SQLAlchemyInbox": "sqlalchemy",
    "SQLAlchemyInboxMiddleware": "sqlalchemy",
    "SQLAlchemyOutbox": "sqlalchemy",
    "async_inbox_session": "sqlalchemy",
    "inbox_session": "sqlalchemy",
    "outbox_tables": "sqlalchemy",
}


def __getattr__(name: str) -> object:
    if name not in _SQLALCHEMY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = value = load_export(__name__, _SQLALCHEMY[name], name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs SQLAlchemy ({error}); pip install 'mqtemplate[sqlalchemy]'", name=error.name
        ) from error
    return value

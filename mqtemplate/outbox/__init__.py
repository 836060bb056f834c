"""Effect once: an outbox for sending, and an inbox for receiving, in the transactions of the user's database."""

from typing import TYPE_CHECKING

from mqtemplate.exports import load_export
from mqtemplate.extras import install_command
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


def __getattr__(name: str) -> object:
    # The names that are not imported above need SQLAlchemy, an extra: imported with their first use.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = value = load_export(__name__, "sqlalchemy", name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs SQLAlchemy ({error}); {install_command('sqlalchemy')}", name=error.name
        ) from error
    return value

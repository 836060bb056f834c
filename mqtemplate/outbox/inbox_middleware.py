"""Inbox as a middleware: each message is handled in one transaction with the record of its id. For SQLAlchemy 2."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from mqtemplate.calls.handling import Delivery, ListenerInfo
from mqtemplate.errors import ListenerError
from mqtemplate.outbox.inbox import check_single_messages
from mqtemplate.outbox.sqlalchemy import SQLAlchemyInbox

_session: ContextVar[Session] = ContextVar("mqtemplate.inbox_session")
_async_session: ContextVar[AsyncSession] = ContextVar("mqtemplate.async_inbox_session")
_SessionType = TypeVar("_SessionType")


class SQLAlchemyInboxMiddleware:
    """Middleware that handles each message in one transaction, with its id in the inbox. A repeat is dropped.

    ::

        @message_listener("orders", "billing", middlewares=[SQLAlchemyInboxMiddleware(engine)])
        def bill(order: Order, session: Annotated[Session, Depends(inbox_session)]) -> None:
            session.add(Payment(order=order.number))

    The transaction is committed when the handler has succeeded. If it raises, or requests its message again, neither
    its changes nor the id are stored.

    Args:
        sessions: An engine, or a function that returns a new session, such as a ``sessionmaker``.
        inbox: The inbox; by default one that keeps ids for seven days.
    """

    def __init__(self, sessions: Engine | Callable[[], Session], inbox: SQLAlchemyInbox | None = None) -> None:
        self._open = partial(Session, sessions) if isinstance(sessions, Engine) else sessions
        self._inbox = inbox or SQLAlchemyInbox()

    def check_listener(self, listener: ListenerInfo) -> None:
        """Refuse a listener around which this middleware cannot work.

        Raises:
            ListenerError: Its handler takes batches, or is ``async def``.
        """
        check_single_messages(listener)
        if listener.is_async:
            raise ListenerError(
                f"listener {listener.id}: SQLAlchemyInboxMiddleware would block the event loop of an async handler; "
                "use AsyncSQLAlchemyInboxMiddleware, with an async engine"
            )

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Open the transaction, and commit it after the handler."""
        with self._open() as session:  # it rolls back what is not committed
            if not self._inbox.is_new(session, delivery.message, delivery.listener.group):
                return
            token = _session.set(session)
            try:
                result = yield delivery
            finally:
                _session.reset(token)
            if delivery.listener.is_done(result):
                session.commit()


class AsyncSQLAlchemyInboxMiddleware:
    """`SQLAlchemyInboxMiddleware` for ``async def`` handlers: an async engine, and `async_inbox_session`.

    Args:
        sessions: An async engine, or a function that returns a new async session.
    """

    def __init__(
        self, sessions: AsyncEngine | Callable[[], AsyncSession], inbox: SQLAlchemyInbox | None = None
    ) -> None:
        self._open = partial(AsyncSession, sessions) if isinstance(sessions, AsyncEngine) else sessions
        self._inbox = inbox or SQLAlchemyInbox()

    def check_listener(self, listener: ListenerInfo) -> None:
        """Refuse a listener around which this middleware cannot work.

        Raises:
            ListenerError: Its handler takes batches, or is not ``async def``.
        """
        check_single_messages(listener)
        if not listener.is_async:
            raise ListenerError(
                f"listener {listener.id}: AsyncSQLAlchemyInboxMiddleware is for async handlers; "
                "use SQLAlchemyInboxMiddleware, with a plain engine"
            )

    async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:
        """Open the transaction, and commit it after the handler."""
        async with self._open() as session:
            if not await self._inbox.async_is_new(session, delivery.message, delivery.listener.group):
                return
            token = _async_session.set(session)
            try:
                result = yield delivery
            finally:
                _async_session.reset(token)
            if delivery.listener.is_done(result):
                await session.commit()


def inbox_session() -> Session:
    """Return the session of the message that is being handled, for ``Depends(inbox_session)``.

    Raises:
        ListenerError: The listener has no `SQLAlchemyInboxMiddleware`.
    """
    return _current(_session, "SQLAlchemyInboxMiddleware")


def async_inbox_session() -> AsyncSession:
    """Return the async session of the message that is being handled, for ``Depends(async_inbox_session)``.

    Raises:
        ListenerError: The listener has no `AsyncSQLAlchemyInboxMiddleware`.
    """
    return _current(_async_session, "AsyncSQLAlchemyInboxMiddleware")


def _current(variable: ContextVar[_SessionType], middleware: str) -> _SessionType:
    try:
        return variable.get()
    except LookupError:
        raise ListenerError(
            f"no message is handled in a transaction of an inbox; give its listener middlewares=[{middleware}(engine)]"
        ) from None

"""`OutboxSession`: it sends the results of a handler in the transaction of the handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, Unpack

from mqtemplate.listener.declaration.results import ResultSender
from mqtemplate.template.options import SendOptions

SessionType = TypeVar("SessionType")


class _Outbox(Protocol):
    @property
    def send(self) -> Callable[..., Any]:
        """Function that adds messages in a transaction."""


class OutboxSession(ResultSender, Generic[SessionType]):
    """Outbox together with the transaction that a handler works in.

    A handler that takes one by ``Annotated[..., Depends(...)]`` sends what it returns through the outbox: the messages
    are stored in the same transaction as its other changes, or not at all. It works with all outboxes::

        def transaction(outbox: SQLAlchemyOutbox, engine: Engine) -> Iterator[OutboxSession[Session]]:
            with Session(engine) as session, session.begin():
                yield OutboxSession(outbox, session)

    Args:
        outbox: A `SQLAlchemyOutbox`, `AsyncSQLAlchemyOutbox` or `DjangoOutbox`.
        session: Session or connection of the transaction; None for Django, whose outbox uses the current one.

    Attributes:
        session: The same, for the changes of the handler.
    """

    def __init__(self, outbox: _Outbox, session: SessionType) -> None:
        self.session = session
        self._outbox = outbox

    def send(self, destination: str, payload: object, delay_level: int = 0, **options: Unpack[SendOptions]) -> object:
        """Send a message if the transaction is committed. With an async outbox, await the result."""
        target = () if self.session is None else (self.session,)
        return self._outbox.send(*target, destination, payload, delay_level, **options)

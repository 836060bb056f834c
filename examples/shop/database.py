"""The database, its outbox and its inbox; and the transaction of a handler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from mqtemplate import Clock, Depends, RocketMQTemplate, load_settings, service
from mqtemplate.outbox import OutboxSession, SQLAlchemyInbox, SQLAlchemyOutbox

from .model import Article, Base
from .settings import Settings, ShopSettings

FIRST_ARTICLES = [("tea", 320, 500), ("mug", 890, 40), ("kettle", 3_900, 2)]


@service
class Database:
    """Engine of the database. The application builds it once, and closes it after everything that uses it."""

    def __init__(self, settings: Settings) -> None:
        self.engine = sa.create_engine(settings.database)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)
        self._creates_tables = settings.create_tables

    def on_start(self) -> None:
        """Create the tables, before anything that uses the database starts."""
        if self._creates_tables:
            self.create_tables()

    def create_tables(self) -> None:
        """Create missing tables and articles, and the folder of SQLite."""
        file = self.engine.url.database
        if file and self.engine.dialect.name == "sqlite":
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        Base.metadata.create_all(self.engine)
        with self.begin() as session:
            for article, cents, stock in FIRST_ARTICLES:
                if session.get(Article, article) is None:
                    session.add(Article(id=article, cents=cents, stock=stock))

    def begin(self) -> AbstractContextManager[Session]:
        """Return a transaction: ``with database.begin() as session``."""
        return self._sessions.begin()

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()


@service
def outbox(database: Database, template: RocketMQTemplate) -> SQLAlchemyOutbox:
    """Messages leave with the transaction in which they are sent."""
    return SQLAlchemyOutbox(database.engine, template)


@service
def inbox(clock: Clock) -> SQLAlchemyInbox:
    """A repeated message has its effect once."""
    return SQLAlchemyInbox(clock=clock)


def unit_of_work(database: Database, outbox: SQLAlchemyOutbox) -> Iterator[OutboxSession[Session]]:
    """Provide the transaction of one message: the changes of the handler, and what it sends."""
    with database.begin() as session:
        yield OutboxSession(outbox, session)


UnitOfWork = Annotated[OutboxSession[Session], Depends(unit_of_work)]


if __name__ == "__main__":
    Database(load_settings(Path(__file__).parent).bind("shop", ShopSettings)).create_tables()

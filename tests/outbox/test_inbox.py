"""Inbox: a repeated message has no second effect."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from mqtemplate import Message, MessageExt, VirtualClock, message_listener
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.outbox import SQLAlchemyInbox
from tests.kit import Kit

pytestmark = pytest.mark.feature("X15")
EFFECT = sa.text("INSERT INTO orders (id, state) SELECT coalesce(max(id), 0) + 1, :state FROM orders")


def effects(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT state FROM orders ORDER BY id")).scalars())


def recorded(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.text("SELECT count(*) FROM mqtemplate_inbox")).scalar_one()


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_repeat_has_no_effect_and_a_failure_records_nothing(
    engine: sa.Engine, mqtemplate_clock: VirtualClock, kit: Kit
) -> None:
    """The same message id arrives twice; the first call also fails after it has recorded the id."""
    inbox, calls = SQLAlchemyInbox(clock=mqtemplate_clock), []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(text: str, message: MessageExt) -> None:
        calls.append(text)
        with Session(engine) as session, session.begin():
            if inbox.is_new(session, message):
                session.execute(EFFECT, {"state": text})
            if len(calls) == 1:
                raise OSError("after the effect, before the commit")

    kit.start(bill)
    for _ in range(2):
        kit.template.broker.sends.send(Message("orders", b"paid", {"UNIQ_KEY": "A1"}))
    kit.harness.advance("1m")

    assert (len(calls), effects(engine)) == (3, ["paid"])


def test_two_consumers_of_one_message_have_an_effect_each(engine: sa.Engine) -> None:
    inbox = SQLAlchemyInbox()

    with Session(engine) as session, session.begin():
        new = [inbox.is_new(session, "A1", consumer) for consumer in ("billing", "stock", "billing")]

    assert new == [True, True, False]


def test_old_ids_are_deleted(engine: sa.Engine, mqtemplate_clock: VirtualClock) -> None:
    """The table is as large as the messages of *keep*."""
    inbox = SQLAlchemyInbox(keep="1h", clock=mqtemplate_clock)
    for number in range(200):
        with engine.begin() as connection:
            assert inbox.is_new(connection, f"A{number}", "billing")
        mqtemplate_clock.move_ms(60_000)

    assert 60 <= recorded(engine) <= 62


def test_an_async_session_works_too(url: str, engine: sa.Engine) -> None:
    async def main() -> list[bool]:
        inbox, async_engine = SQLAlchemyInbox(), create_async_engine(url.replace("sqlite://", "sqlite+aiosqlite://"))
        async with AsyncSession(async_engine) as session, session.begin():
            new = [await inbox.async_is_new(session, "A1", "billing") for _ in range(2)]
        await async_engine.dispose()
        return new

    assert asyncio.run(main()) == [True, False]


def test_what_an_inbox_cannot_know_is_an_error(engine: sa.Engine) -> None:
    inbox = SQLAlchemyInbox()

    with engine.begin() as connection:
        with pytest.raises(ListenerError, match="outside of a listener an inbox cannot know the consumer"):
            inbox.is_new(connection, "A1")
        with pytest.raises(ListenerError, match="the message has no UNIQ_KEY"):
            inbox.is_new(connection, Message("orders", b"x"), "billing")
    with pytest.raises(ConfigurationError, match="keep must be a duration"):
        SQLAlchemyInbox(keep="long")

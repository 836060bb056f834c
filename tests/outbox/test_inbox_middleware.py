"""Inbox as a middleware: a message, its effect and its id are one transaction."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from mqtemplate import ConsumeStatus, Depends, Message, MQApplication, RocketMQTemplate, message_listener, publishes
from mqtemplate.errors import ListenerError
from mqtemplate.outbox import (
    AsyncSQLAlchemyInboxMiddleware,
    OutboxSession,
    SQLAlchemyInboxMiddleware,
    SQLAlchemyOutbox,
    async_inbox_session,
    inbox_session,
)
from mqtemplate.testing.harness import StartApp
from tests.kit import Kit
from tests.outbox.test_inbox import EFFECT, effects, recorded

pytestmark = [pytest.mark.feature("X15"), pytest.mark.mqtemplate(raise_handler_errors=False)]
CurrentSession = Annotated[Session, Depends(inbox_session)]
CurrentAsyncSession = Annotated[AsyncSession, Depends(async_inbox_session)]
IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}


def unit_of_work(outbox: SQLAlchemyOutbox, session: CurrentSession) -> OutboxSession[Session]:
    return OutboxSession(outbox, session)


UnitOfWork = Annotated[OutboxSession[Session], Depends(unit_of_work)]


def send_twice(template: RocketMQTemplate, text: str = "paid") -> None:
    for _ in range(2):
        template.broker.sends.send(Message("orders", text.encode(), {"UNIQ_KEY": f"id of {text}"}))


@pytest.fixture(params=["engine", "sessionmaker"])
def once(request: pytest.FixtureRequest, engine: sa.Engine) -> SQLAlchemyInboxMiddleware:
    """The middleware, with an engine or with a factory of sessions."""
    return SQLAlchemyInboxMiddleware(engine if request.param == "engine" else sessionmaker(engine))


def test_a_repeat_is_dropped_and_a_failure_stores_nothing(
    engine: sa.Engine, once: SQLAlchemyInboxMiddleware, kit: Kit
) -> None:
    """The first call fails after its effect, the second one succeeds, and the repeat reaches no handler."""
    calls: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", retry=["1s"], middlewares=[once])
    def bill(text: str, session: CurrentSession) -> None:
        calls.append(text)
        session.execute(EFFECT, {"state": text})
        if len(calls) == 1:
            raise OSError("after the effect, before the commit")

    kit.start(bill)
    kit.template.broker.sends.send(Message("orders", b"paid", {"UNIQ_KEY": "A1"}))
    kit.harness.advance("1m")
    kit.template.broker.sends.send(Message("orders", b"paid", {"UNIQ_KEY": "A1"}))
    kit.harness.advance("1m")

    assert (len(calls), effects(engine), recorded(engine)) == (2, ["paid"], 1)


def test_a_message_that_is_requested_again_stores_nothing(
    engine: sa.Engine, once: SQLAlchemyInboxMiddleware, kit: Kit
) -> None:
    calls: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", retry=["1s"], middlewares=[once])
    def bill(text: str, session: CurrentSession) -> ConsumeStatus:
        calls.append(text)
        session.execute(EFFECT, {"state": text})
        return ConsumeStatus.RECONSUME_LATER if len(calls) == 1 else ConsumeStatus.CONSUME_SUCCESS

    kit.start(bill)
    kit.template.broker.sends.send(Message("orders", b"paid", {"UNIQ_KEY": "A1"}))
    kit.harness.advance("1m")

    assert (len(calls), effects(engine), recorded(engine)) == (2, ["paid"], 1)


def test_two_listeners_of_one_message_have_an_effect_each(
    engine: sa.Engine, once: SQLAlchemyInboxMiddleware, kit: Kit
) -> None:
    """The consumer in the inbox is the group."""

    def effect(text: str, session: CurrentSession) -> None:
        session.execute(EFFECT, {"state": text})

    first = message_listener("orders", "billing", id="first", middlewares=[once])(effect)
    kit.start(message_listener("orders", "stock", id="second", middlewares=[once])(first))
    send_twice(kit.template)
    kit.harness.advance("1m")

    assert effects(engine) == ["paid", "paid"]


def test_what_a_handler_publishes_is_in_the_transaction(
    engine: sa.Engine, once: SQLAlchemyInboxMiddleware, kit: Kit
) -> None:
    """Effect, id of the message, and the messages that it causes, through an outbox: all of them, or nothing."""
    outbox, receipts, calls = SQLAlchemyOutbox(engine, kit.template), list[str](), list[str]()
    kit.harness.add(outbox.relay)

    @message_listener(topic="orders", consumer_group="billing", retry=["1s"], middlewares=[once])
    @publishes("receipts")
    def bill(text: str, unit: UnitOfWork) -> str:
        calls.append(text)
        unit.session.execute(EFFECT, {"state": text})
        if len(calls) == 1:
            raise ConnectionError("before the commit")
        return f"receipt: {text}"

    @message_listener(topic="receipts", consumer_group="mails")
    def mail(text: str) -> None:
        receipts.append(text)

    kit.start(bill, mail, outbox)
    send_twice(kit.template)
    kit.harness.advance("1m")

    assert (len(calls), effects(engine), receipts) == (2, ["paid"], ["receipt: paid"])


def test_an_async_handler_has_an_async_session(url: str, engine: sa.Engine) -> None:
    """On the system clock, since a database driver waits for real sockets."""
    calls: list[str] = []

    async def main() -> None:
        async_engine, done = create_async_engine(url.replace("sqlite://", "sqlite+aiosqlite://")), asyncio.Event()
        once = AsyncSQLAlchemyInboxMiddleware(async_sessionmaker(async_engine))

        @message_listener("orders", "billing", consume_mode="ORDERLY", retry=["10ms"], middlewares=[once])
        async def bill(text: str, session: CurrentAsyncSession) -> None:
            calls.append(text)
            await session.execute(EFFECT, {"state": text})
            if len(calls) == 1:
                raise OSError("after the effect, before the commit")
            if text == "the end":
                done.set()

        async with MQApplication(bill, settings=IN_MEMORY, environment={}) as app:
            broker = app.broker
            queue = (await asyncio.to_thread(broker.queues, "orders"))[0]
            for key, body in (("A1", b"paid"), ("A1", b"paid"), ("A2", b"the end")):
                await asyncio.to_thread(broker.sends.send, Message("orders", body, {"UNIQ_KEY": key}), queue)
            await asyncio.wait_for(done.wait(), 60)
        await async_engine.dispose()

    asyncio.run(main())

    assert calls == ["paid", "paid", "the end"]
    assert effects(engine) == ["paid", "the end"]


async def receive_async(text: str) -> None:
    """Handle a message."""


def receive(text: str) -> None:
    """Handle a message."""


def receive_batch(texts: list[str]) -> None:
    """Handle messages."""


@pytest.mark.parametrize(
    ("make", "handler", "reason"),
    [
        (SQLAlchemyInboxMiddleware, receive_batch, "the handler takes batches; call is_new of the inbox for each"),
        (SQLAlchemyInboxMiddleware, receive_async, "would block the event loop of an async handler; use Async"),
        (AsyncSQLAlchemyInboxMiddleware, receive, "is for async handlers; use SQLAlchemyInboxMiddleware"),
    ],
)
def test_a_listener_around_which_it_cannot_work_is_refused_at_the_start(
    make: Any, handler: Any, reason: str, mqtemplate_app: StartApp
) -> None:
    once = make(sa.create_engine("sqlite://"))

    with pytest.raises(ListenerError, match=reason):
        mqtemplate_app(message_listener("orders", "billing", middlewares=[once])(handler))


def test_without_the_middleware_there_is_no_session() -> None:
    with pytest.raises(ListenerError, match=r"give its listener middlewares=\[SQLAlchemyInboxMiddleware\(engine\)\]"):
        inbox_session()
    with pytest.raises(ListenerError, match=r"middlewares=\[AsyncSQLAlchemyInboxMiddleware\(engine\)\]"):
        async_inbox_session()

"""Outbox and inbox for SQLAlchemy 2: sync and async engines, sessions and connections.

The inbox is also a middleware: each message is handled in one transaction with the record of its id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar, Unpack

import sqlalchemy as sa
from sqlalchemy.engine import Connection, CursorResult, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from mqtemplate.calls.handling import Delivery, ListenerInfo
from mqtemplate.clock import Clock
from mqtemplate.durations import Duration
from mqtemplate.errors import ConfigurationError, EventLoopBlockedError, ListenerError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import Message
from mqtemplate.outbox.changes import UnsentMessages, cancel_of, reschedule_of
from mqtemplate.outbox.database import (
    INBOX,
    KEY_LENGTH,
    LEASE_TABLE,
    OUTBOX,
    Execute,
    OutboxChange,
    Result,
    add_change,
    add_rows,
    check_columns,
    check_database,
)
from mqtemplate.outbox.inbox import InboxCore, check_single_messages
from mqtemplate.outbox.relay import LEASE, POLL_MS, RelayOutcome, RelaySteps, ignored_database_errors
from mqtemplate.outbox.sending import RelayedOutbox, RowFactory, log_deferred, noted_database_errors
from mqtemplate.pending import ScheduleChange
from mqtemplate.template.options import SendOptions, shows_send_options
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.user_code import error_text

_log = get_logger("mqtemplate.outbox")

_session: ContextVar[Session] = ContextVar("mqtemplate.inbox_session")
_async_session: ContextVar[AsyncSession] = ContextVar("mqtemplate.async_inbox_session")
_SessionType = TypeVar("_SessionType")
_Result = TypeVar("_Result")

_LONGEST_SEARCH_S = 30.0
"""Guard against a loop that ends while a thread waits for it."""

Target: TypeAlias = Session | Connection
"""Session or connection whose transaction contains the business change."""
AsyncTarget: TypeAlias = AsyncSession | AsyncConnection
"""The same on an async engine."""


def outbox_tables(metadata: sa.MetaData) -> tuple[sa.Table, ...]:
    """Add the tables of outbox and inbox to a metadata, for ``create_all`` and for Alembic."""
    serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only INTEGER counts by itself there
    change_key = sa.Column("change_key", sa.String(KEY_LENGTH))
    is_change = change_key.is_not(None)
    return (
        sa.Table(
            OUTBOX,
            metadata,
            sa.Column("id", serial, primary_key=True, autoincrement=True),
            sa.Column("msg_id", sa.String(64), nullable=False),
            sa.Column("topic", sa.String(255), nullable=False),
            sa.Column("hash_key", sa.Text),
            sa.Column("properties", sa.Text, nullable=False),
            sa.Column("body", sa.LargeBinary, nullable=False),
            sa.Column("created_ms", sa.BigInteger, nullable=False),
            sa.Column("error", sa.Text),
            change_key,
            # Messages are not in it, so that they cost nothing.
            sa.Index("mqtemplate_outbox_change_key", change_key, sqlite_where=is_change, postgresql_where=is_change),
            sqlite_autoincrement=True,  # else SQLite uses the ids of deleted rows again
        ),
        sa.Table(
            LEASE_TABLE,
            metadata,
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("owner", sa.String(64), nullable=False),
            sa.Column("until_ms", sa.BigInteger, nullable=False),
        ),
        sa.Table(
            INBOX,
            metadata,
            sa.Column("consumer", sa.String(255), primary_key=True),
            sa.Column("msg_id", sa.String(255), primary_key=True),
            sa.Column("received_ms", sa.BigInteger, nullable=False, index=True),
        ),
    )


class SQLAlchemyOutbox(RelayedOutbox):
    """Outbox on a sync engine: ``send`` adds a row in the caller's transaction, and a relay sends it after the commit.

    As an object of an `MQApplication` it starts and stops its relay with the application.

    Args:
        engine: The engine of the database that has the tables of `outbox_tables`.
        lease: Time after which another process relays, if one dies.

    Attributes:
        relay: The relay; on a virtual clock a harness steps it while it is started.
    """

    def __init__(self, engine: Engine, template: RocketMQTemplate, lease: Duration = LEASE) -> None:
        self._engine = engine
        super().__init__(engine.dialect.name, template, self._transaction, lease, engine)

    @shows_send_options
    def send(
        self,
        target: Target,
        destination: str,
        payload: object,
        delay_level: int = 0,
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message if the transaction of *target* is committed. Other arguments as `RocketMQTemplate.sync_send`.

        A delay counts from this call; a delay level from the relay.

        Returns:
            The message id; of a list, the id of the first message.

        Raises:
            MessageError: The message cannot be sent.
        """
        msg_id = self._add(_executor(target), destination, payload, delay_level, options)
        if isinstance(target, Session):
            _after_commit(target, self.relay.wake)
        return msg_id

    def cancel(self, target: Target, *, key: str, topic: str | None = None) -> None:
        """Cancel the pending messages with a key if the transaction of *target* is committed.

        It acts on the messages that were sent before: those that the relay has not sent yet are never sent, and then
        it cancels those at the broker. A later ``send`` with the key is not affected. The answer of the broker is in
        the log event ``outbox.change_relayed``.

        Args:
            key: A business key: all pending messages with it are cancelled, as by `RocketMQTemplate.cancel`. Or the
                message id of one message, which need not have a delay if the relay has not sent it yet.
            topic: Only messages for this topic.

        Raises:
            MessageError: The key is not one word of up to 255 characters, or the topic is not a legal name.
        """
        self._add_to(target, cancel_of(key, topic))

    def reschedule(
        self,
        target: Target,
        *,
        key: str,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        topic: str | None = None,
    ) -> None:
        """Change the deliver time of the pending messages with a key if the transaction of *target* is committed.

        Without *delay* and *deliver_at*, deliver them now. Other arguments as in `cancel`.

        Args:
            delay: ``"3h"`` or a timedelta, counted from this call.
            deliver_at: An aware datetime, or epoch milliseconds.

        Raises:
            MessageError: As `cancel`; or the time is invalid.
        """
        self._add_to(target, reschedule_of(key, topic, delay, deliver_at, self._clock.now_ms()))

    def change_unsent(self, key: str, topic: str | None, deliver_ms: int | None) -> ScheduleChange | None:
        """See `ChangeableOutbox.change_unsent`.

        Raises:
            ConfigurationError: It would commit an open transaction, since the engine has one connection.
        """
        _check_no_transaction(self._engine)
        return super().change_unsent(key, topic, deliver_ms)

    def _add_to(self, target: Target, change: OutboxChange) -> None:
        self._add_change(_executor(target), change)
        if isinstance(target, Session):
            _after_commit(target, self.relay.wake)

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        with self._engine.begin() as connection:
            yield _executor(connection)


class AsyncSQLAlchemyOutbox:
    """Outbox on an async engine; its relay is a task on the event loop of ``on_start``."""

    def __init__(self, engine: AsyncEngine, template: RocketMQTemplate, lease: Duration = LEASE) -> None:
        check_database(engine.dialect.name)
        if template.broker.clock.is_virtual:
            raise ConfigurationError(
                "the relay of an async outbox waits for a real database, which a virtual clock cannot step; "
                "test with SQLAlchemyOutbox, or on the system clock"
            )
        self._engine = engine
        self._rows = RowFactory(template)
        self._steps = RelaySteps(template.broker, lease)
        self._clock = template.broker.clock
        self._unsent = UnsentMessages(self._clock)
        self._failure_log = LimitedLog(_log, self._clock.steady_ms, burst=1)  # each second, until the cause is gone
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        template.add_outbox(engine, self)

    @shows_send_options
    async def send(
        self,
        target: AsyncTarget,
        destination: str,
        payload: object,
        delay_level: int = 0,
        **options: Unpack[SendOptions],
    ) -> str:
        """Send a message if the transaction of *target* is committed; as `SQLAlchemyOutbox.send`."""
        rows = self._rows.rows(destination, payload, delay_level, options)
        await target.run_sync(lambda inner: add_rows(_executor(inner), rows, self._clock.now_ms()))
        if isinstance(target, AsyncSession):
            _after_commit(target.sync_session, self._woken.set)
        return rows[0].msg_id

    async def cancel(self, target: AsyncTarget, *, key: str, topic: str | None = None) -> None:
        """Cancel messages if the transaction of *target* is committed; as `SQLAlchemyOutbox.cancel`."""
        await self._add_to(target, cancel_of(key, topic))

    async def reschedule(
        self,
        target: AsyncTarget,
        *,
        key: str,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        topic: str | None = None,
    ) -> None:
        """Change deliver times if the transaction of *target* is committed; as `SQLAlchemyOutbox.reschedule`."""
        await self._add_to(target, reschedule_of(key, topic, delay, deliver_at, self._clock.now_ms()))

    async def _add_to(self, target: AsyncTarget, change: OutboxChange) -> None:
        await target.run_sync(lambda inner: add_change(_executor(inner), change, self._clock.now_ms()))
        if isinstance(target, AsyncSession):
            _after_commit(target.sync_session, self._woken.set)

    # --- changes by the template, in a thread --------------------------------------------------

    def change_unsent(self, key: str, topic: str | None, deliver_ms: int | None) -> ScheduleChange | None:
        """See `ChangeableOutbox.change_unsent`."""
        with noted_database_errors():
            return self._on_loop(self._change_unsent(OutboxChange(key=key, topic=topic, deliver_ms=deliver_ms)))

    def defer_change(self, key: str, topic: str | None, deliver_ms: int | None, reason: str) -> None:
        """See `ChangeableOutbox.defer_change`."""
        change = OutboxChange(key=key, topic=topic, deliver_ms=deliver_ms)
        self._on_loop(self._defer(change))
        log_deferred(change, reason)

    async def _change_unsent(self, change: OutboxChange) -> ScheduleChange | None:
        _check_no_transaction(self._engine.sync_engine)
        async with self._engine.begin() as connection:
            found = await connection.run_sync(lambda inner: self._unsent.find(_executor(inner), change))
        if not found:
            return None
        async with self._engine.begin() as connection:
            result = await connection.run_sync(lambda inner: self._unsent.add(_executor(inner), found, change))
        self._woken.set()
        return result

    async def _defer(self, change: OutboxChange) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(lambda inner: self._unsent.defer(_executor(inner), change))

    def _on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop of the engine, and wait for it in this thread."""
        loop = self._loop
        problem = self._loop_problem(loop)
        if loop is None or problem is not None:
            work.close()
            assert problem is not None
            raise problem
        return asyncio.run_coroutine_threadsafe(work, loop).result(_LONGEST_SEARCH_S)

    @staticmethod
    def _loop_problem(loop: asyncio.AbstractEventLoop | None) -> Exception | None:
        if loop is None or not loop.is_running():
            return ConfigurationError(
                "the async outbox of this template is not started, so its messages cannot be changed by the template; "
                "start it (an MQApplication does, or await outbox.on_start()), or call cancel or reschedule of the "
                "outbox in a transaction"
            )
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            if asyncio.get_running_loop() is loop:
                return EventLoopBlockedError(
                    "the template would wait for its async outbox, which works on this event loop; write "
                    "'await template.async_cancel(...)' or 'await template.async_reschedule(...)', or call cancel or "
                    "reschedule of the outbox in a transaction"
                )
        return None

    async def on_start(self) -> None:
        """Start the relay.

        Raises:
            ConfigurationError: An older version created the table.
        """
        self._loop = asyncio.get_running_loop()
        with ignored_database_errors():
            async with self._engine.begin() as connection:
                await connection.run_sync(lambda inner: check_columns(_executor(inner)))
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def on_stop(self) -> None:
        """Stop the relay after the current batch."""
        task, self._task = self._task, None
        if task is not None:
            self._woken.set()
            await task
            try:
                async with self._engine.begin() as connection:
                    await connection.run_sync(lambda inner: self._steps.end(_executor(inner)))
            except Exception as error:  # the database is down: another process continues when the lease is over
                _log.warning("outbox.lease_kept", reason=error_text(error))

    async def _run(self) -> None:
        while self._task is not None:
            self._woken.clear()
            try:
                outcome = await self._relay()
            except Exception as error:  # drivers raise errors of their own, such as OSError; the next look may succeed
                self._failure_log.warning("outbox.relay_failed", reason=error_text(error), retry_ms=POLL_MS)
                outcome = None
            if outcome is None or outcome.error is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), POLL_MS / 1_000)

    async def _relay(self) -> RelayOutcome | None:
        async with self._engine.connect() as connection:
            if not await connection.run_sync(lambda inner: self._steps.peek(_executor(inner))):
                return None
        async with self._engine.begin() as connection:
            rows = await connection.run_sync(lambda inner: self._steps.claim(_executor(inner)))
        if not rows:
            return None
        outcome = await asyncio.to_thread(self._steps.send, rows)
        async with self._engine.begin() as connection:
            await connection.run_sync(lambda inner: self._steps.settle(_executor(inner), outcome))
        return outcome


class SQLAlchemyInbox:
    """Inbox: it records message ids in the transaction of the effect. It works with sync and async sessions.

    ::

        with Session(engine) as session, session.begin():
            if inbox.is_new(session, message):
                session.add(Payment(...))

    Args:
        keep: Time for which an id is kept; longer than a message can be repeated.
    """

    def __init__(self, keep: Duration = "7d", clock: Clock | None = None) -> None:
        self._core = InboxCore(keep, clock)

    def is_new(self, target: Target, message: Message | str, consumer: str | None = None) -> bool:
        """Return True and record the message if it has no effect yet; False if it is a repeat.

        Args:
            target: Session or connection whose transaction contains the effect.
            message: The message, or a key of its content.
            consumer: Name of the effect; by default the consumer group of the listener that runs.

        Raises:
            ListenerError: The id or the consumer is missing.
        """
        return self._core.record(_executor(target), message, consumer)

    async def async_is_new(self, target: AsyncTarget, message: Message | str, consumer: str | None = None) -> bool:
        """Do `is_new` on an async session or connection."""
        return await target.run_sync(lambda inner: self._core.record(_executor(inner), message, consumer))


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


def _executor(target: Target) -> Execute:
    def execute(statement: str, parameters: Mapping[str, Any]) -> Result:
        result = target.execute(sa.text(statement), parameters)
        assert isinstance(result, CursorResult)
        return Result(result.all(), 0) if result.returns_rows else Result((), result.rowcount)

    return execute


def _check_no_transaction(engine: Engine) -> None:
    """Refuse to use the only connection of an engine, as of SQLite in memory, while it has an open transaction.

    Raises:
        ConfigurationError: It has one, which the end of another transaction would commit or roll back.
    """
    pool = engine.pool
    if isinstance(pool, StaticPool):
        connection = pool.connection.driver_connection
    elif isinstance(pool, SingletonThreadPool):
        checked_out = engine.raw_connection()  # the one that this thread has already
        connection = checked_out.driver_connection
        checked_out.close()
    else:
        return
    if getattr(connection, "in_transaction", False):
        raise ConfigurationError(
            "the template cannot look in the outbox while a transaction is open on the only connection of its engine "
            f"({type(pool).__name__}): it would commit it; call cancel or reschedule of the outbox in the transaction, "
            "or call the template after the commit"
        )


def _after_commit(session: Session, call: Callable[[], None]) -> None:
    """Call a function after the commits of a session, from now on. A second call has no effect."""
    known: set[Callable[[], None]] = session.info.setdefault("mqtemplate.outbox", set())
    if call not in known:
        known.add(call)
        sa.event.listen(session, "after_commit", lambda _session: call())

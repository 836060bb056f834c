"""Sending through an outbox: rows for messages, and the results of a handler in its transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar, Unpack

from mqtemplate.durations import Duration
from mqtemplate.errors import MessageError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.results import ResultSender
from mqtemplate.message import Message, Property, create_unique_id
from mqtemplate.outbox.changes import UnsentMessages
from mqtemplate.outbox.database import Execute, OutboxChange, OutboxRow, add_change, add_rows, check_database
from mqtemplate.outbox.relay import OutboxRelay, Transaction
from mqtemplate.pending import ScheduleChange
from mqtemplate.template.options import SendOptions, hash_key_text, shows_send_options
from mqtemplate.template.outbound import MessageFactory, read_options
from mqtemplate.template.rocketmq_template import RocketMQTemplate

_log = get_logger("mqtemplate.outbox")


class RowFactory:
    """Factory of rows from payloads: with the destinations, converter and options of a template."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._now_ms = template.broker.clock.now_ms
        self._messages = MessageFactory(template.converter, self._now_ms)

    def rows(self, destination: str, payload: object, delay_level: int, options: SendOptions) -> list[OutboxRow]:
        """Return one row for a payload, or one for each item of a list.

        Raises:
            MessageError: The message cannot be sent, or the option ``queue`` is given.
        """
        if options.get("queue") is not None:
            raise MessageError(
                "a message of an outbox has no option 'queue'; a hash_key selects the queue when it is sent"
            )
        hash_key = options.get("hash_key")
        extras = read_options(delay_level, options, self._now_ms)
        messages: Sequence[Message] = (
            self._messages.batch(destination, payload, extras)
            if isinstance(payload, list)
            else [self._messages.one(destination, payload, extras)]
        )
        key = None if hash_key is None else hash_key_text(hash_key)
        if key is not None:
            for message in messages:
                message.properties[Property.SHARDING_KEY] = key
        return [self._row(message, key) for message in messages]

    def _row(self, message: Message, hash_key: str | None) -> OutboxRow:
        msg_id = create_unique_id()
        properties = {**message.properties, Property.UNIQ_KEY: msg_id}
        # A delay counts from the call, not from the time at which the row is relayed.
        for name, unit_ms in ((Property.TIMER_DELAY_MS, 1), (Property.TIMER_DELAY_SEC, 1_000)):
            if (delay := properties.pop(name, None)) is not None:
                properties[Property.TIMER_DELIVER_MS] = str(self._now_ms() + int(delay) * unit_ms)
        return OutboxRow(
            id=0,
            msg_id=msg_id,
            topic=message.topic,
            hash_key=hash_key,
            properties=json.dumps(properties, separators=(",", ":")),
            body=message.body,
        )


@contextmanager
def noted_database_errors() -> Iterator[None]:
    """Add to errors of the database what `RocketMQTemplate.cancel` and ``reschedule`` did: nothing."""
    try:
        yield
    except MQTemplateError:
        raise
    except Exception as error:
        error.add_note(
            "the outbox could not be changed, and the broker was not asked; in an open transaction call cancel or "
            "reschedule of the outbox: outbox.cancel(session, key=...)"
        )
        raise


def log_deferred(change: OutboxChange, reason: str) -> None:
    """Log that the relay executes a change later."""
    _log.info("outbox.change_deferred", key=change.key, topic=change.topic, deliver_ms=change.deliver_ms, reason=reason)


class RelayedOutbox:
    """Base of the outboxes with blocking connections: a row in the caller's transaction, and a relay that sends it.

    As an object of an `MQApplication` it starts and stops its relay with the application. ``cancel`` and
    ``reschedule`` of its template look in it, too.

    Args:
        database: Name of the database.
        transaction: Opens a transaction for the relay.
        table: Identity of its table in this process.
        lease: Time after which another process relays, if one dies.

    Attributes:
        relay: The relay; on a virtual clock a harness steps it while it is started.
    """

    def __init__(
        self, database: str, template: RocketMQTemplate, transaction: Transaction, lease: Duration, table: Hashable
    ) -> None:
        check_database(database)
        self._rows = RowFactory(template)
        self._clock = template.broker.clock
        self._transaction_of_own = transaction
        self._unsent = UnsentMessages(self._clock)
        self.relay = OutboxRelay(template.broker, transaction, lease)
        template.add_outbox(table, self)

    def _add(self, execute: Execute, destination: str, payload: object, delay_level: int, options: SendOptions) -> str:
        """Add rows, and return the message id of the first one."""
        rows = self._rows.rows(destination, payload, delay_level, options)
        add_rows(execute, rows, self._clock.now_ms())
        return rows[0].msg_id

    def _add_change(self, execute: Execute, change: OutboxChange) -> None:
        add_change(execute, change, self._clock.now_ms())

    def change_unsent(self, key: str, topic: str | None, deliver_ms: int | None) -> ScheduleChange | None:
        """See `ChangeableOutbox.change_unsent`."""
        change = OutboxChange(key=key, topic=topic, deliver_ms=deliver_ms)
        with noted_database_errors():
            with self._transaction_of_own() as execute:
                found = self._unsent.find(execute, change)
            if not found:
                return None
            with self._transaction_of_own() as execute:
                result = self._unsent.add(execute, found, change)
        self.relay.wake()
        return result

    def defer_change(self, key: str, topic: str | None, deliver_ms: int | None, reason: str) -> None:
        """See `ChangeableOutbox.defer_change`."""
        change = OutboxChange(key=key, topic=topic, deliver_ms=deliver_ms)
        with self._transaction_of_own() as execute:
            self._unsent.defer(execute, change)
        log_deferred(change, reason)

    def on_start(self) -> None:
        """Start the relay."""
        self.relay.start()

    def on_stop(self) -> None:
        """Stop the relay."""
        self.relay.stop()


SessionType = TypeVar("SessionType")


class _Outbox(Protocol):
    @property
    def send(self) -> Callable[..., Any]:
        """Function that adds messages in a transaction."""

    @property
    def cancel(self) -> Callable[..., Any]:
        """Function that adds a cancel in a transaction."""

    @property
    def reschedule(self) -> Callable[..., Any]:
        """Function that adds a reschedule in a transaction."""


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

    @shows_send_options
    def send(self, destination: str, payload: object, delay_level: int = 0, **options: Unpack[SendOptions]) -> object:
        """Send a message if the transaction is committed. With an async outbox, await the result."""
        return self._outbox.send(*self._target(), destination, payload, delay_level, **options)

    def cancel(self, *, key: str, topic: str | None = None) -> object:
        """Cancel messages if the transaction is committed. With an async outbox, await the result."""
        return self._outbox.cancel(*self._target(), key=key, topic=topic)

    def reschedule(
        self,
        *,
        key: str,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        topic: str | None = None,
    ) -> object:
        """Change deliver times if the transaction is committed. With an async outbox, await the result."""
        return self._outbox.reschedule(*self._target(), key=key, delay=delay, deliver_at=deliver_at, topic=topic)

    def _target(self) -> tuple[object, ...]:
        return () if self.session is None else (self.session,)

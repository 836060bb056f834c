"""`DjangoOutbox` and `DjangoInbox`: they use the connection of the current thread.

A module of its own, since a package only says what is public.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Unpack

from django.db import connections, transaction

from mqtemplate.calls.handling import Delivery, ListenerInfo
from mqtemplate.clock import Clock
from mqtemplate.durations import Duration
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.message import Message
from mqtemplate.outbox.changes import cancel_of, reschedule_of
from mqtemplate.outbox.database import Execute, OutboxChange, Result, check_database
from mqtemplate.outbox.inbox import InboxCore, check_single_messages
from mqtemplate.outbox.relay import LEASE
from mqtemplate.outbox.sending import RelayedOutbox
from mqtemplate.template.options import SendOptions, shows_send_options
from mqtemplate.template.rocketmq_template import RocketMQTemplate

_PARAMETER = re.compile(r":(\w+)")


class DjangoOutbox(RelayedOutbox):
    """Outbox in a database of Django. As an object of an `MQApplication` it starts and stops its relay with it.

    Args:
        using: Alias of the database.
        lease: Time after which another process relays, if one dies.

    Attributes:
        relay: The relay; on a virtual clock a harness steps it while it is started.
    """

    def __init__(self, template: RocketMQTemplate, using: str = "default", lease: Duration = LEASE) -> None:
        self._using = using
        super().__init__(connections[using].vendor, template, self._transaction, lease, using)

    @shows_send_options
    def send(self, destination: str, payload: object, delay_level: int = 0, **options: Unpack[SendOptions]) -> str:
        """Send a message if the current transaction is committed. Other arguments as `RocketMQTemplate.sync_send`.

        Outside of a transaction Django commits it at once. A delay counts from this call; a delay level from the
        relay.

        Returns:
            The message id; of a list, the id of the first message.

        Raises:
            MessageError: The message cannot be sent.
        """
        with transaction.atomic(using=self._using):
            msg_id = self._add(_executor(self._using), destination, payload, delay_level, options)
            transaction.on_commit(self.relay.wake, using=self._using)
        return msg_id

    def cancel(self, *, key: str, topic: str | None = None) -> None:
        """Cancel the pending messages with a key if the current transaction is committed.

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
        self._add_here(cancel_of(key, topic))

    def reschedule(
        self,
        *,
        key: str,
        delay: Duration | None = None,
        deliver_at: datetime | int | None = None,
        topic: str | None = None,
    ) -> None:
        """Change the deliver time of the pending messages with a key if the current transaction is committed.

        Without *delay* and *deliver_at*, deliver them now. Other arguments as in `cancel`.

        Args:
            delay: ``"3h"`` or a timedelta, counted from this call.
            deliver_at: An aware datetime, or epoch milliseconds.

        Raises:
            MessageError: As `cancel`; or the time is invalid.
        """
        self._add_here(reschedule_of(key, topic, delay, deliver_at, self._clock.now_ms()))

    def _add_here(self, change: OutboxChange) -> None:
        with transaction.atomic(using=self._using):
            self._add_change(_executor(self._using), change)
            transaction.on_commit(self.relay.wake, using=self._using)

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        # A thread of its own, of the relay or of an async verb, never ends a request, which would do it. Within a
        # transaction of the caller, this one is a part of it, and Django would close the connection all the same.
        connection = connections[self._using]
        is_outermost = not connection.in_atomic_block
        if is_outermost:
            connection.close_if_unusable_or_obsolete()
        try:
            with transaction.atomic(using=self._using):
                yield _executor(self._using)
        finally:
            if is_outermost:
                connection.close_if_unusable_or_obsolete()


class DjangoInbox:
    """Inbox in a database of Django.

    ::

        with transaction.atomic():
            if inbox.is_new(message):
                Payment.objects.create(...)

    Args:
        keep: Time for which an id is kept; longer than a message can be repeated.
        using: Alias of the database.
    """

    def __init__(self, keep: Duration = "7d", using: str = "default", clock: Clock | None = None) -> None:
        self._using = using
        self._core = InboxCore(keep, clock)

    def is_new(self, message: Message | str, consumer: str | None = None) -> bool:
        """Return True and record the message if it has no effect yet; False if it is a repeat.

        Args:
            message: The message, or a key of its content.
            consumer: Name of the effect; by default the consumer group of the listener that runs.

        Raises:
            ConfigurationError: No transaction is open, so the record and the effect would be separate.
            ListenerError: The id or the consumer is missing.
        """
        check_database(connections[self._using].vendor)
        if not connections[self._using].in_atomic_block:
            raise ConfigurationError(
                "an inbox needs the transaction of the effect; write 'with transaction.atomic():' around both"
            )
        return self._core.record(_executor(self._using), message, consumer)


class DjangoInboxMiddleware:
    """Middleware that handles each message in one transaction, with its id in the inbox. A repeat is dropped.

    The transaction is committed when the handler has succeeded. If it raises, or requests its message again, neither
    its changes nor the id are stored.

    Args:
        inbox: The inbox; by default one that keeps ids for seven days.
        using: Alias of the database of the inbox.
    """

    def __init__(self, inbox: DjangoInbox | None = None, using: str = "default") -> None:
        self._inbox = inbox or DjangoInbox(using=using)
        self._using = using

    def check_listener(self, listener: ListenerInfo) -> None:
        """Refuse a listener around which this middleware cannot work.

        Raises:
            ListenerError: Its handler takes batches, or is ``async def``: Django's transactions are not async.
        """
        check_single_messages(listener)
        if listener.is_async:
            raise ListenerError(
                f"listener {listener.id}: transactions of Django are not async; write the handler with 'def'"
            )

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        """Open the transaction, and commit it after the handler."""
        with transaction.atomic(using=self._using):
            if not self._inbox.is_new(delivery.message, delivery.listener.group):
                return
            result = yield delivery
            if not delivery.listener.is_done(result):
                transaction.set_rollback(True, using=self._using)


def _executor(using: str) -> Execute:
    def execute(statement: str, parameters: Mapping[str, Any]) -> Result:
        with connections[using].cursor() as cursor:
            cursor.execute(_PARAMETER.sub(r"%(\1)s", statement), dict(parameters))
            return Result(cursor.fetchall(), 0) if cursor.description else Result((), cursor.rowcount)

    return execute

"""`DjangoOutbox` and `DjangoInbox`: they use the connection of the current thread.

A module of its own, since a package only says what is public.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

from django.db import close_old_connections, connections, transaction

from mqtemplate.calls.handling import Delivery, ListenerInfo
from mqtemplate.clock import Clock
from mqtemplate.durations import Duration
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.message import Message
from mqtemplate.outbox.database import Execute, Result, check_database
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
        relay: The relay; on a virtual clock add it to the harness.
    """

    def __init__(self, template: RocketMQTemplate, using: str = "default", lease: Duration = LEASE) -> None:
        self._using = using
        super().__init__(connections[using].vendor, template, self._transaction, lease)

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

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        close_old_connections()  # a thread of its own never ends a request, which would do it
        with transaction.atomic(using=self._using):
            yield _executor(self._using)


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

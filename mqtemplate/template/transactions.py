"""Transactions of a template: a message that is delivered if, and only if, a local transaction commits.

Source: ``rocketmq-spring: RocketMQUtil``, ``client: DefaultMQProducerImpl.sendMessageInTransaction``. As there, what a
local transaction raises leaves its state unknown: the broker asks later. Better here: one template may have several
listeners, told apart by topic and tag.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, get_type_hints

import structlog

from mqtemplate.broker import Broker, Registration
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ConfigurationError, ListenerError, MessageError, MQTemplateError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property, create_unique_id
from mqtemplate.results import SendResult, SendStatus, TransactionSendResult, TransactionState
from mqtemplate.template.destination import parse_destination
from mqtemplate.template.transaction_listener import TransactionListenerSpec, transaction_listener_spec

_log = structlog.stdlib.get_logger("mqtemplate.template")

_RESULT_FIELDS = tuple(field.name for field in fields(SendResult))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One listener, its methods ready to be called with a message as it is."""

    name: str
    execute: Callable[[Message, object], object]
    check: Callable[[MessageExt], object]


class TransactionListeners:
    """The listeners of one template, and its answers to the broker's questions.

    Args:
        group: The producer group that the broker asks; None if the template has none.
    """

    def __init__(self, broker: Broker, converter: MessageConverter, group: str | None) -> None:
        self._broker = broker
        self._converter = converter
        self._group = group
        self._lock = threading.Lock()
        self._endpoints: dict[tuple[str, str | None], _Endpoint] = {}
        self._registration: Registration | None = None
        self._threads = self._max_waiting = 0

    @property
    def group(self) -> str:
        if self._group is None:
            raise ConfigurationError(
                "a transaction needs a producer group, which the broker asks what became of it: give the template "
                "producer_group, in application.yml rocketmq.producer.group"
            )
        return self._group

    def add(self, listener: object) -> None:
        """Take a listener in, and answer the broker's questions from now on.

        Raises:
            ListenerError: It is no transaction listener, or its transactions have one.
            ConfigurationError: The template has no producer group.
        """
        spec = transaction_listener_spec(type(listener))
        if spec is None:
            raise ListenerError(
                f"{type(listener).__qualname__} is no transaction listener; decorate the class with "
                "@transaction_listener"
            )
        key = _key(spec.destination)
        endpoint = _Endpoint(
            type(listener).__qualname__,
            self._adapted(listener, "execute_local_transaction"),
            self._adapted(listener, "check_local_transaction"),
        )
        with self._lock:
            if key in self._endpoints:
                raise ListenerError(
                    f"the transactions of {spec.destination or 'all topics'!r} have a listener already, "
                    f"{self._endpoints[key].name}; give {endpoint.name} a destination of its own: "
                    '@transaction_listener("topic") or ("topic:tag")'
                )
            self._register(spec)
            self._endpoints[key] = endpoint

    def _register(self, spec: TransactionListenerSpec) -> None:
        """Be the group's checker, with threads for the listener that needs the most."""
        if spec.maximum_pool_size <= self._threads and spec.blocking_queue_size <= self._max_waiting:
            return
        if self._registration is not None:
            self._registration.close()
        self._threads = max(self._threads, spec.maximum_pool_size)
        self._max_waiting = max(self._max_waiting, spec.blocking_queue_size)
        self._registration = self._broker.check_transactions(
            self.group, self.check, threads=self._threads, max_waiting=self._max_waiting
        )

    def _adapted(self, listener: object, name: str) -> Callable[..., object]:
        """A method that takes the message as it is, whatever its first parameter is annotated with."""
        method = getattr(listener, name)
        where = f"{type(listener).__qualname__}.{name}"
        parameters = list(inspect.signature(method).parameters)
        if not parameters:
            raise ListenerError(f"{where}: has no parameter for the message; write it first")
        try:
            wanted = get_type_hints(method).get(parameters[0], Message)
        except NameError as exc:
            raise ListenerError(f"{where}: an annotation cannot be read: {exc}; import the name") from exc
        if wanted is MessageExt and name == "execute_local_transaction":
            raise ListenerError(
                f"{where}: takes a MessageExt, and there is none before the message is delivered; take a Message"
            )
        if wanted in (Message, MessageExt, Any, object):
            return method  # type: ignore[no-any-return]
        from_body = self._converter.from_body
        return lambda message, *rest: method(from_body(message.body, wanted, message.properties), *rest)

    def of(self, message: Message) -> _Endpoint | None:
        """The listener whose transaction a message belongs to."""
        keys = ((message.topic, message.tags), (message.topic, None), ("", None))
        return next((found for key in keys if (found := self._endpoints.get(key)) is not None), None)

    def check(self, message: MessageExt) -> TransactionState:
        """Answer the broker."""
        endpoint = self.of(message)
        if endpoint is None:
            _log.error("transaction.no_listener", topic=message.topic, tag=message.tags, group=self._group)
            return TransactionState.UNKNOWN
        return _state(endpoint.check(message), endpoint.name)

    def close(self) -> None:
        with self._lock:
            registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()


class TransactionVerbs:
    """The verbs of `mqtemplate.template.RocketMQTemplate` for messages in transactions."""

    broker: Broker
    send_message_timeout: int
    _transactions: TransactionListeners
    _single_message: Callable[..., tuple[Message, MessageQueue | None, int]]

    def add_transaction_listener(self, listener: object) -> None:
        """Let an object of a class marked ``@transaction_listener`` answer for its transactions.

        An application does it by itself for the classes it is given.

        Raises:
            ListenerError: It is no transaction listener, or its transactions have one.
            ConfigurationError: The template has no producer group.
        """
        self._transactions.add(listener)

    def send_in_transaction(
        self,
        destination: str,
        payload: object,
        arg: object = None,
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
    ) -> TransactionSendResult:
        """Send a message that is delivered if the local transaction commits, and dropped if it rolls back.

        The broker gets the message first, unseen. Then the listener's ``execute_local_transaction`` runs, in this
        thread, with the message and *arg*. Then the broker hears its state. If that is ``UNKNOWN``, or is lost on the
        way, the broker asks ``check_local_transaction`` later. What the listener raises is logged, and is ``UNKNOWN``.

        A delay counts from the commit. The other arguments, and what is raised before the message is with the broker,
        are those of ``sync_send``; a list is refused.

        Returns:
            With ``local_transaction_state``. ``ROLLBACK``, too, where the broker could not promise to keep the
            message (`SendResult.send_status`); the listener was not called then.
        """
        if isinstance(payload, list):
            raise MessageError("a transaction has one message, got a list; pass a tuple to send one JSON array")
        message, queue, timeout_ms = self._single_message(
            destination, payload, timeout, delay_level, delay, deliver_at, hash_key, keys, headers, queue
        )
        endpoint = self._transactions.of(message)
        if endpoint is None:
            raise ListenerError(
                f"no transaction listener answers for {destination!r}; mark a class with @transaction_listener and "
                "give it to the application, or call add_transaction_listener"
            )
        message.properties[Property.UNIQ_KEY] = create_unique_id()
        message.properties[Property.TRANSACTION_PREPARED] = "true"
        half = self.broker.send_half(message, self._transactions.group, queue, timeout_ms)
        remark: str | None
        state, remark = TransactionState.ROLLBACK, f"the message was stored with {half.send_result.send_status.value}"
        try:
            if half.send_result.send_status is SendStatus.SEND_OK:
                state, remark = TransactionState.UNKNOWN, "the local transaction was interrupted"
                state, remark = _execute(endpoint, message, arg)
        finally:
            try:
                self.broker.end_transaction(half, state, remark)
            except MQTemplateError as exc:
                _log.warning("transaction.end_failed", topic=message.topic, state=state.value, reason=str(exc))
        sent = {name: getattr(half.send_result, name) for name in _RESULT_FIELDS}
        return TransactionSendResult(**sent, local_transaction_state=state)


def _execute(endpoint: _Endpoint, message: Message, arg: object) -> tuple[TransactionState, str | None]:
    """What a local transaction came to, and the text of what it raised."""
    try:
        return _state(endpoint.execute(message, arg), endpoint.name), None
    except Exception as exc:
        _log.exception("transaction.execute_failed", listener=endpoint.name, topic=message.topic, tag=message.tags)
        return TransactionState.UNKNOWN, f"{type(exc).__name__}: {exc}"


def _state(answer: object, listener: str) -> TransactionState:
    if isinstance(answer, TransactionState):
        return answer
    if answer is not None:
        _log.error(
            "transaction.no_state",
            listener=listener,
            answer=repr(answer)[:200],
            hint="return TransactionState.COMMIT, ROLLBACK or UNKNOWN",
        )
    return TransactionState.UNKNOWN


def _key(destination: str) -> tuple[str, str | None]:
    if not destination:
        return "", None
    target = parse_destination(destination)
    return target.topic, target.tag

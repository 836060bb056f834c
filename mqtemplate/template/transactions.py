"""Transactions of a template: a message is delivered if, and only if, a local transaction commits.

Source: ``rocketmq-spring: RocketMQUtil``, ``client: DefaultMQProducerImpl.sendMessageInTransaction``. As there, a
local transaction that raises has an unknown state, and the broker checks it later. Unlike there, one template may have
several listeners, distinguished by topic and tag.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from mqtemplate.broker import Broker, Registration
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.send import SendCall, SendPipeline
from mqtemplate.converter import MessageConverter, TypeChecks, payload_of
from mqtemplate.errors import ConfigurationError, ConversionError, ListenerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, Property, create_unique_id
from mqtemplate.results import HalfMessage, SendResult, SendStatus, TransactionSendResult, TransactionState
from mqtemplate.template.destination import parse_destination
from mqtemplate.template.transaction_spec import TransactionListenerSpec, transaction_listener_spec
from mqtemplate.user_code import error_text, safe_text

_log = get_logger("mqtemplate.template")

_RESULT_FIELDS = tuple(field.name for field in fields(SendResult))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One listener; its methods take a message as it is."""

    name: str
    execute: Callable[[Message, object], object]
    check: Callable[[MessageExt], object]


class Transactions:
    """Transactions of one template: sends half messages, executes local transactions and answers transaction checks.

    Args:
        observation: Gets the ends of transactions.
        group: Producer group that the broker checks; None if the template has none.
    """

    def __init__(
        self,
        broker: Broker,
        sends: SendPipeline,
        observation: Observation,
        converter: MessageConverter,
        group: str | None,
    ) -> None:
        self._broker = broker
        self._sends = sends
        self._observation = observation
        self._converter = converter
        self._group = group
        self._lock = threading.Lock()
        self._endpoints: dict[tuple[str, str | None], _Endpoint] = {}
        self._registration: Registration | None = None
        self._threads = self._max_waiting = 0

    def add(self, listener: object) -> None:
        """Register a listener. From now on it answers the broker's transaction checks.

        Raises:
            ListenerError: It is not a transaction listener, or its destination has a listener already.
            ConfigurationError: The template has no producer group.
        """
        name = type(listener).__qualname__
        spec = transaction_listener_spec(type(listener))
        if spec is None:
            raise ListenerError(f"{name} is not a transaction listener; decorate the class with @transaction_listener")
        key = _key(spec.destination)
        endpoint = _Endpoint(
            name,
            self._adapted(listener, "execute_local_transaction"),
            self._adapted(listener, "check_local_transaction"),
        )
        with self._lock:
            if key in self._endpoints:
                raise ListenerError(
                    f"the transactions of {spec.destination or 'all topics'!r} have a listener already, "
                    f"{self._endpoints[key].name}; give {name} a destination of its own: "
                    '@transaction_listener("topic") or ("topic:tag")'
                )
            self._register(spec)
            self._endpoints[key] = endpoint

    def send(self, call: SendCall, destination: str, arg: object) -> TransactionSendResult:
        """Send the message of *call* as a half message, execute the local transaction, and end the transaction.

        Raises:
            ListenerError: No listener handles transactions of the destination.
            ConfigurationError: The template has no producer group.
        """
        [message] = call.messages
        endpoint = self._endpoint_of(message)
        if endpoint is None:
            raise ListenerError(
                f"no transaction listener handles {destination!r}; mark a class with @transaction_listener and "
                "give it to the application, or call add_transaction_listener"
            )
        message.properties[Property.UNIQ_KEY] = create_unique_id()
        message.properties[Property.TRANSACTION_PREPARED] = "true"
        half: HalfMessage = self._sends.call(call.of_group(self._producer_group))
        remark: str | None
        state, remark = TransactionState.ROLLBACK, f"the message was stored with {half.send_result.send_status.value}"
        try:
            if half.send_result.send_status is SendStatus.SEND_OK:
                # Set first: an interrupt, such as KeyboardInterrupt, must not roll back what may have been committed.
                state, remark = TransactionState.UNKNOWN, "the local transaction was interrupted"
                state, remark = _execute(endpoint, message, arg)
        finally:
            try:
                self._broker.end_transaction(half, state, remark)
                self._observation.transaction_ended(half, state)
            except MQTemplateError as exc:  # the broker checks the transaction later
                _log.warning("transaction.end_failed", topic=message.topic, state=state.value, reason=str(exc))
        sent = {name: getattr(half.send_result, name) for name in _RESULT_FIELDS}
        return TransactionSendResult(**sent, local_transaction_state=state)

    def close(self) -> None:
        """Answer no more transaction checks."""
        with self._lock:
            registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    @property
    def _producer_group(self) -> str:
        if self._group is None:
            raise ConfigurationError(
                "a transaction needs a producer group, whose members the broker checks; give the template "
                "producer_group, in application.yml rocketmq.producer.group"
            )
        return self._group

    def _register(self, spec: TransactionListenerSpec) -> None:
        """Register as the checker of the group, with the threads that the most demanding listener needs."""
        if spec.maximum_pool_size <= self._threads and spec.blocking_queue_size <= self._max_waiting:
            return
        if self._registration is not None:
            self._registration.close()
        self._threads = max(self._threads, spec.maximum_pool_size)
        self._max_waiting = max(self._max_waiting, spec.blocking_queue_size)
        self._registration = self._broker.check_transactions(
            self._producer_group, self._check, threads=self._threads, max_waiting=self._max_waiting
        )

    def _adapted(self, listener: object, name: str) -> Callable[..., object]:
        """Return a method that takes the message as it is, whatever the annotation of its first parameter."""
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
        converter = self._converter
        try:
            TypeChecks(converter).check(wanted)
        except ConversionError as exc:
            raise ListenerError(f"{where}: {exc}") from exc
        return lambda message, *rest: method(payload_of(message, wanted, converter), *rest)

    def _endpoint_of(self, message: Message) -> _Endpoint | None:
        """Return the most specific listener for a message: by topic and tag, by topic, or for all topics."""
        keys = ((message.topic, message.tags), (message.topic, None), ("", None))
        return next((found for key in keys if (found := self._endpoints.get(key)) is not None), None)

    def _check(self, message: MessageExt) -> TransactionState:
        endpoint = self._endpoint_of(message)
        if endpoint is None:
            _log.error("transaction.no_listener", topic=message.topic, tag=message.tags, group=self._group)
            return TransactionState.UNKNOWN
        return _state(endpoint.check(message), endpoint.name)


def _execute(endpoint: _Endpoint, message: Message, arg: object) -> tuple[TransactionState, str | None]:
    """Return the state of the local transaction, and the text of the exception if it raised one."""
    try:
        return _state(endpoint.execute(message, arg), endpoint.name), None
    except Exception as exc:  # any other is raised in the caller's thread, and the state stays unknown
        _log.exception("transaction.execute_failed", listener=endpoint.name, topic=message.topic, tag=message.tags)
        return TransactionState.UNKNOWN, error_text(exc)


def _state(answer: object, listener: str) -> TransactionState:
    if isinstance(answer, TransactionState):
        return answer
    if answer is not None:
        _log.error(
            "transaction.no_state",
            listener=listener,
            answer=safe_text(answer, 200, repr),
            hint="return TransactionState.COMMIT, ROLLBACK or UNKNOWN",
        )
    return TransactionState.UNKNOWN


def _key(destination: str) -> tuple[str, str | None]:
    if not destination:
        return "", None
    target = parse_destination(destination)
    return target.topic, target.tag

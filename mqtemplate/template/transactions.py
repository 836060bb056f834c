"""Transactions of a template: a message is delivered if, and only if, a local transaction commits.

`transaction_listener` marks the class that executes and checks local transactions. It stores attributes and does
nothing else.

Source: ``rocketmq-spring: RocketMQUtil``, ``client: DefaultMQProducerImpl.sendMessageInTransaction``. As there, a local
transaction that raises has an unknown state, and the broker checks it later. Unlike there, one template may have
several listeners, distinguished by topic and tag.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast, get_type_hints

from mqtemplate.broker import Broker, Registration
from mqtemplate.callables import lazy_kind, refuse_bare
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.send import SendCall, SendPipeline
from mqtemplate.converter import MessageConverter, TypeChecks, payload_of
from mqtemplate.errors import ConfigurationError, ConversionError, ListenerError, MQTemplateError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, Property, create_unique_id
from mqtemplate.results import HalfMessage, SendResult, SendStatus, TransactionSendResult, TransactionState
from mqtemplate.template.options import parse_destination
from mqtemplate.user_code import error_text, safe_text

_log = get_logger("mqtemplate.template")

_RESULT_FIELDS = tuple(field.name for field in fields(SendResult))
_Target = TypeVar("_Target", bound=type)


# --- the declaration of a listener ------------------------------------------------------------------


TRANSACTION_LISTENER_ATTRIBUTE = "__mqtemplate_transaction_listener__"
"""Attribute of a decorated class that holds its `TransactionListenerSpec`."""

DEFAULT_TEMPLATE_BEAN_NAME = "rocketmqTemplate"
"""Spring's name for the only template of an application. Source: ``@RocketMQTransactionListener``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionListenerSpec:
    """Attributes of one ``@transaction_listener``. The names are as in ``@RocketMQTransactionListener``.

    Attributes:
        destination: ``"topic"`` or ``"topic:tag"`` whose transactions the listener handles. Empty: all transactions for
            which the template has no listener with a matching destination. The most specific listener wins.
        core_pool_size, maximum_pool_size: Threads for transaction checks. The second is their largest number and must
            not be below the first; a thread starts when a check needs it.
        blocking_queue_size: Checks that may wait for a thread. Beyond it a check is dropped; the broker repeats it.
        rocketmq_template_bean_name: Name of the template, where an application has several.
    """

    destination: str
    core_pool_size: int
    maximum_pool_size: int
    blocking_queue_size: int
    rocketmq_template_bean_name: str


def transaction_listener_spec(kind: object) -> TransactionListenerSpec | None:
    """Return the attributes that the decorator stored on this class; None for a class that merely inherits them."""
    return cast("TransactionListenerSpec | None", getattr(kind, "__dict__", {}).get(TRANSACTION_LISTENER_ATTRIBUTE))


_METHODS = ("execute_local_transaction", "check_local_transaction")
_KEEP_ALIVE_TIME = 60_000
_KEEP_ALIVE_UNIT = "MILLISECONDS"


def transaction_listener(
    destination: str = "",
    *,
    core_pool_size: int = 1,
    maximum_pool_size: int = 1,
    keep_alive_time: int = _KEEP_ALIVE_TIME,
    keep_alive_time_unit: str = _KEEP_ALIVE_UNIT,
    blocking_queue_size: int = 2_000,
    rocketmq_template_bean_name: str = DEFAULT_TEMPLATE_BEAN_NAME,
) -> Callable[[_Target], _Target]:
    """Mark a class as the listener for transactions of a template. `TransactionListenerSpec` describes each attribute.

    ::

        @transaction_listener("orders")
        class OrderTransactions:
            def execute_local_transaction(self, message: Message, arg: object) -> TransactionState: ...
            def check_local_transaction(self, message: MessageExt) -> TransactionState: ...

    The first parameter may have another annotation; the method then gets the payload in that type. An application
    builds the class by the types of its constructor. Without an application, ``template.add_transaction_listener``
    takes an object.

    Raises:
        ListenerError: The class lacks a method, or an attribute has an invalid value.
        UnsupportedError: *keep_alive_time* is set: the threads live as long as the template.
    """
    refuse_bare("@transaction_listener", destination, "@transaction_listener()", ListenerError)
    if destination:
        parse_destination(destination)
    if keep_alive_time != _KEEP_ALIVE_TIME or keep_alive_time_unit.upper() != _KEEP_ALIVE_UNIT:
        raise UnsupportedError(
            "@transaction_listener: keep_alive_time is not supported: the threads for transaction checks live as long "
            "as the template; remove it"
        )
    _check_number("core_pool_size", core_pool_size, 1, 1_000)
    _check_number("maximum_pool_size", maximum_pool_size, core_pool_size, 1_000)
    _check_number("blocking_queue_size", blocking_queue_size, 1, 1_000_000)
    spec = TransactionListenerSpec(
        destination=destination,
        core_pool_size=core_pool_size,
        maximum_pool_size=maximum_pool_size,
        blocking_queue_size=blocking_queue_size,
        rocketmq_template_bean_name=rocketmq_template_bean_name,
    )

    def mark(target: _Target) -> _Target:
        _check_class(target)
        setattr(target, TRANSACTION_LISTENER_ATTRIBUTE, spec)
        return target

    return mark


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ListenerError(f"@transaction_listener: {name} must be a whole number from {low} to {high}, got {value!r}")


def _check_class(target: Any) -> None:
    if not inspect.isclass(target):
        raise ListenerError(
            f"@transaction_listener: {getattr(target, '__qualname__', target)!r} is not a class; decorate a class with "
            f"{' and '.join(_METHODS)}"
        )
    for name in _METHODS:
        method = getattr(target, name, None)
        if not callable(method):
            raise ListenerError(
                f"@transaction_listener: class {target.__qualname__} has no method {name}; write "
                f"{' and '.join(_METHODS)}: the sender executes a transaction, and the broker checks it later"
            )
        if (kind := lazy_kind(method)) is not None:
            raise ListenerError(
                f"@transaction_listener: {target.__qualname__}.{name} has a 'yield' ({kind}), so a call of it runs "
                "nothing; write 'return TransactionState.COMMIT'"
            )
        if inspect.iscoroutinefunction(method):
            raise ListenerError(
                f"@transaction_listener: {target.__qualname__}.{name} is 'async def', and the caller needs its result "
                "at once; write 'def', and run asynchronous code with asyncio.run"
            )


# --- the transactions of a template -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One listener; its methods take a message as it is."""

    name: str
    execute: Callable[[Message, object], object]
    check: Callable[[MessageExt], object]


class TemplateTransactions:
    """Transactions of one template: sends half messages, executes local transactions and answers transaction checks.

    Args:
        observation: Gets the ends of transactions.
        group: Producer group that the broker checks, if the template has one.
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
        half: HalfMessage = self._sends.call(call.replace(group=self._producer_group))
        remark: str | None
        state, remark = TransactionState.ROLLBACK, f"the message was stored with {half.send_result.send_status.value}"
        try:
            if half.send_result.send_status is SendStatus.SEND_OK:
                # Set first: an interrupt, such as KeyboardInterrupt, must not roll back what may have been committed.
                state, remark = TransactionState.UNKNOWN, "the local transaction was interrupted"
                state, remark = _execute(endpoint, message, arg)
        finally:
            try:
                self._broker.transactions.end_transaction(half, state, remark)
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
        self._registration = self._broker.transactions.check_transactions(
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
                f"{where}: takes a MessageExt, which does not exist before the message is delivered; take a Message"
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

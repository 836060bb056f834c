"""The decorator ``@transaction_listener``. It stores attributes on the class and does nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from mqtemplate.callables import lazy_kind
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.template.destination import parse_destination
from mqtemplate.template.transaction_spec import (
    DEFAULT_TEMPLATE_BEAN_NAME,
    TRANSACTION_LISTENER_ATTRIBUTE,
    TransactionListenerSpec,
)

_Target = TypeVar("_Target", bound=type)

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

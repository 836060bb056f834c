"""``@transaction_listener``: it notes which transactions a class knows about, and does nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.template.destination import parse_destination

TRANSACTION_LISTENER_ATTRIBUTE = "__mqtemplate_transaction_listener__"
"""Where a decorated class keeps its `TransactionListenerSpec`."""

_Target = TypeVar("_Target", bound=type)

_METHODS = ("execute_local_transaction", "check_local_transaction")
_KEEP_ALIVE_TIME = 60_000
_KEEP_ALIVE_UNIT = "MILLISECONDS"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionListenerSpec:
    """The attributes of one ``@transaction_listener``; the names are those of ``@RocketMQTransactionListener``.

    Attributes:
        destination: ``"topic"`` or ``"topic:tag"``: only these transactions are this listener's. Empty: all that no
            other listener of the template names. The most exact one is asked.
        core_pool_size, maximum_pool_size: Threads that answer the broker's questions; the second is the number of
            them, made as questions come, and may not be below the first.
        blocking_queue_size: Questions that may wait for a thread; the broker asks again for more.
        rocketmq_template_bean_name: The template whose transactions these are, where there are several.
    """

    destination: str = ""
    core_pool_size: int = 1
    maximum_pool_size: int = 1
    blocking_queue_size: int = 2_000
    rocketmq_template_bean_name: str = "rocketmqTemplate"


def transaction_listener(
    destination: str = "",
    *,
    core_pool_size: int = 1,
    maximum_pool_size: int = 1,
    keep_alive_time: int = _KEEP_ALIVE_TIME,
    keep_alive_time_unit: str = _KEEP_ALIVE_UNIT,
    blocking_queue_size: int = 2_000,
    rocketmq_template_bean_name: str = "rocketmqTemplate",
) -> Callable[[_Target], _Target]:
    """Make a class answer for the transactions of a template; `TransactionListenerSpec` tells each attribute.

    ::

        @transaction_listener("orders")
        class OrderTransactions:
            def execute_local_transaction(self, message: Message, arg: object) -> TransactionState: ...
            def check_local_transaction(self, message: MessageExt) -> TransactionState: ...

    The first parameter may be annotated with another type, and then gets the payload as that. An application builds
    the class by its constructor's types; without one, ``template.add_transaction_listener`` takes an object.

    Raises:
        ListenerError: The class lacks a method, or an attribute cannot be.
        UnsupportedError: *keep_alive_time* is set: the threads stay as long as the template.
    """
    if destination:
        parse_destination(destination)
    if keep_alive_time != _KEEP_ALIVE_TIME or keep_alive_time_unit.upper() != _KEEP_ALIVE_UNIT:
        raise UnsupportedError(
            "@transaction_listener: keep_alive_time cannot be honoured: the threads that answer for transactions stay "
            "as long as the template; remove it"
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

    def note(target: _Target) -> _Target:
        _check_class(target)
        setattr(target, TRANSACTION_LISTENER_ATTRIBUTE, spec)
        return target

    return note


def transaction_listener_spec(kind: object) -> TransactionListenerSpec | None:
    """What the decorator noted on this very class; what a base class noted is that class's own."""
    return cast("TransactionListenerSpec | None", getattr(kind, "__dict__", {}).get(TRANSACTION_LISTENER_ATTRIBUTE))


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ListenerError(f"@transaction_listener: {name} must be a whole number from {low} to {high}, got {value!r}")


def _check_class(target: Any) -> None:
    if not inspect.isclass(target):
        raise ListenerError(
            f"@transaction_listener: {getattr(target, '__qualname__', target)!r} is no class; decorate a class with "
            f"{' and '.join(_METHODS)}"
        )
    for name in _METHODS:
        method = getattr(target, name, None)
        if not callable(method):
            raise ListenerError(
                f"@transaction_listener: class {target.__qualname__} has no method {name}; a transaction is executed "
                "when it is sent, and checked when the broker asks what became of it"
            )
        if inspect.iscoroutinefunction(method):
            raise ListenerError(
                f"@transaction_listener: {target.__qualname__}.{name} is 'async def', and the sender waits for its "
                "answer; write 'def', and run what is asynchronous with asyncio.run"
            )

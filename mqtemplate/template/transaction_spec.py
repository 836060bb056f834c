"""Attributes of a class marked ``@transaction_listener``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

TRANSACTION_LISTENER_ATTRIBUTE = "__mqtemplate_transaction_listener__"
"""Attribute of a decorated class that holds its `TransactionListenerSpec`."""

DEFAULT_TEMPLATE_BEAN_NAME = "rocketmqTemplate"
"""Spring's name for the only template of an application. Source: ``@RocketMQTransactionListener``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionListenerSpec:
    """Attributes of one ``@transaction_listener``. The names are those of ``@RocketMQTransactionListener``.

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

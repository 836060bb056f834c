"""What an application sends with, and receives with when it asks."""

from mqtemplate.template.destination import MessageQueueSelector, parse_destination, select_queue_by_hash
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.spring_names import LocalRequestCallback, SendCallback
from mqtemplate.template.transaction_listener import (
    TRANSACTION_LISTENER_ATTRIBUTE,
    TransactionListenerSpec,
    transaction_listener,
    transaction_listener_spec,
)

__all__ = [
    "TRANSACTION_LISTENER_ATTRIBUTE",
    "LocalRequestCallback",
    "MessageQueueSelector",
    "RocketMQTemplate",
    "SendCallback",
    "TransactionListenerSpec",
    "parse_destination",
    "select_queue_by_hash",
    "transaction_listener",
    "transaction_listener_spec",
]

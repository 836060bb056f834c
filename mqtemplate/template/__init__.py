"""The public API for sending messages, and for receiving them on request."""

from mqtemplate.template.destination import MessageQueueSelector, parse_destination, select_queue_by_hash
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.send_options import SendOptions
from mqtemplate.template.spring_names import LocalRequestCallback, SendCallback
from mqtemplate.template.subscription import Subscription
from mqtemplate.template.transaction_listener import transaction_listener
from mqtemplate.template.transaction_spec import (
    TRANSACTION_LISTENER_ATTRIBUTE,
    TransactionListenerSpec,
    transaction_listener_spec,
)

__all__ = [
    "TRANSACTION_LISTENER_ATTRIBUTE",
    "LocalRequestCallback",
    "MessageQueueSelector",
    "RocketMQTemplate",
    "SendCallback",
    "SendOptions",
    "Subscription",
    "TransactionListenerSpec",
    "parse_destination",
    "select_queue_by_hash",
    "transaction_listener",
    "transaction_listener_spec",
]
